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

import llama_cpp
import numpy as np

from specli import gguf_file
from specli.config import KvOverride, ModelOptions, PlacementOptions
from specli.engine.devices import Device, backend_function, list_devices, select_devices
from specli.engine.log import LOG
from specli.engine.parameters import ModelParameters, context_length, context_params, gpu_layers
from specli.errors import EngineError, ModelLoadError
from specli.free_memory import available_ram
from specli.memory_plan import (
    HOST,
    HOST_RESERVE,
    MIB,
    Buffer,
    Kind,
    ModelMemory,
    Room,
    Setup,
    rough_bound,
)
from specli.memory_search import choose, require_fit

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
_ModelKey = tuple[Path, int, PlacementOptions, tuple[KvOverride, ...]]
KvHeads = Callable[[int], int]  # layer -> KV heads
_OUTPUT_NAME = re.compile(r"llama_context: +(.+?)  output buffer size = ")


class LlamaSizer:
    """``memory_plan.Sizer`` over llama.cpp. A context manager: ``no_alloc`` models stay open to be asked again.

    ``rooms``: what is free, instead of what the system and the devices say. ``models``: what will be asked about, whose
    ``-dev`` says which devices there are; none: llama.cpp's choice.
    """

    def __init__(self, rooms: Sequence[Room] | None = None, models: Sequence[ModelOptions] = ()) -> None:
        llama_cpp.llama_backend_init()
        self._devices = devices_of(models)
        self._given_rooms = rooms
        self._models: dict[_ModelKey, _OpenModel] = {}
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
            limit = self._longest_asked() // options.n_sequences
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
        tensors = self._tensors_of(options)
        with _captured_log() as lines:
            context = llama_cpp.llama_init_from_model(model.handle, context_params(options, n_ctx, n_rows_max))
            reason = LOG.last_error()
            llama_cpp.llama_free(context) if context else None
        if not context:
            raise EngineError(
                f"llama.cpp refuses a context of {n_ctx} tokens for {options.label}: {reason or 'it gave no reason'}"
            )
        n_layers = 1 + int(llama_cpp.llama_model_n_layer(model.handle))
        rooms = {name: device.name for device in self._devices for name in (device.name, device.buffer_name)}
        buffers = [
            *tensors.buffers(options, model.layer_devices, self._devices),
            *_context_buffers(lines, tensors.kv_heads, rooms),
            _output_buffer(lines, rooms, model.n_vocab * n_rows_max),
        ]
        return ModelMemory(n_ctx, model.n_ctx_train, n_layers, tuple(part for part in buffers if part.n_bytes))

    def _open(self, options: ModelOptions) -> _OpenModel:
        key = (options.path, gpu_layers(options), options.placement, options.kv_overrides)
        if key not in self._models:
            while len(self._models) >= _N_MODELS_OPEN:
                self._models.pop(next(iter(self._models))).close()
            self._models[key] = _OpenModel(options, to_cpu=not select_devices(options.placement))
        else:
            self._models[key] = self._models.pop(key)  # used last
        return self._models[key]

    def _tensors_of(self, options: ModelOptions) -> _Tensors:
        path = options.path
        if path not in self._tensors:
            opened = [model for (other, *_), model in self._models.items() if other == path and model.tensor_buffers]
            if opened and not options.placement.tensor_overrides:
                tensor_buffers = opened[0].tensor_buffers
            else:
                on_cpu = ModelOptions(path, n_gpu_layers="0", kv_overrides=options.kv_overrides)
                model = _OpenModel(on_cpu, to_cpu=True)
                model.close()
                tensor_buffers = model.tensor_buffers
            self._tensors[path] = _Tensors(_shards(path), tensor_buffers)
        return self._tensors[path]


class _OpenModel:
    """A model without weights. ``layer_devices[i]``: the device of layer i, the output layer last.

    ``to_cpu`` fills ``tensor_buffers``, pairs of tensor and CPU buffer type; it changes nothing without devices.
    """

    def __init__(self, options: ModelOptions, to_cpu: bool) -> None:
        cpu = backend_function("ggml_backend_cpu_buffer_type", ctypes.c_void_p)()
        parameters = ModelParameters(options, [(b"", cpu)] if to_cpu else [])
        parameters.params.no_alloc, parameters.params.load_mode = True, llama_cpp.LLAMA_LOAD_MODE_NONE
        with _captured_log() as lines:
            self.handle = llama_cpp.llama_model_load_from_file(os.fsencode(options.path), parameters.params)
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

    def buffers(
        self, options: ModelOptions, layer_devices: Sequence[str], devices: Sequence[Device]
    ) -> Iterator[Buffer]:
        """The weights by buffer: read in place from the file, rewritten for the CPU, or on a device."""
        by_name = {device.name: device for device in devices}
        place = _Places(options, layer_devices, {device.buffer_name: device.name for device in devices})
        mapped: dict[int, dict[str, gguf_file.TensorInfo]] = {}
        others: dict[str, dict[str, int]] = {}
        seen: set[str] = set()
        for name, cpu_buffer in self.cpu_buffers:
            if name not in self.where:
                continue
            number, info = self.where[name]
            device = place.device(name, is_copy=name in seen)
            seen.add(name)
            if device not in by_name and _is_read_in_place(cpu_buffer):
                mapped.setdefault(number, {})[name] = info
            else:  # a second use of a tensor in the same buffer takes nothing
                others.setdefault(device if device in by_name else cpu_buffer, {})[name] = info.n_bytes
        for name, n_bytes in _adapters(options):
            others.setdefault(place.device(name, is_copy=False), {})[f"{name} of LoRA"] = n_bytes
        for part in mapped.values():
            yield _mapped_buffer(list(part.values()), options.load_mode, all(device.maps_files for device in devices))
        for name, tensors in others.items():
            n_bytes, is_on_device = sum(tensors.values()), name in by_name
            is_mapped = is_on_device and by_name[name].maps_weights
            yield Buffer(name if is_on_device else HOST, name, "weights", n_bytes, n_bytes, is_mapped)


@dataclass(frozen=True)
class _Places:
    """Where tensors go. ``buffers``: a device's buffer type -> its name."""

    options: ModelOptions
    layer_devices: Sequence[str]
    buffers: dict[str, str]

    def device(self, name: str, is_copy: bool) -> str:
        """The device of a tensor. ``is_copy``: embeddings used a second time, as the output matrix."""
        for pattern, buffer_type in self.options.placement.tensor_overrides:
            if re.search(pattern, name):
                return self.buffers.get(buffer_type, HOST)
        layer = re.match(r"(?:blk|enc\.blk|dec\.blk)\.(\d+)\.", name)
        if layer is not None and int(layer[1]) < len(self.layer_devices):
            return self.layer_devices[int(layer[1])]
        is_input = name.startswith(_INPUT_TENSORS) and not is_copy
        return HOST if is_input or not self.layer_devices else self.layer_devices[-1]


def _adapters(options: ModelOptions) -> Iterator[tuple[str, int]]:
    """Tensors of the LoRA adapters, by the names of the weights that they lie over, and their bytes."""
    for lora in options.loras:
        for info in gguf_file.read_header(lora.path).tensors:
            yield info.name, info.n_bytes


def _is_read_in_place(cpu_buffer: str) -> bool:
    """Plain and pinned host buffers give way to the mapped file; others (CPU_REPACK, AMX) hold rewritten copies."""
    return cpu_buffer == HOST or cpu_buffer.endswith("_Host")


def _mapped_buffer(parts: list[gguf_file.TensorInfo], load_mode: str, maps_files: bool) -> Buffer:
    """Weights in their file's layout: in place where ``-lm`` (auto: where the devices can), else copied to RAM."""
    hot = sum(info.n_bytes for info in parts)
    if load_mode not in ("mmap", "mmap+mlock") and not (load_mode == "auto" and maps_files):
        return Buffer(HOST, HOST, "weights", hot, hot)
    first, end = min(info.offset for info in parts), max(info.offset + info.n_bytes for info in parts)
    is_locked = load_mode == "mmap+mlock"
    return Buffer(HOST, "CPU_Mapped", "weights", end - first, end - first if is_locked else hot, not is_locked)


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


# -- rooms -------------------------------------------------------------------------------------------------------------


def devices_of(models: Sequence[ModelOptions]) -> list[Device]:
    """The devices that ``models`` may use, each once; without any llama.cpp's choice. Raises ``ConfigError``."""
    found = {device.name: device for options in models for device in select_devices(options.placement)}
    return list(found.values()) if models else list_devices()


def host_room() -> Room:
    """RAM; of unknown size where the system does not say."""
    ram = available_ram()
    if ram is None:
        return Room(HOST, "RAM", 0, 0, HOST_RESERVE)
    return Room(HOST, ram.source, ram.free, ram.total, HOST_RESERVE)


# -- before a session loads --------------------------------------------------------------------------------------------


def fit(setup: Setup, notice: Callable[[str], None]) -> Setup:
    """``setup`` with ``-ngl auto`` and an unset ``-c`` settled, for loading next; ``notice`` gets one-line warnings.

    llama.cpp is asked only where the headers leave a doubt: asking takes 0.1 s per 50,000 tokens of vocabulary. Raises
    ``ModelLoadError``, with a command that fits, when it cannot fit.
    """
    files = [setup.target, *([setup.draft] if setup.draft else [])]
    devices = devices_of(files)
    if devices and any(options.placement.split_mode in ("row", "tensor") for options in files):
        notice("memory is not planned with -sm row or tensor; -ngl auto puts all layers on the devices")
        return setup
    rooms = (host_room(), *(device.room() for device in devices))
    bound = sum(rough_bound(_shards(options.path), options, setup.n_max + 1) for options in files)
    bound += sum(n_bytes for options in files for _name, n_bytes in _adapters(options))
    if all(room.total and bound + room.reserve <= room.free for room in rooms):
        return setup
    with LlamaSizer(rooms, files) as sizer:
        choice = choose(setup, sizer)
        require_fit(choice.plan, sizer)
    for line in choice.notices:
        notice(line)
    return choice.plan.setup


def _shards(path: Path) -> tuple[gguf_file.GgufHeader, ...]:
    return gguf_file.check_loadable(gguf_file.read_header(path), "target")
