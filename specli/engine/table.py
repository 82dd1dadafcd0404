"""A numpy model with a tiny vocabulary: the shipped fake, for tests, demonstrations and simulations.

Logits are a pure function of the whole history, so a cache that holds the wrong tokens shows at once. Limits and
rollback errors are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specli.engine.base import CacheLedger, Evaluation, Row, Slice
from specli.errors import RollbackUnsupported

LogitsFunction = Callable[[Sequence[int]], Row]


class TableEngine(CacheLedger):
    """An ``Engine`` over ``logits(history)``, float32 ``(n_vocab,)``, called with all tokens up to the row's own.

    ``can_roll_back`` False acts like a recurrent memory. ``pass_s(n_tokens)``, if given, is added to ``busy_s`` per
    batch (simulated time). ``batches`` logs (start, length) of every slice, for tests of chunking.
    """

    def __init__(
        self,
        logits: LogitsFunction,
        n_vocab: int,
        n_ctx: int = 256,
        n_batch: int = 64,
        n_rows_max: int = 64,
        n_sequences: int = 1,
        can_roll_back: bool = True,
        pass_s: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__(n_ctx, n_batch, n_rows_max, n_sequences, n_vocab)
        self.busy_s = 0.0
        self.batches: list[tuple[int, int]] = []
        self.can_roll_back = can_roll_back
        self._logits, self._pass_s = logits, pass_s
        self._history: list[list[int]] = [[] for _ in range(n_sequences)]

    def evaluate(self, slices: Sequence[Slice], interruptible: bool = False) -> Evaluation:
        """Rows of one batch; see ``Engine.evaluate``."""
        self.check(slices)
        rows = []
        for part in slices:
            history = self._history[part.sequence]
            wanted = []
            for i, token in enumerate(part.tokens):
                history.append(int(token))
                if i >= len(part.tokens) - part.n_rows:
                    wanted.append(np.asarray(self._logits(history), np.float32).copy())
            rows.append(np.stack(wanted) if wanted else np.empty((0, self.n_vocab), np.float32))
            self.batches.append((part.start, len(part.tokens)))
        self.advance(slices)
        if self._pass_s is not None:
            self.busy_s += self._pass_s(sum(len(part.tokens) for part in slices))
        return Evaluation(rows)

    def rollback(self, sequence: int, n_past: int) -> None:
        """Keep the first ``n_past`` tokens; without rollback only 0 or all of them are possible."""
        if not self.can_roll_back and 0 < n_past < self.n_past(sequence):
            raise RollbackUnsupported("this memory cannot drop a tail; decode plainly (--spec-type none)")
        self.cut(sequence, n_past)
        del self._history[sequence][n_past:]

    def close(self) -> None:
        """Nothing is held."""


def random_logits(n_vocab: int, seed: int, scale: float = 2.0, order: int = 3) -> LogitsFunction:
    """Seeded random logits that depend on the last ``order`` tokens, float32 ``(n_vocab,)``."""

    def logits(history: Sequence[int]) -> Row:
        key = [seed, len(history[-order:]), *history[-order:]]
        return np.random.default_rng(key).normal(0.0, scale, n_vocab).astype(np.float32)

    return logits


def scripted_logits(n_vocab: int, script: Callable[[int], int]) -> LogitsFunction:
    """Logits whose argmax at position t (tokens before it) is ``script(t)``, whatever the history says."""

    def logits(history: Sequence[int]) -> Row:
        row = np.zeros(n_vocab, np.float32)
        row[script(len(history))] = 10.0
        return row

    return logits
