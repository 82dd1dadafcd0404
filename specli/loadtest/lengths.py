"""Lengths in tokens: how the command line writes them, and how they are drawn."""

from __future__ import annotations

import numpy as np

from specli.config import LENGTH_KINDS, LENGTHS, LengthOptions
from specli.errors import ConfigError

INPUT, OUTPUT = 0, 1  # of the pairs in ``config.LENGTHS``


def parse(flag: str, text: str, role: int) -> LengthOptions:
    """``chat``, ``uniform:64,256``, ``normal:200,50`` or ``lognormal:120,0.7``. Raises ``ConfigError``.

    ``role``: ``INPUT`` or ``OUTPUT``, which of a named pair is meant.
    """
    if text in LENGTHS:
        return LENGTHS[text][role]
    kind, _, numbers = text.partition(":")
    parts = numbers.split(",")
    try:
        first, second = map(float, parts)
    except ValueError:
        first = second = float("nan")
    if kind not in LENGTH_KINDS or first != first or second != second:
        raise ConfigError(
            f"{flag} got {text!r}, expected one of {', '.join(LENGTHS)}, or uniform:LOW,HIGH, normal:MEAN,DEVIATION "
            "or lognormal:MEDIAN,SIGMA in tokens"
        )
    return LengthOptions(kind, first, second)


def draw(lengths: LengthOptions, rng: np.random.Generator) -> int:
    """One length, tokens, between ``low`` and ``high``."""
    if lengths.kind == "uniform":
        return int(rng.integers(lengths.low, lengths.high + 1))
    if lengths.kind == "normal":
        value = rng.normal(lengths.first, lengths.second)
    else:
        value = lengths.first * float(np.exp(rng.normal(0.0, lengths.second)))
    return int(np.clip(round(value), lengths.low, lengths.high))
