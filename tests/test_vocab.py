"""Which pairs of vocabularies may work together, and the words for those that may not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import plain_tokens, write_tiny

from specli.errors import ModelLoadError, VocabMismatch
from specli.gguf_file import StringArray, read_header
from specli.vocab import VocabInfo, compare, llama_cpp_refuses, overlap, require_compatible

WAY_OUT = "run without -md, or draft from the text itself with --spec-type ngram"
TEXTS = [f"t{i}" for i in range(300)]


def strings(texts: list[str] | list[bytes]) -> StringArray:
    raw = [text.encode() if isinstance(text, str) else text for text in texts]
    ends = np.cumsum([0, *(8 + len(text) for text in raw)]).astype(np.uint64)
    return StringArray(b"".join(len(text).to_bytes(8, "little") + text for text in raw), ends)


def vocab(texts: list[str] | list[bytes] = TEXTS, **changes: object) -> VocabInfo:
    """A BPE vocabulary of normal tokens that adds neither BOS nor EOS."""
    values: dict[str, object] = {
        "path": Path("m.gguf"),
        "model": "gpt2",
        "kind": "BPE",
        "pre": "qwen2",
        "tokens": strings(texts),
        "token_types": np.ones(len(texts), np.int32),
        "merges": strings(["t 1", "t 2"]),
        "bos_id": 1,
        "eos_id": 2,
        "eot_id": None,
        "add_bos": False,
        "add_eos": False,
    }
    return VocabInfo(**(values | changes))


def changed(*ids: int) -> list[str]:
    return [f"other{i}" if i in ids else text for i, text in enumerate(TEXTS)]


# -- accepted ----------------------------------------------------------------------------------------------------------


def test_equal_vocabularies_are_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StringArray, "_texts", None)
    comparison = compare(vocab(), vocab())
    assert comparison.compatible
    assert (comparison.reason, comparison.notes, comparison.n_shared) == (None, (), 300)


@pytest.mark.parametrize("gap", [0, 1, 127, 128, 129, 250])
@pytest.mark.parametrize("target_is_larger", [True, False])
def test_any_size_gap_is_accepted_and_told(gap: int, target_is_larger: bool) -> None:
    large, small = vocab(), vocab(TEXTS[: 300 - gap])
    target, draft = (large, small) if target_is_larger else (small, large)
    comparison = require_compatible(target, draft)
    assert comparison.n_shared == 300 - gap
    if gap == 0:
        assert comparison.notes == ()
        return
    (note,) = comparison.notes
    sizes = f"the target has {target.n_tokens} tokens and the draft {draft.n_tokens}, a gap of {gap}"
    assert note.startswith(sizes)
    assert f"{gap} of them no padding (id {300 - gap} 't{300 - gap}'" in note
    assert note.endswith(f"ids from {300 - gap} are never drafted")
    assert ("more than llama.cpp allows (128)" in note) == (gap > 128)


@pytest.mark.parametrize("token_id", [0, 4])
def test_a_difference_below_id_5_is_a_note(token_id: int) -> None:
    comparison = require_compatible(vocab(), vocab(changed(token_id)))
    expected = f"token texts below id 5 differ: id {token_id} (target 't{token_id}', draft 'other{token_id}')"
    assert comparison.notes == (expected,)


def test_all_five_low_differences_are_cut_to_three() -> None:
    (note,) = compare(vocab(), vocab(changed(0, 1, 2, 3, 4))).notes
    assert "id 2 (target 't2', draft 'other2'), …" in note
    assert "id 3" not in note


def test_bos_ids_that_are_not_added_may_differ() -> None:
    comparison = require_compatible(vocab(bos_id=11), vocab(bos_id=None))
    assert comparison.notes == ("BOS ids differ, target 11, draft none: neither model adds it",)


def test_eos_and_end_of_turn_may_differ() -> None:
    comparison = require_compatible(vocab(eos_id=2, eot_id=7), vocab(eos_id=5))
    assert comparison.notes == (
        "EOS ids differ, target 2, draft 5: the target's decides where text ends",
        "end-of-turn ids differ, target 7, draft none: the target's decides where text ends",
    )


def test_token_types_may_differ() -> None:
    types = np.ones(300, np.int32)
    types[[7, 8, 9, 10]] = [3, 4, 77, -1]
    (note,) = require_compatible(vocab(), vocab(token_types=types)).notes
    assert note == (
        "token types differ at 4 ids: id 7 't7' (target normal, draft control), id 8 't8' (target normal, draft "
        "user-defined), id 9 't9' (target normal, draft 77), …"
    )


def test_same_ids_but_another_pre_tokenizer() -> None:
    """Case E1: ids mean the same, so speculation is safe, but the files encode text differently."""
    (note,) = require_compatible(vocab(), vocab(pre="qwen35")).notes
    assert note.startswith("pre-tokenizers differ, target 'qwen2', draft 'qwen35': they may encode text differently")
    (note,) = require_compatible(vocab(pre=None), vocab(pre="mpt")).notes
    assert note.startswith("pre-tokenizers differ, target none, draft 'mpt'")


def test_missing_or_halved_merges_are_told() -> None:
    """Case E3."""
    expected = "merges differ, target 2, draft {}: only the target's are used"
    assert require_compatible(vocab(), vocab(merges=None)).notes == (expected.format("missing"),)
    assert require_compatible(vocab(), vocab(merges=strings(["t 1"]))).notes == (expected.format("1"),)


def test_gap_types_and_eos_together() -> None:
    """Case E5: two vocabularies with an equal prefix."""
    types = np.ones(300, np.int32)
    types[0] = 2
    comparison = require_compatible(vocab(TEXTS[:236], eos_id=2), vocab(eos_id=250, token_types=types))
    gap, eos, kinds = comparison.notes
    assert "a gap of 64" in gap
    assert "target 2, draft 250" in eos
    assert "id 0 't0' (target normal, draft unknown)" in kinds


def test_scores_and_normalizers_may_differ() -> None:
    scores, other = np.zeros(300, np.float32), np.zeros(300, np.float32)
    other[[3, 4]] = 1
    flags = (("add_space_prefix", "yes"),), (("add_space_prefix", "no"),)
    spm = {"model": "llama", "kind": "SPM", "merges": None}
    target = vocab(**spm, scores=scores, normalizer=flags[0])
    assert require_compatible(target, target).notes == ()
    notes = require_compatible(target, vocab(**spm, scores=other, normalizer=flags[1])).notes
    assert notes == (
        "scores differ at 2 ids: only the target's are used",
        "normalizer flags differ, target add_space_prefix yes, draft add_space_prefix no: only the target's are used",
    )


def test_other_ids_that_end_text_are_told() -> None:
    """Case D8: the target's count."""
    (note,) = require_compatible(vocab(end_ids=frozenset({2, 7})), vocab(end_ids=frozenset({2}))).notes
    assert note == "the ids that end text differ, target {2, 7}, draft {2}: the target's decides where text ends"


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_every_rule_is_a_check() -> None:
    checks = {check.name: check for check in compare(vocab(), vocab(changed(20))).checks}
    assert list(checks) == [
        *("vocabulary type", "tokens", "token texts", "BOS", "EOS", "end of turn", "ids that end text", "token types"),
        *("pre-tokenizer", "merges"),
    ]
    assert (checks["BOS"].target, checks["token texts"].draft) == ("1 't1', not added", "1 of 300 differ")
    assert {name for name, check in checks.items() if check.outcome != "equal"} == {"token texts"}
    assert {name for name, check in checks.items() if check.about == "text"} == {"pre-tokenizer", "merges"}
    assert compare(vocab(), vocab(changed(20))).differing == (20,)


PADDING = ["[PAD7]", "<pad>", "<unused3>", "<|reserved_special_token_12|>", "<|extra_0|>", "[unused1]", "<dummy32000>"]
NO_PADDING = ["pad", "extra", "[INST]", "<|im_end|>", "<s>", "unused3", "<0x0A>", "[PADDED]", "<|fim_pad|>"]


def test_padding_by_text_and_by_type() -> None:
    types = np.ones(len(PADDING + NO_PADDING) + 1, np.int32)
    types[-1] = 5
    found = vocab([*PADDING, *NO_PADDING, "unused"], token_types=types).padding_ids(0, len(types))
    assert found.tolist() == [*range(len(PADDING)), len(types) - 1]
    assert vocab([*PADDING, *NO_PADDING, "unused"], token_types=types).padding_ids(3, 5).tolist() == [3, 4]


def test_padding_against_tokens_is_told() -> None:
    """A base model's file may hold padding where its chat model has tokens: refused as by llama.cpp, and said."""
    padded = [text if i < 298 else f"[PAD{i}]" for i, text in enumerate(TEXTS)]
    reason = compare(vocab(), vocab(padded)).reason
    assert "differ at 2 of 300 (2 of them padding in one model): id 298 (target 't298', draft '[PAD298]')" in reason


def test_overlap() -> None:
    target, draft = vocab(), vocab(["t1", "t0", *TEXTS[2:200]])
    shared = overlap(target, draft, compare(target, draft))
    assert (shared.n_target, shared.n_same_id, shared.n_same_text) == (300, 198, 200)
    assert (shared.same_id_percent, shared.same_text_percent) == (66.0, pytest.approx(66.667, abs=1e-3))
    assert overlap(target, target, compare(target, target)) is None


def test_overlap_of_two_alphabets() -> None:
    """Byte-level BPE and SentencePiece write the same text in two ways."""
    bpe = vocab(["Ġthe", "the", "Ã©", "Ġ"])
    spm = vocab(["▁the", "x", "é", "▁"], model="llama", kind="SPM")
    assert bpe.plain_texts() == [" the", "the", "é", " "]
    assert spm.plain_texts([0, 2]) == [" the", "é"]
    assert vocab(["▁the"], model="gemma4", pre="gemma4").plain_texts() == [" the"]
    assert vocab(["Ã", "世"]).plain_texts() == ["\ufffd", "世"]  # half a character; an added token as it is
    assert overlap(bpe, spm, compare(bpe, spm)).n_same_text == 3


def test_what_llama_cpp_would_say() -> None:
    def says(target: VocabInfo, draft: VocabInfo) -> str | None:
        return llama_cpp_refuses(target, draft, compare(target, draft))

    assert says(vocab(), vocab(changed(4), pre="qwen35", merges=None)) is None
    assert says(vocab(), vocab(changed(4, 5, 9))) == "texts differ first at id 5 (target 't5', draft 'other5')"
    assert says(vocab(), vocab(TEXTS[:172])) is None
    assert says(vocab(), vocab(TEXTS[:171])) == "the sizes differ by 129 tokens, and it allows 128 at most"
    both = says(vocab(add_bos=True), vocab(changed(5)))
    assert both == "both models or neither must add BOS, but the target adds it and the draft does not"
    assert says(vocab(), vocab(model="llama", kind="SPM")).startswith("vocabulary types must be equal")


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_id", [5, 139, 299])
def test_one_different_text(token_id: int) -> None:
    comparison = compare(vocab(), vocab(changed(token_id)))
    assert not comparison.compatible
    assert comparison.notes == ()
    assert comparison.reason == (
        "token texts must be equal over the shared ids 0 to 299, but differ at 1 of 300: "
        f"id {token_id} (target 't{token_id}', draft 'other{token_id}') "
        f"(the target has 300 tokens and the draft 300); {WAY_OUT}"
    )


def test_unrelated_vocabularies() -> None:
    """Case D1: sizes and first differing ids, with both texts; ids below 5 do not crowd out the ones that count."""
    reason = compare(vocab(), vocab([f"x{i}" for i in range(40)])).reason
    assert "over the shared ids 0 to 39, but differ at 40 of 40: id 5 (target 't5', draft 'x5'), id 6" in reason
    assert "id 7 (target 't7', draft 'x7'), … (the target has 300 tokens and the draft 40)" in reason
    assert "id 8" not in reason


def test_a_vocabulary_of_fewer_than_five_tokens() -> None:
    comparison = compare(vocab(TEXTS[:3]), vocab())
    assert comparison.compatible
    assert comparison.n_shared == 3


def test_other_vocabulary_type() -> None:
    reason = compare(vocab(), vocab(model="llama", kind="SPM")).reason
    assert reason.startswith("vocabulary types must be equal, but the target's is BPE ('gpt2') and the draft's SPM (")
    assert reason.endswith(WAY_OUT)
    assert compare(vocab(), vocab(model="gemma4")).compatible  # another name for BPE: llama.cpp compares types


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_added_tokens(name: str) -> None:
    """Case D4: ids matter only where both add the token; adding it in one model alone never works."""
    both = {f"add_{name}": True}
    reason = compare(vocab(**both, **{f"{name}_id": 11}), vocab(**both, **{f"{name}_id": 12})).reason
    expected = f"both models add {name.upper()}, so its id must be equal, but the target's is 11 and the draft's 12 ("
    assert reason.startswith(expected)
    assert compare(vocab(**both), vocab(**both)).notes == ()
    reason = compare(vocab(**both), vocab()).reason
    assert reason.startswith(
        f"both models or neither must add {name.upper()}, but the target adds it and the draft does not ("
    )
    assert "the target does not and the draft adds it" in compare(vocab(), vocab(**both)).reason


def test_mismatch_says_the_same_words() -> None:
    draft = vocab(changed(20))
    with pytest.raises(VocabMismatch) as caught:
        require_compatible(vocab(), draft)
    assert str(caught.value) == f"this draft does not fit this target: {compare(vocab(), draft).reason}"
    assert caught.value.exit_code == 4


def test_texts_are_shown_printable_and_short() -> None:
    texts = [text.encode() for text in TEXTS]
    texts[9] = b"\xff\n\x1b" + b"y" * 5000
    reason = compare(vocab(), vocab(texts)).reason
    assert reason.isprintable()
    assert r"draft '�\n\x1byy" in reason
    assert len(reason) < 400


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.binary(max_size=2), max_size=12),
    st.lists(st.binary(max_size=2), max_size=12),
)
def test_texts_decide_as_a_plain_loop_would(target: list[bytes], draft: list[bytes]) -> None:
    comparison = compare(vocab(target), vocab(draft))
    equal = [a == b for a, b in zip(target, draft, strict=False)]
    assert comparison.compatible == all(equal[5:])
    assert comparison.compatible == compare(vocab(draft), vocab(target)).compatible
    assert (comparison.reason is None) == comparison.compatible
    if comparison.compatible:
        assert any("below id 5" in note for note in comparison.notes) == (not all(equal))


# -- from files --------------------------------------------------------------------------------------------------------


def info(path: Path, **arguments: object) -> VocabInfo:
    return VocabInfo.from_header(read_header(write_tiny(path / "v.gguf", vocab_only=True, **arguments)))


def test_from_header(tmp_path: Path) -> None:
    found = info(tmp_path, **{"tokenizer.ggml.eot_token_id": 2})
    assert (found.model, found.kind, found.pre, found.n_tokens) == ("gpt2", "BPE", "smollm", 272)
    assert (found.bos_id, found.eos_id, found.eot_id) == (1, 2, 2)
    assert (found.add_bos, found.add_eos) == (False, False)
    assert found.tokens[1] == b"<|im_start|>"
    assert found.token_types.shape == (272,)
    assert len(found.merges) == 1


def test_extra_token_types_do_not_count(tmp_path: Path) -> None:
    found = info(tmp_path, tokens=plain_tokens()[0], token_types=[1] * 300)
    assert found.token_types.shape == (259,)


BAD_FILES = {
    "no tokenizer": ({"tokenizer.ggml.model": None}, "the file has no tokenizer, expected tokenizer.ggml.model"),
    "unknown": ({"tokenizer.ggml.model": "klingon"}, "the tokenizer is 'klingon', expected one of llama, gpt2"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing, expected at least one token"),
    "no types": ({"tokenizer.ggml.token_type": None}, "tokenizer.ggml.token_type is missing, expected one for each"),
    "short types": ({"token_types": [1] * 9}, "tokenizer.ggml.token_type has 9 elements, expected one for each of 272"),
    "no scores": ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores is missing, expected one for each of 272"),
    "no scores (UGM)": ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.scores is missing"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_vocabularies(tmp_path: Path, kind: str) -> None:
    """Case K7."""
    arguments, part = BAD_FILES[kind]
    with pytest.raises(ModelLoadError) as caught:
        info(tmp_path, **arguments)
    assert part in str(caught.value)


def test_empty_token_list(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "v.gguf", vocab_only=True, tokens=["only"])
    content = path.read_bytes()
    one = (1).to_bytes(8, "little") + (4).to_bytes(8, "little") + b"only"
    assert content.count(one) == 1
    path.write_bytes(content.replace(one, bytes(8)))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.tokens is empty, expected at least one token"):
        VocabInfo.from_header(read_header(path))


def test_wrong_types_are_refused_by_the_header(tmp_path: Path) -> None:
    from gguf import GGUFValueType as Type

    narrow = ([1] * 272, Type.ARRAY, Type.UINT8)
    with pytest.raises(ModelLoadError, match="stored as array of uint8, expected array of int32"):
        info(tmp_path, **{"tokenizer.ggml.token_type": narrow})


# -- llama.cpp ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    """The library, whose log ``LOG`` takes: another callback would take it away from every later test."""
    import llama_cpp

    import specli.engine.log  # noqa: F401

    return llama_cpp


SCORES = {"tokenizer.ggml.scores": [0.5] * 272}
UNSET = {f"tokenizer.ggml.{key}": None for key in ("bos_token_id", "eos_token_id", "add_bos_token")}
PRES = ["default", "smollm", "qwen2", "llama-bpe", "llama3", "tekken", "chameleon", "falcon3", "pixtral", "lfm2"]
PRES += ["gemma4", "granite-embed-multi-311m", "deepseek-llm", "gpt-4o", "llama4", "command-r", "jina-v5-nano"]
PRES += ["llama-v3", "falcon-h1", "midm-2.0", "kimi-k2", "hunyuan", "seed-coder"]
SETTINGS = [
    *({"tokenizer.ggml.pre": pre, **UNSET} for pre in PRES),
    *({"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False} for pre in ("llama-bpe", "gemma4")),
    {"tokenizer.ggml.pre": None, **UNSET},
    {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True},
    {"tokenizer.ggml.bos_token_id": 272, "tokenizer.ggml.eos_token_id": 2**32 - 1},
    {"tokens": plain_tokens()[0][:10], **UNSET},
    {"tokenizer.ggml.model": "gemma4", **UNSET},
    {"tokenizer.ggml.model": "llama", **UNSET, **SCORES},
    {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": False, **SCORES},
    {"tokenizer.ggml.model": "bert", **UNSET},
    {"tokenizer.ggml.model": "t5", **UNSET, **SCORES},
    {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 10, "tokenizer.ggml.fim_rep_token_id": 11},
    *(
        {"tokens": [*plain_tokens()[0], *texts]}
        for texts in (
            ["<|return|>", "<|call|>", "<|end|>"],
            ["<|flush|>", "<|calls|>", "<|end|>"],
            ["<|call|>", "<|end|>"],
            ["</s>", "<|tool_response>"],
            ["</s>", "<|file_sep|>", "<|eom_id|>", "x<|eot_id|>", "<|eot_id|>x"],
            ["<fim_pad>", "<|repo_name|>", "[e~[", "<｜end▁of▁sentence｜>"],
        )
    ),
]


@pytest.mark.parametrize("arguments", SETTINGS, ids=lambda value: str(sorted(value.items()))[:60])
def test_special_tokens_as_llama_cpp_sets_them(tmp_path: Path, llama, arguments: dict[str, object]) -> None:
    found = info(tmp_path, **arguments)
    params = llama.llama_model_default_params()
    params.vocab_only = True
    model = llama.llama_model_load_from_file(str(tmp_path / "v.gguf").encode(), params)
    assert model
    theirs = llama.llama_model_get_vocab(model)
    kinds = {"SPM": 1, "BPE": 2, "WPM": 3, "UGM": 4}
    assert (
        kinds[found.kind],
        found.n_tokens,
        -1 if found.bos_id is None else found.bos_id,
        -1 if found.eos_id is None else found.eos_id,
        found.add_bos,
        found.add_eos,
    ) == (
        llama.llama_vocab_type(theirs),
        llama.llama_vocab_n_tokens(theirs),
        llama.llama_vocab_bos(theirs),
        llama.llama_vocab_eos(theirs),
        llama.llama_vocab_get_add_bos(theirs),
        llama.llama_vocab_get_add_eos(theirs),
    )
    assert found.end_ids == {token for token in range(found.n_tokens) if llama.llama_vocab_is_eog(theirs, token)}
    llama.llama_model_free(model)
