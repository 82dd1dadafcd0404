"""The sampler chain against llama.cpp's own, and the exact selection of the highest logits against a full sort."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import llama_cpp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from specli.errors import EngineError
from specli.samplers import top_ids
from specli.sampling import Distribution, Sampler, top_probability

TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
BOUNDARY = 1e-6  # nearer boundaries may fall on either side in llama.cpp's float32 ...
ROUNDING = 2.0**-24  # ... and top-p, a float32 sum, adds this for each of its terms


@contextmanager
def llama_chain(sampler: Sampler) -> Iterator[object]:
    """top-k, top-p, min-p, temperature and the final softmax, made by llama.cpp."""
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for step in (
        llama_cpp.llama_sampler_init_top_k(sampler.top_k),
        llama_cpp.llama_sampler_init_top_p(sampler.top_p, 1),
        llama_cpp.llama_sampler_init_min_p(sampler.min_p, 1),
        llama_cpp.llama_sampler_init_temp_ext(sampler.temperature, 0.0, 1.0),
        llama_cpp.llama_sampler_init_dist(1),
    ):
        llama_cpp.llama_sampler_chain_add(chain, step)
    yield chain
    llama_cpp.llama_sampler_free(chain)


def llama_distribution(chain: object, row: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """What llama.cpp leaves of ``row``: ids and probabilities."""
    data = np.empty(row.size, TOKEN_DATA)
    data["id"], data["logit"], data["p"] = np.arange(row.size), row, 0
    pointer = ctypes.cast(data.ctypes.data, llama_cpp.llama_token_data_p)
    candidates = llama_cpp.llama_token_data_array(data=pointer, size=row.size, selected=-1, sorted=False)
    llama_cpp.llama_sampler_apply(chain, ctypes.byref(candidates))
    kept = data[: candidates.size]
    return kept["id"].copy(), kept["p"].copy()


def by_logit(ids: NDArray[np.int64], probs: NDArray[np.float64], row: NDArray[np.float32]) -> np.ndarray:
    """Columns (logit, probability), highest first: the same for every choice among equal logits. Without -inf."""
    pairs = np.stack([row[ids].astype(np.float64), probs.astype(np.float64)])
    pairs = pairs[:, pairs[0] > -np.inf]
    return pairs[:, np.lexsort((-pairs[1], -pairs[0]))]


def is_boundary(row: NDArray[np.float32], sampler: Sampler, low: int, high: int) -> bool:
    """Whether keeping ``low`` or ``high`` logits is a matter of float32 rounding."""
    logits = np.sort(row[np.isfinite(row)].astype(np.float64))[::-1]
    logits = logits[: sampler.top_k] if sampler.top_k > 0 else logits
    reached = np.cumsum(np.exp(logits - logits[0]))
    reached /= reached[-1]
    by_top_p = np.abs(reached[low - 1 : high - 1] - sampler.top_p).max() < BOUNDARY + ROUNDING * logits.size
    if sampler.min_p <= 0:
        return bool(by_top_p)
    margins = np.abs(logits[low:high] - logits[0] - np.log(sampler.min_p))
    return bool(by_top_p or margins.max() < BOUNDARY * max(1.0, abs(logits[0])))


def check(sampler: Sampler, chain: object, row: NDArray[np.float32]) -> bool:
    """Compare with llama.cpp; False where the two sides differ by a rounding boundary."""
    ours = sampler.distribution(row.copy())
    assert ours.ids.dtype == np.int64
    assert (np.diff(ours.ids) > 0).all()
    assert ours.probs.dtype == np.float64
    assert ours.probs.min() >= 0
    assert abs(ours.probs.sum() - 1) < 1e-12
    mine = by_logit(ours.ids, ours.probs, row)
    theirs = by_logit(*llama_distribution(chain, row), row)
    if mine.shape != theirs.shape:
        low, high = sorted((mine.shape[1], theirs.shape[1]))
        assert is_boundary(row, sampler, low, high), (low, high, sampler)
        return False
    np.testing.assert_array_equal(mine[0], theirs[0])
    rounding = 2.0**-23 * np.abs(mine[0]).max() / sampler.temperature  # of logit / temperature in float32
    if rounding < 0.01:
        np.testing.assert_allclose(mine[1], theirs[1], rtol=1e-4 + 4 * rounding, atol=1e-9)
    return True


def rows(size: int, n: int, rng: np.random.Generator) -> Iterator[NDArray[np.float32]]:
    """Random and adversarial rows of one size."""
    for i in range(n):
        row = rng.normal(0, 4, size)
        kind = i % 8
        if kind == 1:  # ties everywhere, at every cut
            row = rng.integers(-3, 4, size).astype(float)
        elif kind == 2:
            row *= 1e4
        elif kind == 3:
            row *= 1e-4
        elif kind == 4:
            row[rng.random(size) < 0.5] = -np.inf
            row[rng.integers(size)] = 3.0
        elif kind == 5:
            row[:] = rng.normal()
        elif kind == 6:  # one winner
            row[rng.integers(size)] = 60.0
        elif kind == 7:  # flat head, long tail: top-p cuts inside a tie
            row = np.where(rng.random(size) < 0.1, 5.0, rng.normal(-3, 1, size))
        yield row.astype(np.float32)


SETTINGS = [
    Sampler(temperature, top_k, top_p, min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.1, 0.8, 1.0, 2.0, 1e-9), (0, 1, 40, 100_000), (1.0, 0.95, 0.5, 1e-6), (0.0, 0.05, 0.5, 1.0)
    )
]


@pytest.mark.parametrize("size", [1, 2, 3, 40, 41, 1000])
def test_chain_equals_llama_cpps(size: int) -> None:
    """2,560 pairs of row and settings for each size."""
    rng = np.random.default_rng(size)
    n_boundary = 0
    for sampler in SETTINGS:
        with llama_chain(sampler) as chain:
            n_boundary += sum(not check(sampler, chain, row) for row in rows(size, 8, rng))
    assert n_boundary <= (0 if size < 40 else 150)  # constant rows: 0.95 of 40 equal probabilities is a boundary


@pytest.mark.parametrize("top_k", [0, 40, 100_000])
@pytest.mark.parametrize(("top_p", "min_p"), [(1.0, 0.0), (0.95, 0.05), (0.5, 0.0), (1.0, 0.05)])
def test_chain_equals_llama_cpps_on_a_large_vocabulary(top_k: int, top_p: float, min_p: float) -> None:
    rng = np.random.default_rng(20)
    sampler = Sampler(0.8, top_k, top_p, min_p)
    with llama_chain(sampler) as chain:
        spread = rng.normal(0, 3, 151_936).astype(np.float32)
        rounded = np.round(spread * 4).astype(np.float32) / 4  # hundreds of ties at the cut
        assert check(sampler, chain, spread)
        check(sampler, chain, rounded)


def test_chain_on_huge_logits() -> None:
    """float32's whole range: differences beyond it are probability 0, not an overflow."""
    row = np.array([3e38, -3e38, 0, 3e38, -np.inf], np.float32)
    for temperature in (1.0, 1e-9, 1e-320):
        for top_k, top_p in itertools.product((0, 2, 5), (1.0, 0.95)):
            law = Sampler(temperature, top_k, top_p, 0.0).distribution(row.copy())
            np.testing.assert_array_equal(law.probs_at(np.arange(5)), [0.5, 0, 0, 0.5, 0])


def test_tiny_temperature_acts_as_greedy() -> None:
    """H18: without overflow warnings (they are errors here)."""
    rng = np.random.default_rng(21)
    for sampler in (Sampler(1e-9), Sampler(1e-9, 0, 1.0, 0.0), Sampler(5e-324, 0, 1.0, 0.0)):
        for _ in range(50):
            row = rng.normal(0, 5, 300).astype(np.float32)
            law = sampler.distribution(row)
            assert law.prob(int(row.argmax())) == 1.0
            assert law.draw(rng.random()) == row.argmax()


def test_known_values() -> None:
    row = np.log(np.array([0.1, 0.4, 0.2, 0.3])).astype(np.float32)
    plain = Sampler(1.0, 0, 1.0, 0.0).distribution(row)
    np.testing.assert_allclose(plain.probs, [0.1, 0.4, 0.2, 0.3], rtol=1e-6)
    np.testing.assert_array_equal(plain.ids, [0, 1, 2, 3])
    top_2 = Sampler(1.0, 2, 1.0, 0.0).distribution(row)
    np.testing.assert_array_equal(top_2.ids, [1, 3])
    np.testing.assert_allclose(top_2.probs, [4 / 7, 3 / 7], rtol=1e-6)
    top_p = Sampler(1.0, 0, 0.65, 0.0).distribution(row)  # 0.4 + 0.3 reaches 0.65
    np.testing.assert_array_equal(top_p.ids, [1, 3])
    min_p = Sampler(1.0, 0, 1.0, 0.45).distribution(row)  # at least 0.18
    np.testing.assert_array_equal(min_p.ids, [1, 2, 3])
    hot = Sampler(2.0, 0, 1.0, 0.0).distribution(row)
    np.testing.assert_allclose(
        hot.probs, np.sqrt([0.1, 0.4, 0.2, 0.3]) / np.sqrt([0.1, 0.4, 0.2, 0.3]).sum(), rtol=1e-6
    )
    # top-p looks at what top-k left: of (0.4, 0.3) / 0.7 the first alone reaches 0.55
    np.testing.assert_array_equal(Sampler(1.0, 2, 0.55, 0.0).distribution(row).ids, [1])


def test_temperature_comes_last() -> None:
    """Truncation looks at untempered logits: the same ids at every temperature."""
    row = np.random.default_rng(22).normal(0, 2, 500).astype(np.float32)
    kept = [Sampler(t, 40, 0.8, 0.1).distribution(row).ids for t in (0.1, 1.0, 5.0)]
    np.testing.assert_array_equal(kept[0], kept[1])
    np.testing.assert_array_equal(kept[0], kept[2])


def test_ties_go_to_the_lowest_ids() -> None:
    row = np.array([1, 2, 1, 2, 1, 2], np.float32)
    np.testing.assert_array_equal(Sampler(1.0, 4, 1.0, 0.0).distribution(row).ids, [0, 1, 3, 5])
    np.testing.assert_array_equal(Sampler(1.0, 2, 1.0, 0.0).distribution(row).ids, [1, 3])
    np.testing.assert_array_equal(Sampler(1.0, 0, 0.3, 0.0).distribution(row).ids, [1, 3])
    assert Sampler(0).argmax(row) == 1


def test_banned_ids() -> None:
    for sampler in (
        Sampler(1.0, 0, 1.0, 0.0, (2, 0)),
        Sampler(1.0, 2, 1.0, 0.0, (2, 0)),
        Sampler(1.0, 0, 0.6, 0.1, (2, 0)),
    ):
        law = sampler.distribution(np.array([5, 1, 9, 1], np.float32))
        np.testing.assert_allclose(law.probs_at(np.arange(4)), [0, 0.5, 0, 0.5])
        assert sampler.argmax(np.array([5, 1, 9, 1], np.float32)) == 1
    with pytest.raises(EngineError):
        Sampler(banned=(0, 1)).distribution(np.zeros(2, np.float32))
    assert Sampler(0.0).is_greedy
    assert not Sampler(1e-9).is_greedy


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("size", [1, 40, 5000, 151_936])
def test_rows_without_meaning_are_refused(bad: float, size: int) -> None:
    rng = np.random.default_rng(23)
    for at in {0, size // 2, size - 1}:
        row = rng.normal(0, 1, size).astype(np.float32)
        row[at] = bad
        for top_k, top_p, min_p in itertools.product((0, 1, 40), (1.0, 0.95), (0.0, 0.05)):
            with pytest.raises(EngineError, match=str(bad)):
                Sampler(0.8, top_k, top_p, min_p).distribution(row.copy())
        with pytest.raises(EngineError, match=str(bad)):
            Sampler(0).argmax(row)
        with pytest.raises(EngineError):
            top_probability(row)


def test_a_row_of_minus_infinity_is_refused() -> None:
    row = np.full(300, -np.inf, np.float32)
    for top_k, top_p in itertools.product((0, 40), (1.0, 0.95)):
        with pytest.raises(EngineError, match="-inf"):
            Sampler(0.8, top_k, top_p).distribution(row.copy())
    with pytest.raises(EngineError, match="-inf"):
        Sampler(0).argmax(row)


# The highest k


def sorted_ids(row: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """What ``top_ids`` promises, by a full stable sort."""
    order = np.argsort(-row.astype(np.float64), kind="stable")[:k]
    return order[np.isfinite(row[order])]


@settings(max_examples=300, deadline=None)
@given(
    hnp.arrays(
        np.float32,
        st.integers(1, 700),
        elements=st.one_of(st.sampled_from([-np.inf, 0.0, -0.0, 1.0, 2.0]), st.floats(-9, 9, width=32)),
        fill=st.just(np.float32(1.0)),
    ),
    st.integers(1, 45),
)
def test_top_ids_against_a_full_sort(row: NDArray[np.float32], k: int) -> None:
    if np.isfinite(row.max()):
        np.testing.assert_array_equal(top_ids(row, k), sorted_ids(row, k))


@pytest.mark.parametrize("size", [127, 128, 129, 1280, 5119, 5120, 5121, 5248, 5249, 20_001])
@pytest.mark.parametrize("k", [1, 10, 39, 40, 41, 64, 512])
def test_top_ids_around_the_shortcuts_limits(size: int, k: int) -> None:
    """128 rows of columns and a remainder behind them; the shortcut starts where there are more columns than k."""
    rng = np.random.default_rng([size, k])
    for row in (
        rng.normal(0, 1, size),
        rng.integers(0, 4, size).astype(float),
        np.where(rng.random(size) < 0.995, -np.inf, rng.integers(0, 3, size)),
        np.sort(rng.normal(0, 1, size)),  # winners in the remainder
        np.sort(rng.normal(0, 1, size))[::-1],
        np.zeros(size),
    ):
        logits = row.astype(np.float32)
        logits[int(rng.integers(size))] = 2.0
        np.testing.assert_array_equal(top_ids(logits, k), sorted_ids(logits, k))


def test_top_ids_on_a_large_vocabulary() -> None:
    rng = np.random.default_rng(24)
    for row in (rng.normal(0, 1, 151_936), np.round(rng.normal(0, 1, 151_936)), rng.permutation(151_936)):
        logits = row.astype(np.float32)
        for k in (1, 40, 1000):
            np.testing.assert_array_equal(top_ids(logits, k), sorted_ids(logits, k))


def test_top_probability_is_the_first_of_the_raw_top_ten() -> None:
    row = np.random.default_rng(25).normal(0, 2, 400).astype(np.float32)
    ten = np.sort(row.astype(np.float64))[::-1][:10]
    assert top_probability(row) == pytest.approx(np.exp(ten[0]) / np.exp(ten).sum(), rel=1e-12)
    assert top_probability(np.zeros(50, np.float32)) == pytest.approx(0.1)
    assert top_probability(np.zeros(4, np.float32)) == pytest.approx(0.25)


# Distribution


def test_distribution_lookups() -> None:
    law = Distribution(np.array([2, 5, 9]), np.array([0.2, 0.0, 0.8]))
    assert [law.prob(token) for token in (0, 2, 3, 5, 9, 10)] == [0, 0.2, 0, 0, 0.8, 0]
    np.testing.assert_array_equal(law.probs_at(np.array([10, 9, 2, 0, 5, 6])), [0, 0.8, 0.2, 0, 0, 0])
    assert [law.draw(u) for u in (0.0, 0.1999, 0.2, 1 - 2**-53)] == [2, 2, 9, 9]


def test_a_point_mass_distribution_is_drawn_for_certain() -> None:
    law = Distribution(np.array([7]), np.array([1.0]))
    assert {law.draw(u) for u in (0.0, 0.5, 1 - 2**-53)} == {7}
