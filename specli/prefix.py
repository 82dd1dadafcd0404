"""What outlives a generation: the tokens that the caches hold, and how much of them a new prompt can keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specli.drafters.base import Drafter, SequenceState
from specli.engine.base import Engine, Slice, roll_back_or_clear

STARTS_OVER = (
    "the memory of this model cannot go back to where the text changed: it is evaluated again from its beginning "
    "(said once)"
)


class KeptPrefix:
    """Sequence ``sequence``, continued by prompt after prompt, each evaluated from where it differs from the last.

    ``engine`` and ``drafter`` hold prefixes of the same tokens: of the prompt and answer that were last generated. That
    holds whenever a generation has ended, was closed or cancelled; after an error ``drop`` makes it hold.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        notice: Callable[[str], None] = lambda _line: None,
        sequence: int = 0,
    ) -> None:
        self._engine, self._drafter, self._notice = engine, drafter, notice
        self._state = SequenceState(sequence, [])
        self._has_told = False

    def n_shared(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of a prompt the cache holds."""
        return min(common_prefix(self._state.tokens, tokens), self._engine.n_past(self._state.id))

    def open(self, state: SequenceState) -> int:
        """Cut caches and drafter back to what they share with ``state.tokens``, a prompt; the number of these tokens.

        It is the ``n_known`` of the ``Request`` that must be run next. The prompt's last token is never among them: its
        row is wanted.
        """
        n_shared = min(common_prefix(self._state.tokens, state.tokens), max(0, len(state.tokens) - 1))
        self._state = state  # the generation appends to it
        if self._engine.n_past(state.id) > n_shared:
            could = roll_back_or_clear(self._engine, state.id, n_shared)
            if not could and not self._has_told:
                self._has_told = True
                self._notice(STARTS_OVER)
        if self._drafter is not None:
            self._drafter.rewind(state, n_shared)
        return n_shared

    def evaluates(self, token: int, n_rows: int, *, interruptible: bool) -> bool:
        """Whether one pass over ``token``, repeated, gives sound logits; everything is dropped. Raises as the engine.

        ``token`` below 0: the vocabulary's first.
        """
        self.drop()
        tokens = [max(0, token)] * min(n_rows, self._engine.n_batch, self._engine.n_ctx)
        rows = self._engine.evaluate([Slice(self._state.id, tokens, 0, len(tokens))], interruptible=interruptible).rows
        self.drop()
        return bool(np.isfinite(rows[0].max(axis=1)).all())  # as for a sampler: -inf is a ban

    def drop(self) -> None:
        """Empty everything: the next prompt is evaluated whole."""
        state, self._state = self._state, SequenceState(self._state.id, [])
        self._engine.rollback(state.id, 0)
        if self._drafter is not None:
            self._drafter.forget(state)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    n = min(len(one), len(other))
    return next((i for i in range(n) if one[i] != other[i]), n)
