"""From a logits row to a distribution: llama.cpp's sampler chain in llama.cpp's order.

    top-k -> top-p -> min-p -> temperature

Truncation looks at untempered logits, as in llama.cpp. Distributions are sparse: with the default top-k a row of
151,936 logits becomes at most 40 probabilities, and the vocabulary is never sorted. Ties go to the lowest id, always.

Sources: llama.cpp ``src/llama-sampler.cpp``; drafter-invariant noise: arXiv 2408.07978.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specli.errors import EngineError

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
Probs = NDArray[np.float64]

_COLDEST = 1e-200  # a temperature over which no difference of float32 logits overflows a float64


@dataclass(frozen=True, slots=True)
class Distribution:
    """A probability for each token of a support, zero elsewhere.

    ``ids``: int64 ``(m,)``, rising. ``probs``: float64 ``(m,)``, summing to 1. Dense when nothing truncates (m is
    then the vocabulary size); sparse otherwise.
    """

    ids: Ids
    probs: Probs

    def prob(self, token: int) -> float:
        """The probability of one token; 0.0 outside the support."""
        at = int(self.ids.searchsorted(token))
        return float(self.probs[at]) if at < self.ids.size and self.ids[at] == token else 0.0

    def probs_at(self, tokens: Ids) -> Probs:
        """The probabilities of ``tokens``, int64 ``(m,)``; 0.0 outside the support."""
        at = np.minimum(self.ids.searchsorted(tokens), self.ids.size - 1)
        return np.where(self.ids[at] == tokens, self.probs[at], 0.0)

    def draw(self, uniform: float) -> int:
        """The token at ``uniform`` in [0, 1) of the cumulative distribution. Never one of probability 0."""
        return int(self.ids[draw_index(self.probs, uniform)])


def draw_index(weights: Probs, uniform: float) -> int:
    """An index drawn in proportion to ``weights`` (float64 ``(m,)``, not all 0). Strict: weight 0 is never drawn."""
    cumulative = weights.cumsum()
    at = int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
    return at if at < weights.size else int(np.flatnonzero(weights)[-1])  # uniform * total rounded up to total


@dataclass(frozen=True, slots=True)
class Sampler:
    """llama.cpp's chain with its names and defaults. Pure: the same row gives the same distribution.

    ``temperature`` 0 means greedy (``is_greedy``). ``top_k`` <= 0, ``top_p`` >= 1 and ``min_p`` <= 0 switch a step
    off. ``banned`` ids get probability 0 before anything else (``--ignore-eos``); their logits are overwritten in
    place with -inf, since rows are views that nobody reads afterwards.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    banned: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit decides alone."""
        return self.temperature <= 0

    def argmax(self, row: Row) -> int:
        """The lowest id with the highest logit of ``row``, float32 ``(n_vocab,)``."""
        self._ban(row)
        best = int(row.argmax())
        _require_finite(row[best])
        return best

    def distribution(self, row: Row) -> Distribution:
        """The distribution that the chain leaves of ``row``, float32 ``(n_vocab,)``."""
        self._ban(row)
        ids, logits = self._truncated(row)
        weights = np.exp((logits - logits.max()) / max(self.temperature, _COLDEST))
        order = ids.argsort()
        return Distribution(ids[order], (weights / weights.sum())[order])

    def _truncated(self, row: Row) -> tuple[Ids, Probs]:
        """Ids that survive top-k, top-p and min-p, and their logits (float64), highest first unless dense."""
        if 0 < self.top_k < row.size:
            ids = top_ids(row, self.top_k)
            if self.top_p < 1:
                weights = np.exp(row[ids].astype(np.float64) - row[ids[0]])
                ids = ids[: _n_reaching(weights, self.top_p * weights.sum())]
        elif self.top_p < 1:
            ids = _nucleus(row, self.top_p)
        else:
            highest = row.max()
            _require_finite(highest)
            floor = highest + np.log(np.float32(self.min_p)) if self.min_p > 0 else -np.inf
            ids = np.flatnonzero(row >= floor)
            return ids, row[ids].astype(np.float64)
        logits = row[ids].astype(np.float64)
        if self.min_p > 0:
            n_kept = int((logits >= logits[0] + np.log(self.min_p)).sum())
            ids, logits = ids[:n_kept], logits[:n_kept]
        return ids, logits

    def _ban(self, row: Row) -> None:
        if self.banned:
            row[list(self.banned)] = -np.inf


def top_ids(row: Row, k: int) -> Ids:
    """The ids of the k highest finite logits of ``row``, highest first, ties by lowest id; int64 ``(<= k,)``.

    Exact without sorting: of n / 128 column maxima at least k reach the k-th highest, so no winner lies below it, and
    one comparison leaves a few hundred candidates (57 µs at 151,936 logits; ``np.argpartition`` takes 1,000).
    """
    n_columns = row.size // 128
    if n_columns > k:
        maxima = row[: n_columns * 128].reshape(128, n_columns).max(axis=0)
        highest = np.maximum(maxima.max(), row[n_columns * 128 :].max(initial=-np.inf))  # passes NaN on
        floor = np.partition(maxima, n_columns - k)[n_columns - k]
    else:
        highest, floor = row.max(), np.float32(-np.inf)
    _require_finite(highest)
    candidates = np.flatnonzero(row >= floor if floor > -np.inf else row > floor)
    logits = row[candidates]
    if candidates.size > 4 * k:
        near = logits >= np.partition(logits, candidates.size - k)[candidates.size - k]
        candidates, logits = candidates[near], logits[near]
    return candidates[(-logits).argsort(kind="stable")[:k]]  # candidates rise, so ties go to the lowest id


def top_probability(row: Row) -> float:
    """A draft model's confidence: its highest probability over its raw top 10 (llama.cpp ``draft-simple``)."""
    logits = row[top_ids(row, 10)].astype(np.float64)
    return float(1.0 / np.exp(logits - logits[0]).sum())


def gumbel_noise(seed: int, position: int, tokens: Ids) -> NDArray[np.float64]:
    """Gumbel noise that is a function of (seed, absolute position, token) alone; float64, shaped like ``tokens``.

    Counter-based: nothing is remembered between calls, so whoever draws position t sees the same noise (drafter-
    invariant sampling, arXiv 2408.07978). The hash is splitmix64's finaliser (Steele, Lea & Flood 2014), its top
    52 bits a uniform in the open interval (0, 1): with 53, the highest would round up to 1.
    """
    key = _mix((seed * _GOLDEN + 1) & _MASK)
    key = _mix((key + position * _GOLDEN) & _MASK)
    hashed = tokens.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
    for shift, factor in _MIX_STEPS:
        hashed = (hashed ^ (hashed >> np.uint64(shift))) * np.uint64(factor)
    hashed ^= hashed >> np.uint64(31)
    uniform = ((hashed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_STEPS: Sequence[tuple[int, int]] = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def _mix(value: int) -> int:
    for shift, factor in _MIX_STEPS:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


def _nucleus(row: Row, top_p: float) -> Ids:
    """The smallest set of highest logits with probability >= ``top_p``, highest first, without a full sort."""
    highest = row.max()
    _require_finite(highest)
    total = np.exp(row.astype(np.float64) - highest).sum()
    k = 64
    while True:
        ids = top_ids(row, k)
        n_kept = _n_reaching(np.exp(row[ids].astype(np.float64) - highest), top_p * total)
        if n_kept < ids.size or ids.size < k or k >= row.size:
            return ids[:n_kept]
        k *= 8


def _n_reaching(weights: Probs, mass: float) -> int:
    """How many of the first ``weights`` add up to ``mass``; all of them where rounding leaves them short of it."""
    return min(int(weights.cumsum().searchsorted(mass)) + 1, weights.size)


def _require_finite(logit: np.float32) -> None:
    """Raise ``EngineError`` when the highest logit is NaN or infinite: the numbers of this row mean nothing."""
    if not math.isfinite(logit):
        raise EngineError(
            f"the model returned {logit} as its highest logit, a finite number was expected; the file is damaged or "
            "its numbers overflow (try -fa off, another cache type, or -ngl 0)"
        )
