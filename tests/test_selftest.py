"""The self-test passes where all is right, and fails on the right line where something was broken on purpose."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from fakes import memo
from support import CommandLine, settings

from specli import bits, verify
from specli.engine.base import Evaluation
from specli.engine.table import TableEngine, random_logits
from specli.errors import Cancelled, EngineError
from specli.selftest import continuations, identity, laws, rollback, suite
from specli.selftest.subject import Subject
from specli.verify import Law, MatchVerifier, Verdict

N_VOCAB = 12
_base, _other = memo(random_logits(N_VOCAB, 1, 2.0)), memo(random_logits(N_VOCAB, 2, 1.0))


class Moved(TableEngine):
    """Like llama.cpp without luck: rows of passes over several tokens move a little."""

    by = 0.02

    def evaluate(self, slices, interruptible=False):
        evaluation = super().evaluate(slices, interruptible)
        (part,), (rows,) = slices, evaluation.rows
        if len(part.tokens) > 1 and part.n_rows:
            rng = np.random.default_rng([part.start, len(part.tokens)])
            return Evaluation([rows + rng.uniform(-self.by, self.by, rows.shape).astype(np.float32)])
        return evaluation


def make_engine(kind=TableEngine, is_draft=False):
    return kind(
        (lambda history: _base(history) + _other(history)) if is_draft else _base,
        N_VOCAB,
        n_ctx=700,
        n_batch=64,
        n_rows_max=32,
    )


def make_subject(kind=TableEngine, **changes) -> Subject:
    rng = np.random.default_rng(0)
    subject = Subject(
        target=make_engine(kind),
        draft=make_engine(is_draft=True),
        piece=lambda _token: b"x",
        end_ids=frozenset({0}),
        prompts=[rng.integers(1, N_VOCAB, 20).tolist() for _ in range(4)],
        text=rng.integers(1, N_VOCAB, 600).tolist(),
        open_engine=lambda _cache_type: make_engine(kind),
    )
    return replace(subject, **changes)


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch):
    monkeypatch.setattr(continuations, "N_DRAWS", 1000)


def failed(subject) -> set[str]:
    return {check.name for check in suite.run(subject) if check.passed is False}


def test_everything_passes_where_everything_is_right():
    started = []
    checks = list(suite.run(make_subject(), started.append))
    assert [check.name for check in checks if check.passed is not True] == []
    assert [check.name for check in checks] == [
        *("law of greedy", "law of coupled", "law of rejection", "law of block"),
        *("rollback of the target", "rollback of the draft", "bit identity of widths", "greedy text", "text of seed 7"),
        *("sampled text, block", "sampled text, rejection", "sampled text, coupled"),
    ]
    assert len(started) == len(checks)
    assert all(check.detail for check in checks)
    json.dumps([dict(check.data) for check in checks], allow_nan=False)


def test_without_a_draft_model_the_text_itself_drafts():
    checks = {check.name: check for check in suite.run(make_subject(draft=None))}
    assert checks["rollback of the draft"].passed is None
    assert all(check.passed is not False for check in checks.values())
    assert checks["greedy text"].data["runs"] == 4 * 2


def test_moved_logits_are_measured_and_excuse_undecided_tokens_only():
    subject = make_subject(Moved)
    checks = {check.name: check for check in suite.run(subject)}
    assert [name for name, check in checks.items() if check.passed is False] == []
    assert "logits move by up to 0.02" in checks["bit identity of widths"].detail
    known = identity.measure_map(subject)
    assert 0 < known.allowed("f16", 4, 100).largest <= 0.02
    assert 0.02 < known.allowed("f16", 4, 100).spread <= 0.04


def test_a_large_move_swaps_tokens_within_the_measured_margin():
    kind = type("Far", (Moved,), {"by": 0.5})
    subject = make_subject(kind)
    found = identity.check_greedy(subject, identity.measure_map(subject))
    assert found.passed
    assert found.data["same"] < found.data["runs"]
    assert 0 < max(found.data["swapped_margins"]) < 1.0
    assert "an undecided token was swapped" in found.detail


def test_what_the_map_calls_exact_must_be_exact():
    """Logits move only where the map did not look: then no difference is excused."""
    subject = make_subject(type("Far", (Moved,), {"by": 0.5}))
    exact = identity.BitMap({"f16": {length: {2: bits.NONE, 17: bits.NONE} for length in bits.LENGTHS}})
    found = identity.check_greedy(subject, exact)
    assert not found.passed
    assert "first fault: prompt" in found.detail


def test_the_map_speaks_for_the_length_of_a_text():
    known = identity.BitMap({"f16": {length: {2: bits.Shift(length, length)} for length in bits.LENGTHS}})
    assert known.allowed("f16", 1, 20).largest == 16
    assert known.allowed("f16", 1, 255).largest == 238
    assert known.allowed("f16", 1, 256).largest == known.allowed("f16", 8, 9999).largest == 520


# -- sabotage


def residual_from_the_target(law):
    def wrong(ids, q, p):
        return Law(law(ids, q, p).lengths, lambda i: p[i])

    return wrong


@pytest.mark.parametrize("name", ["block", "rejection"])
def test_a_residual_that_ignores_the_draft_fails_its_law_and_its_texts(monkeypatch, name):
    right = getattr(verify, f"{name}_law")
    monkeypatch.setattr(verify, f"{name}_law", residual_from_the_target(right))
    assert failed(make_subject()) == {f"law of {name}", f"sampled text, {name}"}


def test_a_greedy_verifier_that_accepts_one_too_many_fails_law_and_text(monkeypatch):
    right = MatchVerifier.verify

    def wrong(self, draft, rows, sequence):
        verdict = right(self, draft, rows, sequence)
        if self.name == "greedy" and verdict.n_accepted < len(draft):
            n = verdict.n_accepted + 1
            return Verdict(n, self.choose(rows[n], sequence, draft.ids[:n], None).token, "recovered")
        return verdict

    monkeypatch.setattr(MatchVerifier, "verify", wrong)
    assert failed(make_subject()) == {"law of greedy", "greedy text"}


def test_noise_that_depends_on_the_draft_fails_the_seed(monkeypatch):
    def make(name, sampler):
        if name != "coupled":
            return original(name, sampler)

        class Wrong(MatchVerifier):
            def verify(self, draft, rows, sequence):
                return super().verify(draft, rows, replace(sequence, seed=sequence.seed + len(draft)))

        return Wrong("coupled", sampler)

    original = verify.make_verifier
    monkeypatch.setattr(verify, "make_verifier", make)
    monkeypatch.setattr("specli.selftest.subject.make_verifier", make)
    assert {"law of coupled", "text of seed 7"} <= failed(make_subject())
    assert "greedy text" not in failed(make_subject())


def test_a_verdict_drawn_with_spent_coins_fails_the_sampled_texts(monkeypatch):
    """The law is right, but the coin that chose the length chooses the token too."""

    def wrong(law, rng, has_bonus):
        assert has_bonus  # no dead ends here
        coin = rng.random()
        n_accepted = verify.draw_index(law.lengths, coin)
        token = law.residual(n_accepted).draw(coin)
        return Verdict(n_accepted, token, "bonus" if n_accepted == law.lengths.size - 1 else "recovered")

    monkeypatch.setattr(verify, "sample", wrong)
    monkeypatch.setattr(continuations, "N_DRAWS", 2000)
    assert failed(make_subject()) == {"sampled text, block", "sampled text, rejection"}


class Keeps(TableEngine):
    """A rollback that leaves one token too many behind, whatever it says."""

    def rollback(self, sequence, n_past):
        left = self._history[sequence][n_past : n_past + 1] if n_past else []
        super().rollback(sequence, n_past)
        self._history[sequence].extend(left)


def test_a_rollback_that_forgets_too_little_fails_its_line():
    assert "rollback of the target" in failed(make_subject(Keeps))
    draft_only = make_subject(draft=make_engine(Keeps, is_draft=True))
    assert failed(draft_only) == {"rollback of the draft"}  # a wrong draft is never a wrong text


def test_an_engine_that_fails_is_a_failed_line_not_an_end():
    class Broken(TableEngine):
        def rollback(self, sequence, n_past):
            if n_past:
                raise EngineError("the device was lost")
            super().rollback(sequence, n_past)

    checks = {check.name: check for check in suite.run(make_subject(Broken))}
    assert not checks["rollback of the target"].passed
    assert checks["rollback of the target"].detail == "failed: the device was lost"
    assert checks["law of block"].passed


def test_the_user_can_stop_it():
    with pytest.raises(Cancelled):
        list(suite.run(make_subject(cancelled=lambda: True)))


# -- parts


def test_the_laws_notice_wrong_variants(monkeypatch):
    assert laws.check_law("block").data["error"] < 1e-14

    def first_failure(ids, q, p):
        right = block(ids, q, p)
        lengths = np.array(right.lengths)
        if len(ids) > 1:  # some of the longest pass goes to the shortest
            lengths[0], lengths[-1] = lengths[0] + lengths[-1] / 2, lengths[-1] / 2
        return Law(lengths, right.residual)

    block = verify.block_law
    monkeypatch.setattr(verify, "block_law", first_failure)
    assert not laws.check_law("block").passed
    assert laws.check_law("rejection").passed


def test_chi_square_and_distance_have_the_false_alarms_they_state():
    rng = np.random.default_rng(5)
    chances = rng.dirichlet(np.ones(20))
    p_values = [
        continuations.chi_square_p(rng.multinomial(2000, chances).astype(float), 2000 * chances) for _ in range(400)
    ]
    assert 0.02 < np.mean(np.array(p_values) < 0.05) < 0.08
    assert min(p_values) > continuations.FALSE_ALARM
    limit = continuations.distance_limit(chances, 2000)
    seen = [np.abs(rng.multinomial(2000, chances) / 2000 - chances).sum() / 2 for _ in range(400)]
    assert max(seen) < limit < 2 * max(seen)


def test_rare_texts_are_pooled():
    chances, seen = np.array([0.5, 0.494, 0.003, 0.003]), np.array([50.0, 48.0, 2.0, 0.0])
    pooled = continuations.pooled(chances, seen, 0.01)
    np.testing.assert_allclose(pooled[0], [0.5, 0.494, 0.006])
    np.testing.assert_allclose(pooled[1], [50, 48, 2])
    assert continuations.chi_square_p(np.array([3.0]), np.array([3.0])) == 1.0


def test_a_memory_of_rows_is_the_engine_itself():
    engine, plain = continuations.MemoEngine(make_engine()), make_engine()
    rng = np.random.default_rng(3)
    from specli.engine.base import Slice

    n_before = 0
    for _ in range(60):
        keep = int(rng.integers(0, engine.n_past(0) + 1))
        for one in (engine, plain):
            one.rollback(0, keep)
        tokens = rng.integers(0, 3, int(rng.integers(1, 5))).tolist()
        part = [Slice(0, tokens, keep, int(rng.integers(0, len(tokens) + 1)))]
        np.testing.assert_array_equal(engine.evaluate(part).rows[0], plain.evaluate(part).rows[0])
        n_before += len(tokens)
    assert len(engine._rows) < n_before


def test_rollback_counts_its_cases():
    found = rollback.check_rollback(make_subject(), "target")
    assert found.data["cases"] == 2 * (5 + 1)
    assert "bit for bit" in found.detail


# -- real weights


@pytest.mark.model
def test_the_default_pair_passes_a_short_version(q4_0_path, draft_path, monkeypatch):
    from specli.cli.selftest import make_subject as of_session
    from specli.session import Session

    monkeypatch.setattr(continuations, "N_DRAWS", 200)
    monkeypatch.setattr(identity, "SETTINGS", {"draft": (3,), "ngram": (8,)})
    monkeypatch.setattr(identity, "WIDTHS", (2, 4, 9))
    monkeypatch.setattr(identity, "N_TOKENS", 24)
    monkeypatch.setattr(bits, "LENGTHS", (16, 238))
    options = settings(q4_0_path, draft_path, n_max=16, fixed=True, model={"n_ctx": 512, "n_threads": 2})
    with Session(options) as session:
        subject = of_session(session, lambda: False, lambda _fraction: None)
        checks = list(suite.run(replace(subject, prompts=subject.prompts[:2])))
    assert [check for check in checks if check.passed is not True] == []
    known = next(check.data["map"] for check in checks if "map" in check.data)
    assert all(shift == 0 for rows in known["f16"].values() for shift in rows.values())


@pytest.mark.model
def test_a_bad_format_and_a_missing_draft_are_one_line(specli: CommandLine, q4_0_path):
    assert "expected one of table, json" in specli("selftest", "-o", "xml").error
    assert "missing.gguf: found no such file" in specli("selftest", "-m", q4_0_path, "-md", "missing.gguf").error
