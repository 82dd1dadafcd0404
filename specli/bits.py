"""Do passes over several tokens give the logits of one-token passes, to the bit? Measured, never assumed.

It is a property of (file, kernels, width, length, cache types): llama.cpp computes a row's sums in another order when
more rows share a pass. On CPUs its one-token passes split the cache between threads beyond 256 tokens, unless the cache
is quantized (ggml-cpu ``ops.cpp``, flash attention); wider ones do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specli.engine.base import Engine, Rows, Slice

LENGTHS = (16, 238, 520)  # tokens before the compared ones: the cache's first 256 cells from both ends, and beyond 512
MAX_WIDTH = 17  # tokens: the longest draft that the controller chooses, and the target's own
TEXT = """\
The harbour of Aldness lies between two low hills, and in winter the fog stays there until noon. On the first of March
1874 a ship came in that nobody expected. It carried 240 crates of oranges, three passengers, and a letter for the
schoolmaster, who was known to receive none. "Open it here," said the captain, "for I was told to bring back an
answer." The letter held a list of names, a drawing of a lighthouse with its door on the wrong side, and a sum: 17
times 23 makes 391. He read it twice. Then he asked for ink, wrote a single word below the sum, and folded the paper
as it had been folded before. def answer(x, y): return x * y # he would have written today. Nobody in the town ever
learned what the word was, though the captain's daughter, who could read upside down, is said to have laughed all the
way to the pier.
"""


@dataclass(frozen=True, slots=True)
class Shift:
    """How far logits moved against one-token passes. ``largest``: of one logit; ``spread``: of a difference of two."""

    largest: float
    spread: float

    @property
    def is_identical(self) -> bool:
        """Every bit was the same."""
        return self.largest == 0 and self.spread == 0


NONE = Shift(0.0, 0.0)


def lengths_within(n_ctx: int, width: int) -> tuple[int, ...]:
    """Where to look in a context of ``n_ctx`` tokens with passes of up to ``width``: its end too, if it is short."""
    fitting = [length for length in LENGTHS if length + width <= n_ctx]
    if len(fitting) < len(LENGTHS):
        fitting.append(max(0, n_ctx - width))
    return tuple(sorted(set(fitting)))


def measure(
    engine: Engine,
    tokens: Sequence[int],
    length: int,
    widths: Sequence[int],
    on_pass: Callable[[], None] = lambda: None,
) -> dict[int, Shift]:
    """The shift of each width behind ``length`` tokens.

    ``tokens``: at least ``length`` and the widest width of them. Sequence 0 is used: it must hold a beginning of
    ``tokens``, and is left with ``length`` of them.
    """
    _feed(engine, tokens, length)
    widest = max(widths)
    rows = list[Rows]()
    for position in range(length, length + widest):
        rows.append(engine.evaluate([Slice(0, [tokens[position]], position, 1)]).rows[0].copy())
        on_pass()
    narrow = np.concatenate(rows)
    shifts = {}
    for width in widths:
        engine.rollback(0, length)
        wide = engine.evaluate([Slice(0, tokens[length : length + width], length, width)]).rows[0]
        shifts[width] = shift(narrow[:width], wide)
        on_pass()
    engine.rollback(0, length)
    return shifts


def together(alone: Engine, shared: Engine, tokens: Sequence[int], length: int, width: int) -> Shift:
    """How far logits move when a pass of up to ``width`` tokens holds all sequences of ``shared``, which must be empty.

    Each has another text, of another length up to ``length``, and another part of the pass, as in a server; it is
    compared with one-token passes of ``alone``, an engine of one sequence. Both are left empty.
    """
    most = max(1, width // shared.n_sequences)
    slices, narrow = list[Slice](), list[Rows]()
    for sequence in range(shared.n_sequences):
        text = [*tokens[sequence:], *tokens[:sequence]]
        n_before, n = max(1, length - 7 * sequence), max(1, most - sequence % 3)
        alone.rollback(0, 0)
        for engine, own in ((alone, 0), (shared, sequence)):
            _feed(engine, text, n_before, own)
        for position in range(n_before, n_before + n):
            row = alone.evaluate([Slice(0, [text[position]], position, 1)]).rows[0]
            narrow.append(row.copy())
        slices.append(Slice(sequence, text[n_before : n_before + n], n_before, n))
    wide = np.concatenate([rows.copy() for rows in shared.evaluate(slices).rows])
    for sequence in range(shared.n_sequences):
        shared.rollback(sequence, 0)
    alone.rollback(0, 0)
    return shift(np.concatenate(narrow), wide)


def pass_ratio(engine: Engine, other: Engine, tokens: Sequence[int], length: int, n: int = 8) -> float:
    """Time of a one-token pass of ``engine`` / of ``other``, behind ``length`` tokens, medians of ``n`` in turn."""
    times: dict[int, list[float]] = {0: [], 1: []}
    for one in (engine, other):
        _feed(one, tokens, length)
    for i in range(2 * n):
        one = (engine, other)[i % 2]
        busy_s = one.busy_s
        one.evaluate([Slice(0, [tokens[length]], length, 1)])
        times[i % 2].append(one.busy_s - busy_s)
        one.rollback(0, length)
    below = float(np.median(times[1]))
    return float(np.median(times[0])) / below if below > 0 else 1.0


def shift(narrow: Rows, wide: Rows) -> Shift:
    """How far ``wide`` moved from ``narrow``; both float32 ``(n, n_vocab)``."""
    if np.array_equal(narrow.view(np.int32), np.ascontiguousarray(wide).view(np.int32)):
        return NONE
    moved = wide.astype(np.float64) - narrow
    largest = float(np.abs(moved).max())
    spread = float((moved.max(axis=1) - moved.min(axis=1)).max())
    return Shift(largest, spread) if largest > 0 else NONE


def widest_identical(shifts: Mapping[int, Shift]) -> int:
    """The largest width up to which every width is identical; 1 if not even two tokens are."""
    widest = 1
    for width in sorted(shifts):
        if not shifts[width].is_identical:
            break
        widest = width
    return widest


def largest(shifts: Mapping[int, Shift]) -> Shift:
    """The largest of several shifts."""
    return Shift(
        max((one.largest for one in shifts.values()), default=0.0),
        max((one.spread for one in shifts.values()), default=0.0),
    )


def sample_tokens(tokenize: Callable[[str], Sequence[int]], n: int) -> list[int]:
    """``n`` tokens of ordinary text, again from its beginning where it is too short."""
    tokens = list(tokenize(TEXT)) or [0]
    return (tokens * (n // len(tokens) + 1))[:n]


def _feed(engine: Engine, tokens: Sequence[int], length: int, sequence: int = 0) -> None:
    """Bring ``sequence`` to the first ``length`` of ``tokens``, in chunks as a prompt is fed."""
    if engine.n_past(sequence) > length:
        engine.rollback(sequence, length)
    while (start := engine.n_past(sequence)) < length:
        chunk = tokens[start : min(length, start + engine.n_batch)]
        engine.evaluate([Slice(sequence, chunk, start, 0)], interruptible=True)
