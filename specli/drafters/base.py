"""The drafter protocol and what a drafter hands to the verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from specli.events import RoundDone
from specli.sampling import Distribution, Sampler, State

if TYPE_CHECKING:
    from specli.verify import Verifier


@dataclass(slots=True)
class SequenceState:
    """What drafters and verifiers may know of a sequence.

    ``tokens`` are the committed ids, prompt first; the next token has position ``len(tokens)``. ``rng`` is the
    sequence's own stream of coins; ``seed`` feeds the counter-based noise of coupled sampling. ``state`` is what the
    sampler carries from token to token, None before the first. ``verifier``: who draws and judges this sequence's
    tokens; None: whoever does for all that bring none. ``n_left``: tokens that may still come, by the limit and the
    target's context; the decode loop keeps it, None before its first round.
    """

    id: int
    tokens: list[int]
    seed: int = 0
    rng: np.random.Generator = field(default_factory=np.random.default_rng)
    state: State | None = None
    verifier: Verifier | None = None
    n_left: int | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain of ``k >= 0`` proposed tokens.

    ``ids``: int ids, length k. ``distributions[i]`` is the ``Distribution`` that ``ids[i]`` was drawn from, or None
    for a point mass (n-gram, greedy and coupled drafts). ``confidence``: float64 ``(k,)``, the drafter's own estimate
    of being right, known before verification (draft model: top-1 probability over its raw top 10, as llama.cpp), or
    None where nobody asked for it. ``parents``: int ``(k,)`` for a tree of candidates, None for a chain.
    """

    ids: Sequence[int] = ()
    distributions: Sequence[Distribution | None] = ()
    confidence: NDArray[np.float64] | None = None
    parents: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, k: int) -> Draft:
        """The first ``k`` tokens. Only point masses may be cut by what was drawn behind these."""
        confidence = None if self.confidence is None else self.confidence[:k]
        return Draft(self.ids[:k], self.distributions[:k], confidence)


EMPTY = Draft()


class Choice(NamedTuple):
    """A drafted token, what it was drawn from (None: a point mass), and the sampler's state behind it."""

    token: int
    distribution: Distribution | None
    state: State | None = None


class Chooser(Protocol):
    """How a draft model draws its tokens, so that the verifier can judge them. Verifiers implement this.

    ``is_sampled``: whether a draw is random. A sampled draft must be verified to its last token; a draft that is a
    point mass (greedy, coupled, n-gram) may be thrown away whole (proof by enumeration in the tests). ``sampler`` knows
    what may come next at all.
    """

    is_sampled: bool
    sampler: Sampler

    def choose(
        self, row: NDArray[np.float32], sequence: SequenceState, drafted: Sequence[int], state: State | None
    ) -> Choice:
        """Draw the token behind ``drafted`` from the draft's logits row, float32 ``(n_vocab,)``.

        ``state``: of the choice before it, None for the first.
        """


class Drafter(Protocol):
    """Proposes tokens for several sequences at once."""

    @property
    def busy_s(self) -> float:
        """Seconds spent in a draft model's passes so far; 0.0 for drafters without one."""

    def propose(self, sequences: Sequence[SequenceState], budgets: Sequence[int]) -> list[Draft]:
        """At most ``budgets[i]`` tokens for ``sequences[i]``. An empty draft is a normal answer."""

    def commit(self, sequence: SequenceState, tokens: Sequence[int]) -> None:
        """``tokens`` have just been appended to ``sequence.tokens``.

        The first call, and the first after ``rewind``, bring the prompt, before it is evaluated.
        """

    def observe(self, outcome: RoundDone) -> None:
        """What the round cost and brought that the last proposals led to."""

    def rewind(self, sequence: SequenceState, n_tokens: int) -> None:
        """A new prompt shares its first ``n_tokens`` with what was committed: keep no more than these.

        The next ``commit`` brings the rest of that prompt.
        """

    def forget(self, sequence: SequenceState) -> None:
        """The sequence has ended; drop what is kept for it."""
