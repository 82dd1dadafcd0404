"""Each sampler against llama.cpp's own on the same rows and histories; mirostat's mu along a text."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from specli import samplers
from specli.config import ModelOptions, SamplingOptions
from specli.errors import EngineError
from specli.samplers import Candidates
from specli.sampling import ORDER, Context, Sampler, State, uniform

TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
N = 500


@contextmanager
def freed(sampler: object) -> Iterator[object]:
    assert sampler
    yield sampler
    llama_cpp.llama_sampler_free(sampler)


def llama_left(sampler: object, row: NDArray[np.float32], recent: Sequence[int] = ()) -> dict[int, float]:
    """Logits that llama.cpp leaves, by id; without those of -inf."""
    for token in recent:
        llama_cpp.llama_sampler_accept(sampler, token)
    data = np.zeros(row.size, TOKEN_DATA)
    data["id"], data["logit"] = np.arange(row.size), row
    pointer = ctypes.cast(data.ctypes.data, llama_cpp.llama_token_data_p)
    array = llama_cpp.llama_token_data_array(data=pointer, size=row.size, selected=-1, sorted=False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    first = (ctypes.cast(array.data, ctypes.c_void_p).value or 0) - data.ctypes.data
    kept = data[first // TOKEN_DATA.itemsize :][: array.size]
    return {int(i): float(logit) for i, logit in zip(kept["id"], kept["logit"], strict=True) if logit > -np.inf}


def ours_left(candidates: Candidates) -> dict[int, float]:
    ids = np.arange(candidates.logits.size) if candidates.ids is None else candidates.ids
    assert len(set(ids.tolist())) == ids.size
    return {int(i): float(x) for i, x in zip(ids, candidates.logits, strict=True) if x > -np.inf}


def assert_alike(ours: dict[int, float], theirs: dict[int, float], boundary: int = 0) -> None:
    """The same tokens, but for ``boundary`` of them that rounding may put on either side, and the same logits."""
    assert len(ours.keys() ^ theirs.keys()) <= boundary
    for token in ours.keys() & theirs.keys():
        assert ours[token] == pytest.approx(theirs[token], rel=2e-5, abs=2e-4)


def rows(n: int, size: int = N) -> Iterator[NDArray[np.float32]]:
    for seed in range(n):
        rng = np.random.default_rng(seed)
        row = rng.normal(0, (1.0, 3.0, 8.0)[seed % 3], size)
        if seed % 4 == 1:
            row[rng.random(size) < 0.4] = -np.inf
        if seed % 5 == 2:
            row = np.round(row)  # ties
        yield row.astype(np.float32)


def dense(row: NDArray[np.float32]) -> Candidates:
    return Candidates(None, row)


def sparse(row: NDArray[np.float32]) -> Candidates:
    """Every finite candidate, in no order."""
    ids = np.flatnonzero(row > -np.inf)
    ids = np.random.default_rng(1).permutation(ids)
    return Candidates(ids, row[ids].astype(np.float64))


FORMS = pytest.mark.parametrize("form", [dense, sparse], ids=["dense", "sparse"])


@FORMS
@pytest.mark.parametrize("p", [0.02, 0.3, 0.9, 0.9999])
def test_typical(form: Callable[[NDArray[np.float32]], Candidates], p: float) -> None:
    for row in rows(30):
        row[np.isinf(row)] = -60.0  # llama.cpp's entropy of a row with -inf is NaN
        with freed(llama_cpp.llama_sampler_init_typical(p, 0)) as sampler:
            ours, theirs = ours_left(samplers.typical(form(row), p)), llama_left(sampler, row)
        has_ties = np.unique(row).size < row.size
        if not has_ties:  # among equal scores the order is anybody's
            assert_alike(ours, theirs, boundary=1)
        else:
            assert abs(len(ours) - len(theirs)) <= 1


@FORMS
@pytest.mark.parametrize("n", [0.3, 1.0, 2.5])
def test_top_n_sigma(form: Callable[[NDArray[np.float32]], Candidates], n: float) -> None:
    for row in rows(30):
        with freed(llama_cpp.llama_sampler_init_top_n_sigma(n)) as sampler:
            assert_alike(ours_left(samplers.top_n_sigma(form(row), n)), llama_left(sampler, row), boundary=1)


@FORMS
@pytest.mark.parametrize("threshold", [0.02, 0.1, 0.4])
def test_xtc(form: Callable[[NDArray[np.float32]], Candidates], threshold: float) -> None:
    """A probability of 1 always excludes, whatever the coin."""
    for row in rows(30):
        with freed(llama_cpp.llama_sampler_init_xtc(1.0, threshold, 0, 1)) as sampler:
            assert_alike(ours_left(samplers.xtc(form(row), 1.0, threshold, 0.7)), llama_left(sampler, row), boundary=1)
        untouched = form(row)
        assert samplers.xtc(untouched, 0.5, threshold, 0.51) is untouched


@FORMS
@pytest.mark.parametrize(
    ("t", "reach", "exponent"), [(0.8, 0.0, 1.0), (1.0, 0.5, 1.0), (0.5, 0.7, 2.0), (2.0, 1.9, 0.5)]
)
def test_temperature(
    form: Callable[[NDArray[np.float32]], Candidates], t: float, reach: float, exponent: float
) -> None:
    for row in rows(30):
        if form is sparse:
            row = row[row > -np.inf]  # llama.cpp counts what has no chance among the candidates
        with freed(llama_cpp.llama_sampler_init_temp_ext(t, reach, exponent)) as sampler:
            theirs = llama_left(sampler, row)
        if reach:
            ours = samplers.dynamic_temperature(form(row), t, reach, exponent)
        else:
            ours = samplers.temperature(form(row), t)
        assert_alike(ours_left(ours), theirs)


@FORMS
@pytest.mark.parametrize(
    ("last_n", "repeat", "frequency", "presence"),
    [(64, 1.3, 0.0, 0.0), (8, 0.7, 0.2, 0.5), (1, 2.0, 0.0, -1.0), (300, 1.0, 0.3, 0.0), (64, 1.1, -0.5, 0.0)],
)
def test_penalties(
    form: Callable[[NDArray[np.float32]], Candidates], last_n: int, repeat: float, frequency: float, presence: float
) -> None:
    for seed, row in enumerate(rows(30)):
        history = np.random.default_rng(seed).integers(0, 40, 200).tolist()
        made = llama_cpp.llama_sampler_init_penalties(N, last_n, repeat, frequency, presence)
        with freed(made) as sampler:
            theirs = llama_left(sampler, row, history)
        recent = Context(history[:150], history[150:]).recent(last_n)
        assert recent == history[-last_n:]
        assert_alike(ours_left(samplers.penalties(form(row), recent, repeat, presence, frequency)), theirs)


@FORMS
@pytest.mark.parametrize(("base", "allowed", "last_n"), [(1.75, 2, 64), (1.0, 1, 200), (3.0, 0, 30), (1e6, 2, 300)])
def test_dry(form: Callable[[NDArray[np.float32]], Candidates], base: float, allowed: int, last_n: int) -> None:
    """Without breakers, on texts of few words that repeat themselves."""
    n_changed = 0
    for seed, row in enumerate(rows(40)):
        rng = np.random.default_rng(seed)
        history = rng.integers(0, 4, 120).tolist()
        history += history[int(rng.integers(0, 60)) :][: int(rng.integers(1, 40))]
        with freed(llama_cpp.llama_sampler_init_dry(None, 0.8, base, allowed, last_n, None, 0)) as sampler:
            theirs = llama_left(sampler, row, history)
        ours = ours_left(samplers.dry(form(row), history[-last_n:], 0.8, base, allowed, {}))
        n_changed += ours != ours_left(form(row))
        assert_alike(ours, theirs)
    assert n_changed > 20


def test_dry_breakers() -> None:
    """1 2 3 has been said before, but token 9 ends a repetition; a token that is one itself is never lowered."""
    row, history = np.zeros(10, np.float32), [1, 2, 3, 4, 0, 1, 2, 3]
    assert samplers.dry(dense(row), history, 1.0, 2.0, 2, {}).logits[4] == -2.0
    assert samplers.dry(dense(row), [1, 2, 3, 4, 9, 3], 1.0, 2.0, 2, {9: [()]}).logits[4] == 0.0
    assert samplers.dry(dense(row), history, 1.0, 2.0, 2, {2: [()]}).logits[4] == 0.0  # 3 alone is too short
    assert samplers.dry(dense(row), history, 1.0, 2.0, 2, {4: [()]}).logits[4] == 0.0
    assert samplers.dry(dense(row), history, 1.0, 2.0, 2, {2: [(3,)]}).logits[4] == 0.0  # 2 3 together
    assert samplers.dry(dense(row), history, 1.0, 2.0, 2, {2: [(0,)]}).logits[4] == -2.0


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_truncates_and_learns_as_llama_cpp(version: int) -> None:
    """llama.cpp draws with its own coins: its draws, our support, our mu, over a text."""
    tau, eta = 3.0, 0.2
    sampler = Sampler(1.0, mirostat=version, mirostat_tau=tau, mirostat_eta=eta)
    state = sampler.start()
    assert state.mu == 2 * tau
    make = {
        1: lambda: llama_cpp.llama_sampler_init_mirostat(N, 7, tau, eta, 100),
        2: lambda: llama_cpp.llama_sampler_init_mirostat_v2(7, tau, eta),
    }[version]
    with freed(make()) as theirs:
        for row in rows(60):
            row[np.isinf(row)] = -30.0
            row += np.arange(N, dtype=np.float32) * 1e-4  # no ties: who of them stays is anybody's
            data = np.zeros(N, TOKEN_DATA)
            data["id"], data["logit"] = np.arange(N), row
            pointer = ctypes.cast(data.ctypes.data, llama_cpp.llama_token_data_p)
            array = llama_cpp.llama_token_data_array(data=pointer, size=N, selected=-1, sorted=False)
            llama_cpp.llama_sampler_apply(theirs, ctypes.byref(array))
            kept = data[: array.size]
            ours = sampler.distribution(row, Context(state=state))
            assert abs(ours.ids.size - kept.size) <= 1 + (version == 1) * 0.02 * kept.size
            token = int(kept["id"][array.selected])
            assert ours.prob(token) == pytest.approx(float(kept["p"][array.selected]), rel=2e-2)
            state = sampler.advance(state, token, ours)
            assert state.mu is not None


def test_bias_comes_first_and_bans() -> None:
    row = np.array([5.0, 4.0, 3.0, 2.0], np.float32)
    before = row.copy()
    sampler = Sampler(0.0, bias={0: -3.0, 2: -np.inf})
    assert sampler.argmax(row) == 1
    assert Sampler(1.0, 0, 1.0, 0.0, bias={2: -np.inf, 9: 1.0}).distribution(row).ids.tolist() == [0, 1, 3]
    assert (row == before).all()  # rows are never written to
    with pytest.raises(EngineError, match="-inf"):
        Sampler(1.0, banned=(0, 1, 2, 3)).distribution(row)


def test_the_order_is_obeyed() -> None:
    """The two highest are 0 and 1; where penalties come first they are 1 and 2."""
    row = np.array([3.0, 2.9, 2.8, -5.0], np.float32)
    context = Context([0, 0], [0])
    first = Sampler(1.0, 2, 1.0, 0.0, repeat_penalty=4.0)
    last = Sampler(1.0, 2, 1.0, 0.0, repeat_penalty=4.0, order=("top_k", "penalties", "temperature"))
    assert first.distribution(row, context).ids.tolist() == [1, 2]
    assert last.distribution(row, context).ids.tolist() == [0, 1]
    assert last.distribution(row, context).prob(1) > 0.8


def test_a_greedy_chain_keeps_what_can_change_the_highest() -> None:
    row = np.array([3.0, 2.9, 2.8, -5.0], np.float32)
    assert Sampler(0.0, repeat_penalty=2.0).argmax(row, Context([0])) == 1
    assert Sampler(0.0, xtc_probability=1.0, xtc_threshold=0.1).argmax(row) == 2  # all but the last of the top three
    assert Sampler(0.0).argmax(np.array([1.0, 7.0, 7.0], np.float32)) == 1
    assert Sampler(0.0, repeat_penalty=1.0, dry_multiplier=0.5).argmax(row) == 0


GREEDY_ORDERS = {
    ("top_k", "penalties", "temperature"): {"top_k": 1},
    ("temperature", "penalties"): {},
    ("temperature", "xtc"): {"xtc_probability": 1.0},
    ("xtc", "penalties", "temperature"): {"xtc_probability": 1.0},
    ("penalties", "typ_p", "top_k", "temperature"): {"top_k": 2, "typical_p": 0.3},
    ("min_p", "penalties", "temperature", "dry"): {"min_p": 0.95},
}


@pytest.mark.parametrize("order", GREEDY_ORDERS, ids="-".join)
def test_a_greedy_chain_keeps_its_order(order: tuple[str, ...]) -> None:
    """Against llama.cpp's chain in that order."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    sampler = Sampler(0.0, **{**off, **GREEDY_ORDERS[order]}, repeat_penalty=3.0, order=order)  # type: ignore[arg-type]
    make = {
        "top_k": lambda: llama_cpp.llama_sampler_init_top_k(sampler.top_k),
        "penalties": lambda: llama_cpp.llama_sampler_init_penalties(N, 64, 3.0, 0.0, 0.0),
        "temperature": lambda: llama_cpp.llama_sampler_init_temp_ext(0.0, 0.0, 1.0),
        "xtc": lambda: llama_cpp.llama_sampler_init_xtc(1.0, 0.1, 0, 1),
        "typ_p": lambda: llama_cpp.llama_sampler_init_typical(sampler.typical_p, 0),
        "min_p": lambda: llama_cpp.llama_sampler_init_min_p(sampler.min_p, 0),
        "dry": lambda: llama_cpp.llama_sampler_init_dry(None, 0.0, 1.75, 2, 64, None, 0),
    }
    for seed in range(20):
        row = np.random.default_rng(seed).normal(0, 3, N).astype(np.float32)
        history = [int(token) for token in np.argsort(-row)[:2]]
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for name in order:
            llama_cpp.llama_sampler_chain_add(chain, make[name]())
        with freed(chain) as theirs:
            left = llama_left(theirs, row, history)
        assert sampler.argmax(row, Context(history)) == max(left, key=lambda token: left[token]), seed


def test_without_a_temperature_in_the_order_nothing_is_greedy() -> None:
    sampler = Sampler(0.0, 0, 1.0, 0.0, order=("top_k",))
    assert not sampler.is_greedy
    row = np.array([1.0, 0.0], np.float32)
    assert sampler.distribution(row).probs[0] == pytest.approx(1 / (1 + np.exp(-1)))


def test_xtc_coins_are_functions_of_seed_and_position() -> None:
    row = np.array([2.0, 1.9, 1.8, 0.0], np.float32)
    sampler = Sampler(1.0, 0, 1.0, 0.0, xtc_probability=0.5, xtc_threshold=0.1)
    sizes = [
        sampler.distribution(row, Context([1] * position, seed=seed)).ids.size
        for seed in range(30)
        for position in range(30)
    ]
    again = [
        sampler.distribution(row, Context([2] * (position - 1), [3], seed=seed)).ids.size if position else None
        for seed in range(30)
        for position in range(30)
    ]
    assert all(a == b for a, b in zip(sizes, again, strict=True) if b is not None)
    share = np.mean([size == 2 for size in sizes])
    assert abs(share - 0.5) < 0.07
    coins = [uniform(3, position) for position in range(2000)]
    assert min(coins) >= 0
    assert max(coins) < 1
    assert abs(np.mean(coins) - 0.5) < 0.03


def test_disabled_samplers_are_the_default_chain() -> None:
    plain = Sampler()
    off = Sampler(
        repeat_last_n=0,
        repeat_penalty=1.5,
        dry_multiplier=1.0,
        dry_penalty_last_n=0,
        xtc_probability=1.0,
        xtc_threshold=0.6,
    )
    context = Context([1, 2, 3, 1, 2])
    for row in rows(20):
        ours, theirs = plain.distribution(row, context), off.distribution(row, context)
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.probs.tolist() == theirs.probs.tolist()


def test_the_names_are_llama_cpps() -> None:
    assert SamplingOptions.samplers == ORDER
    assert State() == (None, None)


def test_a_session_looks_for_breakers_once(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request with penalties of its own has its own sampler; the vocabulary is the same."""
    from specli.config import Settings
    from specli.engine.llama import LlamaModel
    from specli.session import Session

    asked, piece = list[int](), LlamaModel.special_piece
    monkeypatch.setattr(LlamaModel, "special_piece", lambda model, token: asked.append(token) or piece(model, token))
    with Session(
        Settings(ModelOptions(tiny_model(), n_ctx=64), sampling=SamplingOptions(dry_multiplier=0.8))
    ) as session:
        n_before = len(asked)
        assert n_before >= session.model.n_vocab
        for seed in range(3):
            verifier = session.verifier_for(SamplingOptions(dry_multiplier=0.8, seed=seed))
            assert verifier.sampler.dry_breakers == session.sampler.dry_breakers != {}
        assert len(asked) == n_before
        other = session.verifier_for(SamplingOptions(dry_multiplier=0.8, dry_breakers=("a",)))
        assert other.sampler.dry_breakers != session.sampler.dry_breakers
        assert session.verifier_for(SamplingOptions()).sampler.dry_breakers == {}


def test_breakers_of_a_real_vocabulary(tiny_model: Callable[..., Path]) -> None:
    """Against llama.cpp's own DRY with its default breakers, on a model's tokens."""
    from specli.chain import make_sampler
    from specli.engine.llama import LlamaModel

    model = LlamaModel(ModelOptions(tiny_model()), lambda _fraction: None, lambda: False)
    try:
        sampler = make_sampler(SamplingOptions(dry_multiplier=0.8, dry_allowed_length=1), model)
        texts = [text.encode() for text in SamplingOptions.dry_breakers]
        array = (ctypes.c_char_p * len(texts))(*texts)
        vocab = llama_cpp.llama_model_get_vocab(model.handle)
        n_changed = 0
        for seed in range(60):
            rng = np.random.default_rng(seed)
            row = rng.normal(0, 2, model.n_vocab).astype(np.float32)
            some = rng.integers(0, model.n_vocab, 6)
            history = some[rng.integers(0, 6, 60)].tolist()
            made = llama_cpp.llama_sampler_init_dry(vocab, 0.8, 1.75, 1, 64, array, len(texts))
            with freed(made) as theirs:
                wanted = llama_left(theirs, row, history)
            ours = samplers.dry(dense(row), history[-64:], 0.8, 1.75, 1, sampler.dry_breakers)
            assert_alike(ours_left(ours), wanted)
            n_changed += bool((ours.logits != row).any())
        assert n_changed > 10
    finally:
        model.close()
