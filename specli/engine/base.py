"""What decoding needs from a model: evaluate tokens, roll back, and say its limits.

An engine deals in token ids only; text lives outside. It holds several sequences, each with its own cache, and it
checks its own limits and raises, because llama.cpp aborts the whole process instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specli.errors import ContextOverflow, EngineError, RollbackUnsupported

Row = NDArray[np.float32]  # (n_vocab,)
Rows = NDArray[np.float32]  # (n_wanted, n_vocab)


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive tokens of one sequence to evaluate in one batch.

    ``start`` is the position of the first token and must equal what the cache holds. ``n_rows`` logits rows are
    wanted, of the last tokens: 0 (feeding only) to ``len(tokens)``.
    """

    sequence: int
    tokens: Sequence[int]
    start: int
    n_rows: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one batch.

    ``rows[i]``: float32 ``(slices[i].n_rows, n_vocab)``, **views, valid until the next evaluate**; row j predicts
    the token after the j-th wanted token. Hidden states of named layers can join here later (feature drafters).
    """

    rows: list[Rows]


class Engine(Protocol):
    """A model with caches. Attributes are constant after loading, but for ``busy_s``."""

    n_vocab: int
    n_ctx: int  # tokens per sequence, as the user asked: never the library's rounded number
    n_batch: int  # tokens in one evaluate
    n_rows_max: int  # logits rows in one evaluate
    n_sequences: int
    busy_s: float  # seconds spent inside the model so far, logits included

    def n_past(self, sequence: int) -> int:
        """Tokens in the cache of ``sequence``."""

    def evaluate(self, slices: Sequence[Slice], interruptible: bool = False) -> Evaluation:
        """Evaluate one batch. With ``interruptible`` a long batch may stop early and raise ``Cancelled``.

        Raises ``EngineError`` (limits, failure), ``ContextOverflow``, ``Cancelled``.
        """

    def rollback(self, sequence: int, n_past: int) -> None:
        """Keep the first ``n_past`` tokens of ``sequence``. Raises ``RollbackUnsupported``; never ignored."""

    def close(self) -> None:
        """Free the model's memory. Calling it twice is fine."""


class CacheLedger:
    """Lengths of the caches and the checks that every engine makes before it touches its model."""

    def __init__(self, n_ctx: int, n_batch: int, n_rows_max: int, n_sequences: int, n_vocab: int) -> None:
        self.n_ctx, self.n_batch, self.n_rows_max = n_ctx, n_batch, n_rows_max
        self.n_sequences, self.n_vocab = n_sequences, n_vocab
        self._n_past = [0] * n_sequences

    def n_past(self, sequence: int) -> int:
        """Tokens in the cache of ``sequence``."""
        return self._n_past[sequence]

    def check(self, slices: Sequence[Slice]) -> None:
        """Raise ``EngineError`` or ``ContextOverflow`` if this batch may not be evaluated."""
        n_tokens = sum(len(part.tokens) for part in slices)
        n_rows = sum(part.n_rows for part in slices)
        if not 0 < n_tokens <= self.n_batch:
            raise EngineError(f"a batch of {n_tokens} tokens was asked for, the engine takes 1 to {self.n_batch}")
        if n_rows > self.n_rows_max:
            raise EngineError(f"{n_rows} logits rows were asked for, the engine was loaded for {self.n_rows_max}")
        for part in slices:
            if not 0 <= part.sequence < self.n_sequences:
                raise EngineError(f"sequence {part.sequence} does not exist, the engine has {self.n_sequences}")
            if not 0 <= part.n_rows <= len(part.tokens):
                raise EngineError(f"{part.n_rows} rows of {len(part.tokens)} tokens were asked for")
            held = self._n_past[part.sequence]
            if part.start != held:
                raise EngineError(f"sequence {part.sequence} holds {held} tokens, the batch starts at {part.start}")
            if held + len(part.tokens) > self.n_ctx:
                raise ContextOverflow(
                    f"{held} + {len(part.tokens)} tokens do not fit a context of {self.n_ctx}; raise it with -c"
                )
            if len(part.tokens) and (min(part.tokens) < 0 or max(part.tokens) >= self.n_vocab):
                raise EngineError(f"a token id outside 0..{self.n_vocab - 1} was given")

    def advance(self, slices: Sequence[Slice]) -> None:
        """Record that ``slices`` are in the caches."""
        for part in slices:
            self._n_past[part.sequence] += len(part.tokens)

    def cut(self, sequence: int, n_past: int) -> None:
        """Record that ``sequence`` holds ``n_past`` tokens now. Raises ``EngineError`` if it held fewer."""
        if not 0 <= n_past <= self._n_past[sequence]:
            raise EngineError(f"cannot roll back to {n_past} tokens, the cache holds {self._n_past[sequence]}")
        self._n_past[sequence] = n_past


def roll_back_or_clear(engine: Engine, sequence: int, n_past: int) -> bool:
    """Roll back to ``n_past`` tokens, or to none where the memory cannot go back that far; whether it could.

    Recurrent memories never can, sliding windows only while what they need is still there.
    """
    try:
        engine.rollback(sequence, n_past)
    except RollbackUnsupported:
        engine.rollback(sequence, 0)
        return False
    return True


CancelCheck = Callable[[], bool]
