"""Shared by the tests: small drafters, memoised tables, and a chi-square test with a stated false-alarm rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from specli.drafters.base import EMPTY, Draft, SequenceState
from specli.engine.base import Row
from specli.engine.table import LogitsFunction
from specli.events import RoundDone
from specli.sampling import Distribution

FALSE_ALARM = 1e-6  # of one chi-square check, were its seeds not fixed


def chi_square_p(
    counts: Sequence[float] | NDArray[np.float64], expected: Sequence[float] | NDArray[np.float64]
) -> float:
    """The p-value of ``counts`` under ``expected`` counts (Wilson-Hilferty); cells expected 0 must be empty."""
    observed, hoped = np.asarray(counts, float).ravel(), np.asarray(expected, float).ravel()
    if observed[hoped == 0].any():
        return 0.0
    observed, hoped = observed[hoped > 0], hoped[hoped > 0]
    degrees = observed.size - 1
    if degrees == 0:
        return 1.0
    statistic = float(((observed - hoped) ** 2 / hoped).sum())
    spread = 2 / (9 * degrees)
    return 1 - NormalDist().cdf(((statistic / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5)


def dense(probs: Sequence[float] | NDArray[np.float64]) -> Distribution:
    """A ``Distribution`` over the tokens of non-zero probability."""
    values = np.asarray(probs, np.float64)
    ids = np.flatnonzero(values)
    return Distribution(ids, values[ids])


def memo(logits: LogitsFunction, order: int = 3) -> LogitsFunction:
    """``logits`` that depend on the last ``order`` tokens only, remembered."""
    known: dict[tuple[int, ...], Row] = {}

    def remembered(history: Sequence[int]) -> Row:
        key = tuple(history[-order:])
        if key not in known:
            known[key] = logits(history)
        return known[key]

    return remembered


class FakeDrafter:
    """Proposes what ``guess(tokens)`` says comes next, as a chain of point masses; counts what it is told.

    ``guess`` gets the history as it would be, returns a token, or None to end the draft there.
    """

    busy_s = 0.0

    def __init__(self, guess: Callable[[Sequence[int]], int | None]) -> None:
        self._guess = guess
        self.committed: dict[int, list[int]] = {}
        self.forgotten: list[int] = []
        self.budgets: list[int] = []
        self.observed: list[RoundDone] = []

    def propose(self, sequences: Sequence[SequenceState], budgets: Sequence[int]) -> list[Draft]:
        drafts = []
        for state, budget in zip(sequences, budgets, strict=True):
            assert self.committed[state.id] == state.tokens  # it was told of every token, in order, once
            self.budgets.append(budget)
            history = list(state.tokens)
            while len(history) - len(state.tokens) < budget and (token := self._guess(history)) is not None:
                history.append(token)
            ids = history[len(state.tokens) :]
            drafts.append(Draft(ids, [None] * len(ids)) if ids else EMPTY)
        return drafts

    def commit(self, sequence: SequenceState, tokens: Sequence[int]) -> None:
        self.committed.setdefault(sequence.id, []).extend(tokens)

    def observe(self, outcome: RoundDone) -> None:
        self.observed.append(outcome)

    def forget(self, sequence: SequenceState) -> None:
        self.forgotten.append(sequence.id)
        self.committed.pop(sequence.id, None)
