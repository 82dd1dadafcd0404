"""Medians, quantiles, and ratios with bootstrap intervals. Pure: numbers in, numbers out, seeded.

A speedup is a ratio of the time that the same tokens take: sum of w * a / sum of w * b over prompts, where a and b are
the TPOT of the two ways of decoding one prompt (the median of its repetitions) and w its tokens. Prompts are the unit
that is resampled, since another user has other prompts; repetitions of one prompt are no news of others. With a single
prompt its repetitions are resampled.

The interval is the percentile bootstrap's with t-corrected percentiles (Hesterberg 2015, "What Teachers Should Know
About the Bootstrap", section 3.1.2): plain percentiles are too narrow for the few prompts that a bench has time for.
Resampling cannot leave the range of what was measured, so below six units the interval is at least that of Student's t
for the logarithm of the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

N_RESAMPLES = 4000
FEW = 6  # units, below which resampling alone is not trusted
CONFIDENCE = 0.95
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95% interval; None where there was too little to tell (one pair)."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends, or None."""
        return None if self.low is None or self.high is None else (self.low, self.high)


@dataclass(frozen=True, slots=True)
class Pair:
    """One comparison: ``before`` and ``after`` are ms per token of ``prompt``, which gave ``tokens`` tokens."""

    prompt: str
    tokens: float
    before: float
    after: float


def speedup(pairs: Sequence[Pair], seed: int = 0, n_resamples: int = N_RESAMPLES) -> Estimate | None:
    """How many times as fast ``after`` is, with its interval; None without a pair."""
    prompts = list(dict.fromkeys(pair.prompt for pair in pairs))
    if not prompts:
        return None
    weights, before, after = _per_prompt(pairs, prompts)
    value = float(weights @ before / (weights @ after))
    n_units = len(prompts) if len(prompts) > 1 else len(pairs)
    if n_units < 2:
        return Estimate(value)
    rng = np.random.default_rng(seed)
    chosen = rng.integers(n_units, size=(n_resamples, n_units))
    if len(prompts) > 1:
        times = np.stack([weights * before, weights * after], axis=1)
        sums = times[chosen].sum(axis=1)
    else:
        times = np.array([[pair.before, pair.after] for pair in pairs])
        sums = np.median(times[chosen], axis=1)
    low, high = percentile_interval(sums[:, 0] / sums[:, 1], n_units)
    if n_units < FEW:
        low, high = _widened(value, low, high, times)
    return Estimate(value, low, high)


def _widened(value: float, low: float, high: float, times: Array) -> tuple[float, float]:
    """``low`` and ``high`` or, where wider, the t interval of log(value). ``times``: ``(n, 2)``, before and after."""
    n = len(times)
    influence = times[:, 0] / times[:, 0].mean() - times[:, 1] / times[:, 1].mean()  # of each unit on the logarithm
    reach = math.exp(t_quantile(0.5 + CONFIDENCE / 2, n - 1) * float(influence.std(ddof=1)) / math.sqrt(n))
    return min(low, value / reach), max(high, value * reach)


def _per_prompt(pairs: Sequence[Pair], prompts: Sequence[str]) -> tuple[Array, Array, Array]:
    """Tokens and the medians of both times, one of each per prompt."""
    rows = []
    for prompt in prompts:
        own = [pair for pair in pairs if pair.prompt == prompt]
        columns = ([pair.tokens for pair in own], [pair.before for pair in own], [pair.after for pair in own])
        rows.append([float(np.mean(columns[0])), float(np.median(columns[1])), float(np.median(columns[2]))])
    weights, before, after = np.array(rows).T
    return weights, before, after


def percentile_interval(values: Array, n_units: int) -> tuple[float, float]:
    """The 95% interval of bootstrapped ``values``, from ``n_units`` resampled units, t-corrected."""
    stretch = math.sqrt(n_units / (n_units - 1)) * t_quantile(0.5 + CONFIDENCE / 2, n_units - 1)
    tail = NormalDist().cdf(-stretch)
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def t_quantile(level: float, degrees: int) -> float:
    """Quantile of Student's t (95% intervals); from 3 degrees on by Abramowitz & Stegun 26.7.5, right to 1%."""
    if degrees == 1:
        return math.tan(math.pi * (level - 0.5))
    if degrees == 2:
        return (2 * level - 1) / math.sqrt(2 * level * (1 - level))
    z, n = NormalDist().inv_cdf(level), degrees
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def median(values: Sequence[float]) -> float | None:
    """The middle value; None of nothing."""
    return float(np.median(values)) if len(values) else None


def quantiles(values: Sequence[float], levels: Sequence[float]) -> list[float] | None:
    """The quantiles at ``levels`` in [0, 1]; None of nothing."""
    return [float(value) for value in np.quantile(values, levels)] if len(values) else None
