"""The devices and buffer types of ggml: what layers can be put on, and by what names."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp._ctypes_extensions import load_shared_library

from specli.config import PlacementOptions
from specli.errors import ConfigError
from specli.memory_plan import DEVICE_RESERVE, MIB, Room

_CPU, _GPU, _INTEGRATED_GPU = 0, 1, 2  # enum ggml_backend_dev_type


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
    """A GPU (or the CPU) as ggml knows it.

    ``maps_files``: weights beside it may be read in place from the file; ``maps_weights``: its own weights too (Metal).
    """

    pointer: int
    name: str
    description: str
    buffer_type: int  # a pointer too
    buffer_name: str
    shares_ram: bool
    maps_files: bool
    maps_weights: bool

    def room(self) -> Room:
        """What is free on it now."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ask = backend_function("ggml_backend_dev_memory", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        ask(self.pointer, ctypes.byref(free), ctypes.byref(total))
        description = f"{self.name} ({self.description})" if self.description else self.name
        return Room(self.name, description, free.value, total.value, DEVICE_RESERVE, self.shares_ram)


def list_devices() -> list[Device]:
    """The devices that llama.cpp would put layers on: integrated GPUs only where there is no other."""
    found = list(_every_device())
    gpus = [device for kind, device in found if kind == _GPU]
    return gpus or [device for kind, device in found if kind == _INTEGRATED_GPU]


def select_devices(placement: PlacementOptions) -> list[Device]:
    """The devices of ``-dev`` in its order, or those that llama.cpp would choose. Raises ``ConfigError``."""
    if placement.devices is None:
        return list_devices()
    known = {device.name: device for kind, device in _every_device() if kind != _CPU}
    for name in placement.devices:
        if name not in known:
            expected = (
                f"one of {', '.join(known)}, or none" if known else "none (this llama.cpp has no device but the CPU)"
            )
            raise ConfigError(f"-dev/--device got {name!r}, expected {expected}; --list-devices shows what there is")
    return [known[name] for name in placement.devices]


def describe_devices() -> list[str]:
    """One line for each device that layers can be put on, as llama.cpp's ``--list-devices`` writes it."""
    lines = []
    for kind, device in _every_device():
        if kind != _CPU:
            room = device.room()
            memory = f"{room.total // MIB} MiB, {room.free // MIB} MiB free"
            lines.append(f"{device.name}: {device.description} ({memory})")
    return lines


def buffer_types() -> dict[str, int]:
    """Buffer types of ggml by name, the CPU's first: what ``-ot`` may name."""
    found = sorted(_every_device(), key=lambda item: item[0] != _CPU)
    return {device.buffer_name: device.buffer_type for _kind, device in found}


def _every_device() -> Iterator[tuple[int, Device]]:
    """All devices with their kind, the CPU among them."""
    llama_cpp.llama_backend_init()
    count = backend_function("ggml_backend_dev_count", ctypes.c_size_t)
    get = backend_function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    return (_device(get(index)) for index in range(count()))


def _device(pointer: int) -> tuple[int, Device]:
    properties = _Properties()
    read = backend_function("ggml_backend_dev_get_props", None, ctypes.c_void_p, ctypes.c_void_p)
    read(pointer, ctypes.byref(properties))
    buffer_type = backend_function("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)(pointer)
    buffer_name = backend_function("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
    name = (properties.name or b"").decode("utf-8", "replace")
    maps_weights = bool(properties.buffer_from_host_ptr)  # Metal, whose type is GPU although its memory is RAM
    device = Device(
        pointer,
        name,
        (properties.description or b"").decode("utf-8", "replace"),
        buffer_type,
        (buffer_name(buffer_type) or b"").decode("utf-8", "replace"),
        properties.type == _INTEGRATED_GPU or maps_weights,
        bool(properties.mmap_support),
        maps_weights and bool(properties.mmap_support),
    )
    return properties.type, device


def backend_function(name: str, result: type | None, *arguments: type) -> Callable[..., Any]:
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
