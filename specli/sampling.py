"""From a logits row to a distribution: llama.cpp's sampler chain in llama.cpp's order and with its names.

    logit bias -> grammar -> penalties -> dry -> top_n_sigma -> top_k -> typ_p -> top_p -> min_p -> xtc -> temperature

Truncation looks at untempered logits, as in llama.cpp. Distributions are sparse: with the default top-k a row of
151,936 logits becomes at most 40 probabilities, and the vocabulary is never sorted. Ties go to the lowest id, always.

The chain defines the law that speculation must keep. So a grammar masks first and the chain follows; llama.cpp's
default order, the whole chain and a second draw where the grammar rejects the first, is another distribution. What a
position may know is its ``Context``: the tokens before it (committed ones and the proposals that it stands behind), its
coin, and the state that those tokens led to. Nothing here is written to, so a rejected proposal leaves no trace.

Sources: llama.cpp ``common/sampling.cpp``; drafter-invariant noise: arXiv 2408.07978.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from specli import samplers
from specli.errors import DeadEnd
from specli.events import TokenLogprob
from specli.samplers import Breakers, Candidates, Ids, Row, require_finite, top_ids

Probs = NDArray[np.float64]

_COLDEST = 1e-200  # a temperature over which no difference of float32 logits overflows a float64
ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")


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


class Constraint(Protocol):
    """What may come next, such as a grammar; immutable, so that a draft can be followed and dropped."""

    def best(self, row: Row, n: int | None) -> Ids:
        """The ``n`` highest ids of ``row`` that are allowed (None: all of them), highest first; int64."""

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""

    def forced(self) -> int | None:
        """The only token that may come next, or None."""

    def after(self, token: int) -> Constraint:
        """The constraint behind ``token``, which must be allowed."""


class State(NamedTuple):
    """What the tokens so far led to. ``mu``: mirostat's, bits; None elsewhere."""

    constraint: Constraint | None = None
    mu: float | None = None


class Context(NamedTuple):
    """What a position may know: ``tokens`` committed, ``drafted`` before it, what they led to, and its coins."""

    tokens: Sequence[int] = ()
    drafted: Sequence[int] = ()
    state: State = State()
    seed: int = 0

    @property
    def position(self) -> int:
        """Absolute, of the token to come."""
        return len(self.tokens) + len(self.drafted)

    def recent(self, n: int) -> list[int]:
        """The last ``n`` tokens; all of them for a negative ``n``."""
        if n < 0:
            return [*self.tokens, *self.drafted]
        return [*self.tokens[max(0, len(self.tokens) - n) :], *self.drafted][-n:] if n else []


_Step = Callable[[Candidates, Context], Candidates]
_NOWHERE = Context()
_XTC_KEY = 0x5AB1E  # keeps XTC's coins apart from the noise of coupled sampling


@dataclass(frozen=True)
class Sampler:
    """llama.cpp's chain with its names and defaults. Pure: the same row and context give the same distribution.

    ``temperature`` 0 means greedy (``is_greedy``). ``top_k`` <= 0, ``top_p`` >= 1, ``min_p`` <= 0, ``typical_p`` >= 1,
    ``top_n_sigma`` <= 0, a penalty at its default, ``dry_multiplier`` 0, ``xtc_probability`` 0 or ``xtc_threshold`` >
    0.5 switch a step off. ``bias`` is added to logits before anything else; -inf bans a token. ``order``: names of
    ``ORDER``. ``mirostat`` 1 or 2 replaces all of them but bias, constraint and temperature.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    banned: tuple[int, ...] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_breakers: Breakers = field(default_factory=dict)
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    order: tuple[str, ...] = ORDER
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        changes = {**self.bias, **dict.fromkeys(self.banned, -np.inf)}
        steps = self._steps()
        is_bare = not changes and self.constraint is None and not steps
        object.__setattr__(self, "_changes", changes)
        object.__setattr__(self, "_chain", tuple(steps.items()))
        object.__setattr__(self, "_is_bare", is_bare)

    _changes: Mapping[int, float] = field(init=False, repr=False, compare=False, hash=False)
    _chain: tuple[tuple[str, _Step], ...] = field(init=False, repr=False, compare=False, hash=False)
    _is_bare: bool = field(init=False, repr=False, compare=False, hash=False)

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit of what is left decides alone."""
        has_temperature = self.mirostat > 0 or "temperature" in self.order
        return has_temperature and self.temperature <= 0 and self.dynatemp_range <= 0

    def start(self) -> State:
        """Before the first generated token."""
        return State(self.constraint, 2 * self.mirostat_tau if self.mirostat else None)

    def advance(self, state: State, token: int, distribution: Distribution | None = None) -> State:
        """Behind ``token``, which was drawn from ``distribution`` (only mirostat asks for it)."""
        constraint, mu = state
        if constraint is None and mu is None:
            return state
        if constraint is not None:
            constraint = constraint.after(token)
        if mu is not None and distribution is not None:
            prob = distribution.prob(token)
            mu -= self.mirostat_eta * (-float(np.log2(prob)) - self.mirostat_tau) if prob > 0 else 0.0
        return State(constraint, mu)

    def forced(self, state: State | None) -> int | None:
        """The only token that may come behind ``state``, whatever a model says, or None."""
        constraint = self._constraint(state)
        return None if constraint is None else constraint.forced()

    def allows_any(self, state: State | None, row: Row) -> bool:
        """Whether anything of ``row`` may come behind ``state``."""
        constraint = self._constraint(state)
        return constraint is None or constraint.best(Candidates(None, row).raised(self._changes).logits, 1).size > 0

    def n_allowed(self, state: State | None, ids: Sequence[int]) -> int:
        """How many of the first ``ids`` may come behind ``state`` at all."""
        constraint = self._constraint(state)
        if constraint is None:
            return len(ids)
        for i, token in enumerate(ids):
            if not constraint.allows(token):
                return i
            constraint = constraint.after(token)
        return len(ids)

    def _constraint(self, state: State | None) -> Constraint | None:
        return self.constraint if state is None else state.constraint

    def argmax(self, row: Row, context: Context = _NOWHERE) -> int:
        """The lowest id with the highest logit of what the chain leaves of ``row``, float32 ``(n_vocab,)``."""
        if self._is_bare:
            best = int(row.argmax())
            require_finite(row[best])
            return best
        left = self._left(row, context, 1)
        at = int(left.logits.argmax())  # NaN is the highest there is
        require_finite(left.logits[at])
        if left.ids is None:
            return at
        return int(left.ids[left.logits == left.logits[at]].min())

    def distribution(self, row: Row, context: Context = _NOWHERE) -> Distribution:
        """The distribution that the chain leaves of ``row``, float32 ``(n_vocab,)``."""
        left = self._left(row, context, None)
        if self.mirostat and context.state.mu is not None:
            left = samplers.mirostat(left, self.mirostat, context.state.mu, row.size)
        if left.ids is None:
            require_finite(left.logits.max())
        ids = np.flatnonzero(left.logits > -np.inf) if left.ids is None else left.ids
        logits = left.logits[ids].astype(np.float64) if left.ids is None else left.logits
        highest = logits.max(initial=-np.inf)
        require_finite(highest)
        weights = np.exp(logits - highest)
        order = ids.argsort()
        return Distribution(ids[order], (weights / weights.sum())[order])

    def _left(self, row: Row, context: Context, n_wanted: int | None) -> Candidates:
        candidates = Candidates(None, row).raised(self._changes)
        constraint = context.state.constraint
        if constraint is None:
            for _name, step in self._chain:
                candidates = step(candidates, context)
            return candidates
        steps = list(self._chain)
        while steps and steps[0][0] in ("penalties", "dry"):  # they look at one token at a time: the mask can wait
            candidates = steps.pop(0)[1](candidates, context)
        n = self.top_k if steps and steps[0][0] == "top_k" else n_wanted if not steps else None
        ids = constraint.best(candidates.logits, n)
        if ids.size == 0:
            raise DeadEnd(
                f"the grammar allows no token behind {context.position} tokens; it has a dead end, or what it needs is "
                "banned",
                len(context.drafted),
            )
        candidates = Candidates(ids, candidates.logits[ids].astype(np.float64), True)
        for _name, step in steps:
            candidates = step(candidates, context)
        return candidates

    def _steps(self) -> dict[str, _Step]:
        """What is switched on, in order; for a greedy chain what can change the highest logit."""
        if self.mirostat:
            if self.is_greedy:
                return {}
            return {"temperature": self._temper}
        known: dict[str, tuple[bool, _Step]] = {
            "penalties": (
                self.repeat_last_n != 0
                and (self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0),
                self._penalties,
            ),
            "dry": (self.dry_multiplier != 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0, self._dry),
            "top_n_sigma": (self.top_n_sigma > 0, lambda left, _: samplers.top_n_sigma(left, self.top_n_sigma)),
            "top_k": (self.top_k > 0, lambda left, _: samplers.top_k(left, self.top_k)),
            "typ_p": (self.typical_p < 1, lambda left, _: samplers.typical(left, self.typical_p)),
            "top_p": (self.top_p < 1, lambda left, _: samplers.top_p(left, self.top_p)),
            "min_p": (self.min_p > 0, lambda left, _: samplers.min_p(left, self.min_p)),
            "xtc": (self.xtc_probability > 0 and self.xtc_threshold <= 0.5, self._xtc),
            "temperature": (not self.is_greedy and (self.temperature != 1 or self.dynatemp_range > 0), self._temper),
        }
        steps = {name: known[name][1] for name in self.order if known[name][0]}
        if self.is_greedy:  # the temperature keeps the highest logit alone, and so does what only truncates before it
            names = [name for name in steps if self.order.index(name) < self.order.index("temperature")]
            while names and names[-1] in ("top_n_sigma", "top_k", "top_p", "min_p"):
                names.pop()
            return {name: steps[name] for name in names}
        return steps

    def _penalties(self, left: Candidates, context: Context) -> Candidates:
        recent = context.recent(self.repeat_last_n)
        return samplers.penalties(left, recent, self.repeat_penalty, self.presence_penalty, self.frequency_penalty)

    def _dry(self, left: Candidates, context: Context) -> Candidates:
        recent = context.recent(self.dry_penalty_last_n)
        return samplers.dry(
            left, recent, self.dry_multiplier, self.dry_base, self.dry_allowed_length, self.dry_breakers
        )

    def _xtc(self, left: Candidates, context: Context) -> Candidates:
        coin = uniform(context.seed ^ _XTC_KEY, context.position)
        return samplers.xtc(left, self.xtc_probability, self.xtc_threshold, coin)

    def _temper(self, left: Candidates, _context: Context) -> Candidates:
        if self.dynatemp_range > 0 and not self.mirostat:
            return samplers.dynamic_temperature(left, self.temperature, self.dynatemp_range, self.dynatemp_exponent)
        return samplers.temperature(left, max(self.temperature, _COLDEST))


def log_probabilities(rows: Iterable[Row], tokens: Sequence[int], n: int) -> tuple[TokenLogprob, ...]:
    """Of each token in its row as the model gave it, float32 ``(n_vocab,)``, and of the ``n`` most likely ids."""
    found = []
    for row, token in zip(rows, tokens, strict=False):
        highest = float(row.max())
        total = highest + float(np.log(np.exp(row.astype(np.float64) - highest).sum()))
        ids = top_ids(row, n).tolist() if n > 0 else []
        best = tuple((i, min(0.0, float(row[i]) - total)) for i in ids)
        found.append(TokenLogprob(token, min(0.0, float(row[token]) - total), best))
    return tuple(found)


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
    hashed = tokens.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(_key(seed, position))
    for shift, factor in _MIX_STEPS:
        hashed = (hashed ^ (hashed >> np.uint64(shift))) * np.uint64(factor)
    hashed ^= hashed >> np.uint64(31)
    uniform = ((hashed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of (seed, absolute position) alone."""
    return (_key(seed, position) >> 11) * 2.0**-53


def _key(seed: int, position: int) -> int:
    return _mix((_mix((seed * _GOLDEN + 1) & _MASK) + position * _GOLDEN) & _MASK)


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_STEPS: Sequence[tuple[int, int]] = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def _mix(value: int) -> int:
    for shift, factor in _MIX_STEPS:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)
