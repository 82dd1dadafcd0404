"""How a server shares its time: how much of a prompt to evaluate between two rounds, and whom to let in.

Pure: it is told times and outcomes, and decides. Without bounds (SLA) a prompt may stretch the gap between two bursts
of the answers under way to ``STRETCH`` times the usual one. With a bound on TPOT it may take what the bound leaves; an
answer is let in while the round that it makes longer still keeps the bound.

    TTFT   arrival -> first token (waiting included)
    TPOT   (last - first token) / (n - 1), ms
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

STRETCH = 2.0  # times the usual gap that a chunk may add to it: below three times in all, with room for a slow moment
MIN_CHUNK = 16  # tokens: a prompt always goes on
MEMORY = 0.8  # per round or chunk: about the last five count
WINDOW_S = 60.0  # of the percentiles
LEVEL = 0.95
N_KEPT = 4096  # answers in a window


@dataclass(frozen=True, slots=True)
class Sla:
    """Bounds for 95% of the answers, ms; None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class Pace:
    """Learns what rounds and prompts cost on this machine, and paces them."""

    def __init__(self, sla: Sla | None = None, *, is_chunked: bool = True) -> None:
        self.sla, self._is_chunked = sla or Sla(), is_chunked
        self._round_s: dict[int, float] = {}  # by sequences: seconds of a round
        self._burst: dict[int, float] = {}  # by sequences: tokens that a round gives each of them
        self._token_s: float | None = None  # seconds per prompt token
        self._ttft = Window()
        self._tpot = Window()

    def observe_round(self, n_sequences: int, n_emitted: int, seconds: float) -> None:
        """A round over ``n_sequences`` took ``seconds`` and emitted ``n_emitted`` tokens in all."""
        if n_sequences < 1:
            return
        self._round_s[n_sequences] = _moved(self._round_s.get(n_sequences), seconds)
        self._burst[n_sequences] = _moved(self._burst.get(n_sequences), max(1.0, n_emitted / n_sequences))

    def observe_chunk(self, n_tokens: int, seconds: float) -> None:
        """Evaluating ``n_tokens`` of a prompt took ``seconds``."""
        if n_tokens > 0:
            self._token_s = _moved(self._token_s, seconds / n_tokens)

    def observe_answer(self, at_s: float, ttft_s: float | None, tpot_ms: float | None) -> None:
        """An answer has ended."""
        if ttft_s is not None:
            self._ttft.add(at_s, 1000 * ttft_s)
        if tpot_ms is not None:
            self._tpot.add(at_s, tpot_ms)

    def chunk(self, n_decoding: int, n_batch: int, n_left: int = 0, waited_s: float = 0.0) -> int:
        """Prompt tokens to evaluate before the next round of ``n_decoding`` sequences, at most ``n_batch``.

        ``n_left``: tokens that the oldest prompt lacks; ``waited_s``: for how long its client has waited.
        """
        if n_decoding == 0 or not self._is_chunked:
            return n_batch
        if self._token_s is None or self._token_s <= 0:
            return min(n_batch, MIN_CHUNK)
        n = int(self._spare_s(n_decoding) / self._token_s)
        if self.sla.tpot_ms is None:
            n = max(n, self._urgent(n_decoding, n_left, waited_s))
        return max(min(MIN_CHUNK, n_batch), min(n, n_batch))

    def _urgent(self, n_decoding: int, n_left: int, waited_s: float) -> int:
        """Tokens per turn by which the oldest prompt still keeps the bound on TTFT; 0 where nothing can or need be."""
        round_s = self._usual_s(n_decoding)
        if self.sla.ttft_ms is None or self._token_s is None or round_s is None:
            return 0
        spare_s = self.sla.ttft_ms / 1000 - waited_s - n_left * self._token_s  # for the rounds in between
        return math.ceil(n_left * round_s / spare_s) if spare_s > 0 else 0

    def _spare_s(self, n_decoding: int) -> float:
        """Seconds that may pass between two rounds."""
        round_s = self._usual_s(n_decoding)
        if round_s is None:
            return 0.0
        if self.sla.tpot_ms is None:
            return STRETCH * round_s
        return max(0.0, self.sla.tpot_ms / 1000 * self._tokens(n_decoding) - round_s)

    def may_admit(self, n_active: int) -> bool:
        """Whether one more answer beside ``n_active`` keeps the bound on TPOT, as far as is known."""
        if self.sla.tpot_ms is None or n_active == 0:
            return True
        foreseen_ms = self.foreseen_tpot_ms(n_active + 1)
        return foreseen_ms is None or foreseen_ms <= self.sla.tpot_ms

    def foreseen_tpot_ms(self, n_active: int) -> float | None:
        """The TPOT of each of ``n_active`` answers; None before anything is known."""
        round_s = self._usual_s(n_active)
        return None if round_s is None else 1000 * round_s / self._tokens(n_active)

    def _usual_s(self, n: int) -> float | None:
        """Seconds of a round over ``n`` sequences: as measured, or as the nearest number of them, scaled up only."""
        if n in self._round_s:
            return self._round_s[n]
        if not self._round_s:
            return None
        nearest = min(self._round_s, key=lambda known: (abs(known - n), -known))
        return self._round_s[nearest]

    def _tokens(self, n: int) -> float:
        """Tokens that a round gives each of ``n`` sequences."""
        if not self._burst:
            return 1.0
        return self._burst[min(self._burst, key=lambda known: (abs(known - n), -known))]

    def wait_s(self, n_waiting: int, n_slots: int, answer_s: float | None) -> int:
        """Whole seconds after which a place in the queue should be free: when the first of them gets a slot."""
        usual_s = 1.0 if answer_s is None else answer_s
        return max(1, min(600, math.ceil(usual_s * max(1, n_waiting) / max(1, n_slots) / 2)))

    def p95(self, now_s: float) -> tuple[float | None, float | None]:
        """TTFT and TPOT (ms) that 95% of the answers of the last minute stayed within; None where there were none."""
        return self._ttft.quantile(now_s), self._tpot.quantile(now_s)

    def broken(self, now_s: float) -> dict[str, bool]:
        """Per bound that was given, whether the last minute broke it."""
        bounds = {"ttft": self.sla.ttft_ms, "tpot": self.sla.tpot_ms}
        found = dict(zip(bounds, self.p95(now_s), strict=True))
        return {
            name: (value := found[name]) is not None and value > bound
            for name, bound in bounds.items()
            if bound is not None
        }


class Window:
    """Values of the last minute."""

    def __init__(self, values: Iterable[tuple[float, float]] = ()) -> None:
        self._values: deque[tuple[float, float]] = deque(values, maxlen=N_KEPT)

    def add(self, at_s: float, value: float) -> None:
        """A value at ``at_s``, which never goes back."""
        self._values.append((at_s, value))

    def _recent(self, now_s: float) -> list[float]:
        while self._values and self._values[0][0] < now_s - WINDOW_S:
            self._values.popleft()
        return [value for _, value in self._values]

    def quantile(self, now_s: float, level: float = LEVEL) -> float | None:
        """The value that a share of ``level`` stays within (nearest rank); None of nothing."""
        recent = sorted(self._recent(now_s))
        return recent[max(0, math.ceil(level * len(recent)) - 1)] if recent else None

    def mean(self, now_s: float) -> float | None:
        """None of nothing."""
        recent = self._recent(now_s)
        return sum(recent) / len(recent) if recent else None

    def total(self, now_s: float) -> float:
        """Their sum."""
        return sum(self._recent(now_s))


def _moved(old: float | None, new: float) -> float:
    return new if old is None else MEMORY * old + (1 - MEMORY) * new
