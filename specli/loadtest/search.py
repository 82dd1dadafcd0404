"""The highest load inside the bounds: doubling until one is outside, then halving the gap. A probe is a step."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

RESOLUTION = 0.05  # of a load, from where on two loads are the same


@dataclass(frozen=True, slots=True)
class Found:
    """``best``: the highest load seen inside the bounds; ``outside``: the lowest seen outside. None: there was none."""

    best: float | None
    outside: float | None


def probes(low: float, high: float, *, is_whole: bool) -> Generator[float, bool, Found]:
    """Yields loads between ``low`` and ``high`` to be measured, takes whether each was inside; returns what was found.

    ``is_whole``: loads are numbers of requests in flight, not rates.
    """
    best: float | None = None
    load = low
    while True:
        if not (yield load):
            outside = load
            break
        best = load
        if load >= high:
            return Found(best, None)
        load = min(2 * load, high)
    while best is not None and (middle := _between(best, outside, is_whole)) is not None:
        if (yield middle):
            best = middle
        else:
            outside = middle
    return Found(best, outside)


def _between(low: float, high: float, is_whole: bool) -> float | None:
    """The next load to look at; None when the ends are close enough."""
    if is_whole:
        return None if high - low <= max(1, math.floor(RESOLUTION * low)) else float((int(low) + int(high)) // 2)
    return None if high / low <= 1 + RESOLUTION else math.sqrt(low * high)
