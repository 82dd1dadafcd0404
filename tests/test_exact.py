"""``--exact`` and the measure behind it: which widths give the logits of one-token passes, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import CommandLine, generate, settings

from specli import bits, exact
from specli.chat import Message
from specli.config import ModelOptions
from specli.engine.base import Evaluation
from specli.engine.table import TableEngine, random_logits
from specli.errors import ConfigError
from specli.session import Hooks, Session

N_VOCAB = 16
LOGITS = random_logits(N_VOCAB, 3)
GIVEN = ModelOptions(Path("target.gguf"), n_ctx=8192)


class Wide(TableEngine):
    """Logits of passes wider than ``exact_to`` tokens, or of any that begins at ``from_length`` or later, move."""

    def __init__(self, exact_to=1, from_length=10**9, n_ctx=600, pass_s=None):
        super().__init__(LOGITS, N_VOCAB, n_ctx=n_ctx, n_batch=64, n_rows_max=17, pass_s=pass_s)
        self.exact_to, self.from_length = exact_to, from_length
        self.is_closed = False

    def evaluate(self, slices, interruptible=False):
        evaluation = super().evaluate(slices, interruptible)
        (part,), (rows,) = slices, evaluation.rows
        n = len(part.tokens)
        moves = part.n_rows and n > 1 and (n > self.exact_to or part.start >= self.from_length)
        return Evaluation([rows + np.float32(0.25)]) if moves else evaluation

    def close(self):
        self.is_closed = True


def tokenize(text):
    return [ord(character) % N_VOCAB for character in text]


class Opener:
    """Engines by cache type and threads; remembers what was asked for."""

    def __init__(self, plain, quantized, one_thread):
        self.kinds = {"plain": plain, "quantized": quantized, "one thread": one_thread}
        self.opened: list[tuple[str, ModelOptions, Wide]] = []

    def __call__(self, options, n_rows_max):
        kind = "one thread" if options.n_threads == 1 else "quantized" if options.cache_type_k == "q8_0" else "plain"
        engine = self.kinds[kind](options.n_ctx)
        self.opened.append((kind, options, engine))
        return engine


def moving(**arguments):
    return lambda n_ctx: Wide(n_ctx=n_ctx, **arguments)


EXACT, NEVER, LONG = moving(exact_to=17), moving(), moving(exact_to=17, from_length=500)


# -- the measure


def test_a_shift_is_zero_only_to_the_bit():
    rows = np.array([[1.0, 2.0, -0.5]], np.float32)
    assert bits.shift(rows, rows.copy()).is_identical
    nudged = np.nextafter(rows, np.float32(9), dtype=np.float32)
    found = bits.shift(rows, nudged)
    assert not found.is_identical
    assert 0 < found.largest < 1e-6
    moved = bits.shift(rows, rows + np.array([[0.5, -0.25, 0.0]], np.float32))
    assert (moved.largest, moved.spread) == (0.5, 0.75)


def test_every_width_is_compared_with_one_token_passes():
    tokens = tokenize("once upon a midnight dreary" * 30)
    engine = Wide(exact_to=4)
    found = bits.measure(engine, tokens, 50, [2, 4, 5, 17])
    assert [width for width, shift in found.items() if shift.is_identical] == [2, 4]
    assert bits.widest_identical(found) == 4
    assert found[17].largest == pytest.approx(0.25)
    assert engine.n_past(0) == 50
    assert bits.measure(engine, tokens, 20, [2])[2].is_identical  # back to a shorter text
    assert bits.largest({}) == bits.NONE


def test_the_time_of_passes_is_compared_in_turn():
    tokens = tokenize("word " * 60)
    slow, fast = (Wide(pass_s=lambda n, unit=unit: unit * n) for unit in (0.03, 0.02))
    assert bits.pass_ratio(slow, fast, tokens, 40) == pytest.approx(1.5)


def test_sample_tokens_are_as_many_as_asked_for():
    assert len(bits.sample_tokens(tokenize, 5000)) == 5000
    assert len(bits.sample_tokens(tokenize, 7)) == 7
    assert bits.sample_tokens(lambda _text: [], 3) == [0, 0, 0]


# -- choosing


def test_given_settings_that_are_exact_are_kept():
    opener = Opener(EXACT, NEVER, NEVER)
    proof = exact.settle(GIVEN, tokenize, opener)
    assert proof.changed == {}
    assert (proof.widest, proof.cost, proof.lengths) == (17, 1.0, bits.LENGTHS)
    assert proof.apply(GIVEN) == GIVEN
    assert len(opener.opened) == 1
    assert "with the settings given (checked behind 16, 238 and 520 tokens)" in proof.words()


def test_quantized_caches_come_next():
    opener = Opener(LONG, EXACT, EXACT)
    proof = exact.settle(GIVEN, tokenize, opener)
    assert proof.changed == {"flash_attn": "on", "cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    assert [kind for kind, _, _ in opener.opened] == ["plain", "quantized"]
    assert all(engine.is_closed for _, _, engine in opener.opened)
    assert proof.apply(GIVEN) == replace(GIVEN, flash_attn="on", cache_type_k="q8_0", cache_type_v="q8_0")
    assert "-fa on -ctk q8_0 -ctv q8_0" in proof.words()
    assert "a one-token pass takes 1.00 × as long" in proof.words()


def test_one_thread_is_the_last_resort():
    proof = exact.settle(replace(GIVEN, n_threads=4), tokenize, Opener(LONG, LONG, EXACT))
    assert proof.changed == {"flash_attn": "on", "n_threads": 1, "n_threads_batch": 4}


def test_without_a_fully_exact_candidate_the_widest_bounds_the_draft():
    proof = exact.settle(GIVEN, tokenize, Opener(moving(exact_to=2), moving(exact_to=3), NEVER))
    assert proof.widest == 3
    assert proof.changed["cache_type_k"] == "q8_0"
    assert "passes of 1 to 3 tokens" in proof.words()


def test_none_is_refused_with_what_was_found():
    opener = Opener(NEVER, NEVER, NEVER)
    with pytest.raises(ConfigError) as error:
        exact.settle(GIVEN, tokenize, opener)
    assert "with the settings given logits move by 0.25; with -fa on -ctk q8_0 -ctv q8_0" in str(error.value)
    assert "target.gguf" in str(error.value)
    assert all(engine.is_closed for _, _, engine in opener.opened)


def test_flash_attention_is_tried_where_it_was_off():
    names = [name for name, _ in exact.candidates(replace(GIVEN, flash_attn="off"))]
    assert names == ["the settings given", "-fa on", "-fa on -ctk q8_0 -ctv q8_0", "-fa on -t 1"]
    given = replace(GIVEN, cache_type_k="q8_0", cache_type_v="q8_0", flash_attn="on")
    assert [name for name, _ in exact.candidates(given)] == ["the settings given", "-fa on -t 1"]


def test_a_short_context_is_checked_as_far_as_it_goes():
    opener = Opener(EXACT, NEVER, NEVER)
    proof = exact.settle(replace(GIVEN, n_ctx=100), tokenize, opener)
    assert proof.lengths == (16, 83)  # to its very end, or 300 tokens would be judged by what holds within 256
    assert opener.opened[0][1].n_ctx == 100
    tiny = exact.settle(replace(GIVEN, n_ctx=8), tokenize, opener)
    assert (tiny.lengths, tiny.widest) == ((0,), 8)


def test_what_was_found_is_kept(tmp_path):
    kept_at, opener = tmp_path / "proof.json", Opener(LONG, EXACT, EXACT)
    first = exact.settle(GIVEN, tokenize, opener, kept_at)
    again = exact.settle(GIVEN, tokenize, Opener(NEVER, NEVER, NEVER), kept_at)
    assert again == first
    kept_at.write_text('{"format": 1, "changed": {"n_ctx": 3}}', "utf-8")
    assert exact.settle(GIVEN, tokenize, opener, kept_at) == first  # a foreign file is as good as none


def test_progress_rises_to_one():
    told = []
    exact.settle(GIVEN, tokenize, Opener(EXACT, EXACT, EXACT), progress=told.append)
    assert told == sorted(told)
    assert 0 < told[-1] <= 1


# -- real weights


@pytest.mark.model
def test_the_text_is_the_same_with_and_without_a_draft_past_256_tokens(q4_0_path, draft_path, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    notices, answers = [], []
    for draft, kind in ((draft_path, "draft"), (None, "none")):
        options = settings(q4_0_path, draft, model={"n_ctx": 352, "n_threads": 2}, type=kind, n_max=4, fixed=True)
        with Session(replace(options, exact=True), Hooks(notice=notices.append)) as session:
            prompt = session.chat_ids([Message("user", "Write a long story about a fox who learns to read.")])
            answers.append(generate(session, prompt, 280))
            assert session.target_options.cache_type_k == "q8_0"
    assert answers[0].tokens == answers[1].tokens
    assert len(prompt) + len(answers[0].tokens) > 256
    assert answers[0].stats.proposed > 0
    assert notices[0] == notices[1]  # the second load found the proof of the first
    assert "passes of 1 to 17 tokens" in notices[0]


@pytest.mark.model
def test_weights_that_are_never_exact_are_refused_in_one_line(specli: CommandLine, tiny_model):
    """F32 weights: every width sums in another order."""
    error = specli("run", "-m", tiny_model(), "--exact", "--raw", "-p", "a b c", "-n", "3").error
    assert error.startswith("--exact found no settings under which passes over 2 tokens")
