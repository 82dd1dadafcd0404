"""GGUF headers: what a good file says, and one clear line for every kind of bad one."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_gguf import (
    CHAT_TEMPLATE,
    array_key,
    gguf_bytes,
    key,
    plain_tokens,
    string,
    string_key,
    tensor,
    write_tiny,
)

from specli.errors import ModelLoadError
from specli.gguf_file import GGML_TYPES, GgufHeader, StringArray, check_loadable, read_header, shown
from specli.vocab import VocabInfo

ARCH = string_key("general.architecture", "llama")
U64_MAX = 2**64 - 1


@pytest.fixture
def save(tmp_path: Path):
    def save(content: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return save


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def refusal(call, *arguments) -> str:
    """The message of the ModelLoadError that ``call`` must raise: one printable line, found, expected, what to do."""
    with pytest.raises(ModelLoadError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert message.isprintable()
    assert ", expected " in message
    assert "; " in message
    return message


# -- what a good file says ---------------------------------------------------------------------------------------------


def test_header_agrees_with_the_gguf_package(tiny: Path) -> None:
    header, reader = read_header(tiny), gguf.GGUFReader(tiny)
    assert header.version == 3
    assert header.file_size == tiny.stat().st_size
    assert (header.alignment, header.data_offset) == (reader.alignment, reader.data_offset)
    for ours, theirs in zip(header.tensors, reader.tensors, strict=True):
        assert ours.name == theirs.name
        assert ours.shape == tuple(theirs.shape.tolist())
        assert (ours.ggml_type, ours.n_bytes) == (theirs.tensor_type.name, theirs.n_bytes)
        assert header.data_offset + ours.offset == theirs.data_offset
    expected = {name: part.contents() for name, part in reader.fields.items() if not name.startswith("GGUF.")}
    assert list(header.metadata) == list(expected)
    for name, value in header.metadata.items():
        if isinstance(value, StringArray):
            assert [text.decode() for text in value] == expected[name]
        elif isinstance(value, np.ndarray):
            assert value.tolist() == expected[name]
        else:
            assert value == expected[name]


def test_properties(tiny: Path) -> None:
    header = read_header(str(tiny))
    assert header.architecture == "llama"
    assert (header.n_vocab, header.context_length, header.hparam("block_count")) == (272, 256, 2)
    assert (header.split_count, header.split_no, header.is_vocab_only) == (1, 0, False)
    assert (header.tokenizer_model, header.tokenizer_pre, header.chat_template) == ("gpt2", "smollm", CHAT_TEMPLATE)
    assert header.tokens is not None
    assert header.tokens[1] == header.tokens[-271] == b"<|im_start|>"
    assert header.tokens[1:4] == [b"<|im_start|>", b"<|im_end|>", "Ā".encode()]
    assert header.tokens[4:1:-2] == ["ā".encode(), b"<|im_end|>"]
    assert header.tokens[3:1] == []
    assert list(header.token_types[:4]) == [3, 3, 3, 1]
    assert header.merges == header.merges[:] or list(header.merges) == ["Ā Ā".encode()]
    assert (header.scores, header.name) == (None, None)
    assert header.value_types["tokenizer.ggml.tokens"] == "array of string"
    with pytest.raises(IndexError):
        header.tokens[272]


def test_every_value_type(save) -> None:
    scalars = [
        (0, "<B", 255, "uint8"),
        (1, "<b", -128, "int8"),
        (2, "<H", 65535, "uint16"),
        (3, "<h", -32768, "int16"),
        (4, "<I", 2**32 - 1, "uint32"),
        (5, "<i", -(2**31), "int32"),
        (6, "<f", 0.5, "float32"),
        (7, "<?", True, "bool"),
        (10, "<Q", U64_MAX, "uint64"),
        (11, "<q", -(2**63), "int64"),
        (12, "<d", 1e300, "float64"),
    ]
    keys = [ARCH, string_key("text", "né"), string_key("bad", b"a\xff"), array_key("none", 8, 0, b"")]
    for kind, code, value, name in scalars:
        packed = struct.pack(code, value)
        keys += [key(f"one {name}", kind, packed), array_key(f"two {name}", kind, 2, packed * 2)]
    keys += [array_key("empty", 5, 0, b""), array_key("strings", 8, 2, string("a") + string(b"\0\xff"))]
    header = read_header(save(gguf_bytes(keys)))
    assert header.metadata["text"] == "né"
    assert header.metadata["bad"] == "a\ufffd"
    for kind, code, value, name in scalars:
        assert header.metadata[f"one {name}"] == value
        assert type(header.metadata[f"one {name}"]) is type(value)
        two = header.metadata[f"two {name}"]
        assert two.tolist() == [value, value]
        assert two.dtype == ("?" if name == "bool" else np.dtype(code))
        assert not two.flags.writeable
        assert header.value_types[f"two {name}"] == f"array of {name}"
        assert kind != 8
    assert list(header.metadata["strings"]) == [b"a", b"\0\xff"]
    assert len(header.metadata["none"]) == len(header.metadata["empty"]) == 0


def test_string_arrays_compare_by_their_bytes(save) -> None:
    def strings(*texts: str) -> StringArray:
        content = gguf_bytes([ARCH, array_key("a", 8, len(texts), b"".join(map(string, texts)))])
        return read_header(save(content)).metadata["a"]

    assert strings("ab", "c") == strings("ab", "c")
    assert hash(strings("ab", "c")) == hash(strings("ab", "c"))
    assert strings("ab", "c") != strings("a", "bc")
    assert strings("ab", "c").head(1) == strings("ab", "d").head(1)
    assert repr(strings("ab", "c")) == "StringArray(2 strings, 19 bytes)"


def test_version_2_scalar_tensors_and_missing_last_padding_are_fine(save) -> None:
    content = gguf_bytes(tensors=[tensor("scalar", []), tensor("row", [3], offset=32)], data=bytes(32 + 12), version=2)
    header = read_header(save(content))
    assert header.version == 2
    assert [(part.shape, part.n_bytes) for part in header.tensors] == [((), 4), ((3,), 12)]


def test_alignment_of_the_file_is_used(save) -> None:
    keys = [ARCH, key("general.alignment", 4, struct.pack("<I", 64))]
    tensors = [tensor("a", [1]), tensor("b", [1], offset=64)]
    header = read_header(save(gguf_bytes(keys, tensors, bytes(68), alignment=64)))
    assert header.data_offset % 64 == 0
    assert check_sizes(header) == header.file_size


def check_sizes(header: GgufHeader) -> int:
    last = header.tensors[-1]
    return header.data_offset + last.offset + last.n_bytes


@pytest.mark.skipif(sys.platform == "win32", reason="ggml's functions are in a library of their own")
def test_ggml_types_are_those_of_ggml(llama) -> None:
    lib = llama.llama_cpp._lib
    lib.ggml_type_name.restype, lib.ggml_type_size.restype = ctypes.c_char_p, ctypes.c_size_t
    lib.ggml_blck_size.restype = ctypes.c_int64
    known = range(max(GGML_TYPES) + 1)  # ggml aborts past its last type
    sizes = {i: (lib.ggml_type_name(i).decode().upper(), lib.ggml_blck_size(i), lib.ggml_type_size(i)) for i in known}
    assert {i: size for i, size in sizes.items() if size[2]} == dict(GGML_TYPES)


def test_gguf_is_not_imported() -> None:
    code = "import sys, specli.vocab; print('gguf' in sys.modules, 'llama_cpp' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False False"


# -- paths -------------------------------------------------------------------------------------------------------------


def test_missing_file(tmp_path: Path) -> None:
    assert "found no such file" in refusal(read_header, tmp_path / "none.gguf")


def test_path_with_control_characters_stays_on_one_line(tmp_path: Path) -> None:
    assert r"a\nb.gguf" in refusal(read_header, tmp_path / "a\nb.gguf")
    assert "reading failed" in refusal(read_header, "a\0b.gguf")


def test_directory_names_the_files_to_give(tmp_path: Path) -> None:
    assert "found a directory" in refusal(read_header, tmp_path)
    assert "it holds none" in refusal(read_header, tmp_path)
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "other.gguf", "readme.txt"):
        (tmp_path / name).touch()
    assert refusal(read_header, tmp_path).endswith("give one of its files: 'm-00001-of-00002.gguf', 'other.gguf'")


def test_empty_file(save) -> None:
    assert "found an empty file" in refusal(read_header, save(b""))


def test_unreadable_file(save, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    path = save(gguf_bytes())
    monkeypatch.setattr(Path, "open", refuse)
    assert "found a file that may not be read" in refusal(read_header, path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_named_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "found a device or a pipe" in refusal(read_header, tmp_path / "pipe")


# -- contents ----------------------------------------------------------------------------------------------------------

NOT_GGUF = {
    "safetensors": (struct.pack("<Q", 4) + b'{"a"' + bytes(8), "a safetensors file", "convert_hf_to_gguf.py"),
    "zip": (b"PK\x03\x04" + bytes(40), "a zip archive or a PyTorch checkpoint", "'PK\\x03\\x04"),
    "pickle": (b"\x80\x02}q\0X", "a PyTorch checkpoint (pickle)", "convert_hf_to_gguf.py"),
    "html": (b"\n<!DOCTYPE html><html>", "a web page", "/resolve/"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a git-lfs pointer", "git lfs pull"),
    "ggml": (b"tjgg" + bytes(40), "from before GGUF", "'tjgg"),
    "json": (b'{"error":"Not Found"}', "a server's error answer", "download the file again"),
    "zeros": (bytes(1000), "never finished", "download it again"),
    "start": (b"GGU", "the first bytes of a GGUF file", "'GGU'"),
    "text": (b"hello, world", "begins with 'hello, w', expected 'GGUF'", "give a GGUF file"),
}


@pytest.mark.parametrize("kind", NOT_GGUF)
def test_other_formats(save, kind: str) -> None:
    content, *parts = NOT_GGUF[kind]
    message = refusal(read_header, save(content))
    for part in [*parts, "expected 'GGUF'"]:
        assert part in message


FAULTS: dict[str, tuple[bytes, list[str]]] = {
    "version 0": (gguf_bytes(version=0), ["GGUF version 0", "2 or 3", "convert it again"]),
    "version 1": (gguf_bytes(version=1), ["GGUF version 1", "2 or 3", "convert it again"]),
    "version 99": (gguf_bytes(version=99), ["GGUF version 99", "2 or 3", "update specli"]),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + bytes(99), ["big-endian", "little-endian"]),
    "no counts": (b"GGUF\3\0\0\0" + bytes(4), ["number of tensors needs 8 bytes at byte 8", "4 bytes that are left"]),
    "keys": (
        gguf_bytes(counts={"keys": 2**40}),
        [f"claims {2**40} metadata keys", f"{14 * 2**40} bytes", "fits the 45 bytes that are left of 69"],
    ),
    "tensors": (
        gguf_bytes(counts={"tensors": U64_MAX}),
        [f"claims {U64_MAX} tensors", "the 53 bytes that are left"],
    ),
    "one key more": (gguf_bytes(counts={"keys": 2}), ["length of the name of metadata key 1 needs 8 bytes"]),
    "one tensor more": (
        gguf_bytes(counts={"tensors": 1}),
        ["length of the name of tensor 0 needs 8 bytes", "0 bytes that are left"],
    ),
    "key length": (gguf_bytes([struct.pack("<Q", 2**60) + bytes(50)]), [f"metadata key 0 needs {2**60} bytes"]),
    "long key": (gguf_bytes([ARCH, string_key("k" * 70_000, "")]), ["key 1 has 70000 bytes", "at most 65536"]),
    "empty key": (gguf_bytes([ARCH, string_key("", "x")]), ["metadata key 1 has no name"]),
    "same key": (gguf_bytes([ARCH, ARCH]), ["'general.architecture' is there twice", "each key once"]),
    "value type": (gguf_bytes([ARCH, key("k", 13, bytes(8))]), ["value of 'k' has the unknown type 13", "0 to 12"]),
    "string length": (
        gguf_bytes([ARCH, key("k", 8, struct.pack("<Q", 2**60))]),
        [f"the value of 'k' needs {2**60} bytes", "0 bytes that are left"],
    ),
    "array length": (
        gguf_bytes([ARCH, array_key("k", 4, 2**60, bytes(40))]),
        [f"claims {2**60} elements in the array 'k'", f"{2**62} bytes", "fits the 40 bytes"],
    ),
    "string array length": (
        gguf_bytes([ARCH, array_key("k", 8, U64_MAX, bytes(40))]),
        [f"claims {U64_MAX} elements in the array 'k'", "fits the 40 bytes"],
    ),
    "string in array": (
        gguf_bytes([ARCH, array_key("k", 8, 3, string("a") + struct.pack("<Q", 2**60) + bytes(40))]),
        ["string 1 of 3 in the array 'k' needs the file up to byte", f"{2**60 + 111}", "no more than its 151"],
    ),
    "string array cut": (
        gguf_bytes([ARCH, array_key("k", 8, 3, string("a" * 20) + string("b"))]),
        ["string 2 of 3 in the array 'k' needs the file up to byte 139", "no more than its 131 bytes"],
    ),
    "array of arrays": (gguf_bytes([ARCH, array_key("k", 9, 1, bytes(40))]), ["elements of the unknown type 9"]),
    "no architecture": (gguf_bytes([string_key("general.name", "x")]), ["general.architecture is missing"]),
    "empty architecture": (gguf_bytes([string_key("general.architecture", "")]), ["general.architecture is missing"]),
    "architecture type": (
        gguf_bytes([key("general.architecture", 4, bytes(4))]),
        ["'general.architecture' is stored as uint32", "expected string"],
    ),
    "token types": (
        gguf_bytes([ARCH, array_key("tokenizer.ggml.token_type", 0, 2, b"\1\1")]),
        ["'tokenizer.ggml.token_type' is stored as array of uint8", "expected array of int32"],
    ),
    "scores": (
        gguf_bytes([ARCH, array_key("tokenizer.ggml.scores", 12, 1, bytes(8))]),
        ["stored as array of float64", "expected array of float32 or array of int32"],
    ),
    "tokens": (gguf_bytes([ARCH, string_key("tokenizer.ggml.tokens", "a")]), ["stored as string", "array of string"]),
    "bos": (
        gguf_bytes([ARCH, key("tokenizer.ggml.bos_token_id", 5, bytes(4))]),
        ["bos_token_id' is stored as int32", "expected uint32"],
    ),
    "context": (
        gguf_bytes([ARCH, string_key("llama.context_length", "8k")]),
        ["'llama.context_length' is stored as string", "expected uint32"],
    ),
    "alignment type": (gguf_bytes([ARCH, key("general.alignment", 10, bytes(8))]), ["stored as uint64", "uint32"]),
    "alignment 0": (gguf_bytes([ARCH, key("general.alignment", 4, bytes(4))]), ["is 0", "a power of two"]),
    "alignment 48": (gguf_bytes([ARCH, key("general.alignment", 4, b"\x30\0\0\0")]), ["is 48", "a power of two"]),
    "zero dimension": (gguf_bytes(tensors=[tensor("w", [4, 0])]), ["'w' has the dimensions [4, 0]", "1 or more"]),
    "huge dimensions": (gguf_bytes(tensors=[tensor("w", [2**32, 2**31])]), [f"dimensions [{2**32}, {2**31}]"]),
    "negative dimension": (gguf_bytes(tensors=[tensor("w", [U64_MAX])]), [f"dimensions [{U64_MAX}]"]),
    "five dimensions": (gguf_bytes(tensors=[tensor("w", [1] * 5)]), ["'w' has 5 dimensions", "at most 4"]),
    "many dimensions": (
        gguf_bytes(tensors=[string("w") + struct.pack("<I", 2**32 - 1) + bytes(40)]),
        [f"'w' has {2**32 - 1} dimensions"],
    ),
    "tensor type": (
        gguf_bytes(tensors=[tensor("w", [32], kind=999)]),
        ["'w' has the unknown type 999", "0 to 42", "update specli"],
    ),
    "removed type": (gguf_bytes(tensors=[tensor("w", [32], kind=4)]), ["'w' has the unknown type 4"]),
    "row": (gguf_bytes(tensors=[tensor("w", [48], kind=2)]), ["'w' has rows of 48", "a multiple of 32", "Q4_0"]),
    "tensor name": (
        gguf_bytes(tensors=[tensor("w" * 64, [1])], data=bytes(4)),
        ["tensor 0 has 64 bytes", "at most 63"],
    ),
    "same tensor": (
        gguf_bytes(tensors=[tensor("w", [1]), tensor("w", [1], offset=32)], data=bytes(64)),
        ["tensor 'w' is there twice"],
    ),
    "misaligned": (
        gguf_bytes(tensors=[tensor("v", [1]), tensor("w", [1], offset=4)], data=bytes(64)),
        ["'w' has offset 4, misaligned", "expected offset 32"],
    ),
    "overlap": (
        gguf_bytes(tensors=[tensor("v", [1]), tensor("w", [1], offset=0)], data=bytes(64)),
        ["'w' has offset 0, overlapping", "expected offset 32"],
    ),
    "gap": (gguf_bytes(tensors=[tensor("w", [1], offset=2**40)]), [f"offset {2**40}", "expected offset 0"]),
    "no data": (gguf_bytes(tensors=[tensor("w", [8])]), ["truncated: it has 128 bytes, 32 too few", "160 bytes"]),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults(save, kind: str) -> None:
    content, parts = FAULTS[kind]
    message = refusal(read_header, save(content))
    for part in parts:
        assert part in message


def test_array_with_more_elements_than_any_model_has(save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(gguf_bytes([ARCH, array_key("k", 8, 3, bytes(24))]))
    monkeypatch.setattr("specli.gguf_file.MAX_ELEMENTS", 2)
    assert "the array 'k' has 3 elements, expected at most 2" in refusal(read_header, path)
    monkeypatch.undo()
    assert len(read_header(path).metadata["k"]) == 3
    monkeypatch.setattr("specli.gguf_file.MAX_VALUE_BYTES", 23)
    assert "the array 'k' has 24 bytes, expected at most 23" in refusal(read_header, path)
    assert "has 30 bytes" in refusal(read_header, save(gguf_bytes([ARCH, string_key("k", "x" * 30)])))


@pytest.mark.parametrize("length", [0.5, 0.99, -1, 1000])
def test_truncated_model_says_both_sizes(tiny: Path, save, length: float) -> None:
    whole = tiny.read_bytes()
    cut = whole[: int(len(whole) * length) if 0 < length < 1 else int(length)]
    message = refusal(read_header, save(cut))
    assert str(len(cut)) in message
    if len(cut) > 100_000:
        header = read_header(tiny)
        assert f"{check_sizes(header) - len(cut)} too few, expected at least {check_sizes(header)} bytes" in message


def test_every_prefix_is_refused(save) -> None:
    keys = [ARCH, key("b", 7, b"\1"), array_key("n", 5, 3, bytes(12)), array_key("s", 8, 2, string("a") + string("bc"))]
    whole = gguf_bytes(keys, [tensor("v", [4, 2]), tensor("w", [32], kind=8, offset=32)], bytes(32 + 34))
    assert len(read_header(save(whole)).tensors) == 2
    for length in range(len(whole)):
        refusal(read_header, save(whole[:length]))


def _mutated(content: bytes, rng: random.Random) -> bytes:
    """``content`` with one to three faults: a byte, a length, a cut, a piece moved."""
    mutated = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(mutated))
        match rng.randrange(6):
            case 0:
                mutated[at] = rng.randrange(256)
            case 1:
                mutated[at] ^= 1 << rng.randrange(8)
            case 2:
                numbers = [0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, U64_MAX, len(content), len(content) // 8]
                mutated[at : at + 8] = struct.pack("<Q", rng.choice(numbers))
            case 3:
                mutated[at : at + 4] = struct.pack("<I", rng.randrange(16))
            case 4:
                del mutated[at:]
            case 5:
                start = rng.randrange(len(mutated))
                mutated[at:at] = mutated[start : start + rng.randrange(64)]
        if not mutated:
            break
    return bytes(mutated)


def _try(path: Path) -> str:
    """Read, check and compare; anything but success or a one-line ModelLoadError is a failure of the test."""
    try:
        header = read_header(path)
        VocabInfo.from_header(header)
        check_loadable(header, "draft")
    except ModelLoadError as error:
        return "refused" if str(error).isprintable() else "refused with a broken line"
    return "accepted"


def test_two_thousand_mutations(save, tmp_path: Path) -> None:
    good = write_tiny(tmp_path / "good.gguf", tokens=plain_tokens(259)[0][:40], n_embd=32, n_layer=1)
    content = good.read_bytes()
    n_header = read_header(good).data_offset
    head, data = content[:n_header], content[n_header:]
    rng = random.Random(20240607)
    outcomes = {"refused": 0, "accepted": 0}
    for number in range(2000):
        path = save(_mutated(head, rng) + data)
        if number % 10:
            outcomes[_try(path)] += 1
            continue
        tracemalloc.start()
        outcomes[_try(path)] += 1
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2_000_000  # bytes; the file has 0.1 MB
    assert outcomes["refused"] + outcomes["accepted"] == 2000
    assert min(outcomes.values()) > 100  # neither everything nor nothing is refused


@pytest.mark.parametrize("kind", ["array length", "string array length", "string in array", "keys", "key length"])
def test_claimed_sizes_are_not_allocated(save, kind: str) -> None:
    path = save(FAULTS[kind][0])
    tracemalloc.start()
    refusal(read_header, path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000


# -- can it be loaded --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mamba", "jamba"])
def test_models_are_loadable(tmp_path: Path, architecture: str) -> None:
    header = read_header(write_tiny(tmp_path / "m.gguf", architecture))
    assert check_loadable(header, "target") == (header,)
    assert check_loadable(header, "draft") == (header,)


NO_MODELS = {
    "vocabulary": ({"vocab_only": True}, ["a vocabulary only", "specli check-tokenizers"]),
    "clip": ({"architecture": "clip", "vocab_only": True}, ["a multimodal projector (mmproj)", "'clip'"]),
    "mmproj": ({"general.type": "mmproj"}, ["a multimodal projector (mmproj)"]),
    "adapter": ({"general.type": "adapter"}, ["an adapter (LoRA)"]),
    "imatrix": ({"general.type": "imatrix"}, ["an importance matrix"]),
    "bert": ({"architecture": "bert", "vocab_only": True}, ["an embedding model (encoder)", "'bert'"]),
    "nomic": ({"architecture": "nomic-bert", "vocab_only": True}, ["an embedding model (encoder)", "'nomic-bert'"]),
    "t5encoder": ({"architecture": "t5encoder", "vocab_only": True}, ["an embedding model (encoder)"]),
    "t5": ({"architecture": "t5", "vocab_only": True}, ["an encoder-decoder model"]),
    "diffusion": ({"architecture": "llada", "vocab_only": True}, ["a diffusion model"]),
    "eagle3": ({"architecture": "eagle3", "vocab_only": True}, ["a draft head", "'eagle3'"]),
    "medusa": ({"architecture": "medusa", "vocab_only": True}, ["a draft head", "'medusa'"]),
    "pooling": ({"llama.pooling_type": 3}, ["an embedding or reranking model (pooling type last)"]),
    "new pooling": ({"llama.pooling_type": 77}, ["pooling type 77"]),
    "not causal": ({"llama.attention.causal": False}, ["attention is not causal"]),
}


@pytest.mark.parametrize("kind", NO_MODELS)
def test_files_that_are_no_text_model(tmp_path: Path, kind: str) -> None:
    arguments, parts = NO_MODELS[kind]
    header = read_header(write_tiny(tmp_path / "m.gguf", **arguments))
    for role, option in (("target", "-m"), ("draft", "-md")):
        message = refusal(check_loadable, header, role)
        for part in [*parts, f"expected a complete text model as the {role}"]:
            assert part in message
        assert message.endswith(f"give {option} another file") or kind == "vocabulary"


def test_keys_that_say_the_usual_are_accepted(tmp_path: Path) -> None:
    usual = {"general.type": "model", "llama.pooling_type": 0, "llama.attention.causal": True}
    header = read_header(write_tiny(tmp_path / "m.gguf", **usual))
    assert check_loadable(header, "target") == (header,)


BAD_VOCABULARIES = {
    "no tokenizer": ({"tokenizer.ggml.model": None}, ["the file has no tokenizer"]),
    "none": ({"tokenizer.ggml.model": "none"}, ["the file has no tokenizer"]),
    "no tokens": ({"tokenizer.ggml.tokens": None}, ["tokenizer.ggml.tokens is missing"]),
    "short types": ({"token_types": [1] * 9}, ["token_type has 9 elements", "one for each of 272 tokens"]),
    "short scores": ({"tokenizer.ggml.scores": [0.5] * 9}, ["scores has 9 elements", "each of 272 tokens"]),
    "no merges": ({"tokenizer.ggml.merges": None}, ["tokenizer.ggml.merges is missing"]),
    "twice": ({"tokens": [*plain_tokens()[0], "!"]}, ["tokens 36 and 259 have the same text '!'"]),
    "twice to C": ({"tokens": [*plain_tokens()[0], b"!\0!"]}, ["tokens 36 and 259 have the same text '!'"]),
    "twice empty": ({"tokens": ["[EMPTY_3]", "a", "b", b"\0"]}, ["tokens 0 and 3 have the same text '[EMPTY_3]'"]),
}


@pytest.mark.parametrize("kind", BAD_VOCABULARIES)
def test_vocabularies_that_llama_cpp_refuses_or_aborts_on(tmp_path: Path, kind: str) -> None:
    arguments, parts = BAD_VOCABULARIES[kind]
    header = read_header(write_tiny(tmp_path / "m.gguf", **arguments))
    message = refusal(check_loadable, header, "target")
    for part in parts:
        assert part in message


def test_vocabularies_that_only_look_wrong(tmp_path: Path) -> None:
    for arguments in (
        {"tokens": [*plain_tokens()[0], "", b"\0a"]},  # llama.cpp: [EMPTY_259], [EMPTY_260]
        {"tokenizer.ggml.merges": None, "tokenizer.ggml.pre": "kimi-k2"},
        {"tokenizer.ggml.token_type": None},
    ):
        header = read_header(write_tiny(tmp_path / "m.gguf", **arguments))
        assert check_loadable(header, "target") == (header,)


def test_tensors_where_llama_cpp_aborts(tmp_path: Path, save) -> None:
    content = write_tiny(tmp_path / "v.gguf", vocab_only=True, **{"general.alignment": 8}).read_bytes()
    content = content[:8] + struct.pack("<Q", 1) + content[16:]  # one tensor
    places = set()
    for n_letters in range(1, 33, 8):
        head = content + tensor("w" * n_letters, [1])
        header = read_header(save(head + bytes(-len(head) % 8) + bytes(4)))
        places.add(header.data_offset % 32)
        if header.data_offset % 32 == 0:
            assert check_loadable(header, "target") == (header,)
        else:
            message = refusal(check_loadable, header, "target")
            assert f"lies at byte {header.data_offset} (general.alignment 8), expected a multiple of 32" in message
    assert places == {0, 8, 16, 24}


# -- shards ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    first = write_tiny(tmp_path / "m.gguf", split_max_tensors=7)
    paths = sorted(tmp_path.glob("m-*.gguf"))
    assert [path.name for path in paths] == [f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    assert paths[0] == first
    return paths


def test_first_shard_loads_all(shards: list[Path]) -> None:
    headers = check_loadable(read_header(shards[0]), "target")
    assert [header.path for header in headers] == shards
    assert [(header.split_no, header.split_count) for header in headers] == [(0, 3), (1, 3), (2, 3)]
    assert [header.architecture for header in headers] == ["llama", "", ""]
    assert sum(len(header.tensors) for header in headers) == 21


def test_first_shard_without_tensors_is_a_model(tmp_path: Path, shards: list[Path]) -> None:
    writer = gguf.GGUFWriter(tmp_path / "s.gguf", "llama", split_max_tensors=1, small_first_shard=True)
    writer.add_array("tokenizer.ggml.tokens", ["a"])
    writer.add_array("tokenizer.ggml.merges", ["a a"])
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_tensor("token_embd.weight", np.ones((1, 32), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    header = read_header(tmp_path / "s-00001-of-00002.gguf")
    assert (len(header.tensors), header.is_vocab_only) == (0, False)
    assert len(check_loadable(header, "target")) == 2


@pytest.mark.parametrize("number", [1, 2])
def test_later_shard_names_the_first(shards: list[Path], number: int) -> None:
    message = refusal(check_loadable, read_header(shards[number]), "draft")
    assert f"found shard {number + 1} of 3, expected the first one" in message
    assert message.endswith("give -md 'm-00001-of-00003.gguf'")


def test_later_shard_under_another_name(shards: list[Path]) -> None:
    message = refusal(check_loadable, read_header(shards[1].rename(shards[1].with_name("x.gguf"))), "target")
    assert "give -m the file that ends in -00001-of-….gguf" in message


def test_missing_shards_are_named(shards: list[Path]) -> None:
    header = read_header(shards[0])
    shards[2].unlink()
    assert "1 of 3 shards are missing: 'm-00003-of-00003.gguf', expected" in refusal(check_loadable, header, "target")
    shards[1].unlink()
    message = refusal(check_loadable, header, "target")
    assert "2 of 3 shards are missing: 'm-00002-of-00003.gguf', 'm-00003-of-00003.gguf', expected all 3" in message


def test_renamed_first_shard(shards: list[Path]) -> None:
    header = read_header(shards[0].rename(shards[0].with_name("model.gguf")))
    message = refusal(check_loadable, header, "target")
    assert "the first of 3 shards is named 'model.gguf', expected a name ending in -00001-of-00003.gguf" in message


def test_truncated_shard(shards: list[Path]) -> None:
    header = read_header(shards[0])
    whole = shards[2].read_bytes()
    shards[2].write_bytes(whole[: len(whole) // 2])
    message = refusal(check_loadable, header, "target")
    assert message.startswith(f"{shards[2]}: ")
    assert f"truncated: it has {len(whole) // 2} bytes" in message


def test_wrong_shard_under_a_right_name(shards: list[Path]) -> None:
    header = read_header(shards[0])
    shards[2].write_bytes(shards[1].read_bytes())
    assert "the file is shard 2 of 3, expected shard 3 of 3" in refusal(check_loadable, header, "target")
    shards[2].write_bytes(gguf_bytes())
    assert "the file is shard 1 of 1, expected shard 3 of 3" in refusal(check_loadable, header, "target")


def test_shards_of_another_model(shards: list[Path], tmp_path: Path) -> None:
    first = read_header(shards[0])
    (tmp_path / "other").mkdir()
    write_tiny(tmp_path / "other" / "m.gguf", "mamba", split_max_tensors=8)
    for path in shards[1:]:
        path.write_bytes((tmp_path / "other" / path.name).read_bytes())
    message = refusal(check_loadable, first, "target")
    assert "the 3 shards hold 22 tensors, expected 21 (split.tensors.count)" in message
    split = [key("split.no", 2, b"\2\0"), key("split.count", 2, b"\3\0")]
    shards[2].write_bytes(gguf_bytes(split, [tensor("token_embd.weight", [1])], bytes(4)))
    assert "'token_embd.weight' is in an earlier shard too" in refusal(check_loadable, first, "target")


# -- llama.cpp ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    """The library, whose log ``LOG`` takes: another callback would take it away from every later test."""
    import llama_cpp

    import specli.engine.log  # noqa: F401

    return llama_cpp


@pytest.mark.parametrize("split", [0, 7])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mamba", "jamba"])
def test_llama_cpp_loads_what_is_accepted(tmp_path: Path, llama, architecture: str, split: int) -> None:
    path = write_tiny(tmp_path / "m.gguf", architecture, split_max_tensors=split)
    check_loadable(read_header(path), "target")
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    assert model
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 64, 1, 1
    context = llama.llama_init_from_model(model, params)
    vocab = llama.llama_model_get_vocab(model)
    ids = (llama.llama_token * 64)()
    text = "<|im_start|>é 日\n".encode()
    n_ids = llama.llama_tokenize(vocab, text, len(text), ids, 64, True, True)
    assert ids[:n_ids] == [1, *(3 + byte for byte in "é 日\n".encode())]
    piece = ctypes.create_string_buffer(32)
    sizes_and_pieces = [(llama.llama_token_to_piece(vocab, i, piece, 32, 0, True), piece.raw) for i in ids[:n_ids]]
    assert b"".join(raw[:size] for size, raw in sizes_and_pieces) == text
    assert llama.llama_decode(context, llama.llama_batch_get_one(ids, n_ids)) == 0
    row = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (272,))
    assert np.isfinite(row).all()
    assert row.std() > 1
    # what makes mamba and jamba fixtures: they cannot drop a tail
    is_cut = llama.llama_memory_seq_rm(llama.llama_get_memory(context), 0, 1, -1)
    assert is_cut == (architecture not in ("mamba", "jamba"))
    llama.llama_free(context)
    llama.llama_model_free(model)


def test_noise_makes_a_draft_of_its_own(tmp_path: Path) -> None:
    paths = [write_tiny(tmp_path / f"{noise}.gguf", noise=noise) for noise in (0.0, 0.1)]
    contents = [path.read_bytes() for path in paths]
    data_offset = read_header(paths[0]).data_offset
    assert contents[0][:data_offset] == contents[1][:data_offset]
    assert contents[0] != contents[1]
    assert write_tiny(tmp_path / "again.gguf").read_bytes() == contents[0]


def test_shown_is_short_and_printable() -> None:
    assert shown(b"\xff\n") == r"'�\n'"
    assert shown("x" * 99, 5) == "'xxxx…'"
    assert len(shown("日".encode() * 999)) == 42
