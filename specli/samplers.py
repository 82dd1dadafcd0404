"""llama.cpp's samplers, one pure function each: candidates in, candidates out.

What a sampler remembers in llama.cpp is an argument here: the recent tokens, a coin, mirostat's mu. So a position of a
draft is judged by what stands before it, and a rejected token leaves no trace.

Source: llama.cpp ``src/llama-sampler.cpp``; each function names the sampler it follows. ``min_keep`` is 0, llama.cpp's
default. Probabilities are float64 here and float32 there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specli.errors import EngineError

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
Logits = NDArray[np.floating]
Breakers = Mapping[int, Sequence[tuple[int, ...]]]

_LOG_OF_MAX = 88.7228391  # of float32, as in llama.cpp
_MIROSTAT_M = 100  # of the most probable tokens, by which mirostat 1 estimates the law's exponent


class Candidates(NamedTuple):
    """Tokens that are still in the race, and their logits.

    ``ids`` None: every token, ``logits`` is float32 ``(n_vocab,)`` and may not be written to. Otherwise int64 ``(m,)``
    beside float64 ``(m,)``, highest logit first where ``is_sorted``.
    """

    ids: Ids | None
    logits: Logits
    is_sorted: bool = False

    def by_logit(self) -> Candidates:
        """The same, highest first, ties by lowest id."""
        if self.is_sorted:
            return self
        if self.ids is None:
            require_finite(self.logits.max())
        ids = np.flatnonzero(self.logits > -np.inf) if self.ids is None else self.ids
        logits = self.logits[ids].astype(np.float64) if self.ids is None else self.logits
        order = np.lexsort((ids, -logits))
        return Candidates(ids[order], logits[order], True)

    def first(self, n: int) -> Candidates:
        """The first ``n``; of sorted ones only."""
        assert self.ids is not None
        return Candidates(self.ids[:n], self.logits[:n], True)

    def raised(self, changes: Mapping[int, float]) -> Candidates:
        """``changes`` added to the logits of some tokens; those that are out of the race stay out."""
        if not changes:
            return self
        if self.ids is None:
            ids = np.fromiter((token for token in changes if 0 <= token < self.logits.size), np.int64)
            logits = self.logits.copy()
            logits[ids] += np.fromiter((changes[token] for token in ids.tolist()), np.float64)
            return Candidates(None, logits)
        extra = np.fromiter((changes.get(token, 0.0) for token in self.ids.tolist()), np.float64)
        return Candidates(self.ids, self.logits + extra)


def probabilities(logits: Logits) -> NDArray[np.float64]:
    """The softmax, float64 ``(m,)``."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    probs: NDArray[np.float64] = weights / weights.sum()
    return probs


def top_k(candidates: Candidates, k: int) -> Candidates:
    """The ``k`` highest (``llama_sampler_top_k_impl``)."""
    if candidates.ids is not None:
        return candidates.by_logit().first(k)
    ids = top_ids(candidates.logits, k)
    return Candidates(ids, candidates.logits[ids].astype(np.float64), True)


def top_p(candidates: Candidates, p: float) -> Candidates:
    """The smallest set of highest ones with probability >= ``p`` (``llama_sampler_top_p_apply``)."""
    if candidates.ids is None:
        ids = _nucleus(candidates.logits, p)
        return Candidates(ids, candidates.logits[ids].astype(np.float64), True)
    candidates = candidates.by_logit()
    weights = np.exp(candidates.logits - candidates.logits[0])
    return candidates.first(_n_reaching(weights, p * weights.sum()))


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Those at least ``p`` times as probable as the best (``llama_sampler_min_p_apply``)."""
    if candidates.ids is None:
        highest = candidates.logits.max()
        require_finite(highest)
        ids = np.flatnonzero(candidates.logits >= highest + np.float32(math.log(p)))
        return Candidates(ids, candidates.logits[ids].astype(np.float64))
    candidates = candidates.by_logit()
    return candidates.first(int((candidates.logits >= candidates.logits[0] + math.log(p)).sum()))


def typical(candidates: Candidates, p: float) -> Candidates:
    """Those whose surprise is nearest to the entropy, up to more than ``p`` (``llama_sampler_typical_apply``).

    Locally typical sampling: Meister et al., arXiv 2202.00666.
    """
    candidates = candidates.by_logit()
    probs = probabilities(candidates.logits)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probs)
    entropy = float(probs @ np.where(probs > 0, surprise, 0.0))
    order = np.abs(surprise - entropy).argsort(kind="stable")
    n_kept = min(int(probs[order].cumsum().searchsorted(p, side="right")) + 1, order.size)
    assert candidates.ids is not None
    return Candidates(candidates.ids[order[:n_kept]], candidates.logits[order[:n_kept]])


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Those within ``n`` standard deviations of the highest logit (``llama_sampler_top_n_sigma_apply``).

    Tang et al., arXiv 2411.07641.
    """
    if candidates.logits.size <= 1:
        return candidates
    require_finite(candidates.logits.max())
    finite = candidates.logits[candidates.logits > -np.inf].astype(np.float64)
    kept = candidates.logits >= finite.max() - n * finite.std()
    ids = np.flatnonzero(kept) if candidates.ids is None else candidates.ids[kept]
    return Candidates(ids, candidates.logits[kept].astype(np.float64), candidates.is_sorted)


def xtc(candidates: Candidates, probability: float, threshold: float, coin: float) -> Candidates:
    """Exclude top choices: without those above ``threshold`` but the last of them (``llama_sample_xtc_apply``).

    ``coin`` in [0, 1): above ``probability`` nothing happens.
    """
    if candidates.logits.size < 2 or coin > probability:
        return candidates
    require_finite(candidates.logits.max())
    at = np.flatnonzero(probabilities(candidates.logits) >= threshold)
    if at.size < 2:
        return candidates
    ids = np.arange(candidates.logits.size) if candidates.ids is None else candidates.ids
    order = np.lexsort((ids[at], -candidates.logits[at]))
    kept = candidates.logits > -np.inf
    kept[at[order[:-1]]] = False
    return Candidates(ids[kept], candidates.logits[kept].astype(np.float64), candidates.is_sorted)


def temperature(candidates: Candidates, t: float) -> Candidates:
    """Logits ÷ ``t`` > 0 (``llama_sampler_temp_impl``)."""
    if candidates.ids is None:
        require_finite(candidates.logits.max())
        ids = np.flatnonzero(candidates.logits > -np.inf)
        return Candidates(ids, candidates.logits[ids].astype(np.float64) / t)
    return Candidates(candidates.ids, candidates.logits / t, candidates.is_sorted)


def dynamic_temperature(candidates: Candidates, t: float, reach: float, exponent: float) -> Candidates:
    """A temperature of ``t`` ± ``reach`` by the entropy (``llama_sampler_temp_ext_apply``)."""
    size = candidates.logits.size
    if size <= 1:
        return candidates
    probs = probabilities(candidates.logits)
    entropy = -float((probs[probs > 0] * np.log(probs[probs > 0])).sum())
    low, high = max(0.0, t - reach), t + reach
    mapped = low + (high - low) * (entropy / math.log(size)) ** exponent
    return temperature(candidates, mapped) if mapped > 0 else candidates.by_logit().first(1)


def penalties(
    candidates: Candidates, recent: Sequence[int], repeat: float, presence: float, frequency: float
) -> Candidates:
    """Lower the logits of recent tokens (``llama_sampler_penalties_apply``)."""
    changes: dict[int, float] = {}
    logit_of = _logits_of(candidates, set(recent))
    for token, count in Counter(recent).items():
        logit = logit_of.get(token)
        if logit is not None:
            scaled = logit * repeat if logit <= 0 else logit / repeat
            changes[token] = scaled - logit - count * frequency - presence if math.isfinite(logit) else 0.0
    return candidates.raised(changes)


def dry(
    candidates: Candidates, recent: Sequence[int], multiplier: float, base: float, allowed: int, breakers: Breakers
) -> Candidates:
    """Don't repeat yourself: lower what would make a repetition longer (``llama_sampler_dry_apply``).

    ``allowed``: repetitions of fewer tokens are free. ``breakers``: first token -> the other tokens of each sequence
    that ends a repetition.
    """
    n = len(recent)
    if n <= allowed:
        return candidates
    backwards = recent[::-1]
    limit = _distance_of_breaker(backwards, breakers)
    if limit < allowed:
        return candidates
    longest: dict[int, int] = {}
    for k, length in enumerate(_common_prefixes(backwards)):
        length = min(length, limit)
        if k > 0 and length >= allowed:
            longest[backwards[k - 1]] = max(length, longest.get(backwards[k - 1], 0))
    most = int(_LOG_OF_MAX / math.log(base)) if base > 1.000001 else 0
    changes = {}
    for token, length in longest.items():
        if () not in breakers.get(token, ()):
            excess = length - allowed
            changes[token] = -multiplier * base ** (min(excess, most) if most > 0 else excess)
    return candidates.raised(changes)


def mirostat(candidates: Candidates, version: int, mu: float, n_vocab: int) -> Candidates:
    """Truncate to a surprise of about ``mu`` bits (``llama_sampler_mirostat_apply``, ``…_v2_apply``).

    Basu et al., arXiv 2007.14966.
    """
    logits = candidates.logits
    require_finite(logits.max())
    highest = float(logits.max())
    total = math.log(float(np.exp(logits.astype(np.float64) - highest).sum()))  # of the softmax, beside the highest
    if version == 2:
        return _reaching(candidates, highest + total - mu * math.log(2))
    best = top_k(candidates, _MIROSTAT_M)
    surprise = total + highest - best.logits[best.logits > -np.inf]  # nats
    n = min(_MIROSTAT_M - 1, surprise.size - 1)
    if n < 1:
        return best.first(1)
    ranks = np.arange(n)
    t, b = np.log((ranks + 2) / (ranks + 1)), np.diff(surprise[: n + 1])
    s_hat = float(t @ b / (t @ t))
    epsilon = s_hat - 1
    with np.errstate(all="ignore"):
        k = np.float64(epsilon * np.float64(2.0) ** mu / (1 - np.float64(n_vocab) ** -epsilon)) ** np.float64(1 / s_hat)
    return top_k(candidates, max(1, int(min(k, logits.size))) if math.isfinite(k) else logits.size)


def _reaching(candidates: Candidates, floor: float) -> Candidates:
    """Those whose logit is at least ``floor``, sorted; the highest at least."""
    kept = candidates.logits >= min(floor, float(candidates.logits.max()))
    ids = np.flatnonzero(kept) if candidates.ids is None else candidates.ids[kept]
    return Candidates(ids, candidates.logits[kept].astype(np.float64)).by_logit()


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
    require_finite(highest)
    candidates = np.flatnonzero(row >= floor if floor > -np.inf else row > floor)
    logits = row[candidates]
    if candidates.size > 4 * k:
        near = logits >= np.partition(logits, candidates.size - k)[candidates.size - k]
        candidates, logits = candidates[near], logits[near]
    return candidates[(-logits).argsort(kind="stable")[:k]]  # candidates rise, so ties go to the lowest id


def require_finite(logit: np.floating) -> None:
    """Raise ``EngineError`` when the highest logit is NaN or infinite: the numbers of this row mean nothing."""
    if not math.isfinite(logit):
        raise EngineError(
            f"the model returned {logit} as its highest logit, a finite number was expected; the file is damaged or "
            "its numbers overflow (try -fa off, another cache type, or -ngl 0)"
        )


def _nucleus(row: Row, p: float) -> Ids:
    """The smallest set of highest logits with probability >= ``p``, highest first, without a full sort."""
    highest = row.max()
    require_finite(highest)
    total = np.exp(row.astype(np.float64) - highest).sum()
    k = 64
    while True:
        ids = top_ids(row, k)
        n_kept = _n_reaching(np.exp(row[ids].astype(np.float64) - highest), p * total)
        if n_kept < ids.size or ids.size < k or k >= row.size:
            return ids[:n_kept]
        k *= 8


def _n_reaching(weights: NDArray[np.float64], mass: float) -> int:
    """How many of the first ``weights`` add up to ``mass``; all of them where rounding leaves them short of it."""
    return min(int(weights.cumsum().searchsorted(mass)) + 1, weights.size)


def _logits_of(candidates: Candidates, wanted: set[int]) -> dict[int, float]:
    if candidates.ids is None:
        return {token: float(candidates.logits[token]) for token in wanted if 0 <= token < candidates.logits.size}
    pairs = zip(candidates.ids.tolist(), candidates.logits.tolist(), strict=True)
    return {token: logit for token, logit in pairs if token in wanted}


def _distance_of_breaker(backwards: Sequence[int], breakers: Breakers) -> int:
    """Tokens behind the last sequence that ends a repetition; all of them without one."""
    if breakers:
        for i, token in enumerate(backwards):
            lengths = (len(tail) for tail in breakers.get(token, ()) if _stands(tail, backwards, i))
            longest = max(lengths, default=None)
            if longest is not None:
                return i - longest
    return len(backwards)


def _stands(tail: Sequence[int], backwards: Sequence[int], i: int) -> bool:
    """Whether ``tail`` follows the token at ``i``, counted from the end."""
    return len(tail) <= i and all(token == backwards[i - 1 - offset] for offset, token in enumerate(tail))


def _common_prefixes(tokens: Sequence[int]) -> list[int]:
    """For each k, how many tokens from k on equal those from 0 on (Z-algorithm, Gusfield 1997); 0 for k = 0."""
    n = len(tokens)
    lengths, left, right = [0] * n, 0, 0  # tokens[left:right] equals a beginning
    for k in range(1, n):
        length = min(right - k, lengths[k - left]) if k < right else 0
        while k + length < n and tokens[length] == tokens[k + length]:
            length += 1
        lengths[k] = length
        if k + length > right:
            left, right = k, k + length
    return lengths
