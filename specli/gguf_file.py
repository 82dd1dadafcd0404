"""GGUF headers, read without touching the weights, and the reasons why a file cannot be loaded.

llama.cpp answers every bad file with the same "failed to load model", and aborts the process for some, so specli
looks first. The rules are those of llama.cpp's ``ggml/src/gguf.cpp``, ``src/llama-model-loader.cpp`` and
``src/llama-vocab.cpp``.

Layout (little-endian; versions 2 and 3 are alike):

    magic "GGUF" | u32 version | u64 tensors | u64 keys
    per key:     string name | u32 type | value          a string is u64 length + bytes
    per tensor:  string name | u32 n_dims | u64 dims | u32 ggml type | u64 offset
    padding to general.alignment (32) | tensor data, each tensor padded to the alignment

``gguf.GGUFReader`` takes 14 s for a vocabulary of 152k tokens, this walker 0.04 s. Every length is checked against the
bytes that are left before anything is read or allocated.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from specli.errors import ModelLoadError

Role = Literal["target", "draft"]
NumberArray: TypeAlias = NDArray[Any]

SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # bytes, GGUF_DEFAULT_ALIGNMENT
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NAME_BYTES = 63  # of a tensor name, GGML_MAX_NAME - 1
MAX_VALUE_BYTES = 1 << 28  # of one string or array; the largest known array has under 1 << 24
MAX_ELEMENTS = 1 << 24  # of one array; the largest known has under 1 << 20

_GET_AGAIN = "the file is truncated or damaged, download or convert it again"

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # name length, a name of one byte, type, a value of one byte
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # name length, n_dims, type, offset


class _Kind(NamedTuple):
    """A fixed-size value type of a key."""

    name: str
    format: struct.Struct
    dtype: str


_STRING, _ARRAY = 8, 9
_KINDS = {
    0: _Kind("uint8", struct.Struct("<B"), "u1"),
    1: _Kind("int8", struct.Struct("<b"), "i1"),
    2: _Kind("uint16", struct.Struct("<H"), "<u2"),
    3: _Kind("int16", struct.Struct("<h"), "<i2"),
    4: _Kind("uint32", _U32, "<u4"),
    5: _Kind("int32", struct.Struct("<i"), "<i4"),
    6: _Kind("float32", struct.Struct("<f"), "<f4"),
    7: _Kind("bool", struct.Struct("<?"), "?"),
    10: _Kind("uint64", _U64, "<u8"),
    11: _Kind("int64", struct.Struct("<q"), "<i8"),
    12: _Kind("float64", struct.Struct("<d"), "<f8"),
}

# The types that llama.cpp insists on: GGUFMeta::GKV::get_kv and llama_vocab::impl::load throw for any other, and
# another type of a shard's split.no aborts the process. "{arch}" stands for general.architecture.
_REQUIRED_TYPES: dict[str, tuple[str, ...]] = {
    "general.architecture": ("string",),
    "general.alignment": ("uint32",),
    "split.no": ("uint16",),
    "split.count": ("uint16",),
    "split.tensors.count": ("int32",),
    "tokenizer.ggml.model": ("string",),
    "tokenizer.ggml.pre": ("string",),
    "tokenizer.ggml.tokens": ("array of string",),
    "tokenizer.ggml.token_type": ("array of int32",),
    "tokenizer.ggml.scores": ("array of float32", "array of int32"),
    "tokenizer.ggml.merges": ("array of string",),
    "tokenizer.ggml.bos_token_id": ("uint32",),
    "tokenizer.ggml.eos_token_id": ("uint32",),
    "tokenizer.ggml.eot_token_id": ("uint32",),
    "tokenizer.ggml.add_bos_token": ("bool",),
    "tokenizer.ggml.add_eos_token": ("bool",),
    "{arch}.context_length": ("uint32",),
    "{arch}.vocab_size": ("uint32",),
    "{arch}.pooling_type": ("uint32",),
    "{arch}.attention.causal": ("bool",),
}

# ggml type id -> (name, elements per block, bytes per block): ggml.h and ggml-common.h of llama-cpp-python 0.3.36.
# Not taken from the `gguf` package: importing it costs 0.3 s at every start, it lacks Q2_0 and has 40 bytes for Q8_1,
# and a type that it knows and llama.cpp does not must be refused anyway. A test compares them with ggml itself.
GGML_TYPES: Mapping[int, tuple[str, int, int]] = MappingProxyType(
    {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        9: ("Q8_1", 32, 36),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1),
        25: ("I16", 1, 2),
        26: ("I32", 1, 4),
        27: ("I64", 1, 8),
        28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36),
        41: ("Q1_0", 128, 18),
        42: ("Q2_0", 64, 18),
    }
)

# Architectures that llama.cpp loads but that cannot write text token by token alone: src/llama-arch.cpp, and the
# files of src/models that switch causal attention off.
_ENCODER = "an embedding model (encoder)"
_DIFFUSION = "a diffusion model"
_HEAD = "a draft head that needs its target's hidden states"
_CANNOT_DECODE: Mapping[str, str] = MappingProxyType(
    {
        "bert": _ENCODER,
        "modern-bert": _ENCODER,
        "nomic-bert": _ENCODER,
        "nomic-bert-moe": _ENCODER,
        "neo-bert": _ENCODER,
        "jina-bert-v2": _ENCODER,
        "jina-bert-v3": _ENCODER,
        "eurobert": _ENCODER,
        "gemma-embedding": _ENCODER,
        "llama-embed": _ENCODER,
        "t5encoder": _ENCODER,
        "t5": "an encoder-decoder model",
        "dream": _DIFFUSION,
        "llada": _DIFFUSION,
        "llada-moe": _DIFFUSION,
        "rnd1": _DIFFUSION,
        "eagle3": _HEAD,
        "medusa": _HEAD,
        "dflash": _HEAD,
        "gemma4-assistant": _HEAD,
        "clip": "a multimodal projector (mmproj)",
        "wavtokenizer-dec": "an audio decoder",
    }
)
_OTHER_TYPES: Mapping[str, str] = MappingProxyType(
    {"adapter": "an adapter (LoRA)", "mmproj": "a multimodal projector (mmproj)", "imatrix": "an importance matrix"}
)
_POOLING = ("none", "mean", "cls", "last", "rank")  # enum llama_pooling_type
_BPE_MODELS = ("gpt2", "hybriddna", "whitespace", "gemma4")  # the tokenizers that need merges
_SHARD_NAME = re.compile(r"(?P<prefix>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class StringArray(Sequence[bytes]):
    """An array of strings as it lies in the file; ``array[i]`` is the bytes of string i.

    ``raw`` holds all strings, each behind its length (u64), so equal arrays have equal ``raw``; ``starts``, uint64
    ``(n + 1,)``, holds the place of each length in ``raw``, and the end.
    """

    __slots__ = ("raw", "starts")

    def __init__(self, raw: bytes, starts: NDArray[np.uint64]) -> None:
        self.raw, self.starts = raw, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self._texts(start, max(start, stop))
            return [self[i] for i in range(start, stop, step)]
        i = index + len(self) if index < 0 else index
        if not 0 <= i < len(self):
            raise IndexError(f"string {index} of an array of {len(self)}")
        return self.raw[int(self.starts[i]) + 8 : int(self.starts[i + 1])]

    def _texts(self, start: int, stop: int) -> list[bytes]:
        edges = self.starts[start : stop + 1].tolist()
        raw = self.raw
        return [raw[begin + 8 : end] for begin, end in pairwise(edges)]

    def head(self, n: int) -> bytes:
        """The first ``n`` strings with their lengths, to compare two arrays without unpacking them."""
        return self.raw[: int(self.starts[n])]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StringArray) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings, {len(self.raw)} bytes)"


Value: TypeAlias = "bool | int | float | str | StringArray | NumberArray"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``shape`` as ggml orders it (row length first), ``offset`` in bytes from ``data_offset``."""

    name: str
    shape: tuple[int, ...]
    ggml_type: str
    offset: int
    n_bytes: int


@dataclass(frozen=True, eq=False)
class GgufHeader:
    """What a GGUF file says about itself. Sizes and offsets in bytes.

    ``metadata`` maps a key to a bool, int, float, str, ``StringArray`` or read-only numpy array, and ``value_types``
    to the stored type (``"uint32"``, ``"array of string"``). Properties are None where the file does not say.
    """

    path: Path
    version: int
    architecture: str  # "" in all but the first shard of a split model
    metadata: Mapping[str, Value] = field(repr=False)
    value_types: Mapping[str, str] = field(repr=False)
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    file_size: int
    alignment: int
    data_offset: int

    def with_overrides(self, values: Mapping[str, bool | int | float | str]) -> GgufHeader:
        """The same with other metadata (``--override-kv``); llama.cpp takes no value of another type, nor does this."""
        taken = {key: value for key, value in values.items() if _is_like(self.metadata.get(key), value)}
        return replace(self, metadata=MappingProxyType({**self.metadata, **taken})) if taken else self

    def hparam(self, name: str) -> Value | None:
        """The value of ``<architecture>.<name>``, for example ``block_count``."""
        return self.metadata.get(f"{self.architecture}.{name}")

    def _int(self, key: str) -> int | None:
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def _str(self, key: str) -> str | None:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def _strings(self, key: str) -> StringArray | None:
        value = self.metadata.get(key)
        return value if isinstance(value, StringArray) else None

    def _numbers(self, key: str) -> NumberArray | None:
        value = self.metadata.get(key)
        return value if isinstance(value, np.ndarray) else None

    @property
    def name(self) -> str | None:
        """The model's name for people (``general.name``)."""
        return self._str("general.name")

    @property
    def n_vocab(self) -> int | None:
        """Tokens in the vocabulary."""
        return self._int(f"{self.architecture}.vocab_size") if self.tokens is None else len(self.tokens)

    @property
    def context_length(self) -> int | None:
        """Tokens that the model was trained for."""
        return self._int(f"{self.architecture}.context_length")

    @property
    def split_count(self) -> int:
        """Files that the model is split into, 1 if it is not split."""
        return max(1, self._int("split.count") or 1)

    @property
    def split_no(self) -> int:
        """Which shard this is, from 0."""
        return self._int("split.no") or 0

    @property
    def is_vocab_only(self) -> bool:
        """No tensors; the first shard of a split model may have none and still be a model."""
        return not self.tensors and self.split_count == 1

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template."""
        return self._str("tokenizer.chat_template")

    @property
    def tokenizer_model(self) -> str | None:
        """The tokenizer algorithm as GGUF names it: ``gpt2`` (BPE), ``llama`` (SentencePiece) and others."""
        return self._str("tokenizer.ggml.model")

    @property
    def tokenizer_pre(self) -> str | None:
        """The pre-tokenizer (how text is cut before BPE)."""
        return self._str("tokenizer.ggml.pre")

    @property
    def tokens(self) -> StringArray | None:
        """The text of each token id."""
        return self._strings("tokenizer.ggml.tokens")

    @property
    def token_types(self) -> NumberArray | None:
        """The type of each token id, int32 ``(n,)``: 1 normal, 2 unknown, 3 control, 4 user, 5 unused, 6 byte."""
        return self._numbers("tokenizer.ggml.token_type")

    @property
    def scores(self) -> NumberArray | None:
        """The score of each token id, float32 or int32 ``(n,)``."""
        return self._numbers("tokenizer.ggml.scores")

    @property
    def merges(self) -> StringArray | None:
        """The BPE merges, the first first."""
        return self._strings("tokenizer.ggml.merges")


def _is_like(old: Value | None, new: bool | int | float | str) -> bool:
    """Whether ``new`` may stand for ``old``; bool is no int here."""
    return old is None or type(old) is type(new)


def shown(raw: bytes | str, limit: int = 40) -> str:
    """``raw`` quoted on one line for a message, unprintable parts escaped, at most ``limit`` characters of it."""
    text = raw[: 4 * limit].decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def fault(path: Path, found: str, expected: str, advice: str) -> ModelLoadError:
    """The error for the file at ``path``: what was found, what was expected, what to do."""
    return ModelLoadError(f"{_one_line(path)}: {found}, expected {expected}; {advice}")


def _one_line(path: Path) -> str:
    text = str(path)
    return text if text.isprintable() else repr(text)


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Read and check the header of the GGUF file at ``path``; no weights are read, the file is closed again.

    Raises ``ModelLoadError`` with one line for anything that is not a whole, well-formed GGUF file.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise _directory_fault(path)
        if not stat.S_ISREG(mode):  # opening a named pipe would wait forever
            raise fault(path, "found a device or a pipe", "a GGUF file", "give the file itself")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise fault(path, "found an empty file", "a GGUF file", "download it again")
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as view:
                return _Walker(path, view, size).header()
    except FileNotFoundError:
        raise fault(path, "found no such file", "a GGUF file", "check the path") from None
    except PermissionError:
        raise fault(path, "found a file that may not be read", "read permission", "check it with ls -l") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, a size that changed meanwhile
        raise fault(path, f"reading failed ({error})", "a readable GGUF file", "check the path") from error


def _directory_fault(path: Path) -> ModelLoadError:
    inside = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(".gguf"))
    first = [name for name in inside if not _SHARD_NAME.fullmatch(name) or "-00001-of-" in name]
    advice = f"give one of its files: {', '.join(shown(name) for name in first[:3])}" if first else "it holds none"
    return fault(path, "found a directory", "a GGUF file", advice)


class _Walker:
    """Reads a header from front to back. ``position`` never passes ``size``."""

    def __init__(self, path: Path, view: mmap.mmap, size: int) -> None:
        self.path, self.view, self.size = path, view, size
        self.position = 0

    def header(self) -> GgufHeader:
        version = self._version()
        n_tensors, n_keys = self._count("tensors", _MIN_TENSOR_BYTES), self._count("metadata keys", _MIN_KEY_BYTES)
        metadata: dict[str, Value] = {}
        value_types: dict[str, str] = {}
        for number in range(n_keys):
            key = self._key(number, metadata)
            metadata[key], value_types[key] = self._value(key)
        architecture = self._architecture(metadata, value_types)
        alignment = self._alignment(metadata)
        tensors = self._tensors(n_tensors, alignment)
        data_offset = _padded(self.position, alignment) if tensors else self.position
        self._check_data(tensors, data_offset)
        return GgufHeader(
            path=self.path,
            version=version,
            architecture=architecture,
            metadata=MappingProxyType(metadata),
            value_types=MappingProxyType(value_types),
            tensors=tensors,
            file_size=self.size,
            alignment=alignment,
            data_offset=data_offset,
        )

    # -- bytes ---------------------------------------------------------------------------------------------------

    def _fault(self, found: str, expected: str, advice: str = _GET_AGAIN) -> ModelLoadError:
        return fault(self.path, found, expected, advice)

    def _take(self, n_bytes: int, what: str) -> int:
        """Step over ``n_bytes`` and return where they begin."""
        start = self.position
        if n_bytes > self.size - start:
            left = f"no more than the {self.size - start} bytes that are left of {self.size}"
            raise self._fault(f"{what} needs {n_bytes} bytes at byte {start}", left)
        self.position = start + n_bytes
        return start

    def _u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.view, self._take(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.view, self._take(8, what))[0])

    def _string(self, what: str, limit: int) -> bytes:
        length = self._u64(f"the length of {what}")
        start = self._take(length, what)
        if length > limit:
            raise self._fault(f"{what} has {length} bytes", f"at most {limit}")
        return self.view[start : start + length]

    # -- head ----------------------------------------------------------------------------------------------------

    def _version(self) -> int:
        magic = self.view[:4]
        if magic != b"GGUF":
            first = self.view[:512]
            hint = _looks_like(first, self.size)
            found = f"the file begins with {shown(first[:8])}" + (f" and looks like {hint[0]}" if hint else "")
            raise self._fault(found, "'GGUF'", hint[1] if hint else "give a GGUF file")
        self.position = 4
        version = self._u32("the version")
        if version & 0xFFFF == 0 and version:  # the test of gguf.cpp: the bytes are the other way round
            raise self._fault("found a big-endian GGUF file", "a little-endian one", "convert it for this machine")
        if version not in SUPPORTED_VERSIONS:
            advice = "convert it again" if version < SUPPORTED_VERSIONS[0] else "update specli, or convert it again"
            raise self._fault(f"found GGUF version {version}", "version 2 or 3", advice)
        return version

    def _count(self, what: str, min_bytes: int) -> int:
        count = self._u64(f"the number of {what}")
        left = self.size - self.position
        if count * min_bytes > left:
            found = f"the file claims {count} {what}, at least {count * min_bytes} bytes"
            raise self._fault(found, f"a number that fits the {left} bytes that are left of {self.size}")
        return count

    # -- metadata ------------------------------------------------------------------------------------------------

    def _key(self, number: int, seen: Mapping[str, Value]) -> str:
        raw = self._string(f"the name of metadata key {number}", 1 << 16)
        key = raw.decode("utf-8", "backslashreplace")
        if not key:
            raise self._fault(f"metadata key {number} has no name", "a name for each key")
        if key in seen:
            raise self._fault(f"metadata key {shown(key)} is there twice", "each key once")
        return key

    def _value(self, key: str) -> tuple[Value, str]:
        what = f"the value of {shown(key)}"
        kind = self._u32(f"the type of {shown(key)}")
        if kind == _STRING:
            return self._string(what, MAX_VALUE_BYTES).decode("utf-8", "replace"), "string"
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _KINDS:
            raise self._fault(f"{what} has the unknown type {kind}", "a GGUF value type, 0 to 12")
        known = _KINDS[kind]
        value = known.format.unpack_from(self.view, self._take(known.format.size, what))[0]
        return value, known.name

    def _array(self, key: str) -> tuple[Value, str]:
        what = f"the array {shown(key)}"
        kind = self._u32(f"the element type of {what}")
        if kind != _STRING and kind not in _KINDS:  # arrays of arrays: gguf.cpp refuses them too
            raise self._fault(f"{what} has elements of the unknown type {kind}", "strings or numbers")
        item_bytes = 8 if kind == _STRING else _KINDS[kind].format.size
        count = self._count(f"elements in {what}", item_bytes)
        if count > MAX_ELEMENTS:
            raise self._fault(f"{what} has {count} elements", f"at most {MAX_ELEMENTS}")
        if kind == _STRING:
            return self._strings(count, what), "array of string"
        known = _KINDS[kind]
        start = self._take(count * item_bytes, what)
        raw = self.view[start : self.position]
        numbers = np.frombuffer(raw, np.uint8) != 0 if known.name == "bool" else np.frombuffer(raw, known.dtype)
        numbers.flags.writeable = False
        return numbers, f"array of {known.name}"

    def _strings(self, count: int, what: str) -> StringArray:
        begin = position = self.position
        view, last = self.view, self.size - 8
        length_at = _U64.unpack_from
        starts = array("Q")
        append = starts.append
        for _ in range(count):
            if position > last:
                break
            append(position)
            position += 8 + length_at(view, position)[0]
        if len(starts) < count or position > self.size:
            number, end = len(starts), position + 8  # the length of the next string does not fit, or ...
            if position > self.size:
                number, end = number - 1, position
            found = f"string {number} of {count} in {what} needs the file up to byte {end}"
            raise self._fault(found, f"no more than its {self.size} bytes")
        if position - begin > MAX_VALUE_BYTES:
            raise self._fault(f"{what} has {position - begin} bytes", f"at most {MAX_VALUE_BYTES}")
        append(position)
        self.position = position
        return StringArray(view[begin:position], np.frombuffer(starts, np.uint64) - np.uint64(begin))

    def _architecture(self, metadata: Mapping[str, Value], value_types: Mapping[str, str]) -> str:
        value = metadata.get("general.architecture", "")
        architecture = value if isinstance(value, str) else ""
        for pattern, allowed in _REQUIRED_TYPES.items():
            key = pattern.replace("{arch}", architecture)
            found = value_types.get(key)
            if found is not None and found not in allowed:
                raise self._fault(
                    f"{shown(key, 80)} is stored as {found}", " or ".join(allowed), "convert the model again"
                )
        if not architecture and not metadata.get("split.no"):  # later shards carry split.* only
            raise self._fault("general.architecture is missing", "the name of an architecture", "convert it again")
        return architecture

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        alignment = value if isinstance(value, int) else 0
        if alignment < 1 or alignment & (alignment - 1):
            raise self._fault(f"general.alignment is {alignment}", "a power of two", "convert it again")
        return alignment

    # -- tensors -------------------------------------------------------------------------------------------------

    def _tensors(self, count: int, alignment: int) -> tuple[TensorInfo, ...]:
        tensors: list[TensorInfo] = []
        seen: set[str] = set()
        expected = 0
        for number in range(count):
            tensor = self._tensor(number)
            if tensor.name in seen:
                raise self._fault(f"tensor {shown(tensor.name)} is there twice", "each tensor once")
            if tensor.offset != expected:  # gguf.cpp: back to back, each padded to the alignment
                wrong = "misaligned" if tensor.offset % alignment else "overlapping or apart from its neighbour"
                raise self._fault(
                    f"tensor {shown(tensor.name)} has offset {tensor.offset}, {wrong}", f"offset {expected}"
                )
            seen.add(tensor.name)
            tensors.append(tensor)
            expected += _padded(tensor.n_bytes, alignment)
        return tuple(tensors)

    def _tensor(self, number: int) -> TensorInfo:
        raw = self._string(f"the name of tensor {number}", MAX_NAME_BYTES)
        name = raw.decode("utf-8", "backslashreplace")
        what = f"tensor {shown(name)}"
        n_dims = self._u32(f"the number of dimensions of {what}")
        if n_dims > MAX_DIMS:
            raise self._fault(f"{what} has {n_dims} dimensions", f"at most {MAX_DIMS}")
        shape = tuple(self._u64(f"the dimensions of {what}") for _ in range(n_dims))
        n_elements = 1
        for size in shape:
            n_elements *= size
        if not 0 < n_elements < 1 << 63:
            raise self._fault(f"{what} has the dimensions {list(shape)}", "dimensions of 1 or more that fit a file")
        kind = self._u32(f"the type of {what}")
        if kind not in GGML_TYPES:
            known = f"one of the {len(GGML_TYPES)} types that this llama.cpp knows (0 to {max(GGML_TYPES)})"
            raise self._fault(f"{what} has the unknown type {kind}", known, "update specli, or quantize it otherwise")
        type_name, block, block_bytes = GGML_TYPES[kind]
        row = shape[0] if shape else 1
        if row % block:
            raise self._fault(f"{what} has rows of {row} elements", f"a multiple of {block}, the block of {type_name}")
        offset = self._u64(f"the offset of {what}")
        return TensorInfo(name, shape, type_name, offset, n_elements // block * block_bytes)

    def _check_data(self, tensors: Sequence[TensorInfo], data_offset: int) -> None:
        """The last tensor must end inside the file; its padding may be missing."""
        if not tensors:
            return
        needed = data_offset + tensors[-1].offset + tensors[-1].n_bytes
        if self.size < needed:
            raise self._fault(
                f"the file is truncated: it has {self.size} bytes, {needed - self.size} too few",
                f"at least {needed} bytes for {len(tensors)} tensors",
                "download or copy it again",
            )


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment


def _looks_like(first: bytes, size: int) -> tuple[str, str] | None:
    """What a file is that begins with ``first``, and what to do about it."""
    text = first.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    json_bytes = _U64.unpack_from(first)[0] if len(first) > 8 else 0
    if 0 < json_bytes < size and first[8:9] == b"{":
        return "a safetensors file", "convert it with llama.cpp's convert_hf_to_gguf.py"
    if first.startswith(b"PK\x03\x04"):
        return "a zip archive or a PyTorch checkpoint", "unpack it, or convert it with convert_hf_to_gguf.py"
    if first[:1] == b"\x80" and first[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a PyTorch checkpoint (pickle)", "convert it with llama.cpp's convert_hf_to_gguf.py"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "a web page, so the download failed", "download the file itself (a /resolve/ link, not /blob/)"
    if text.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer", "fetch the file itself with git lfs pull"
    if first[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "a GGML file from before GGUF", "get the model as GGUF"
    if text.startswith((b"{", b"[")):
        return "JSON text, perhaps a server's error answer", "download the file again"
    if b"GGUF".startswith(first):
        return "the first bytes of a GGUF file", "download it again"
    if not first.strip(b"\0"):
        return "a download that was never finished (zeros)", "download it again"
    return None


# -- can it be loaded ------------------------------------------------------------------------------------------------


def check_loadable(header: GgufHeader, role: Role) -> tuple[GgufHeader, ...]:
    """Say why the model of ``header`` cannot be the ``role``, or return the headers of all its files, in order.

    Raises ``ModelLoadError`` for a shard that is not the first, for shards that are missing or do not belong together,
    for anything that is no model that writes text, and for vocabularies that llama.cpp refuses or aborts on.
    """
    option = "-m" if role == "target" else "-md"
    if header.split_no > 0:
        first = _shard_path(header, 0)
        raise fault(
            header.path,
            f"found shard {header.split_no + 1} of {header.split_count}",
            "the first one",
            f"give {option} {shown(first.name, 200) if first else 'the file that ends in -00001-of-….gguf'}",
        )
    reason = _no_text_model(header)
    if reason:
        found, advice = reason
        expected = f"a complete text model as the {role}"
        raise fault(header.path, f"the file is {found}", expected, advice or f"give {option} another file")
    _check_sizes(header)
    check_vocabulary(header)
    check_loading_vocabulary(header)
    headers = _shards(header)
    for shard in headers:
        _check_data_alignment(shard)
    return headers


def _no_text_model(header: GgufHeader) -> tuple[str, str] | None:
    """What the file is if it cannot write text, and special advice."""
    kind = str(header.metadata.get("general.type", ""))
    pooling = header.hparam("pooling_type")
    if kind in _OTHER_TYPES:
        return _OTHER_TYPES[kind], ""
    if header.architecture in _CANNOT_DECODE:
        return f"{_CANNOT_DECODE[header.architecture]}, architecture {shown(header.architecture)}", ""
    if isinstance(pooling, int) and pooling > 0:
        name = _POOLING[pooling] if pooling < len(_POOLING) else str(pooling)
        return f"an embedding or reranking model (pooling type {name})", ""
    if header.hparam("attention.causal") is False:
        return "an embedding or diffusion model (attention is not causal)", ""
    if header.is_vocab_only:
        return "a vocabulary only, without weights", "use it with `specli check-tokenizers`, or give a model's file"
    return None


_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS of llama-hparams.h
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_ONE_EXPERT_IS_NONE = ("hunyuan_vl", "hunyuan-dense")


def _check_sizes(header: GgufHeader) -> None:
    """The numbers that ``llama_model_base::load_hparams`` asserts, which would end the process.

    And a context that its own int32 can hold.
    """

    def number(name: str, default: int) -> int:
        value = header.hparam(name)
        largest = value.max(initial=0) if isinstance(value, np.ndarray) else value
        return int(largest) if isinstance(largest, int | np.integer) else default

    n_layer, n_expert, n_groups = number("block_count", 1), number("expert_count", 0), number("expert_group_count", 0)
    n_used, n_groups_used = number("expert_used_count", 0), number("expert_group_used_count", 0)
    if header.architecture in _ONE_EXPERT_IS_NONE and n_expert <= 1:
        n_expert = n_used = 0
    scaling = header.hparam("rope.scaling.type")
    rules = (
        ("context_length", 0 < number("context_length", 1) < 1 << 31, "1 token or more that an int32 can count"),
        ("block_count", 0 < n_layer <= _MAX_LAYERS, f"1 to {_MAX_LAYERS} layers"),
        ("nextn_predict_layers", number("nextn_predict_layers", 0) <= n_layer, f"at most block_count ({n_layer})"),
        ("expert_count", 0 <= n_expert <= _MAX_EXPERTS, f"0 to {_MAX_EXPERTS} experts"),
        ("expert_used_count", (n_used > 0) == (n_expert > 0) and n_used <= n_expert, f"some of {n_expert} experts"),
        ("expert_group_count", n_groups < max(1, n_expert), f"less than expert_count ({n_expert})"),
        ("expert_group_count", n_groups < 2 or n_expert % n_groups == 0, f"a divisor of expert_count ({n_expert})"),
        ("expert_group_used_count", n_groups < 2 or 0 < n_groups_used < n_groups, f"some of {n_groups} groups"),
        ("rope.scaling.type", scaling is None or scaling in _ROPE_SCALINGS, f"one of {', '.join(_ROPE_SCALINGS)}"),
    )
    for name, is_right, expected in rules:
        if not is_right:
            found = header.hparam(name)
            what = shown(found) if isinstance(found, str) else "missing" if found is None else found
            raise fault(header.path, f"{header.architecture}.{name} is {what}", expected, "convert the model again")


def check_vocabulary(header: GgufHeader) -> StringArray:
    """The tokens of ``header``. Raises ``ModelLoadError`` if it has no tokenizer, no tokens, or arrays too short."""
    model, tokens = header.tokenizer_model, header.tokens
    if model is None or model in ("none", "no_vocab"):
        raise fault(header.path, "the file has no tokenizer", "tokenizer.ggml.model", "convert it with its tokenizer")
    if not tokens:
        found = "tokenizer.ggml.tokens is " + ("missing" if tokens is None else "empty")
        raise fault(header.path, found, "at least one token", "convert the model again")
    for key, values in (("token_type", header.token_types), ("scores", header.scores)):
        if values is not None and len(values) < len(tokens):
            found = f"tokenizer.ggml.{key} has {len(values)} elements"
            raise fault(header.path, found, f"one for each of {len(tokens)} tokens", "convert the model again")
    return tokens


def check_loading_vocabulary(header: GgufHeader) -> None:
    """Two faults of a vocabulary that llama.cpp meets only when it loads one."""
    if header.tokenizer_model in _BPE_MODELS and header.merges is None and header.tokenizer_pre != "kimi-k2":
        raise fault(
            header.path, "tokenizer.ggml.merges is missing", "the merges of a BPE tokenizer", "convert the model again"
        )
    texts = header.tokens[:] if header.tokens else []
    if b"\0" in b"".join(texts) or b"" in texts:  # llama.cpp reads C strings, and names the empty ones
        texts = [text.partition(b"\0")[0] or b"[EMPTY_%d]" % i for i, text in enumerate(texts)]
    if len(set(texts)) == len(texts):
        return
    first: dict[bytes, int] = {}
    for i, text in enumerate(texts):
        if first.setdefault(text, i) != i:  # GGML_ASSERT(id_to_token.size() == token_to_id.size()) aborts the process
            found = f"tokens {first[text]} and {i} have the same text {shown(text)}"
            raise fault(header.path, found, "a text of its own for each token", "convert the model again")


_LORA_PAIR = (".lora_a", ".lora_b")


def check_adapter(adapter: GgufHeader, model: Sequence[GgufHeader]) -> None:
    """Say why ``adapter`` is no LoRA adapter for ``model`` (the headers of its files).

    The rules are those of llama.cpp's ``src/llama-adapter.cpp``. Raises ``ModelLoadError``.
    """
    advice = "give --lora an adapter that convert_lora_to_gguf.py made for this model"
    expected = f"a LoRA adapter for architecture {shown(model[0].architecture)}"
    kind, form = adapter.metadata.get("general.type"), adapter.metadata.get("adapter.type")
    if kind != "adapter":
        what = _OTHER_TYPES.get(str(kind), "a model" if adapter.tensors else "a vocabulary only, without weights")
        raise fault(adapter.path, f"the file is {what}", expected, advice)
    if form != "lora":
        raise fault(adapter.path, f"the file is an adapter of type {shown(str(form))}", expected, advice)
    if adapter.architecture != model[0].architecture:
        found = f"the adapter is for architecture {shown(adapter.architecture)}"
        raise fault(adapter.path, found, expected, advice)
    shapes = {tensor.name: tensor.shape for header in model for tensor in header.tensors}
    parts = {tensor.name: tensor.shape for tensor in adapter.tensors if not tensor.name.endswith("_norm.weight")}
    if not parts:
        raise fault(adapter.path, "the adapter has no tensors", expected, advice)
    for name in parts:
        _check_pair(adapter.path, name, parts, shapes, advice)


def _check_pair(
    path: Path, name: str, parts: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], advice: str
) -> None:
    """One tensor of an adapter: its partner is there, and both fit the weight that they lie over."""
    base, end = name[:-7], name[-7:]
    if end not in _LORA_PAIR:
        raise fault(path, f"tensor {shown(name, 80)} is no half of a LoRA pair", "names in .lora_a and .lora_b", advice)
    if any(base + half not in parts for half in _LORA_PAIR):
        raise fault(path, f"tensor {shown(name, 80)} has no partner", "pairs of .lora_a and .lora_b", advice)
    a, b = (parts[base + half] for half in _LORA_PAIR)
    if base not in shapes:
        raise fault(path, f"tensor {shown(base, 80)} is not in the model", "tensors of the model", advice)
    shape = shapes[base]
    is_embedding = base.endswith("token_embd.weight")  # there A and B are the other way round
    found = (b[1:2] + a[1:2]) if is_embedding else (a[:1] + b[1:2])
    if found != shape[:2]:
        was = f"tensor {shown(base, 80)} is for a weight of {list(found)}"
        raise fault(path, was, f"{list(shape[:2])} as in the model", advice)


def _check_data_alignment(header: GgufHeader) -> None:
    """ggml_backend_cpu_buffer_from_ptr aborts the process for mapped tensors at any other place."""
    for tensor in header.tensors:
        place = header.data_offset + tensor.offset
        if place % DEFAULT_ALIGNMENT:
            found = f"tensor {shown(tensor.name)} lies at byte {place} (general.alignment {header.alignment})"
            raise fault(header.path, found, f"a multiple of {DEFAULT_ALIGNMENT}", "convert the model again")


def _shard_path(header: GgufHeader, number: int) -> Path | None:
    """Where shard ``number`` of a split model lies, by llama.cpp's pattern ``%s-%05d-of-%05d.gguf``."""
    match = _SHARD_NAME.fullmatch(header.path.name)
    if not match or (int(match["no"]), int(match["count"])) != (header.split_no + 1, header.split_count):
        return None
    return header.path.with_name(f"{match['prefix']}-{number + 1:05d}-of-{header.split_count:05d}.gguf")


def _shards(first: GgufHeader) -> tuple[GgufHeader, ...]:
    """The headers of all shards, checked as ``llama_model_loader`` does."""
    count = first.split_count
    if count > 1 and _shard_path(first, 0) is None:
        found = f"the first of {count} shards is named {shown(first.path.name, 200)}"
        raise fault(first.path, found, f"a name ending in -00001-of-{count:05d}.gguf", "rename the shards back")
    paths = [path for path in (_shard_path(first, number) for number in range(1, count)) if path is not None]
    missing = [shown(path.name, 200) for path in paths if not path.exists()]
    if missing:
        found = f"{len(missing)} of {count} shards are missing: {', '.join(missing[:3])}{', …' * (len(missing) > 3)}"
        raise fault(first.path, found, f"all {count} files in one directory", "download the missing ones")
    headers = [first]
    for number, path in enumerate(paths, 1):
        header = read_header(path)
        if header.metadata.get("split.no") != number:
            found = f"the file is shard {header.split_no + 1} of {header.split_count}"
            raise fault(path, found, f"shard {number + 1} of {count}", "download it again under its own name")
        headers.append(header)
    if count > 1:
        _check_tensor_sum(headers)
    return tuple(headers)


def _check_tensor_sum(headers: Sequence[GgufHeader]) -> None:
    """Shards together must hold each tensor once and as many as the first one says."""
    first = headers[0]
    seen: set[str] = set()
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in seen:
                found = f"tensor {shown(tensor.name)} is in an earlier shard too"
                raise fault(header.path, found, "each tensor once", "download all shards of one model")
            seen.add(tensor.name)
    claimed = first.metadata.get("split.tensors.count")
    if claimed != len(seen):
        found = f"the {len(headers)} shards hold {len(seen)} tensors"
        raise fault(first.path, found, f"{claimed} (split.tensors.count)", "download all shards of one model")
