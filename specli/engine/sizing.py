"""Asks llama.cpp how much memory a model takes, without reading a weight.

A model loaded with ``no_alloc`` has its vocabulary and the shapes of its tensors, and a context over it goes through
the same graph reservation as a real one; what llama.cpp then says in its log is what it would allocate. Two things it
does not say there:

- Weights per buffer (0.00 under ``no_alloc``). They follow from the header and two answers: which device each layer was
  assigned to, and which CPU buffer type each tensor was given. For the second, all tensors are "overridden" to the
  CPU, which makes llama.cpp choose among the CPU's buffer types as always, and log each choice.
- The device of each part of the KV cache, when several share it: layers are logged with their devices, and a cache's
  size is shared out by its layers' KV heads.

Recurrent states and the output buffer are allocated for the moment even so.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp._ctypes_extensions import load_shared_library

from specli import gguf_file
from specli.config import ModelOptions
from specli.engine.llama import context_length, context_params, gpu_layers
from specli.engine.log import LOG
from specli.errors import EngineError, ModelLoadError
from specli.free_memory import available_ram
from specli.memory_plan import (
    DEVICE_RESERVE,
    HOST,
    HOST_RESERVE,
    MIB,
    Buffer,
    Kind,
    ModelMemory,
    Room,
    Setup,
    choose,
    require_fit,
    rough_bound,
)

_GPU, _INTEGRATED_GPU = 1, 2  # enum ggml_backend_dev_type
_N_MODELS_OPEN = 2
_CELL_BYTES = 64  # of llama.cpp's bookkeeping per token of context, allocated under no_alloc too (llama-kv-cells.h)
_INPUT_TENSORS = ("token_embd.", "position_embd.", "token_types.", "per_layer_token_embd.")  # llama-arch.cpp

_LAYER_DEVICE = re.compile(r"load_tensors: layer +(\d+) assigned to device (.+), is_swa = ")
_TENSOR_BUFFER = re.compile(r"tensor (.+) \(\d+ MiB \S+\) buffer type overridden to (.+)")
_CACHE_LAYER = re.compile(r"\w+: layer +(\d+): dev = (.+)")
_CACHE_SIZE = re.compile(r"llama_kv_cache: size = +([\d.]+) MiB \(")
_STATE_SIZE = re.compile(r"\w+: +(.+?) (?:RS|DSV4 \w+ state) buffer size = +([\d.]+) MiB")
_COMPUTE_SIZE = re.compile(r"\w+: +(.+?) compute buffer size = +([\d.]+) MiB")
_BufferRooms = dict[str, str]  # a buffer's or device's name -> the room it is in; what is not there is in RAM
KvHeads = Callable[[int], int]  # layer -> KV heads
_OUTPUT_NAME = re.compile(r"llama_context: +(.+?)  output buffer size = ")


class LlamaSizer:
    """``memory_plan.Sizer`` over llama.cpp. A context manager: ``no_alloc`` models stay open to be asked again.

    ``rooms``: what is free, instead of what the system and the devices say.
    """

    def __init__(self, rooms: Sequence[Room] | None = None) -> None:
        llama_cpp.llama_backend_init()
        self._devices = list_devices()
        self._given_rooms = rooms
        self._models: dict[tuple[Path, int], _OpenModel] = {}
        self._tensors: dict[Path, _Tensors] = {}
        self._measured: dict[tuple[ModelOptions, int], ModelMemory] = {}

    def rooms(self) -> tuple[Room, ...]:
        """See ``memory_plan.Sizer``."""
        if self._given_rooms is None:
            self._given_rooms = (host_room(), *(device.room() for device in self._devices))
        return tuple(self._given_rooms)

    def trained_context(self, options: ModelOptions) -> int:
        """See ``memory_plan.Sizer``."""
        return int(llama_cpp.llama_model_n_ctx_train(self._open(options).handle))

    def measure(self, options: ModelOptions, n_rows_max: int) -> ModelMemory:
        """See ``memory_plan.Sizer``. Answers are remembered."""
        key = (options, n_rows_max)
        if key not in self._measured:
            n_ctx = context_length(options.n_ctx, self.trained_context(options))
            limit = self._longest_asked()
            if n_ctx <= limit:
                memory = self._ask(options, n_ctx, n_rows_max)
            else:  # its bookkeeping alone could exhaust the memory; beyond here every size is linear in the context
                half, whole = (self.measure(replace(options, n_ctx=n), n_rows_max) for n in (limit // 2, limit))
                memory = _extrapolate(half, whole, n_ctx)
            self._measured[key] = memory
        return self._measured[key]

    def close(self) -> None:
        """Free the models. Calling it twice is fine."""
        while self._models:
            self._models.popitem()[1].close()

    def __enter__(self) -> LlamaSizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _longest_asked(self) -> int:
        """Tokens of context whose bookkeeping takes at most 128 MiB and an eighth of the free RAM."""
        room = self.rooms()[0]
        return max(1 << 16, min(1 << 21, room.free // 8 // _CELL_BYTES if room.total else 1 << 21))

    def _ask(self, options: ModelOptions, n_ctx: int, n_rows_max: int) -> ModelMemory:
        model = self._open(options)
        tensors = self._tensors_of(options.path)
        with _captured_log() as lines:
            context = llama_cpp.llama_init_from_model(model.handle, context_params(options, n_ctx, n_rows_max, 1))
            reason = LOG.last_error()
            llama_cpp.llama_free(context) if context else None
        if not context:
            raise EngineError(
                f"llama.cpp refuses a context of {n_ctx} tokens for {options.label}: {reason or 'it gave no reason'}"
            )
        n_layers = 1 + int(llama_cpp.llama_model_n_layer(model.handle))
        rooms = {name: device.name for device in self._devices for name in (device.name, device.buffer_name)}
        buffers = [
            *tensors.buffers(model.layer_devices, self._devices),
            *_context_buffers(lines, tensors.kv_heads, rooms),
            _output_buffer(lines, rooms, model.n_vocab * n_rows_max),
        ]
        return ModelMemory(n_ctx, model.n_ctx_train, n_layers, tuple(part for part in buffers if part.n_bytes))

    def _open(self, options: ModelOptions) -> _OpenModel:
        key = (options.path, gpu_layers(options))
        if key not in self._models:
            while len(self._models) >= _N_MODELS_OPEN:
                self._models.pop(next(iter(self._models))).close()
            self._models[key] = _OpenModel(options, key[1], to_cpu=not self._devices)
        else:
            self._models[key] = self._models.pop(key)  # used last
        return self._models[key]

    def _tensors_of(self, path: Path) -> _Tensors:
        if path not in self._tensors:
            opened = [model for (other, _), model in self._models.items() if other == path and model.tensor_buffers]
            if opened:
                tensor_buffers = opened[0].tensor_buffers
            else:
                model = _OpenModel(ModelOptions(path), 0, to_cpu=True)
                model.close()
                tensor_buffers = model.tensor_buffers
            self._tensors[path] = _Tensors(_shards(path), tensor_buffers)
        return self._tensors[path]


class _Override(ctypes.Structure):
    """llama.cpp's ``llama_model_tensor_buft_override``."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class _OpenModel:
    """A model without weights. ``layer_devices[i]``: the device of layer i, the output layer last.

    ``to_cpu`` fills ``tensor_buffers``, pairs of tensor and CPU buffer type; it changes nothing without devices.
    """

    def __init__(self, options: ModelOptions, n_gpu_layers: int, to_cpu: bool) -> None:
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.no_alloc, params.load_mode = True, llama_cpp.LLAMA_LOAD_MODE_NONE
        overrides = (_Override * 2)(
            _Override(b"", _backend_function("ggml_backend_cpu_buffer_type", ctypes.c_void_p)())
        )
        if to_cpu:
            params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        with _captured_log() as lines:
            self.handle = llama_cpp.llama_model_load_from_file(os.fsencode(options.path), params)
            reason = LOG.last_error()
        if not self.handle:
            raise ModelLoadError(f"llama.cpp could not load {options.path}: {reason or 'it gave no reason'}")
        self.n_ctx_train = int(llama_cpp.llama_model_n_ctx_train(self.handle))
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.handle)))
        self.layer_devices = [match[2] for line in lines if (match := _LAYER_DEVICE.match(line))]
        self.tensor_buffers = [(match[1], match[2]) for line in lines if (match := _TENSOR_BUFFER.match(line))]

    def close(self) -> None:
        if self.handle:
            llama_cpp.llama_model_free(self.handle)
            self.handle = None


@contextmanager
def _captured_log() -> Iterator[Iterable[str]]:
    """All of llama.cpp's lines while it is entered, however many, and none of them shown."""
    lines: deque[tuple[int, str]] = deque()
    before, verbose = LOG.lines, LOG.verbose
    LOG.lines, LOG.verbose = lines, False
    try:
        yield _Texts(lines)
    finally:
        LOG.lines, LOG.verbose = before, verbose


@dataclass(frozen=True)
class _Texts:
    """The lines of a log without their levels; may be read again and again."""

    lines: deque[tuple[int, str]]

    def __iter__(self) -> Iterator[str]:
        return (line.rstrip("\n") for _level, line in self.lines)


# -- weights -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a model's shards, and the CPU buffer type that llama.cpp chose for each use of one."""

    shards: tuple[gguf_file.GgufHeader, ...]
    cpu_buffers: list[tuple[str, str]]
    where: dict[str, tuple[int, gguf_file.TensorInfo]] = field(init=False)

    def __post_init__(self) -> None:
        found = {info.name: (number, info) for number, shard in enumerate(self.shards) for info in shard.tensors}
        object.__setattr__(self, "where", found)

    def kv_heads(self, layer: int) -> int:
        """KV heads of a layer, to share a cache's size out; 1 where all layers are alike."""
        heads = self.shards[0].hparam("attention.head_count_kv")
        return int(heads[layer]) if isinstance(heads, np.ndarray) and layer < len(heads) else 1

    def buffers(self, layer_devices: Sequence[str], devices: Sequence[Device]) -> Iterator[Buffer]:
        """The weights by buffer: read in place from the file, rewritten for the CPU, or on a device."""
        by_name = {device.name: device for device in devices}
        mapped: dict[int, dict[str, gguf_file.TensorInfo]] = {}
        others: dict[str, dict[str, int]] = {}
        seen: set[str] = set()
        for name, cpu_buffer in self.cpu_buffers:
            if name not in self.where:
                continue
            number, info = self.where[name]
            device = self._device(name, layer_devices, is_copy=name in seen)
            seen.add(name)
            if device not in by_name and _is_read_in_place(cpu_buffer):
                mapped.setdefault(number, {})[name] = info
            else:  # a second use of a tensor in the same buffer takes nothing
                others.setdefault(device if device in by_name else cpu_buffer, {})[name] = info.n_bytes
        for part in mapped.values():
            yield _mapped_buffer(list(part.values()), all(device.maps_files for device in devices))
        for name, tensors in others.items():
            n_bytes, is_on_device = sum(tensors.values()), name in by_name
            is_mapped = is_on_device and by_name[name].maps_weights
            yield Buffer(name if is_on_device else HOST, name, "weights", n_bytes, n_bytes, is_mapped)

    @staticmethod
    def _device(name: str, layer_devices: Sequence[str], is_copy: bool) -> str:
        """Where a tensor goes. ``is_copy``: embeddings used a second time, as the output matrix."""
        layer = re.match(r"(?:blk|enc\.blk|dec\.blk)\.(\d+)\.", name)
        if layer is not None and int(layer[1]) < len(layer_devices):
            return layer_devices[int(layer[1])]
        is_input = name.startswith(_INPUT_TENSORS) and not is_copy
        return HOST if is_input or not layer_devices else layer_devices[-1]


def _is_read_in_place(cpu_buffer: str) -> bool:
    """Plain and pinned host buffers give way to the mapped file; others (CPU_REPACK, AMX) hold rewritten copies."""
    return cpu_buffer == HOST or cpu_buffer.endswith("_Host")


def _mapped_buffer(parts: list[gguf_file.TensorInfo], maps_files: bool) -> Buffer:
    hot = sum(info.n_bytes for info in parts)
    if not maps_files:
        return Buffer(HOST, HOST, "weights", hot, hot)
    first, end = min(info.offset for info in parts), max(info.offset + info.n_bytes for info in parts)
    return Buffer(HOST, "CPU_Mapped", "weights", end - first, hot, is_mapped=True)


# -- caches and compute buffers ----------------------------------------------------------------------------------------


def _context_buffers(lines: Iterable[str], kv_heads: KvHeads, rooms: _BufferRooms) -> Iterator[Buffer]:
    """KV caches, recurrent states and compute buffers, from the log of making a context."""
    layers: list[tuple[int, str]] = []
    for line in lines:
        if match := _CACHE_LAYER.match(line):
            layers.append((int(match[1]), match[2]))
        elif match := _CACHE_SIZE.match(line):
            yield from _share_out(float(match[1]), layers, kv_heads, rooms)
            layers = []
        elif match := _STATE_SIZE.match(line):
            yield _logged_buffer(match[1], "state", float(match[2]), rooms)
            layers = []
        elif match := _COMPUTE_SIZE.match(line):
            yield _logged_buffer(match[1], "compute", float(match[2]), rooms)


def _share_out(mib: float, layers: list[tuple[int, str]], kv_heads: KvHeads, rooms: _BufferRooms) -> Iterator[Buffer]:
    """One cache, split by the devices of its layers."""
    weights: dict[str, int] = {}
    for layer, device in layers:
        weights[device] = weights.get(device, 0) + max(1, kv_heads(layer))
    whole = sum(weights.values())
    for device, weight in weights.items():
        yield _logged_buffer(device, "kv", mib * weight / whole, rooms)


def _logged_buffer(name: str, kind: Kind, mib: float, rooms: _BufferRooms) -> Buffer:
    n_bytes = round(mib * MIB)
    return Buffer(rooms.get(name, HOST), name, kind, n_bytes, n_bytes)


def _output_buffer(lines: Iterable[str], rooms: _BufferRooms, n_logits: int) -> Buffer:
    """float32 logits rows: llama.cpp begins with one per sequence and grows to what a round asks for."""
    name = next((match[1] for line in lines if (match := _OUTPUT_NAME.match(line))), HOST)
    return Buffer(rooms.get(name, HOST), name, "output", 4 * n_logits, 4 * n_logits)


def _extrapolate(half: ModelMemory, whole: ModelMemory, n_ctx: int) -> ModelMemory:
    """``whole`` stretched to ``n_ctx`` along the line through both."""
    times = (n_ctx - whole.n_ctx) / (whole.n_ctx - half.n_ctx)
    buffers = []
    for low, high in zip(half.buffers, whole.buffers, strict=True):
        more = round((high.n_bytes - low.n_bytes) * times)
        buffers.append(replace(high, n_bytes=high.n_bytes + more, hot_bytes=high.hot_bytes + more))
    return replace(whole, n_ctx=n_ctx, buffers=tuple(buffers))


# -- devices -----------------------------------------------------------------------------------------------------------


class _Properties(ctypes.Structure):
    """ggml's ``ggml_backend_dev_props``."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("async", ctypes.c_bool),
        ("host_buffer", ctypes.c_bool),
        ("buffer_from_host_ptr", ctypes.c_bool),
        ("events", ctypes.c_bool),
        ("mmap_support", ctypes.c_bool),
    )


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as ggml knows it.

    ``maps_files``: weights beside it may be read in place from the file; ``maps_weights``: its own weights too (Metal).
    """

    pointer: int
    name: str
    description: str
    buffer_name: str
    shares_ram: bool
    maps_files: bool
    maps_weights: bool

    def room(self) -> Room:
        """What is free on it now."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ask = _backend_function("ggml_backend_dev_memory", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        ask(self.pointer, ctypes.byref(free), ctypes.byref(total))
        description = f"{self.name} ({self.description})" if self.description else self.name
        return Room(self.name, description, free.value, total.value, DEVICE_RESERVE, self.shares_ram)


def host_room() -> Room:
    """RAM; of unknown size where the system does not say."""
    ram = available_ram()
    if ram is None:
        return Room(HOST, "RAM", 0, 0, HOST_RESERVE)
    return Room(HOST, ram.source, ram.free, ram.total, HOST_RESERVE)


def list_devices() -> list[Device]:
    """The devices that llama.cpp would put layers on: integrated GPUs only where there is no other."""
    count = _backend_function("ggml_backend_dev_count", ctypes.c_size_t)
    get = _backend_function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    found = [_device(get(index)) for index in range(count())]
    gpus = [device for kind, device in found if kind == _GPU]
    return gpus or [device for kind, device in found if kind == _INTEGRATED_GPU]


def _device(pointer: int) -> tuple[int, Device]:
    properties = _Properties()
    read = _backend_function("ggml_backend_dev_get_props", None, ctypes.c_void_p, ctypes.c_void_p)
    read(pointer, ctypes.byref(properties))
    buffer_type = _backend_function("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
    buffer_name = _backend_function("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
    name = (properties.name or b"").decode("utf-8", "replace")
    maps_weights = bool(properties.buffer_from_host_ptr)  # Metal, whose type is GPU although its memory is RAM
    device = Device(
        pointer,
        name,
        (properties.description or b"").decode("utf-8", "replace"),
        (buffer_name(buffer_type(pointer)) or b"").decode("utf-8", "replace"),
        properties.type == _INTEGRATED_GPU or maps_weights,
        bool(properties.mmap_support),
        maps_weights and bool(properties.mmap_support),
    )
    return properties.type, device


def _backend_function(name: str, result: type | None, *arguments: type) -> Callable[..., Any]:
    """A function of ggml, through libllama, which links it.

    The wheel holds each library under three names. Loading ``libggml.so`` beside the ``libggml.so.0`` that libllama
    uses (as ``llama_cpp._ggml`` does) gives a second ggml, with devices of its own.
    """
    function: Callable[..., Any] = ctypes.CFUNCTYPE(result, *arguments)(_address(name))
    return function


def _address(symbol: str) -> int:
    libraries: list[ctypes.CDLL] = [llama_cpp.llama_cpp._lib]
    if not hasattr(libraries[0], symbol):  # Windows finds no symbols of what a library links, and loads each DLL once
        folder = Path(llama_cpp.__file__).parent / "lib"
        libraries = [load_shared_library(base, folder) for base in ("ggml", "ggml-base", "ggml-cpu")]
    function = next(getattr(library, symbol) for library in libraries if hasattr(library, symbol))
    return ctypes.cast(function, ctypes.c_void_p).value or 0


# -- before a session loads --------------------------------------------------------------------------------------------


def fit(setup: Setup, notice: Callable[[str], None]) -> Setup:
    """``setup`` with ``-ngl auto`` and an unset ``-c`` settled, for loading next; ``notice`` gets one-line warnings.

    llama.cpp is asked only where the headers leave a doubt: asking takes 0.1 s per 50,000 tokens of vocabulary. Raises
    ``ModelLoadError``, with a command that fits, when it cannot fit.
    """
    llama_cpp.llama_backend_init()
    rooms = (host_room(), *(device.room() for device in list_devices()))
    files = [setup.target, *([setup.draft] if setup.draft else [])]
    bound = sum(rough_bound(_shards(options.path), options, setup.n_max + 1) for options in files)
    if all(room.total and bound + room.reserve <= room.free for room in rooms):
        return setup
    with LlamaSizer(rooms) as sizer:
        choice = choose(setup, sizer)
        require_fit(choice.plan, sizer)
    for line in choice.notices:
        notice(line)
    return choice.plan.setup


def _shards(path: Path) -> tuple[gguf_file.GgufHeader, ...]:
    return gguf_file.check_loadable(gguf_file.read_header(path), "target")
