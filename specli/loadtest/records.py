"""What was asked and what came back, in marks of one monotonic clock (seconds). Figures are derived in ``figures``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Burst:
    """Text that arrived in one piece: when, how many characters, in how many events."""

    at_s: float
    n_chars: int
    n_events: int


@dataclass(frozen=True, slots=True)
class Record:
    """One request that ended, well or not.

    ``due_s``: when it arrived: its place in an open loop's schedule, or when a closed loop sent it. ``error``: its kind
    (``http 429``, ``timeout``, ``cut``, …), None of a good one. Tokens are of the server's usage, None without one.
    """

    index: int
    is_measured: bool
    due_s: float
    sent_s: float
    ended_s: float
    bursts: tuple[Burst, ...] = ()
    asked_input: int | None = None
    asked_output: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    proposed: int | None = None  # drafted tokens, where the answer tells (llama-server's timings)
    accepted: int | None = None
    error: str | None = None
    message: str = ""

    @property
    def first_s(self) -> float | None:
        """When the first text arrived."""
        return self.bursts[0].at_s if self.bursts else None

    @property
    def last_s(self) -> float | None:
        """When the last text arrived."""
        return self.bursts[-1].at_s if self.bursts else None


@dataclass(frozen=True, slots=True)
class StepRun:
    """One load, run: ``started_s`` to ``ended_s`` is the steady window; None when it never began.

    ``n_unfinished``: measured requests that had not ended when everything had to stop; ``n_cut``: those that were under
    way then, those of the warm-up too. ``lag_ms``: how late this machine itself was, at the 99th percentile.
    """

    records: tuple[Record, ...]
    started_s: float | None
    ended_s: float | None
    n_unfinished: int = 0
    lag_ms: float | None = None
    stopped: bool = False  # by the user or the clock
    hopeless: bool = False  # given up: nothing but failures, of the warm-up maybe
    n_cut: int = 0

    @property
    def is_cut(self) -> bool:
        """Whether requests were dropped, whose tokens nobody has counted."""
        return self.n_unfinished > 0 or self.n_cut > 0
