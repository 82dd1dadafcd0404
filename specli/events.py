"""What a generation tells its observers. Leaves: nothing here imports specli.

Times are seconds. ``at_s`` marks are read from the clock that the decode loop was given. Times belong to the whole
batch, counts to one sequence.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "eos", "cancelled"]


class Provenance(enum.Enum):
    """Who proposed a token. The target chose every one of them."""

    DRAFT = "draft"  # proposed by a drafter, accepted by the target
    TARGET = "target"  # the target's own: first token, recovered after a rejection, or bonus


@dataclass(frozen=True, slots=True)
class SpeculationState:
    """Whether a session drafts, and why not if it does not.

    ``k``: the longest draft, tokens; every draft's length where it is fixed. ``expectation``: why a draft model may
    well not pay here, known before anything is drafted; empty where nothing speaks against it.
    """

    active: bool
    reason: str  # empty while active
    drafter: str  # "draft smollm2-135m-draft-q8_0.gguf", "n-gram"
    k: int
    verify: str
    n_ctx: int
    is_fixed: bool = True
    expectation: str = ""


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The whole prompt is in the target's cache and the first token is known.

    ``started_at_s`` is the moment the request was accepted (before tokenizing); ``prefill_s`` counts evaluation only.
    ``n_reused`` of the ``n_prompt`` tokens were in the cache already; the others were evaluated.
    """

    sequence: int
    n_prompt: int
    started_at_s: float
    at_s: float
    prefill_s: float
    n_reused: int = 0


@dataclass(frozen=True, slots=True)
class SequenceRound:
    """One sequence's part of a round, in tokens. Draft tokens behind a cut (EOS, limit) are not counted."""

    sequence: int
    proposed: int
    accepted: int
    emitted: int


@dataclass(frozen=True, slots=True)
class RoundDone:
    """Propose, verify, roll back, once for every active sequence. ``host_s`` is what neither model's passes took.

    ``state``: who drafts in rounds like this, as a controller has it (``record.Record.state``), "" without one.
    """

    sequences: tuple[SequenceRound, ...]
    at_s: float
    draft_s: float
    verify_s: float
    host_s: float
    state: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of characters with one provenance."""

    text: str
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class Text:
    """Characters that are final: no stop string and no unfinished character can take them back."""

    sequence: int
    spans: tuple[Span, ...]

    @property
    def text(self) -> str:
        """The characters of all spans, joined."""
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One emitted token: natural log of its probability (<= 0), and the most likely ids with theirs, best first.

    By the target's row before any sampler (as OpenAI's ``logprobs``).
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the tokens that a prefill or a round has just emitted, in order."""

    sequence: int
    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a sequence.

    ``tokens`` are the ids that were kept: they describe the same cut as the text. ``n_cut`` ids at the tail were
    emitted by rounds and then taken back, because a stop string began before them. ``stop`` is the stop string found.
    ``explanation`` says in one line what the controller decided and why; empty without one.
    """

    sequence: int
    reason: FinishReason
    tokens: tuple[int, ...]
    at_s: float
    n_cut: int = 0
    stop: str | None = None
    explanation: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence that cannot go on, while the others of its batch do. ``error`` says why (a ``SpecError``)."""

    sequence: int
    error: Exception


Event = PrefillDone | RoundDone | Text | Logprobs | Finished | Failed
