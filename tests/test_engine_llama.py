"""llama.cpp behind the ``Engine`` protocol: rows, caches, limits that raise instead of aborting, and interrupts.

Tiny random models. Passes of different width differ by rounding, here by up to 0.1 where logits have a standard
deviation of 3; a wrong cache moves them by about 10.
"""

from __future__ import annotations

import ctypes
from contextlib import closing
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from support import first_difference, forced_rows, load_model, make_engine, never
from tiny_gguf import byte_token, plain_tokens

from specli import gguf_file
from specli.config import ModelOptions
from specli.engine.base import CacheLedger, Slice
from specli.engine.log import LOG
from specli.engine.parameters import ModelParameters, context_params
from specli.engine.process import unused_kernels
from specli.errors import Cancelled, ContextOverflow, EngineError, ModelLoadError, RollbackUnsupported

CLOSE = 0.15  # between passes of different width
TEXT = [int(token) for token in np.random.default_rng(0).integers(3, 259, 1000)]


@pytest.fixture
def load(tiny_model, closing_stack):
    """A tiny model's engine: ``load("llama", n_ctx=64)``."""

    def load(architecture="llama", n_rows_max=64, n_sequences=1, cancelled=never, arguments=None, **options):
        model = closing_stack.enter_context(closing(load_model(tiny_model(architecture, **(arguments or {})))))
        return closing_stack.enter_context(closing(make_engine(model, n_rows_max, n_sequences, cancelled, **options)))

    return load


class Switch:
    """Says "stop" from the ``n``-th question on, once it is turned on."""

    def __init__(self) -> None:
        self.left = -1

    def turn_on(self, n: int = 1) -> None:
        self.left = n

    def turn_off(self) -> None:
        self.left = -1

    def __call__(self) -> bool:
        if self.left > 0:
            self.left -= 1
        return self.left == 0


def assert_close(one: np.ndarray, other: np.ndarray, *what: object) -> None:
    assert one.shape == other.shape, what
    assert float(np.abs(one - other).max()) < CLOSE, what


# -- rows


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mamba", "jamba"])
@pytest.mark.parametrize("width", [2, 3, 8, 17, 64])
def test_a_wide_pass_gives_the_rows_of_one_by_one(load, architecture, width):
    engine = load(architecture)
    narrow = forced_rows(engine, TEXT[:130], 1)
    assert narrow.dtype == np.float32
    assert narrow.shape == (130, engine.n_vocab)
    assert_close(forced_rows(engine, TEXT[:130], width), narrow)


def test_only_the_wanted_rows_come_back(load):
    engine = load()
    rows = forced_rows(engine, TEXT[:20], 1)
    engine.rollback(0, 0)
    assert engine.evaluate([Slice(0, TEXT[:10], 0, 0)]).rows[0].shape == (0, engine.n_vocab)
    last = engine.evaluate([Slice(0, TEXT[10:20], 10, 3)]).rows[0]
    assert_close(last, rows[17:20])
    assert engine.n_past(0) == 20
    assert engine.busy_s > 0


def test_repeated_passes_are_equal_to_the_bit(load):
    engine = load()
    first = forced_rows(engine, TEXT[:60], 4)
    assert (forced_rows(engine, TEXT[:60], 4) == first).all()


# -- sequences


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mamba", "jamba"])
def test_sequences_in_one_batch_are_each_as_if_alone(load, architecture):
    """Ragged batches: lengths and numbers of rows differ between the sequences and from round to round."""
    engine = load(architecture, n_sequences=3, n_ctx=200)
    texts = [TEXT[:40], TEXT[100:160], TEXT[200:230]]
    widths = [(3, 1, 2), (1, 5, 1), (4, 2, 3), (2, 6, 1)]
    got: list[list[np.ndarray]] = [[], [], []]
    for turn in range(40):
        slices = []
        for sequence, text in enumerate(texts):
            start = engine.n_past(sequence)
            part = text[start : start + widths[turn % 4][sequence]]
            if part:
                slices.append(Slice(sequence, part, start, len(part)))
        if not slices:
            break
        for part, rows in zip(slices, engine.evaluate(slices).rows, strict=True):
            got[part.sequence].append(rows.copy())
    alone = load(architecture, n_ctx=200)
    for sequence, text in enumerate(texts):
        assert engine.n_past(sequence) == len(text)
        assert_close(np.concatenate(got[sequence]), forced_rows(alone, text, 1), sequence)


def test_rolling_one_sequence_back_leaves_the_others(load):
    engine = load(n_sequences=2, n_ctx=100)
    engine.evaluate([Slice(0, TEXT[:20], 0, 0), Slice(1, TEXT[50:70], 0, 0)])
    engine.rollback(0, 5)
    assert (engine.n_past(0), engine.n_past(1)) == (5, 20)
    both = engine.evaluate([Slice(0, TEXT[5:8], 5, 3), Slice(1, TEXT[70:72], 20, 2)]).rows
    alone = load(n_ctx=100)
    assert_close(both[0], forced_rows(alone, TEXT[:8], 1)[5:])
    assert_close(both[1], forced_rows(alone, TEXT[50:72], 1)[20:])


def test_every_sequence_has_a_context_of_its_own(load):
    engine = load(n_sequences=3, n_ctx=300)
    for sequence in range(3):
        engine.evaluate([Slice(sequence, TEXT[:300], 0, 1)])
    assert [engine.n_past(sequence) for sequence in range(3)] == [300, 300, 300]
    with pytest.raises(ContextOverflow, match=r"300 \+ 1 tokens do not fit a context of 300"):
        engine.evaluate([Slice(1, TEXT[:1], 300, 1)])


def test_sequences_that_fill_the_shared_cache_raise_and_stay_whole(load, monkeypatch):
    """It cannot happen with what the engine asks for; a cache that llama.cpp makes smaller must be no disaster."""

    def smaller(options, n_ctx, n_rows_max):
        params = context_params(options, n_ctx, n_rows_max)
        params.n_ctx = n_ctx
        return params

    monkeypatch.setattr("specli.engine.llama.context_params", smaller)
    engine = load(n_sequences=3, n_ctx=100)  # llama.cpp makes 256 cells of it, for all three
    for sequence in (0, 1):
        engine.evaluate([Slice(sequence, TEXT[:100], 0, 1)])
    with pytest.raises(EngineError, match="no free cache cells for 100 more tokens"):
        engine.evaluate([Slice(2, TEXT[:100], 0, 1)])
    assert [engine.n_past(sequence) for sequence in range(3)] == [100, 100, 0]
    engine.rollback(0, 0)
    rows = engine.evaluate([Slice(2, TEXT[:100], 0, 1)]).rows[0]
    monkeypatch.undo()
    assert_close(rows, forced_rows(load(n_ctx=100), TEXT[:100], 1)[-1:])


# -- kernels


@pytest.mark.parametrize(
    ("info", "uses"), [(b"CPU : AVX2 = 1 | AMX_INT8 = 1 | REPACK = 1 | ", False), (b"CPU : ", True)]
)
def test_amx_kernels_are_never_used(tiny_model, monkeypatch, info, uses):
    """They end the process in many builds (llama.cpp issue 20824)."""
    monkeypatch.setattr(llama_cpp, "llama_print_system_info", lambda: info)
    assert ModelParameters(ModelOptions(tiny_model("llama"))).params.use_extra_bufts is uses
    assert [line.partition(",")[0] for line in unused_kernels()] == (
        [] if uses else ["this llama.cpp was built with AMX kernels"]
    )


# -- rollback


@pytest.mark.parametrize("kept", [0, 1, 7, 29, 30])
def test_evaluating_after_a_rollback_equals_fresh(load, kept):
    engine = load()
    assert engine.can_roll_back
    fresh = forced_rows(engine, TEXT[:40], 1)
    engine.rollback(0, 0)
    engine.evaluate([Slice(0, [*TEXT[:kept], *TEXT[500 : 530 - kept]], 0, 1)])
    engine.rollback(0, kept)
    assert engine.n_past(0) == kept
    assert_close(engine.evaluate([Slice(0, TEXT[kept:40], kept, 40 - kept)]).rows[0], fresh[kept:])


def test_rounds_of_rejected_drafts_leave_no_trace(load):
    """Cases B2: 200 rounds, each with three wrong tokens behind a right one."""
    engine = load()
    fresh = forced_rows(engine, TEXT[:200], 1)
    engine.rollback(0, 0)
    for n, token in enumerate(TEXT[:200]):
        rows = engine.evaluate([Slice(0, [token, *TEXT[700:703]], n, 4)]).rows[0]
        assert_close(rows[0], fresh[n], n)
        engine.rollback(0, n + 1)
        assert engine.n_past(0) == n + 1


@pytest.mark.parametrize("architecture", ["mamba", "jamba"])
def test_a_recurrent_memory_refuses_and_is_cleared(load, architecture):
    """Cases B5, B6: never a false that someone ignores; nor where only some layers are recurrent."""
    engine = load(architecture)
    assert not engine.can_roll_back
    fresh = forced_rows(engine, TEXT[:30], 1)
    with pytest.raises(RollbackUnsupported, match="cannot drop its last tokens"):
        engine.rollback(0, 20)
    assert engine.n_past(0) == 0
    assert (forced_rows(engine, TEXT[:30], 1) == fresh).all()
    engine.rollback(0, 30)  # nothing to drop
    assert engine.n_past(0) == 30
    engine.rollback(0, 0)  # all of it
    assert engine.n_past(0) == 0


@pytest.mark.parametrize("architecture", ["llama", "mamba", "jamba"])
def test_looking_ahead_is_not_rolling_back(load, architecture):
    engine = load(architecture)
    engine.evaluate([Slice(0, TEXT[:10], 0, 0)])
    with pytest.raises(EngineError, match="cannot roll back to 11 tokens, the cache holds 10"):
        engine.rollback(0, 11)
    with pytest.raises(EngineError):
        engine.rollback(0, -1)
    assert engine.n_past(0) == 10


# -- sliding windows


@pytest.fixture(params=[False, True], ids=["small", "full"])
def sliding(request, load):
    """A window of 32 tokens with batches of 8, in a cache of 256 cells that evicts, or (--swa-full) in a whole one."""
    shape = {"context_length": 2048, "sliding_window": 32}
    return load("gemma2", n_ctx=1024, n_ubatch=8, swa_full=request.param, arguments=shape)


def test_rounds_roll_back_at_every_length_around_a_sliding_window(sliding):
    """Cases B8: before, at and behind the window, and around the 256 cells where evicting begins."""
    assert sliding.can_roll_back
    assert sliding.model.n_swa == 32
    fresh = forced_rows(sliding, TEXT[:420], 1)
    sliding.rollback(0, 0)
    for n, token in enumerate(TEXT[:420]):
        rows = sliding.evaluate([Slice(0, [token, *TEXT[700:707]], n, 8)]).rows[0]
        assert_close(rows[0], fresh[n], n)
        sliding.rollback(0, n + 1)


def test_a_far_rewind_of_a_sliding_window_is_right_or_refused(sliding, request):
    text = TEXT[:600]
    fresh = forced_rows(sliding, text, 1)
    n_refused = 0
    for kept in (599, 570, 569, 568, 567, 500, 400, 360, 352, 344, 343, 336, 320, 300, 200, 31, 1):
        forced_rows(sliding, text, 8)
        try:
            sliding.rollback(0, kept)
        except RollbackUnsupported:
            n_refused += 1
            assert sliding.n_past(0) == 0
            continue
        row = sliding.evaluate([Slice(0, text[kept : kept + 1], kept, 1)]).rows[0]
        assert_close(row[0], fresh[kept], kept)
    assert (n_refused == 0) == request.node.callspec.params["sliding"]


# -- limits


@pytest.mark.parametrize(
    ("slices", "error", "message"),
    [
        ([Slice(0, TEXT[:33], 0, 1)], EngineError, "33 tokens was asked for, the engine takes 1 to 32"),
        ([Slice(0, [], 0, 0)], EngineError, "0 tokens was asked for"),
        ([], EngineError, "0 tokens was asked for"),
        ([Slice(0, TEXT[:6], 0, 6)], EngineError, "6 logits rows were asked for, the engine was loaded for 5"),
        ([Slice(0, TEXT[:2], 0, 3)], EngineError, "3 rows of 2 tokens"),
        ([Slice(0, TEXT[:2], 0, -1)], EngineError, "-1 rows of 2 tokens"),
        ([Slice(2, TEXT[:2], 0, 1)], EngineError, "sequence 2 does not exist, the engine has 2"),
        ([Slice(-1, TEXT[:2], 0, 1)], EngineError, "sequence -1 does not exist"),
        ([Slice(0, TEXT[:2], 1, 1)], EngineError, "sequence 0 holds 0 tokens, the batch starts at 1"),
        ([Slice(0, [272], 0, 1)], EngineError, "token id outside 0..271"),
        ([Slice(0, [5, -1], 0, 1)], EngineError, "token id outside"),
        ([Slice(1, TEXT[:1], 40, 1)], ContextOverflow, "40 \\+ 1 tokens do not fit a context of 40"),
        ([Slice(0, TEXT[:1], 0, 1), Slice(1, TEXT[:1], 40, 1)], ContextOverflow, "do not fit"),
    ],
)
def test_limits_raise_and_nothing_is_evaluated(load, slices, error, message):
    """llama.cpp would end the process."""
    engine = load(n_rows_max=5, n_sequences=2, n_ctx=40, n_ubatch=32)
    engine.evaluate([Slice(1, TEXT[:32], 0, 1)])
    engine.evaluate([Slice(1, TEXT[32:40], 32, 1)])
    with pytest.raises(error, match=message):
        engine.evaluate(slices)
    assert (engine.n_past(0), engine.n_past(1)) == (0, 40)
    row = engine.evaluate([Slice(0, TEXT[:2], 0, 1)]).rows[0]
    assert_close(row, forced_rows(load(), TEXT[:2], 1)[-1:])


def test_an_empty_slice_beside_a_full_one_is_nothing(load):
    engine = load(n_sequences=2)
    rows = engine.evaluate([Slice(0, [], 0, 0), Slice(1, TEXT[:3], 0, 2)]).rows
    assert [len(part) for part in rows] == [0, 2]


@pytest.mark.parametrize("n_ctx", [1, 2, 40, 250, 257])
def test_n_ctx_is_the_users_number(load, n_ctx):
    """llama.cpp rounds it up to a multiple of 256."""
    engine = load(n_ctx=n_ctx, n_ubatch=16)
    assert engine.n_ctx == n_ctx
    for start in range(0, n_ctx, 16):
        part = TEXT[start : min(start + 16, n_ctx)]
        engine.evaluate([Slice(0, part, start, 1)])
    with pytest.raises(ContextOverflow, match=f"{n_ctx} \\+ 1 tokens do not fit a context of {n_ctx}"):
        engine.evaluate([Slice(0, TEXT[:1], n_ctx, 1)])


def test_n_ctx_defaults_to_what_was_trained_up_to_a_cap(load):
    assert load().n_ctx == 256
    assert load(arguments={"context_length": 300_000}).n_ctx == 8192
    assert load(arguments={"context_length": 700}, n_ctx=0).n_ctx == 700


def test_the_batch_is_what_one_evaluate_takes(load):
    assert load(n_ctx=100).n_batch == 100
    assert load(n_ubatch=16).n_batch == 16
    assert load(n_batch=8, n_ubatch=16).n_batch == 8


def test_the_ledger_counts_what_the_caches_hold():
    ledger = CacheLedger(n_ctx=10, n_batch=8, n_rows_max=2, n_sequences=2, n_vocab=5)
    parts = [Slice(0, [1, 2, 3], 0, 1), Slice(1, [4], 0, 1)]
    ledger.check(parts)
    assert (ledger.n_past(0), ledger.n_past(1)) == (0, 0)
    ledger.advance(parts)
    assert (ledger.n_past(0), ledger.n_past(1)) == (3, 1)
    ledger.cut(0, 1)
    ledger.cut(0, 1)
    with pytest.raises(EngineError, match="cannot roll back to 2"):
        ledger.cut(0, 2)
    assert (ledger.n_past(0), ledger.n_past(1)) == (1, 1)


# -- interrupts


def test_cancelling_while_weights_load(tiny_model):
    asked = []

    def cancelled() -> bool:
        asked.append(1)
        return True

    with pytest.raises(Cancelled, match="stopped while loading"):
        load_model(tiny_model(), cancelled)
    assert len(asked) >= 2  # llama.cpp's callback and the check behind it
    load_model(tiny_model()).close()


def test_loading_tells_how_far_it_has_come(tiny_model):
    from specli.config import ModelOptions
    from specli.engine.llama import LlamaModel

    seen: list[float] = []
    LlamaModel(ModelOptions(tiny_model()), seen.append, never).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert min(seen) >= 0


def test_cancelling_while_a_context_warms_up(tiny_model, closing_stack):
    model = closing_stack.enter_context(closing(load_model(tiny_model())))
    with pytest.raises(Cancelled):
        make_engine(model, cancelled=lambda: True)
    closing_stack.enter_context(closing(make_engine(model)))  # the model is none the worse for it


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_cancelling_a_prefill_keeps_what_was_there(load, architecture):
    switch = Switch()
    engine = load(architecture, cancelled=switch)
    fresh = forced_rows(engine, TEXT[:200], 1)
    engine.rollback(0, 0)
    engine.evaluate([Slice(0, TEXT[:50], 0, 1)], interruptible=True)
    switch.turn_on(5)
    with pytest.raises(Cancelled, match="stopped during evaluation"):
        engine.evaluate([Slice(0, TEXT[50:200], 50, 1)], interruptible=True)
    assert engine.n_past(0) == 50
    assert llama_cpp.llama_memory_seq_pos_max(engine._memory, 0) == 49
    switch.turn_off()
    assert_close(engine.evaluate([Slice(0, TEXT[50:200], 50, 1)]).rows[0], fresh[-1:])


@pytest.mark.parametrize("architecture", ["mamba", "jamba"])
def test_cancelling_a_recurrent_prefill_starts_over(load, architecture):
    switch = Switch()
    engine = load(architecture, cancelled=switch)
    fresh = forced_rows(engine, TEXT[:100], 4)
    engine.rollback(0, 0)
    engine.evaluate([Slice(0, TEXT[:50], 0, 1)])
    switch.turn_on(5)
    with pytest.raises(Cancelled):
        engine.evaluate([Slice(0, TEXT[50:100], 50, 1)], interruptible=True)
    assert engine.n_past(0) == 0
    switch.turn_off()
    assert (forced_rows(engine, TEXT[:100], 4) == fresh).all()


def test_a_pass_that_is_not_interruptible_asks_nobody(load):
    """A Python callback costs 7% of a one-token pass."""
    switch = Switch()
    engine = load(cancelled=switch)
    engine.evaluate([Slice(0, TEXT[:2], 0, 1)], interruptible=True)
    switch.turn_on()
    engine.evaluate([Slice(0, TEXT[2:3], 2, 1)])
    assert engine.n_past(0) == 3


# -- closing


def test_closing_twice_and_using_what_is_closed(tiny_model):
    model = load_model(tiny_model())
    engine = make_engine(model)
    engine.evaluate([Slice(0, TEXT[:3], 0, 1)])
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.evaluate([Slice(0, TEXT[:3], 3, 1)])
    with pytest.raises(EngineError, match="closed"):
        engine.rollback(0, 0)
    model.close()
    model.close()
    with pytest.raises(EngineError, match="closed"):
        make_engine(model)


# -- text


@pytest.mark.model
def test_every_id_of_the_vocabulary_keeps_all_its_bytes(target_path, target_model):
    """Cases F6, by two oracles: the header's own texts, and llama.cpp with a buffer of 512 bytes."""
    header = gguf_file.read_header(target_path)
    bytes_of = {byte_token(byte): byte for byte in range(256)}
    buffer = ctypes.create_string_buffer(512)
    assert target_model.n_vocab == len(header.tokens) == 49152
    for token, (text, kind) in enumerate(zip(header.tokens[:], header.token_types, strict=True)):
        piece = target_model.piece(token)
        n = llama_cpp.llama_token_to_piece(target_model._vocab, token, buffer, 512, 0, False)
        assert piece == buffer.raw[:n], token
        expected = b"" if kind == 3 else bytes(bytes_of[character] for character in text.decode())
        assert piece == expected, token
        assert target_model.token_text(token) == text.decode(), token


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "Hello, world.",
        "日本 and 🦙",
        "👩‍👩‍👧 family",
        " " * 64 + "X",
        " " * 128 + "X",
        "\t\n \r\n\0end",
        "a" * 3000,
        "e\u0301 ﷽ \U0010ffff",
    ],
)
def test_text_survives_tokenizing(target_model, text):
    ids = target_model.tokenize(text, False, False)
    assert b"".join(map(target_model.piece, ids)).decode() == text
    assert b"\xef\xbf\xbd" not in b"".join(map(target_model.piece, ids))


@pytest.mark.model
def test_characters_may_be_split_over_tokens(target_model):
    """Cases, section 0."""
    assert target_model.tokenize("🦙", False, False) == [10813, 116, 243]
    assert target_model.tokenize("日本", False, False) == [23274, 115, 40993]
    assert target_model.tokenize("", True, True) == []


def test_a_piece_may_be_longer_than_any_buffer(tiny_model, closing_stack):
    texts, types = plain_tokens(272)
    texts[270], types[270] = "x" * 1500, 1
    path = tiny_model(tokens=tuple(texts), token_types=tuple(types))
    model = closing_stack.enter_context(closing(load_model(path)))
    assert model.piece(270) == b"x" * 1500
    assert [model.piece(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert model.piece(1) == b""
    assert model.token_text(1) == "<|im_start|>"


def test_control_text_is_control_only_on_request(tiny_model, closing_stack):
    model = closing_stack.enter_context(closing(load_model(tiny_model())))
    assert model.tokenize("<|im_end|>", False, True) == [2]
    ids = model.tokenize("<|im_end|>", False, False)
    assert 2 not in ids
    assert b"".join(map(model.piece, ids)) == b"<|im_end|>"
    assert model.end_ids == {0, 2}


# -- llama.cpp's log


@pytest.mark.parametrize("cut", [20, 1000, -1], ids=["head", "vocabulary", "last byte"])
def test_llama_cpps_reason_is_quoted(tiny_model, tmp_path, cut):
    """``gguf_file`` finds the faults of a file first; what it lets through gets llama.cpp's own words."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(tiny_model()).read_bytes()[:cut])
    with pytest.raises(ModelLoadError, match=r"llama\.cpp could not load") as caught:
        load_model(broken)
    message = str(caught.value)
    assert str(broken) in message
    assert "gave no reason" not in message
    assert "\n" not in message


def test_an_error_is_not_quoted_for_a_later_failure(tiny_model, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError):
        load_model(broken)
    assert LOG.last_error()
    load_model(tiny_model()).close()
    assert LOG.last_error() is None


def test_the_log_is_shown_on_demand(tiny_model, capsys, monkeypatch):
    load_model(tiny_model()).close()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(LOG, "verbose", True)
    load_model(tiny_model()).close()
    assert "general.architecture" in capsys.readouterr().err
    assert any("general.architecture" in line for _, line in LOG.lines)


# -- quantizing


@pytest.mark.model
def test_a_quantized_copy_loads_and_speaks_alike(target_model, q4_0_path, target_path):
    assert q4_0_path.stat().st_size < target_path.stat().st_size
    assert not list(q4_0_path.parent.glob("*.part"))
    header, original = gguf_file.read_header(q4_0_path), gguf_file.read_header(target_path)
    assert header.tokens == original.tokens
    assert header.chat_template == original.chat_template
    text = target_model.tokenize("The quick brown fox jumps over the lazy dog.", False, False)
    rows = []
    with closing(load_model(target_path)) as original_model:
        for model in (target_model, original_model):
            with closing(make_engine(model, n_ctx=64)) as engine:
                rows.append(forced_rows(engine, text, len(text)))
    assert np.corrcoef(rows[0].ravel(), rows[1].ravel())[0, 1] > 0.9


def test_quantizing_is_whole_or_not_at_all(tiny_model, tmp_path):
    from specli.engine.quantize import quantize
    from specli.errors import ConfigError

    goal = tmp_path / "new" / "copy.gguf"
    with pytest.raises(ConfigError, match="expected one of Q4_0, Q8_0"):
        quantize(tiny_model(), goal, "Q9_9", never)
    with pytest.raises(Cancelled, match=r"stopped while making copy\.gguf"):
        quantize(tiny_model(), goal, "Q8_0", lambda: True)
    assert not goal.exists()
    (tmp_path / "broken.gguf").write_bytes(b"GGUF no more")
    with pytest.raises(ModelLoadError, match="could not quantize"):
        quantize(tmp_path / "broken.gguf", goal, "Q8_0", never)
    assert not goal.exists()
    quantize(tiny_model(), goal, "Q8_0", never)
    with closing(load_model(goal)) as model, closing(make_engine(model)) as engine:
        assert first_difference(forced_rows(engine, TEXT[:5], 1).shape, (5, 272)) is None
    assert [path.name for path in goal.parent.iterdir()] == ["copy.gguf"]
