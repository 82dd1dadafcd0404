"""The verifiers' laws by enumeration: nothing is drawn, every draft, verdict and residual is weighed.

Over three tokens of vocabulary and several chained rounds the law of what is emitted is summed up exactly and compared
with the target's own. The verdict's law is read from ``verify`` itself, so what is tested is what runs.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from specli import verify
from specli.drafters.base import Draft, SequenceState
from specli.sampling import Distribution, Sampler, gumbel_noise
from specli.selftest.subject import Check

N_VOCAB, N_TOKENS, K = 3, 3, 3
TOLERANCE = 1e-12
_N_ROWS = 200  # random cases for the verifiers that match tokens
History = tuple[int, ...]
Table = Callable[[History], Distribution]


@dataclass(frozen=True, slots=True)
class Case:
    """Target and draft tables by shape, and how drafts are drawn."""

    target: str
    draft: str
    stops: bool = False  # drafting may stop early, by what was drafted and by the next row
    point_mass: bool = False  # the draft's likeliest token for certain


CASES = (
    Case("any", "any"),
    Case("any", "any", stops=True),
    Case("zeros", "any"),
    Case("any", "zeros"),
    Case("ties", "ties"),
    Case("any", "any", point_mass=True),
    Case("zeros", "any", stops=True, point_mass=True),
)


def check_law(name: str) -> Check:
    """Whether rejection or block emits the target's law."""
    law = {"rejection": verify.rejection_law, "block": verify.block_law}[name]
    worst = 0.0
    for i, case in enumerate(CASES):
        target, draft = _table(i, case.target), _table(100 + i, case.draft)
        worst = max(worst, _law_error(target, draft, case, law))
    passed = worst <= TOLERANCE
    detail = f"largest error {worst:.1g} over {len(CASES)} families of tables (allowed: {TOLERANCE:g})"
    return Check(f"law of {name}", passed, detail, {"error": worst, "allowed": TOLERANCE})


def check_matching(name: str) -> Check:
    """Whether greedy or coupled emits exactly the target's own choice at every position, whatever was drafted."""
    sampler = Sampler(0.0) if name == "greedy" else Sampler(0.8, top_k=5, top_p=0.95, min_p=0.05)
    verifier, rng = verify.make_verifier(name, sampler), np.random.default_rng(3)
    n_wrong = 0
    for case in range(_N_ROWS):
        k = case % 5
        rows = np.round(rng.normal(0, 2, (k + 1, 8)), 1).astype(np.float32)  # rounded: ties happen
        state = SequenceState(0, [1] * int(rng.integers(1, 9)), seed=case)
        own = [_choice(name, sampler, rows[i], case, len(state.tokens) + i) for i in range(k + 1)]
        ids = [token if rng.random() < 0.7 else int(rng.integers(8)) for token in own[:k]]
        n_right = next((i for i in range(k) if ids[i] != own[i]), k)
        verdict = verifier.verify(Draft(ids, [None] * k), rows.copy(), state)
        n_wrong += (verdict.n_accepted, verdict.next_token) != (n_right, own[n_right])
    detail = f"{_N_ROWS - n_wrong} of {_N_ROWS} verdicts are the target's own choices"
    return Check(f"law of {name}", n_wrong == 0, detail, {"wrong": n_wrong, "cases": _N_ROWS})


def _choice(name: str, sampler: Sampler, row: np.ndarray, seed: int, position: int) -> int:
    """The target's own token, by definition and not by the verifier."""
    if name == "greedy":
        return int(np.flatnonzero(row == row.max())[0])
    distribution = sampler.distribution(row.copy())
    scores = np.log(distribution.probs) + gumbel_noise(seed, position, distribution.ids)
    return int(distribution.ids[scores.argmax()])


def _law_error(target: Table, draft: Table, case: Case, law: Callable[..., verify.Law]) -> float:
    emitted = _emitted_law(target, draft, case, law)
    wanted = {
        tokens: float(np.prod([target(tokens[:i]).prob(token) for i, token in enumerate(tokens)]))
        for tokens in itertools.product(range(N_VOCAB), repeat=N_TOKENS)
    }
    return max(abs(emitted.get(tokens, 0.0) - chance) for tokens, chance in wanted.items())


def _emitted_law(target: Table, draft: Table, case: Case, law: Callable[..., verify.Law]) -> dict[History, float]:
    """The law of the first tokens that are emitted, round by round."""
    unfinished: dict[History, float] = {(): 1.0}
    finished: dict[History, float] = defaultdict(float)
    while unfinished:
        following: dict[History, float] = defaultdict(float)
        for history, reached in unfinished.items():
            for drawn, ids, qs in _drafts(draft, case, history):
                verdicts = law(ids, qs, [target(history + ids[:i]) for i in range(len(ids) + 1)])
                for length in np.flatnonzero(verdicts.lengths):
                    residual = verdicts.residual(int(length))
                    for token, chance in zip(residual.ids, residual.probs, strict=True):
                        tokens = (*history, *ids[:length], int(token))
                        mass = reached * drawn * float(verdicts.lengths[length]) * float(chance)
                        (following if len(tokens) < N_TOKENS else finished)[tokens[:N_TOKENS]] += mass
        unfinished = following
    return finished


def _drafts(
    draft: Table, case: Case, history: History, drafted: History = (), qs: tuple[Distribution | None, ...] = ()
) -> Iterator[tuple[float, History, tuple[Distribution | None, ...]]]:
    """Every draft behind ``history`` with its chance and what its tokens were drawn from."""
    q = draft(history + drafted)
    stops = case.stops and (drafted[-1:] == (1,) or float(q.probs.max()) < 0.5)
    if len(drafted) == K or stops:
        yield 1.0, drafted, qs
        return
    if case.point_mass:
        choices = [(int(q.ids[q.probs.argmax()]), 1.0)]
    else:
        choices = [(int(x), float(chance)) for x, chance in zip(q.ids, q.probs, strict=True)]
    for x, chance in choices:
        handed_on = (*qs, None if case.point_mass else q)
        for rest, ids, tail in _drafts(draft, case, history, (*drafted, x), handed_on):
            yield chance * rest, ids, tail


def _table(seed: int, shape: str) -> Table:
    """Seeded random distributions, one for each history: any, with zeros, with ties."""
    known: dict[History, Distribution] = {}

    def distribution(history: History) -> Distribution:
        if history not in known:
            rng = np.random.default_rng([seed, len(history), *history])
            weights = rng.integers(1, 3, N_VOCAB).astype(float) if shape == "ties" else rng.dirichlet(np.ones(N_VOCAB))
            if shape == "zeros":
                weights[rng.permutation(N_VOCAB)[: rng.integers(0, N_VOCAB)]] = 0.0
            ids = np.flatnonzero(weights)
            known[history] = Distribution(ids, weights[ids] / weights.sum())
        return known[history]

    return distribution
