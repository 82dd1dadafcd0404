"""The verifiers: their laws by enumeration (nothing is sampled), wrong laws that must fail it, and the coins."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from fakes import FALSE_ALARM, chi_square_p, dense

from specli.drafters.base import EMPTY, Draft, SequenceState
from specli.sampling import Distribution, Sampler, draw_index, gumbel_noise
from specli.verify import Law, block_law, make_verifier, rejection_law, sample

V, N = 3, 3  # vocabulary; tokens whose joint law is compared, so up to N chained rounds
History = tuple[int, ...]
Table = Callable[[History], Distribution]
LawFunction = Callable[[Sequence[int], Sequence[Distribution | None], Sequence[Distribution]], Law]
LAWS: list[LawFunction] = [rejection_law, block_law]


def no_stop(_drafted: History, _q: Distribution) -> bool:
    return False


@dataclass(frozen=True)
class Drafting:
    """How a draft is drawn: ``stop(x_1..x_i, q_i)`` decides before x_(i+1) is drawn whether it is drawn at all.

    ``point_mass``: the draft's likeliest token for certain. ``judge_by_q``: a point mass that is handed on with its
    full q (H11, wrong). ``n_min``: shorter drafts are thrown away.
    """

    q: Table
    k_max: int
    stop: Callable[[History, Distribution], bool] = no_stop
    point_mass: bool = False
    judge_by_q: bool = False
    n_min: int = 0

    def drafts(
        self, history: History, drafted: History = (), qs: tuple[Distribution | None, ...] = ()
    ) -> Iterator[tuple[float, History, tuple[Distribution | None, ...]]]:
        """Every draft after ``history`` with its probability."""
        q = self.q(history + drafted)
        if len(drafted) == self.k_max or self.stop(drafted, q):
            yield (1.0, drafted, qs) if len(drafted) >= self.n_min else (1.0, (), ())
            return
        if self.point_mass:
            choices = [(int(q.ids[q.probs.argmax()]), 1.0)]
        else:
            choices = [(int(x), float(probability)) for x, probability in zip(q.ids, q.probs, strict=True)]
        handed_on = None if self.point_mass and not self.judge_by_q else q
        for x, probability in choices:
            for rest, ids, tail in self.drafts(history, (*drafted, x), (*qs, handed_on)):
                yield probability * rest, ids, tail


def emitted_law(p: Table, drafting: Drafting, law: LawFunction) -> dict[History, float]:
    """The exact law of the first N emitted tokens: all draws x accepted lengths x residual tokens, round by round."""
    unfinished: dict[History, float] = {(): 1.0}
    finished: dict[History, float] = defaultdict(float)
    while unfinished:
        following: dict[History, float] = defaultdict(float)
        for history, reached in unfinished.items():
            for drawn, ids, qs in drafting.drafts(history):
                verdicts = law(ids, qs, [p(history + ids[:i]) for i in range(len(ids) + 1)])
                assert verdicts.lengths.sum() == pytest.approx(1, abs=1e-12)
                assert verdicts.lengths.min() >= 0
                for length in np.flatnonzero(verdicts.lengths):
                    residual = verdicts.residual(int(length))
                    assert residual.probs.sum() == pytest.approx(1, abs=1e-12)
                    assert residual.probs.min() >= 0
                    for token, probability in zip(residual.ids, residual.probs, strict=True):
                        emitted = (*history, *ids[:length], int(token))
                        mass = reached * drawn * float(verdicts.lengths[length]) * float(probability)
                        (following if len(emitted) < N else finished)[emitted[:N]] += mass
        unfinished = following
    return finished


def target_law(p: Table) -> dict[History, float]:
    """The target's own law of N tokens."""
    return {
        tokens: float(np.prod([p(tokens[:i]).prob(token) for i, token in enumerate(tokens)]))
        for tokens in itertools.product(range(V), repeat=N)
    }


def law_error(p: Table, drafting: Drafting, law: LawFunction) -> float:
    """The largest difference between the emitted law and the target's."""
    emitted, wanted = emitted_law(p, drafting, law), target_law(p)
    assert sum(wanted.values()) == pytest.approx(1)
    return max(abs(emitted.get(tokens, 0.0) - probability) for tokens, probability in wanted.items())


def table(seed: int, shape: str) -> Table:
    """Seeded random distributions, one for each history."""
    known: dict[History, Distribution] = {}

    def distribution(history: History) -> Distribution:
        if history not in known:
            rng = np.random.default_rng([seed, len(history), *history])
            known[history] = dense(SHAPES[shape](rng))
        return known[history]

    return distribution


def _with_zeros(rng: np.random.Generator) -> np.ndarray:
    weights = rng.dirichlet(np.ones(V)) * (rng.random(V) < 0.6)
    return weights / weights.sum() if weights.any() else np.eye(V)[rng.integers(V)]


def _with_ties(rng: np.random.Generator) -> np.ndarray:
    weights = rng.integers(1, 3, V).astype(float)
    return weights / weights.sum()


SHAPES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "any": lambda rng: rng.dirichlet(np.ones(V)),
    "zeros": _with_zeros,
    "ties": _with_ties,
    "flat": lambda _rng: np.full(V, 1 / V),
    "one": lambda rng: np.eye(V)[rng.integers(V)],
    "low": lambda rng: np.append(rng.dirichlet(np.ones(2)), 0.0),  # never token 2
    "high": lambda _rng: np.array([0.0, 0.0, 1.0]),  # only token 2: disjoint from "low"
}


def stop_by_history(drafted: History, _q: Distribution) -> bool:
    return bool(drafted) and drafted[-1] == 1


def stop_by_row(drafted: History, q: Distribution) -> bool:
    return q.probs.max() < 0.6


def stop_by_both(drafted: History, q: Distribution) -> bool:
    return sum(drafted) > 1 or (len(drafted) == 1 and q.probs.max() < 0.7)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("k_max", range(4))
@pytest.mark.parametrize(
    ("p_shape", "q_shape"),
    [
        ("any", "any"),
        ("any", "zeros"),
        ("zeros", "any"),
        ("zeros", "zeros"),
        ("ties", "ties"),
        ("flat", "zeros"),
        ("any", "one"),
        ("one", "any"),
        ("low", "high"),
        ("high", "low"),
    ],
)
def test_emitted_law_is_the_targets(law: LawFunction, k_max: int, p_shape: str, q_shape: str) -> None:
    for seed in range(2):
        p, q = table(seed, p_shape), table(100 + seed, q_shape)
        assert law_error(p, Drafting(q, k_max), law) < 1e-12


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", ["any", "zeros", "ties"])
def test_equal_distributions_accept_everything(law: LawFunction, shape: str) -> None:
    p = table(5, shape)
    drafting = Drafting(p, 3)
    assert law_error(p, drafting, law) < 1e-12
    for _drawn, ids, qs in drafting.drafts(()):
        verdicts = law(ids, qs, [p(ids[:i]) for i in range(len(ids) + 1)])
        np.testing.assert_array_equal(verdicts.lengths, [0, 0, 0, 1])


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("stop", [stop_by_history, stop_by_row, stop_by_both])
@pytest.mark.parametrize("shapes", [("any", "any"), ("zeros", "zeros"), ("any", "zeros")])
def test_stopping_before_a_draw_is_exact(
    law: LawFunction, stop: Callable[[History, Distribution], bool], shapes: tuple[str, str]
) -> None:
    p, q = table(7, shapes[0]), table(8, shapes[1])
    assert law_error(p, Drafting(q, 3, stop), law) < 1e-12


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("k_max", range(4))
@pytest.mark.parametrize("p_shape", ["any", "zeros", "ties", "one"])
def test_point_masses_are_exact(law: LawFunction, k_max: int, p_shape: str) -> None:
    p, q = table(9, p_shape), table(10, "any")
    assert law_error(p, Drafting(q, k_max, stop_by_row, point_mass=True), law) < 1e-12
    assert law_error(p, Drafting(q, k_max, point_mass=True), law) < 1e-12


@pytest.mark.parametrize("law", LAWS)
def test_dropping_a_short_draft(law: LawFunction) -> None:
    """Biased when its tokens were drawn at random; exact for point masses."""
    p, q = table(11, "any"), table(12, "any")
    sampled = Drafting(q, 3, stop_by_history, n_min=2)
    assert law_error(p, sampled, law) > 1e-3
    assert law_error(p, replace(sampled, n_min=0), law) < 1e-12
    assert law_error(p, replace(sampled, point_mass=True), law) < 1e-12
    shortest = min(len(ids) for _drawn, ids, _qs in replace(sampled, n_min=0, point_mass=True).drafts(()))
    longest = max(len(ids) for _drawn, ids, _qs in replace(sampled, point_mass=True).drafts((0,)))
    assert (shortest, longest) == (1, 3)  # point masses of both kinds, dropped and kept, were enumerated


# Wrong on purpose: the enumeration must notice each.


def residual_from_p(law: LawFunction) -> LawFunction:
    def wrong(ids: Sequence[int], q: Sequence[Distribution | None], p: Sequence[Distribution]) -> Law:
        return Law(law(ids, q, p).lengths, lambda i: p[i])

    return wrong


def block_until_first_failure(ids: Sequence[int], q: Sequence[Distribution | None], p: Sequence[Distribution]) -> Law:
    """Block verification's tests, but the first failure ends the run."""
    right = block_law(ids, q, p)
    passes, fails_later = [], 1.0
    for length in range(len(ids), 0, -1):  # lengths[i] = h_i * prod(1 - h_j for j > i)
        passes.insert(0, min(1.0, float(right.lengths[length]) / fails_later) if fails_later > 0 else 0.0)
        fails_later *= 1 - passes[0]
    reached = np.cumprod([1.0, *passes])
    return Law(reached * np.append(1 - np.asarray(passes), 1.0), right.residual)


@pytest.mark.parametrize("law", LAWS)
def test_enumeration_notices_a_residual_from_p(law: LawFunction) -> None:
    assert law_error(table(13, "any"), Drafting(table(14, "any"), 3), residual_from_p(law)) > 1e-3


@pytest.mark.parametrize("law", LAWS)
def test_enumeration_notices_a_greedy_draft_judged_by_its_full_q(law: LawFunction) -> None:
    drafting = Drafting(table(14, "any"), 3, point_mass=True, judge_by_q=True)
    assert law_error(table(13, "any"), drafting, law) > 1e-3
    assert law_error(table(13, "any"), replace(drafting, judge_by_q=False), law) < 1e-12


def test_enumeration_notices_block_stopping_at_the_first_failure() -> None:
    assert law_error(table(13, "any"), Drafting(table(14, "any"), 3), block_until_first_failure) > 1e-3


def test_greedy_draft_on_the_public_example() -> None:
    """H11: p = [.6, .3, .1], q = [.2, .7, .1], the draft's argmax proposed; the emitted token's law is p exactly."""
    p = dense([0.6, 0.3, 0.1])
    for law in LAWS:
        verdicts = law([1], [None], [p, dense([1.0, 0.0, 0.0])])
        np.testing.assert_allclose(verdicts.lengths, [0.7, 0.3], atol=1e-15)
        first = verdicts.lengths[0] * verdicts.residual(0).probs_at(np.arange(3))
        first[1] += verdicts.lengths[1]
        np.testing.assert_allclose(first, [0.6, 0.3, 0.1], atol=1e-15)


def test_laws_agree_for_one_token_and_block_accepts_more_of_a_chain() -> None:
    p, q = table(15, "any"), table(16, "any")
    expected = dict.fromkeys(LAWS, 0.0)
    for drawn, ids, qs in Drafting(q, 3).drafts(()):
        rows = [p(ids[:i]) for i in range(4)]
        for law in LAWS:
            expected[law] += drawn * float(law(ids, qs, rows).lengths @ np.arange(4))
        np.testing.assert_allclose(
            rejection_law(ids[:1], qs[:1], rows[:2]).lengths, block_law(ids[:1], qs[:1], rows[:2]).lengths, atol=1e-15
        )
    assert expected[block_law] > expected[rejection_law] + 1e-3


@pytest.mark.parametrize("law", LAWS)
def test_lengths_of_long_random_drafts(law: LawFunction) -> None:
    rng = np.random.default_rng(17)
    for _ in range(200):
        k, n_vocab = int(rng.integers(0, 9)), int(rng.integers(2, 60))
        q = [dense(rng.dirichlet(np.full(n_vocab, 0.2))) for _ in range(k)]
        p = [dense(rng.dirichlet(np.full(n_vocab, 0.2))) for _ in range(k + 1)]
        ids = [distribution.draw(rng.random()) for distribution in q]
        lengths = law(ids, q, p).lengths
        assert lengths.shape == (k + 1,)
        assert lengths.min() >= 0
        assert abs(lengths.sum() - 1) < 1e-12


# Coins


@pytest.mark.parametrize("uniform", [0.0, 5e-324, 0.5, 1 - 2**-53])
def test_draw_never_takes_a_weight_of_zero(uniform: float) -> None:
    for weights in ([0, 0, 1, 0], [0, 0.3, 0, 0.7, 0, 0], [0, 1e-300, 0], [1, 0], [0, 1e300, 0], [0, 0.1, 0.2, 0]):
        index = draw_index(np.asarray(weights, float), uniform)
        assert weights[index] > 0


def test_draw_at_its_ends_and_boundaries() -> None:
    weights = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [draw_index(weights, u) for u in (0.0, 0.2499, 0.25, 1 - 2**-53)] == [1, 1, 3, 3]
    third = np.full(3, 0.1)  # the cumulative sum is 0.30000000000000004: u * total may round up to it
    assert draw_index(third, float(np.nextafter(1, 0))) == 2


@pytest.mark.parametrize("name", ["block", "rejection"])
def test_sampled_verdicts_follow_the_law(name: str) -> None:
    law = {"block": block_law, "rejection": rejection_law}[name]
    p = [dense([0.5, 0.3, 0.2]), dense([0.1, 0.2, 0.7]), dense([0.2, 0.2, 0.6])]
    q = [dense([0.2, 0.5, 0.3]), dense([0.3, 0.6, 0.1])]
    known, rng, n = law([1, 1], q, p), np.random.default_rng(18), 10_000
    counts = np.zeros((3, 3))
    for _ in range(n):
        verdict = sample(known, rng)
        counts[verdict.n_accepted, verdict.next_token] += 1
        assert verdict.kind == ("bonus" if verdict.n_accepted == 2 else "recovered")
    expected = [n * known.lengths[i] * known.residual(i).probs_at(np.arange(3)) for i in range(3)]
    assert chi_square_p(counts, expected) > FALSE_ALARM


def rows_of(*probs: Sequence[float]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs, np.float64)).astype(np.float32)


PLAIN = Sampler(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@pytest.mark.parametrize("name", ["block", "rejection", "coupled"])
def test_first_token_of_a_judged_draft_has_the_targets_law(name: str) -> None:
    """H11 and H13 through the verifiers themselves: the draft draws as the verifier says, the target judges."""
    verifier, n = make_verifier(name, PLAIN), 10_000
    p, q = rows_of([0.6, 0.3, 0.1], [0.1, 0.1, 0.8]), rows_of([0.2, 0.7, 0.1])[0]
    counts, n_accepted = np.zeros(3), 0
    for seed in range(n):
        state = SequenceState(0, [0], seed, np.random.default_rng(seed))
        token, distribution, _state = verifier.choose(q, state, [], None)
        verdict = verifier.verify(Draft([token], [distribution]), p, state)
        counts[token if verdict.n_accepted else verdict.next_token] += 1
        n_accepted += verdict.n_accepted
    assert chi_square_p(counts, n * np.array([0.6, 0.3, 0.1])) > FALSE_ALARM
    overlap = 0.2 + 0.3 + 0.1  # sum of min(p, q): what rejection accepts; coupled accepts somewhat less, never more
    if name == "coupled":
        assert 0.5 < n_accepted / n < overlap
    else:
        assert abs(n_accepted / n - overlap) < 0.02


def test_coupled_token_has_the_targets_law() -> None:
    verifier, n = make_verifier("coupled", PLAIN), 10_000
    probs = [0.5, 0.0, 0.2, 0.2, 0.1]
    rows = rows_of(probs)
    for position in (1, 9):
        counts = np.zeros(5)
        for seed in range(n):
            counts[verifier.verify(EMPTY, rows, SequenceState(0, [0] * position, seed)).next_token] += 1
        assert chi_square_p(counts, n * np.asarray(probs)) > FALSE_ALARM


def test_coupled_tokens_of_one_seed_are_independent_over_positions() -> None:
    verifier, n = make_verifier("coupled", PLAIN), 10_000
    probs = np.array([0.5, 0.3, 0.2])
    rows, counts, last = rows_of(probs), np.zeros((3, 3)), 0
    for position in range(1, n + 1):
        token = verifier.choose(rows[0], SequenceState(0, [0] * position, 4), [], None).token
        counts[last, token] += 1
        last = token
    assert chi_square_p(counts, n * np.outer(probs, probs)) > FALSE_ALARM


def test_coupled_emits_the_same_with_any_draft_and_ignores_the_states_coins() -> None:
    verifier = make_verifier("coupled", Sampler())
    rows = np.random.default_rng(19).normal(0, 2, (4, 50)).astype(np.float32)
    for seed in range(100):
        state = SequenceState(0, [3, 4], seed, np.random.default_rng())
        wanted = [verifier.choose(row, state, [0] * i, None).token for i, row in enumerate(rows)]
        for n_right in range(4):
            ids = [*wanted[:n_right], *[(t + 1) % 50 for t in wanted[n_right:3]]]
            verdict = verifier.verify(Draft(ids, [None] * 3), rows.copy(), state)
            assert [*ids[: verdict.n_accepted], verdict.next_token] == wanted[: n_right + 1]
            assert verdict.kind == ("bonus" if n_right == 3 else "recovered")


# Noise


def test_noise_is_a_function_of_its_arguments_alone() -> None:
    tokens = np.array([5, 0, 151_935, 17], np.int64)
    noise = gumbel_noise(42, 7, tokens)
    gumbel_noise(1, 1, np.arange(1000))
    np.testing.assert_array_equal(noise, gumbel_noise(42, 7, tokens))
    for i, token in enumerate(tokens):
        assert gumbel_noise(42, 7, np.array([token]))[0] == noise[i]  # the support does not matter
    assert not (noise == gumbel_noise(43, 7, tokens)).any()
    assert not (noise == gumbel_noise(42, 8, tokens)).any()
    assert gumbel_noise(0, 0, tokens[:0]).shape == (0,)


def test_noise_is_finite_where_the_hash_has_its_extreme_values() -> None:
    """The uniform lies in the open interval (0, 1): tokens are chosen here that hash to all ones and to all zeros."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def unmix(value: int) -> int:  # the inverse of splitmix64's finaliser
        for shift, factor in ((31, 1), (27, 0x94D049BB133111EB), (30, 0xBF58476D1CE4E5B9)):
            value = (value * pow(factor, -1, 1 << 64)) & mask if factor != 1 else value
            unshifted = value
            for _ in range(64 // shift + 1):
                unshifted = value ^ (unshifted >> shift)
            value = unshifted
        return value

    def mix(value: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            value = ((value ^ (value >> shift)) * factor) & mask
        return value ^ (value >> 31)

    seed, position = 3, 5
    key = mix((mix((seed * golden + 1) & mask) + position * golden) & mask)
    for hashed in (mask, 0):
        token = ((unmix(hashed) - key) * pow(golden, -1, 1 << 64)) & mask
        assert mix((token * golden + key) & mask) == hashed
        noise = gumbel_noise(seed, position, np.array([token], np.uint64).astype(np.int64))
        assert np.isfinite(noise).all()
        assert abs(noise[0]) > 3  # far out on either side


def test_noise_is_gumbel_and_uncorrelated_between_neighbours() -> None:
    """All bounds are 6 standard deviations of the estimate."""
    n = 100
    grid = np.array([[gumbel_noise(seed, at, np.arange(n)) for at in range(n)] for seed in range(20)])
    assert np.unique(grid).size == grid.size
    uniform = np.exp(-np.exp(-grid))
    assert ((uniform > 0) & (uniform < 1)).all()
    assert abs(uniform.mean() - 0.5) < 6 * (1 / 12 / grid.size) ** 0.5
    counts = np.histogram(uniform, bins=50, range=(0, 1))[0]
    assert chi_square_p(counts, np.full(50, grid.size / 50)) > FALSE_ALARM
    scores = (uniform - 0.5) * 12**0.5
    for axis in range(3):
        here, there = np.delete(scores, -1, axis), np.delete(scores, 0, axis)
        assert abs((here * there).mean()) < 6 / here.size**0.5
    diagonal = scores[:, :-1, :-1] * scores[:, 1:, 1:]
    assert abs(diagonal.mean()) < 6 / diagonal.size**0.5


# Greedy


@pytest.mark.parametrize("name", ["block", "rejection", "coupled"])
def test_temperature_zero_makes_every_verifier_greedy(name: str) -> None:
    verifier = make_verifier(name, Sampler(temperature=0.0))
    assert (verifier.name, verifier.is_sampled) == ("greedy", False)


def test_greedy_takes_the_lowest_id_of_a_tie_on_every_path() -> None:
    verifier, state = make_verifier("greedy", Sampler(temperature=0)), SequenceState(0, [0])
    tie = np.array([0, 3, 1, 3, 3], np.float32)
    assert verifier.choose(tie, state, [], None)[:2] == (1, None)  # the draft's choice
    assert verifier.verify(EMPTY, tie[None], state).next_token == 1  # plain, bonus
    rows = np.stack([tie, tie])
    for other in (0, 2, 3, 4):
        verdict = verifier.verify(Draft([other], [None]), rows, state)
        assert (verdict.n_accepted, verdict.next_token, verdict.kind) == (0, 1, "recovered")
    verdict = verifier.verify(Draft([1], [None]), rows, state)
    assert (verdict.n_accepted, verdict.next_token, verdict.kind) == (1, 1, "bonus")


@pytest.mark.parametrize("name", ["greedy", "block", "rejection", "coupled"])
def test_trees_are_refused(name: str) -> None:
    verifier = make_verifier(name, Sampler(temperature=0.0 if name == "greedy" else 1.0))
    tree = Draft([1, 2], [None, None], parents=np.array([-1, -1], np.int32))
    with pytest.raises(ValueError, match="tree"):
        verifier.verify(tree, np.zeros((3, 4), np.float32), SequenceState(0, [0]))
