"""``specli check-tokenizers``: both verdicts, the words, the ranking, the exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from gguf import GGUFValueType as Type
from support import CommandLine, Ended
from tiny_gguf import array_key, gguf_bytes, key, plain_tokens, string, string_key, tensor, write_tiny

from specli.engine.vocabulary import Vocabulary
from specli.errors import ModelLoadError
from specli.gguf_file import read_header
from specli.pairing import PairReport, SizeRatio, Unread, check_drafts, read_model, size_ratio
from specli.probes import PROBES, compare_encodings
from specli.vocab import VocabInfo

WORDS = ("he", "ll", "hell", "hello", "12", "123", "Ġw", "or", "Ġwor", "ld", "Ġworld")
MERGES = ("h e", "l l", "he ll", "hell o", "1 2", "12 3", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld")
TEXTS = [*plain_tokens()[0], *WORDS]
HELLO = TEXTS.index("hello")


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """A small byte-level vocabulary with merges, by name; ``weights`` makes a model of it."""

    def write(name: str, *, weights: bool = False, **changes: object) -> Path:
        values: dict[str, object] = {"tokens": TEXTS, "tokenizer.ggml.merges": list(MERGES), **changes}
        types = [3] * 3 + [1] * (len(values["tokens"]) - 3)
        return write_tiny(tmp_path / f"{name}.gguf", vocab_only=not weights, **({"token_types": types} | values))

    return write


def with_text(token: int, text: str) -> list[str]:
    return [*TEXTS[:token], text, *TEXTS[token + 1 :]]


def report(target: Path, draft: Path) -> PairReport:
    (result,) = check_drafts(read_model(target, "target"), [draft])
    assert isinstance(result, PairReport)
    return result


def found(ended: Ended, code: int) -> dict:
    assert ended.code == code, ended.err
    assert ended.err == ""
    return json.loads(ended.out)


# -- two verdicts ------------------------------------------------------------------------------------------------------


def test_a_copy_is_alike_in_every_respect(make) -> None:
    result = report(make("target"), make("draft"))
    assert (result.ids_interchangeable, result.text_alike, result.llama_cpp, result.is_compatible) == (
        True,
        True,
        None,
        True,
    )
    assert result.encodings.n_probes == len(PROBES)
    assert {check.outcome for check in result.comparison.checks} == {"equal"}
    assert (result.overlap, result.size) == (None, None)


def test_one_text_differs(make) -> None:
    """The id and both texts are named (case D6), and a string that shows it."""
    result = report(make("target"), make("draft", tokens=with_text(HELLO, "zq")))
    assert not result.ids_interchangeable
    assert f"differ at 1 of 270: id {HELLO} (target 'hello', draft 'zq')" in result.comparison.reason
    assert result.llama_cpp == f"texts differ first at id {HELLO} (target 'hello', draft 'zq')"
    assert result.text_alike is False
    texts = [example.text for example in result.encodings.differing]
    assert "hello" in texts
    example = result.encodings.differing[texts.index("hello")]
    assert example.target == (HELLO,)
    assert example.draft == tuple(TEXTS.index(char) for char in "hello")  # byte by byte: no token for the whole
    assert (result.overlap.n_same_id, result.overlap.n_same_text) == (269, 269)


def test_padding_at_the_end_is_told_from_tokens(make) -> None:
    """Case D2."""
    padding = [f"[PAD{i}]" for i in range(270, 334)]
    unused = [f"surplus{i}" for i in range(64)]
    for name, texts, kind in (("named", padding, 1), ("typed", unused, 5)):
        result = report(make("target"), make(name, tokens=TEXTS + texts, token_types=[3] * 3 + [1] * 267 + [kind] * 64))
        assert (result.ids_interchangeable, result.text_alike, result.llama_cpp) == (True, True, None)
        assert result.comparison.notes == (
            "the target has 270 tokens and the draft 334, a gap of 64, all of it padding: ids from 270 are never "
            "drafted",
        )
    result = report(make("larger", tokens=[*TEXTS, *padding[:62], "new", "newer"]), make("target"))
    assert result.ids_interchangeable
    assert result.comparison.tail.owner == "target"
    assert "a gap of 64, 2 of them no padding (id 332 'new', id 333 'newer'): ids" in result.comparison.notes[0]


def test_a_gap_that_llama_cpp_refuses(make) -> None:
    padding = [f"<|reserved_special_token_{i}|>" for i in range(129)]
    result = report(make("target"), make("draft", tokens=TEXTS + padding))
    assert (result.ids_interchangeable, result.is_compatible) == (True, True)
    assert result.llama_cpp == "the sizes differ by 129 tokens, and it allows 128 at most"


def test_merges_cut(make) -> None:
    """Case E3: both counts, and strings that show it."""
    result = report(make("target"), make("draft", **{"tokenizer.ggml.merges": list(MERGES[:6])}))
    assert (result.ids_interchangeable, result.text_alike, result.is_compatible) == (True, False, True)
    assert "merges differ, target 11, draft 6: only the target's are used" in result.comparison.notes
    world = next(example for example in result.encodings.differing if example.text == "Hello world")
    assert world.target[-1] == TEXTS.index("Ġworld")
    assert world.draft == tuple(TEXTS.index(text) for text in ("H", "e", "ll", "o", "Ġ", "w", "o", "r", "l", "d"))


def test_one_merge_lost_shows_in_a_string_made_for_it(make) -> None:
    merges = [merge for merge in MERGES if merge != "12 3"]
    result = report(
        make("target", **{"tokenizer.ggml.pre": "gpt-2"}),
        make("draft", **{"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": merges}),
    )
    assert result.text_alike is False
    texts = {example.text: example for example in result.encodings.differing}
    assert texts["Hello 123"].target[-1] == TEXTS.index("123")
    assert texts["123"].draft == (TEXTS.index("12"), TEXTS.index("3"))
    assert "123" not in PROBES


def test_merges_missing(make) -> None:
    """Case E3: llama.cpp cannot load such a file; that is said, with the counts, and nothing crashes."""
    result = report(make("target"), make("draft", **{"tokenizer.ggml.merges": None}))
    assert (result.ids_interchangeable, result.text_alike, result.is_compatible) == (True, False, False)
    assert "merges differ, target 11, draft missing: only the target's are used" in result.comparison.notes
    assert "tokenizer.ggml.merges is missing" in result.fault
    assert result.llama_cpp == "it cannot load the vocabulary of the draft"
    assert "tokenizer.ggml.merges is missing" in result.encodings.untried


def test_another_pre_tokenizer(make) -> None:
    """Case E1: ids are the same, and text is not: smollm cuts digits apart, gpt-2 does not."""
    result = report(
        make("target", **{"tokenizer.ggml.pre": "gpt-2"}), make("draft", **{"tokenizer.ggml.pre": "smollm"})
    )
    assert (result.ids_interchangeable, result.text_alike, result.llama_cpp) == (True, False, None)
    first = result.encodings.differing[0]
    assert first.text == "Hello 123"
    hell = tuple(TEXTS.index(text) for text in ("H", "e", "ll", "o", "Ġ"))
    assert first.target == (*hell, TEXTS.index("123"))
    assert first.draft == (*hell, *(TEXTS.index(digit) for digit in "123"))
    assert [check.name for check in result.text_differences] == ["pre-tokenizer"]


def test_another_name_for_the_same_pre_tokenizer(make) -> None:
    result = report(make("target", **{"tokenizer.ggml.pre": "gpt-2"}), make("draft", **{"tokenizer.ggml.pre": "phi-2"}))
    assert result.text_alike is True
    assert [check.name for check in result.text_differences] == ["pre-tokenizer"]


def test_different_families(make) -> None:
    """Case D1: sizes and the first ids, whatever else differs."""
    result = report(make("target"), make("draft", tokens=[f"t{i}" for i in range(300)]))
    assert not result.ids_interchangeable
    assert "over the shared ids 0 to 269, but differ at 270 of 270: id 5 (target '" in result.comparison.reason
    assert "(the target has 270 tokens and the draft 300)" in result.comparison.reason
    assert result.overlap.same_id_percent == 0
    assert result.text_alike is False


def test_types_and_end_ids_differ(make) -> None:
    """Case E5: texts equal, 64 more, another EOS, other types: compatible, and all of it told."""
    types = [2] + [3] * 2 + [1] * 267 + [3] * 64
    texts = [*TEXTS, "<|end|>", *(f"<|placeholder{i}|>" for i in range(63))]
    draft = make("draft", tokens=texts, token_types=types, **{"tokenizer.ggml.eos_token_id": 270})
    result = report(make("target"), draft)
    assert result.is_compatible
    gap, eos, ends, kinds = result.comparison.notes
    assert "a gap of 64, 1 of them no padding (id 270 '<|end|>')" in gap
    assert eos == "EOS ids differ, target 2, draft 270: the target's decides where text ends"
    assert (
        ends == "the ids that end text differ, target {0, 2}, draft {0, 2, 270}: the target's decides where text ends"
    )
    assert kinds == "token types differ at 1 ids: id 0 '<|endoftext|>' (target control, draft unknown)"


# -- sizes and ranking -------------------------------------------------------------------------------------------------


def test_parameters_are_counted_over_all_shards(make) -> None:
    whole = read_model(make("whole", weights=True), "target")
    split = read_model(make("split", weights=True, split_max_tensors=7), "target")
    assert split.header.split_count > 1
    assert whole.n_params == sum(int(n) for n in sizes(whole.path))
    assert (split.n_params, split.n_active) == (whole.n_params, whole.n_params)


def sizes(path: Path) -> Sequence[int]:
    from gguf import GGUFReader

    return [tensor.n_elements for tensor in GGUFReader(path).tensors]


def test_of_experts_only_those_in_use_count(tmp_path: Path) -> None:
    path = tmp_path / "moe.gguf"
    keys = [string_key("general.architecture", "llama"), key("llama.expert_count", 4, (8).to_bytes(4, "little"))]
    keys += [key("llama.expert_used_count", 4, (2).to_bytes(4, "little")), string_key("tokenizer.ggml.model", "gpt2")]
    keys += [array_key("tokenizer.ggml.tokens", 8, 1, string("a")), array_key("tokenizer.ggml.merges", 8, 0, b"")]
    keys += [array_key("tokenizer.ggml.token_type", 5, 1, (1).to_bytes(4, "little"))]
    tensors = [tensor("output.weight", (32, 2)), tensor("blk.0.ffn_up_exps.weight", (32, 2, 8), offset=256)]
    path.write_bytes(gguf_bytes(keys, tensors, bytes(256 + 2048)))
    model = read_model(path, "target")
    assert (model.n_params, model.n_active) == (64 + 512, 64 + 128)


@pytest.mark.parametrize(
    ("ratio", "useful", "part"),
    [
        (0.5, False, "outside the useful range, 1:4 to 1:20: drafting 3 tokens costs about 6.0 passes of the target"),
        (3.99, False, "drafting 3 tokens costs about 0.8 passes"),
        (4, True, "in the useful range, 1:4 to 1:20: a draft pass costs about 25% of a target pass"),
        (20, True, "a draft pass costs about 5% of a target pass"),
        (20.1, False, "so small a draft seldom says what the target would say"),
    ],
)
def test_useful_sizes(ratio: float, useful: bool, part: str) -> None:
    size = SizeRatio(ratio)
    assert size.is_useful == useful
    assert part in size.words


def test_no_ratio_without_weights(make) -> None:
    model, vocabulary = read_model(make("model", weights=True), "target"), read_model(make("v"), "draft")
    assert size_ratio(model, vocabulary) is None
    assert size_ratio(model, model).ratio == 1


def test_ranking(make, tmp_path: Path) -> None:
    """What fits first: a useful size, the middle of the range before its ends, then unknown sizes; bad files last."""
    target = make("target", weights=True, n_embd=128, n_layer=8)
    (tmp_path / "bad.gguf").write_text("hello")
    drafts = [
        tmp_path / "bad.gguf",
        make("other", weights=True, tokens=with_text(HELLO, "zq")),
        make("small", weights=True, n_embd=32, n_layer=1),
        make("vocabulary"),
        make("equal", weights=True, n_embd=128, n_layer=8, seed=1),
        make("lower-end", weights=True, n_embd=64, n_layer=6),
        make("middle", weights=True, n_embd=64, n_layer=3),
    ]
    results = check_drafts(read_model(target, "target"), drafts)
    names = [(result.path if isinstance(result, Unread) else result.draft.path).stem for result in results]
    ratios = {result.draft.path.stem: result.size.ratio for result in results[:5] if result.size}
    assert names == ["middle", "lower-end", "vocabulary", "small", "equal", "other", "bad"]
    assert 4 < ratios["lower-end"] < ratios["middle"] < 9 < 20 < ratios["small"]


# -- files -------------------------------------------------------------------------------------------------------------


def test_missing_shards_do_not_stop_the_comparison(make, tmp_path: Path) -> None:
    """Case K1: the first shard holds the vocabulary; which ones are missing is told."""
    target = make("target")
    first = make("split", weights=True, split_max_tensors=7)
    missing = sorted(tmp_path.glob("split-0000[2-9]-of-*.gguf"))
    for path in missing:
        path.unlink()
    result = report(target, first)
    assert (result.ids_interchangeable, result.text_alike, result.is_compatible) == (True, True, True)
    assert result.draft.gap is not None
    assert missing[0].name in result.draft.gap
    assert result.size is None
    assert result.encodings.untried is not None


def test_a_later_shard_is_no_model(make, tmp_path: Path, specli: CommandLine) -> None:
    """Case K1."""
    first = make("split", weights=True, split_max_tensors=7)
    second = Path(str(first).replace("-00001-", "-00002-"))
    ended = specli("check-tokenizers", "-m", make("target"), "-md", second)
    assert ended.code == 2
    assert f"found shard 2 of 3, expected the first one; give -md '{first.name}'" in ended.error


def test_two_tokens_with_one_text_are_refused_before_llama_cpp_aborts(make) -> None:
    result = report(make("target"), make("draft", tokens=with_text(HELLO, "he")))
    assert f"tokens {TEXTS.index('he')} and {HELLO} have the same text 'he'" in result.fault
    assert not result.is_compatible
    assert result.encodings.untried is not None


def test_bytes_without_a_token_are_refused_before_llama_cpp_throws(make) -> None:
    scores = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.5] * 270, "tokenizer.ggml.merges": None}
    path = make("spm", **scores)
    header = read_header(path)
    with pytest.raises(ModelLoadError, match="162 of 256 bytes have no token"):
        Vocabulary(header, VocabInfo.from_header(header))
    result = report(path, path)
    assert "bytes have no token" in result.encodings.untried
    assert result.text_alike is True  # all that decides is equal


def test_an_architecture_that_llama_cpp_does_not_know(make) -> None:
    path = make("odd", **{"general.architecture": "klingon"})
    result = report(path, path)
    assert "the target's vocabulary cannot be loaded" in result.encodings.untried


def test_bad_files_one_line_each(make, tmp_path: Path, specli: CommandLine) -> None:
    """Cases K4, K7, K8: exit code 2, nothing on stdout."""
    good = make("good")
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "head.gguf").write_bytes(good.read_bytes()[:1000])
    projector = gguf_bytes([string_key("general.architecture", "clip")], [tensor("a", (32,))], bytes(128))
    (tmp_path / "clip.gguf").write_bytes(projector)
    narrow = make("narrow", **{"tokenizer.ggml.token_type": ([1] * 270, Type.ARRAY, Type.UINT8)})
    for path, part in (
        (tmp_path / "none.gguf", "found no such file"),
        (tmp_path / "text.gguf", "the file begins with 'hello', expected 'GGUF'"),
        (tmp_path / "head.gguf", "truncated or damaged"),
        (tmp_path / "clip.gguf", "the file is a multimodal projector (mmproj), architecture 'clip'"),
        (narrow, "stored as array of uint8, expected array of int32"),
    ):
        for arguments in (("-m", path, "-md", good), ("-m", good, path)):
            ended = specli("check-tokenizers", *arguments)
            assert ended.code == 2
            assert part in ended.error
            assert path.name in ended.error


def test_bad_drafts_among_good_ones(make, tmp_path: Path, specli: CommandLine) -> None:
    """A bad file is a row; the others go on; the code says that something went wrong."""
    (tmp_path / "text.gguf").write_text("hello")
    target = make("target")
    ended = specli(
        "check-tokenizers", "-m", target, "-md", tmp_path / "text.gguf", "-md", tmp_path / "no", make("draft")
    )
    assert (ended.code, ended.err) == (2, "")
    lines = ended.out.decode().splitlines()
    rows = [line.split() for line in lines if "cannot be read" in line or line.startswith("1")]
    assert [row[:2] for row in rows] == [["1", "draft.gguf"], ["–", "text.gguf"], ["–", "no"]]
    assert "found no such file" in " ".join(ended.out.decode().split())
    data = json.loads(specli("check-tokenizers", "-m", target, tmp_path / "text.gguf", "-o", "json").out)
    assert data["drafts"][0]["compatible"] is None
    assert "expected 'GGUF'" in data["drafts"][0]["error"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("-m", "x.gguf"), "-m x.gguf was given without a draft to compare it with; add -md FILE"),
        (("-o", "xml"), "-o/--output got 'xml', expected one of table, json"),
    ],
)
def test_usage(specli: CommandLine, arguments: Sequence[str], part: str) -> None:
    ended = specli("check-tokenizers", *arguments)
    assert ended.code == 2
    assert part in ended.error


# -- what is printed ---------------------------------------------------------------------------------------------------

DRAFT_KEYS = {
    *("path", "name", "architecture", "parameters", "active_parameters", "vocabulary_only", "fault", "tokenizer"),
    *("error", "compatible", "ids", "text", "llama_cpp", "size", "checks"),
}


def test_json(make, specli: CommandLine) -> None:
    target, draft = make("target", weights=True), make("draft", tokens=[*with_text(HELLO, "zq"), "[PAD]"])
    data = found(specli("check-tokenizers", "-m", target, draft, "-o", "json"), 1)
    assert set(data) == {"target", "drafts"}
    assert data["target"]["path"] == str(target)
    tokenizer = data["target"]["tokenizer"]
    assert [tokenizer[name] for name in ("model", "type", "pre", "tokens", "merges")] == [
        "gpt2",
        "BPE",
        "smollm",
        270,
        11,
    ]
    assert [tokenizer[name] for name in ("bos", "eos", "eot", "end_ids", "add_bos")] == [1, 2, None, [0, 2], False]
    (result,) = data["drafts"]
    assert set(result) == DRAFT_KEYS
    assert (result["compatible"], result["size"], result["parameters"], result["vocabulary_only"]) == (
        *(False, None),
        *(None, True),
    )
    ids = result["ids"]
    assert (ids["interchangeable"], ids["shared"], ids["differing"]) == (False, 270, 1)
    assert ids["first_differing"] == [{"id": HELLO, "target": "hello", "draft": "zq"}]
    assert ids["extra"] == {"in": "draft", "from": 270, "count": 1, "not_padding": 0}
    assert ids["overlap_percent"] == {"same_id": 99.63, "same_text": 99.63}
    assert result["llama_cpp"] == {
        "accepts": False,
        "reason": f"texts differ first at {ids['reason'].split(': ')[1].split(' (the')[0]}",
    }
    example = next(item for item in result["text"]["differing"] if item["text"] == "hello")
    assert example["target"] == [HELLO]
    assert {check["name"]: check["outcome"] for check in result["checks"]}["token texts"] == "breaks"
    (same,) = found(specli("check-tokenizers", "-m", target, target, "-o", "json"), 0)["drafts"]
    assert same["size"] == {"ratio": 1.0, "useful": False, "reason": SizeRatio(1).words}


def test_run_says_the_same_words(make, specli: CommandLine) -> None:
    target = make("target", weights=True)
    draft = make("draft", weights=True, tokens=with_text(HELLO, "zq"))
    data = found(specli("check-tokenizers", "-m", target, "-md", draft, "-o", "json"), 1)
    ended = specli("run", "-m", target, "-md", draft, "-p", "x")
    assert ended.code == 4
    assert ended.error == f"this draft does not fit this target: {data['drafts'][0]['ids']['reason']}"


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_for_a_pipe(make, specli: CommandLine, width: int) -> None:
    """No escape code, no line over the width, no blanks at the ends; the verdicts stand first."""
    target, draft = make("target"), make("draft", **{"tokenizer.ggml.pre": "gpt-2"})
    ended = specli("check-tokenizers", "-m", target, draft, env={"COLUMNS": str(width), "FORCE_COLOR": "1"})
    assert (ended.code, ended.err) == (0, "")
    text = ended.out.decode()
    assert "\x1b" not in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert lines == [line.rstrip() for line in lines]
    assert lines[0].split() == ["target", "target.gguf", "vocabulary", "only"]
    assert lines[3].startswith("ids interchangeable  yes  safe to speculate")
    assert any(line.startswith("text encodes alike   no   ids differ for ") for line in lines)
    assert any(line.startswith("~   pre-tokenizer") and line.split()[2:] == ["smollm", "gpt-2"] for line in lines)
    assert any(line.startswith("'Hello 123'") for line in lines)


def test_names_that_would_be_confused_are_paths(make, tmp_path: Path, specli: CommandLine) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    target, one, other = make("target"), make("a/m"), make("b/m")
    out = specli("check-tokenizers", "-m", target, one, other, env={"COLUMNS": "300"}).out.decode()
    assert str(one) in out
    assert str(other) in out


# -- probes ------------------------------------------------------------------------------------------------------------


def test_probes_are_distinct_and_hold_what_tells_tokenizers_apart() -> None:
    assert len(set(PROBES)) == len(PROBES) >= 90
    assert {"Hello 123", "don't", "สวัสดี"} <= set(PROBES)
    assert all(
        any(part in probe for probe in PROBES) for part in ("\r\n", "\t\t", "🦙", "\u200d", "def f(", "¥", "мир")
    )


def test_compare_encodings() -> None:
    result = compare_encodings(lambda text: [*text.encode()], lambda text: [len(text)], ["\x01", "ab"])
    assert result.n_probes == 2
    (example,) = result.differing
    assert (example.text, example.target, example.draft) == ("ab", (97, 98), (2,))


# -- real files --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copy_of(target_path: Path, tmp_path_factory) -> Callable[..., Path]:
    """Vocabulary-only copies of the default target with something changed."""
    header = read_header(target_path)
    kept = {
        name: value
        for name, value in header.metadata.items()
        if name.startswith("tokenizer.ggml.") and isinstance(value, bool | int | str)
    }
    kept |= {"tokens": header.tokens[:], "token_types": header.token_types.tolist(), "vocab_only": True}
    kept |= {"tokenizer.ggml.merges": header.merges[:]}
    folder = tmp_path_factory.mktemp("copies")
    return lambda name, **changes: write_tiny(folder / f"{name}.gguf", **(kept | changes))


@pytest.mark.model
def test_default_pair(target_path: Path, specli: CommandLine) -> None:
    data = found(specli("check-tokenizers", "-o", "json"), 0)
    assert data["target"]["path"] == str(target_path)
    assert (data["target"]["parameters"], data["target"]["tokenizer"]["merges"]) == (134_515_008, 48_900)
    (draft,) = data["drafts"]
    assert (draft["parameters"], draft["compatible"]) == (11_798_208, True)
    assert draft["ids"]["interchangeable"] is True
    assert draft["text"]["alike"] is True
    assert draft["llama_cpp"] == {"accepts": True, "reason": None}
    assert draft["size"]["ratio"] == 11.401
    assert draft["size"]["useful"] is True
    assert {check["outcome"] for check in draft["checks"]} == {"equal"}


@pytest.mark.model
def test_copies_of_the_default_target(target_path: Path, copy_of) -> None:
    """Show 1: a text changed, 64 padding tokens, half of the merges, another pre-tokenizer."""
    header = read_header(target_path)
    texts, types = header.tokens[:], header.token_types.tolist()
    changed = [*texts[:20000], "Ġzzqqzz".encode(), *texts[20001:]]
    result = report(target_path, copy_of("one-text", tokens=changed))
    assert (result.ids_interchangeable, result.text_alike) == (False, False)
    assert "differ at 1 of 49152: id 20000 (target 'ĠBrow', draft 'Ġzzqqzz')" in result.comparison.reason
    assert [(example.text, example.target) for example in result.encodings.differing] == [(" Brow", (20000,))]

    padded = [*texts, *(b"[PAD%d]" % i for i in range(49152, 49216))]
    result = report(target_path, copy_of("padded", tokens=padded, token_types=types + [5] * 64))
    assert (result.ids_interchangeable, result.text_alike, result.llama_cpp) == (True, True, None)
    assert "a gap of 64, all of it padding" in result.comparison.notes[0]

    merges = {"tokenizer.ggml.merges": header.merges[:24450]}
    result = report(target_path, copy_of("merges-cut", **merges))
    assert (result.ids_interchangeable, result.text_alike) == (True, False)
    assert "merges differ, target 48900, draft 24450: only the target's are used" in result.comparison.notes
    assert "naïve café" in {example.text for example in result.encodings.differing}

    result = report(target_path, copy_of("pre", **{"tokenizer.ggml.pre": "llama-bpe"}))
    assert (result.ids_interchangeable, result.text_alike) == (True, False)
    examples = {example.text: (example.target, example.draft) for example in result.encodings.differing}
    assert examples["\n\n\n\nx"] == ((16506, 198, 104), (22342, 104))


@pytest.mark.model
def test_another_family_against_the_default_target(target_path: Path, make, specli: CommandLine) -> None:
    ended = specli("check-tokenizers", "-m", target_path, "-md", make("draft"))
    assert (ended.code, ended.err) == (1, "")
    words = " ".join(ended.out.decode().split())
    assert "differ at 267 of 270: id 5 (target '<file_sep>', draft" in words
    assert "(the target has 49152 tokens and the draft 270)" in words
