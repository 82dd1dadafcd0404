"""Which drafted tokens the target accepts, so that what is emitted has the target's own distribution.

Let x_1..x_k be the draft, p_i the target's distribution after x_1..x_i, q_i the draft's before x_(i+1).
*Accepted* tokens are the draft's; then the target adds one of its own: *recovered* after a rejection, *bonus* when
all were accepted. A point-mass draft (n-gram, greedy) is q = one-hot.

    greedy     accept while the argmax is equal. Temperature 0.
    rejection  accept x_(i+1) with chance min(1, p_i/q_i)          (Leviathan 2211.17192, Chen 2302.01318)
    block      accept the longest prefix that passes a joint test  (Sun 2403.10444); accepts most
    coupled    draft and target share noise that depends on (seed, position, token) only (2408.07978): the same seed
               gives the same text without a draft, with any draft, and with any K

For rejection and block a pure function states the law, P(accepted length = i) and the residual distribution after
each i; one shared function samples from it. The tests enumerate the law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from specli.drafters.base import Choice, Draft, SequenceState
from specli.engine.base import Rows
from specli.samplers import Row
from specli.sampling import Context, Distribution, Probs, Sampler, State, draw_index, gumbel_noise


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's answer to a draft: how many of its tokens stand, and the token that follows them, if any."""

    n_accepted: int
    next_token: int | None
    kind: Literal["recovered", "bonus", "none"]

    def emitted(self, draft: Draft) -> list[int]:
        """The tokens that this adds to the text."""
        return [*draft.ids[: self.n_accepted], *(() if self.next_token is None else (self.next_token,))]


class Verifier(Protocol):
    """Judges drafts, and says how a draft model must draw so that it can judge (``Chooser``)."""

    name: str
    sampler: Sampler
    is_sampled: bool

    def choose(self, row: Row, sequence: SequenceState, drafted: Sequence[int], state: State | None) -> Choice:
        """Draw a draft token behind ``drafted`` from the draft's logits row, float32 ``(n_vocab,)``."""

    def verify(self, draft: Draft, rows: Rows, sequence: SequenceState) -> Verdict:
        """Judge ``draft``, k tokens, by the target's logits ``rows``, float32 ``(k + 1, n_vocab)``.

        ``sequence.state`` is then what the accepted tokens and the next one lead to. With k rows there is no next one
        behind a draft that is accepted to its end.
        """


@dataclass(frozen=True, slots=True)
class Law:
    """``lengths``: float64 ``(k + 1,)``, P(accepted length = i). ``residual(i)``: what the next token is drawn from."""

    lengths: Probs
    residual: Callable[[int], Distribution]


def rejection_law(ids: Sequence[int], q: Sequence[Distribution | None], p: Sequence[Distribution]) -> Law:
    """The law of token-by-token rejection; ``ids`` and ``q`` have length k, ``p`` k + 1, or k without a bonus."""
    ratios = [min(1.0, p[i].prob(x) / _draft_prob(q[i], x)) for i, x in enumerate(ids)]
    reached = np.cumprod([1.0, *ratios])
    lengths = reached * np.append(1.0 - np.asarray(ratios, np.float64), 1.0)
    return Law(lengths, lambda i: p[i] if i == len(ids) else _normalised(p[i], _excess(1.0, p[i], q[i], ids[i])))


def block_law(ids: Sequence[int], q: Sequence[Distribution | None], p: Sequence[Distribution]) -> Law:
    """The law of block verification; shapes as ``rejection_law``."""
    k, weights = len(ids), [1.0]
    for i, x in enumerate(ids):
        weights.append(min(1.0, weights[i] * p[i].prob(x) / _draft_prob(q[i], x)))
    excess = [_excess(weights[i], p[i], q[i], ids[i]) for i in range(k)]
    passes = np.empty(k + 1)
    for i in range(k):
        mass = float(excess[i].sum())
        passes[i] = mass / (mass + (1.0 - weights[i])) if mass > 0 else 0.0  # the brackets keep it <= 1
    passes[k] = weights[k]
    fails_later = np.append(np.cumprod((1.0 - passes)[:0:-1])[::-1], 1.0)  # all of i+1..k fail
    return Law(passes * fails_later, lambda i: p[i] if i == k else _normalised(p[i], excess[i]))


def sample(law: Law, rng: np.random.Generator, *, has_bonus: bool = True) -> Verdict:
    """Draw an accepted length and the token that follows it; without a bonus none follows the whole draft."""
    k, n_accepted = law.lengths.size - 1, draw_index(law.lengths, rng.random())
    if n_accepted == k and not has_bonus:
        return Verdict(n_accepted, None, "none")
    return Verdict(n_accepted, law.residual(n_accepted).draw(rng.random()), "bonus" if n_accepted == k else "recovered")


def _draft_prob(q: Distribution | None, token: int) -> float:
    return 1.0 if q is None else q.prob(token)


def _excess(weight: float, p: Distribution, q: Distribution | None, drafted: int) -> Probs:
    """(weight * p - q)+ on the support of ``p``; outside it there is nothing left of p."""
    left = weight * p.probs
    if q is None:
        return np.where(p.ids == drafted, np.maximum(left - 1.0, 0.0), left)
    return np.maximum(left - q.probs_at(p.ids), 0.0)


def _normalised(p: Distribution, weights: Probs) -> Distribution:
    """``weights`` on the support of ``p``, scaled to sum 1. All zero happens by rounding only, where p equals q."""
    mass = weights.sum()
    return Distribution(p.ids, weights / mass) if mass > 0 else p


class LawVerifier:
    """Rejection or block: the draft samples its tokens, the verdict is sampled from the law."""

    is_sampled = True

    def __init__(self, name: str, law: Callable[..., Law], sampler: Sampler) -> None:
        self.name, self._law, self.sampler = name, law, sampler

    def choose(self, row: Row, sequence: SequenceState, drafted: Sequence[int], state: State | None) -> Choice:
        """A draw from the draft's distribution with the sequence's own coins."""
        context = _context(self.sampler, sequence, drafted, state)
        distribution = self.sampler.distribution(row, context)
        token = distribution.draw(sequence.rng.random())
        return Choice(token, distribution, self.sampler.advance(context.state, token, distribution))

    def verify(self, draft: Draft, rows: Rows, sequence: SequenceState) -> Verdict:
        """Sample the verdict from the law of this draft under the target's rows."""
        _require_chain(draft)
        states, target_probs = self._along(draft, rows, sequence)
        if draft.ids:
            law = self._law(draft.ids, draft.distributions, target_probs)
            verdict = sample(law, sequence.rng, has_bonus=len(rows) > len(draft))
        else:  # the law is certain
            verdict = Verdict(0, target_probs[0].draw(sequence.rng.random()), "bonus")
        n, token = verdict.n_accepted, verdict.next_token
        sequence.state = states[n] if token is None else self.sampler.advance(states[n], token, target_probs[n])
        return verdict

    def _along(self, draft: Draft, rows: Rows, sequence: SequenceState) -> tuple[list[State], list[Distribution]]:
        """State and target distribution at each position of ``draft``.

        Behind a token that the target never emits there is nothing to judge: the last distribution stands for the
        rest, whose chance to be reached is 0.
        """
        states, target_probs = [_context(self.sampler, sequence, (), None).state], list[Distribution]()
        for i, row in enumerate(rows):
            context = _context(self.sampler, sequence, draft.ids[:i], states[i])
            target_probs.append(self.sampler.distribution(row, context))
            if i < len(draft):
                if target_probs[i].prob(draft.ids[i]) == 0:
                    return states, target_probs + [target_probs[i]] * (len(rows) - 1 - i)
                states.append(self.sampler.advance(states[i], draft.ids[i], target_probs[i]))
        return states, target_probs


class MatchVerifier:
    """Greedy or coupled: draft and target each have one token per position, accepted while they are equal."""

    is_sampled = False

    def __init__(self, name: str, sampler: Sampler) -> None:
        self.name, self.sampler = name, sampler

    def choose(self, row: Row, sequence: SequenceState, drafted: Sequence[int], state: State | None) -> Choice:
        """The token behind ``drafted``: the draft's or, on the target's row, the one to emit. A point mass."""
        context, distribution = _context(self.sampler, sequence, drafted, state), None
        if self.sampler.is_greedy:
            token = self.sampler.argmax(row, context)
        else:
            distribution = self.sampler.distribution(row, context)
            token = coupled_token(distribution, context.seed, context.position)
        return Choice(token, None, self.sampler.advance(context.state, token, distribution))

    def verify(self, draft: Draft, rows: Rows, sequence: SequenceState) -> Verdict:
        """Emit the target's token at each position; rows behind the first difference are not looked at."""
        _require_chain(draft)
        state = sequence.state
        for i, row in enumerate(rows):
            token, _, state = self.choose(row, sequence, draft.ids[:i], state)
            if i == len(draft) or token != draft.ids[i]:
                sequence.state = state
                return Verdict(i, token, "bonus" if i == len(draft) else "recovered")
        sequence.state = state
        return Verdict(len(rows), None, "none")


def make_verifier(name: str, sampler: Sampler) -> Verifier:
    """The verifier ``name`` (block, rejection, coupled); temperature 0 makes every one of them greedy."""
    if sampler.is_greedy:
        return MatchVerifier("greedy", sampler)
    if name == "coupled":
        return MatchVerifier("coupled", sampler)
    laws: dict[str, Callable[..., Law]] = {"block": block_law, "rejection": rejection_law}
    return LawVerifier(name, laws[name], sampler)


def coupled_token(distribution: Distribution, seed: int, position: int) -> int:
    """Argmax of log p + noise over the support: a draw from p, the same for everyone who holds the same row."""
    with np.errstate(divide="ignore"):  # a probability that underflowed to 0 has score -inf
        scores = np.log(distribution.probs) + gumbel_noise(seed, position, distribution.ids)
    return int(distribution.ids[int(scores.argmax())])


def _context(sampler: Sampler, sequence: SequenceState, drafted: Sequence[int], state: State | None) -> Context:
    """What the position behind ``drafted`` may know."""
    return Context(sequence.tokens, drafted, state or sequence.state or sampler.start(), sequence.seed)


def _require_chain(draft: Draft) -> None:
    if draft.parents is not None:
        raise ValueError("this verifier judges chains, not trees of candidates")
