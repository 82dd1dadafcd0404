"""Files and situations that cannot be used, through the whole command: one line each, and nothing was loaded.

What was found, what was expected, what to do. ``test_gguf_file`` has the many ways in which a header can be damaged,
``test_cli`` prompts and streams, ``test_options`` options.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support import HANG_S, load_model, make_engine, settings
from tiny_gguf import gguf_bytes, string_key, tensor, write_lora

import specli.engine.llama
from specli import gguf_file
from specli.config import KvOverride, Lora
from specli.engine.llama import LlamaEngine
from specli.engine.log import LOG
from specli.errors import EngineError, ModelLoadError
from specli.session import Hooks, Session

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
ARCH = string_key("general.architecture", "llama")


@pytest.fixture
def run(specli, tiny_model):
    """``run("-md", path)`` on a good tiny target, or on another one."""

    def run(*flags, model=None, **options):
        return specli("run", "-m", model or tiny_model(), "-t", "1", "-p", "hi", "-n", "3", *flags, **options)

    return run


@pytest.fixture
def forbid_loading(monkeypatch):
    def refuse(*_arguments):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(specli.engine.llama, "LlamaModel", refuse)


def check(error: str, path: Path, *parts: str) -> None:
    """One line with the file, what was found, what was expected, and what to do."""
    assert error.startswith(f"{path}: ")
    for part in (*parts, ", expected ", "; "):
        assert part in error


# -- files that are something else (cases K8)

KINDS: dict[str, tuple[dict[str, object], list[str]]] = {
    "vocabulary": ({"vocab_only": True}, ["a vocabulary only, without weights", "specli check-tokenizers"]),
    "clip": ({"architecture": "clip", "vocab_only": True}, ["a multimodal projector (mmproj), architecture 'clip'"]),
    "mmproj": ({"general.type": "mmproj"}, ["a multimodal projector (mmproj)"]),
    "adapter": ({"general.type": "adapter", "adapter.type": "lora"}, ["an adapter (LoRA)"]),
    "imatrix": ({"general.type": "imatrix"}, ["an importance matrix"]),
    "bert": ({"architecture": "bert", "vocab_only": True}, ["an embedding model (encoder), architecture 'bert'"]),
    "pooling": ({"llama.pooling_type": 1}, ["an embedding or reranking model (pooling type mean)"]),
    "not causal": ({"llama.attention.causal": False}, ["attention is not causal"]),
    "eagle3": ({"architecture": "eagle3", "vocab_only": True}, ["a draft head that needs its target's hidden states"]),
}


@pytest.mark.parametrize("option", ["-m", "-md"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_no_text_model_says_what_it_is(run, tiny_model, option, kind):
    arguments, parts = KINDS[kind]
    path = tiny_model(**arguments)
    ended = run(model=path) if option == "-m" else run(option, path)
    role = "target" if option == "-m" else "draft"
    assert ended.code == 3
    check(ended.error, path, *parts, f"expected a complete text model as the {role}")
    if kind != "vocabulary":
        assert ended.error.endswith(f"give {option} another file")


def test_an_adapter_as_its_tool_writes_it(run, tiny_model, tmp_path):
    path = write_lora(tmp_path / "lora.gguf", tiny_model())
    for ended in (run(model=path), run("-md", path)):
        assert ended.code == 3
        check(ended.error, path, "the file is an adapter (LoRA)")


def test_the_vocabulary_alone_is_fine_where_only_it_matters(specli, tiny_model):
    path = tiny_model(vocab_only=True)
    assert specli("check-tokenizers", "-m", path, "-md", tiny_model()).code == 0


# -- adapters

ADAPTERS: dict[str, tuple[Callable[[Path, Path], object], list[str]]] = {
    "missing": (lambda path, model: None, ["found no such file", "check the path"]),
    "a model": (
        lambda path, model: path.write_bytes(model.read_bytes()),
        ["the file is a model", "for architecture 'llama'"],
    ),
    "a vocabulary": (lambda path, model: path.write_bytes(gguf_bytes([ARCH])), ["the file is a vocabulary only"]),
    "mmproj": (lambda path, model: write_lora(path, model, **{"general.type": "mmproj"}), ["a multimodal projector"]),
    "control vector": (
        lambda path, model: write_lora(path, model, **{"adapter.type": "control_vector"}),
        ["an adapter of type 'control_vector'"],
    ),
    "another architecture": (
        lambda path, model: write_lora(path, model, **{"general.architecture": "qwen2"}),
        ["the adapter is for architecture 'qwen2', expected a LoRA adapter for architecture 'llama'"],
    ),
    "another size": (
        lambda path, model: write_lora(path, model, ["blk.7.attn_q.weight"]),
        ["tensor 'blk.7.attn_q.weight' is not in the model"],
    ),
    "another width": (
        lambda path, model: write_lora(path, model.with_name("wide.gguf")),
        ["tensor 'blk.0.attn_q.weight' is for a weight of [128, 128], expected [64, 64] as in the model"],
    ),
    "one half": (
        lambda path, model: write_lora(path, model, halves=["lora_a"]),
        ["tensor 'blk.0.attn_q.weight.lora_a' has no partner"],
    ),
    "other names": (
        lambda path, model: write_lora(path, model, halves=["lora_a", "lora_b"], names=["x"]),
        ["tensor 'x' is not in the model"],
    ),
    "nothing in it": (lambda path, model: write_lora(path, model, []), ["the adapter has no tensors"]),
    "cut": (
        lambda path, model: path.write_bytes(write_lora(path, model).read_bytes()[:-100]),
        ["the file is truncated", "download or copy it again"],
    ),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_that_do_not_belong_to_the_model(tiny_model, tmp_path, forbid_loading, kind):
    make, parts = ADAPTERS[kind]
    model, path = tmp_path / "model.gguf", tmp_path / "lora.gguf"
    model.write_bytes(tiny_model().read_bytes())
    (tmp_path / "wide.gguf").write_bytes(tiny_model(n_embd=128).read_bytes())
    make(path, model)
    with pytest.raises(ModelLoadError) as caught:
        Session(settings(model, model={"loras": (Lora(path),)}))
    check(str(caught.value), path, *parts)


def test_an_adapter_that_is_refused_is_one_line_of_the_command(run, tiny_model, tmp_path):
    path = write_lora(tmp_path / "lora.gguf", tiny_model(), **{"general.architecture": "gemma2"})
    ended = run("--lora", path)
    assert ended.code == 3
    check(ended.error, path, "for architecture 'gemma2'", "convert_lora_to_gguf.py made for this model")
    assert run("--lora", write_lora(path, tiny_model())).code == 0


def test_llama_cpps_reason_is_quoted_for_an_adapter(tiny_model, tmp_path):
    """What the header's rules let through, and what it is when the model was not looked at."""
    path = write_lora(tmp_path / "lora.gguf", tiny_model(), halves=["lora_a"])
    with pytest.raises(ModelLoadError, match=r"could not lay .*lora\.gguf over .*: .*missing one component"):
        load_model(tiny_model(), loras=(Lora(path),))
    load_model(tiny_model()).close()


def test_an_adapter_for_the_embeddings_has_its_halves_the_other_way_round(tiny_model, tmp_path):
    """``llm_build_inp_embd``: A is (vocabulary, rank) there."""
    header = gguf_file.read_header(tiny_model())
    name = "token_embd.weight"
    for shapes, is_right in ((([2, 272], [2, 64]), True), (([64, 2], [2, 272]), False)):
        parts = [tensor(f"{name}.lora_a", shapes[0]), tensor(f"{name}.lora_b", shapes[1])]
        sizes = [4 * a * b for a, b in shapes]
        padded = -(-sizes[0] // 32) * 32
        parts[1] = tensor(f"{name}.lora_b", shapes[1], offset=padded)
        keys = [ARCH, string_key("general.type", "adapter"), string_key("adapter.type", "lora")]
        (tmp_path / "lora.gguf").write_bytes(gguf_bytes(keys, parts, bytes(padded + sizes[1])))
        adapter = gguf_file.read_header(tmp_path / "lora.gguf")
        if is_right:
            gguf_file.check_adapter(adapter, [header])
        else:
            with pytest.raises(ModelLoadError, match="is for a weight of"):
                gguf_file.check_adapter(adapter, [header])


# -- shards (cases K1)


@pytest.fixture
def shards(tmp_path) -> list[Path]:
    from tiny_gguf import write_tiny

    write_tiny(tmp_path / "m.gguf", split_max_tensors=7)
    return sorted(tmp_path.glob("m-*.gguf"))


@pytest.mark.parametrize("option", ["-m", "-md"])
def test_shards(run, tiny_model, shards, option):
    def ended(path):
        return run(model=path) if option == "-m" else run(option, path, "--spec-type", "draft")

    assert len(shards) == 3
    assert ended(shards[0]).code == 0
    for shard, number in ((shards[1], 2), (shards[2], 3)):
        found = ended(shard)
        assert found.code == 3
        check(found.error, shard, f"found shard {number} of 3", f"give {option} 'm-00001-of-00003.gguf'")
    found = ended(shards[0].parent)
    assert found.code == 3
    assert "found a directory" in found.error
    assert "'m-00001-of-00003.gguf'" in found.error
    shards[1].unlink()
    found = ended(shards[0])
    assert found.code == 3
    check(found.error, shards[0], "1 of 3 shards are missing: 'm-00002-of-00003.gguf'", "download the missing ones")


def test_a_shard_of_something_else(run, shards):
    shards[1].write_bytes(shards[2].read_bytes())
    found = run(model=shards[0])
    assert found.code == 3
    check(found.error, shards[1], "the file is shard 3 of 3, expected shard 2 of 3")


# -- formats


@pytest.mark.parametrize("option", ["-m", "-md", "--lora"])
@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (gguf_bytes([ARCH], version=99), ["found GGUF version 99, expected version 2 or 3", "update specli"]),
        (gguf_bytes([ARCH], version=1), ["found GGUF version 1", "convert it again"]),
        (
            b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + bytes(99),
            ["found a big-endian GGUF file", "convert it for this machine"],
        ),
        (gguf_bytes(tensors=[tensor("w", [4, 0])]), ["tensor 'w' has the dimensions [4, 0]"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", ["a git-lfs pointer", "git lfs pull"]),
    ],
    ids=["version 99", "version 1", "big-endian", "zero dimension", "git-lfs"],
)
def test_formats(run, tmp_path, option, content, parts):
    """Cases K6."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    ended = run(model=path) if option == "-m" else run(option, path)
    assert ended.code == 3
    check(ended.error, path, *parts)


SIZES = {
    "no layers": ({"llama.block_count": 0}, "llama.block_count is 0, expected 1 to 512 layers"),
    "many layers": ({"llama.block_count": 513}, "llama.block_count is 513, expected 1 to 512"),
    "no context": ({"llama.context_length": 0}, "llama.context_length is 0, expected 1 token or more"),
    "long context": ({"llama.context_length": 2**31}, f"llama.context_length is {2**31}, expected 1 token or more"),
    "next": ({"llama.nextn_predict_layers": 3}, "llama.nextn_predict_layers is 3, expected at most block_count (2)"),
    "experts": ({"llama.expert_count": 1025, "llama.expert_used_count": 2}, "llama.expert_count is 1025"),
    "none used": ({"llama.expert_count": 8}, "llama.expert_used_count is missing, expected some of 8 experts"),
    "none there": ({"llama.expert_used_count": 2}, "llama.expert_used_count is 2, expected some of 0 experts"),
    "more used": (
        {"llama.expert_count": 2, "llama.expert_used_count": 3},
        "llama.expert_used_count is 3, expected some of 2 experts",
    ),
    "groups": (
        {"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_group_count": 3},
        "llama.expert_group_count is 3, expected a divisor of expert_count (8)",
    ),
    "groups used": (
        {"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_group_count": 4},
        "llama.expert_group_used_count is missing, expected some of 4 groups",
    ),
    "scaling": (
        {"llama.rope.scaling.type": "magic"},
        "llama.rope.scaling.type is 'magic', expected one of none, linear",
    ),
}


@pytest.mark.parametrize("kind", SIZES)
def test_numbers_that_would_end_the_process(tiny_model, forbid_loading, kind):
    """``GGML_ASSERT`` in llama.cpp's ``load_hparams``; whether the file says so or ``--override-kv``."""
    keys, expected = SIZES[kind]
    path = tiny_model(**keys)
    with pytest.raises(ModelLoadError) as caught:
        Session(settings(path))
    check(str(caught.value), path, expected, "convert the model again")
    overrides = tuple(KvOverride(key, value) for key, value in keys.items())
    with pytest.raises(ModelLoadError) as caught:
        Session(settings(tiny_model(), model={"kv_overrides": overrides}))
    check(str(caught.value), tiny_model(), expected)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("general.architecture=str:foo", "unknown model architecture: 'foo'"),
        ("llama.block_count=int:9", "tensor 'blk.2.attn_norm.weight' not found"),
        ("tokenizer.ggml.pre=str:nope", "unknown pre-tokenizer type: 'nope'"),
        ("llama.rope.dimension_count=int:7", "invalid n_rot: 7, expected 32"),
        ("llama.context_length=int:-1", "llama.context_length is -1, expected 1 token or more"),
    ],
)
def test_metadata_that_does_not_fit_gets_the_reason(run, override, reason):
    """llama.cpp's last word is "failed to load model"; the reason stands before it."""
    for fit in ("on", "off"):
        ended = run("--override-kv", override, "-fit", fit)
        assert ended.code == 3
        assert reason in ended.error


@pytest.mark.parametrize("folder", ["モデル", "a\nb"])
@pytest.mark.parametrize("locale", ["C.UTF-8", "C", "POSIX"])
def test_a_file_of_any_name_is_named_under_any_locale(run, tmp_path, folder, locale):
    path = tmp_path / folder / "нет.gguf"
    ended = run(model=path, env={"LC_ALL": locale})
    assert ended.code == 3
    assert "found no such file" in ended.error
    assert "нет.gguf" in ended.error


# -- memory


def limit_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))


@LINUX
@pytest.mark.parametrize(
    ("flags", "code", "parts"),
    [
        (("-c", "200000000"), 3, ["must stay in memory", "this fits", "specli run"]),
        (("-c", "200000000", "-fit", "off"), 6, ["could not make a context of 200000000 tokens", "try a smaller -c"]),
        (
            ("-c", "2000000000", "-b", "2000000000", "-ub", "2000000000", "-fit", "off"),
            6,
            ["no memory for passes of 2000000000 tokens", "try a smaller -ub, -b or -c"],
        ),
    ],
)
def test_what_memory_cannot_hold(specli, tiny_model, flags, code, parts):
    command = ("run", "-m", tiny_model(), "-t", "1", "-p", "hi", *flags)
    with specli.start(*command, preexec_fn=limit_memory) as process:
        out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, out) == (code, b"")
    assert err.count(b"\n") == 1
    for part in parts:
        assert part in err.decode()


def test_weights_that_could_not_be_locked_are_told(tiny_model, monkeypatch):
    """Root may lock anything, so the system's refusal is put into the log."""
    load = specli.engine.llama.llama_cpp.llama_model_load_from_file

    def refuse(*given):
        LOG.lines.append((3, "warning: failed to mlock 1234-byte buffer (after previously locking 0 bytes)"))
        return load(*given)

    monkeypatch.setattr(specli.engine.llama.llama_cpp, "llama_model_load_from_file", refuse)
    for mode, expected in (("mlock", 1), ("mmap+mlock", 1), ("auto", 0)):
        notices: list[str] = []
        chosen = settings(tiny_model(), type="none", model={"load_mode": mode})
        with Session(chosen, Hooks(notice=notices.append)):
            assert len(notices) == expected
        assert all(f"-lm {mode}: the system did not let" in line and "ulimit -l" in line for line in notices)


def test_settings_that_the_library_refuses_are_told_in_its_words(tiny_model):
    with closing(load_model(tiny_model())) as model:
        options = replace(model.options, n_ctx=64, cache_type_v="q8_0")
        object.__setattr__(options, "flash_attn", "off")  # config would not let it through
        with pytest.raises(EngineError, match=r"context of 64 tokens for \S+: quantized V cache requires flash_attn"):
            LlamaEngine(model, options, 1, lambda: False)
        make_engine(model, n_ctx=64).close()


# -- bytes


@pytest.mark.skipif(os.name == "nt", reason="bytes in the environment")
def test_bytes_that_are_not_text(run, tmp_path):
    """Cases L8; ``test_cli`` has -p, -f and standard input."""
    file = tmp_path / "bad.txt"
    file.write_bytes(b"ok \xff")
    for flag in ("-sysf", "--chat-template-file"):
        ended = run(flag, file)
        assert ended.code == 2
        assert f"{file} is not UTF-8: byte 0xff at offset 3" in ended.error
    for flag in ("-sys", "--chat-template", "--lora", "-dev", "-ot", "--override-kv", "-C"):
        ended = run(flag, b"a\xff")
        assert ended.code == 2
        assert "an argument is not UTF-8" in ended.error
    for variable in (b"LLAMA_ARG_CHAT_TEMPLATE", b"LLAMA_ARG_MODEL", b"LLAMA_ARG_SPEC_TYPE"):
        ended = run(env={variable: b"a\xff"})
        assert ended.code == 2
        assert ended.error == f"the variable {variable.decode()} is not UTF-8, at character 1"
