"""llama.cpp's parameters for a model and for a context, from ``ModelOptions``; loading and sizing share them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import llama_cpp

from specli.config import CACHE_TYPES, CONTEXT_CAP, KvOverride, ModelOptions
from specli.engine.devices import buffer_types, select_devices
from specli.errors import ConfigError

_GGML_TYPES = {name: getattr(llama_cpp, f"GGML_TYPE_{name.upper()}", 30) for name in CACHE_TYPES}  # 30 = BF16
_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
_GPU_LAYERS = {"auto": -1, "all": -2}
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}  # enum llama_split_mode
_LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "dio": 4}  # enum llama_load_mode
_ROPE_SCALINGS = {None: -1, "none": 0, "linear": 1, "yarn": 2}  # enum llama_rope_scaling_type


class _Override(ctypes.Structure):
    """llama.cpp's ``llama_model_tensor_buft_override``."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class ModelParameters:
    """``params`` for loading, and what they point to, alive as long as this object is."""

    def __init__(self, options: ModelOptions, more_overrides: Sequence[tuple[bytes, int]] = ()) -> None:
        """``more_overrides``: patterns and buffer types behind those of ``-ot``. Raises ``ConfigError``."""
        self.params: llama_cpp.llama_model_params = llama_cpp.llama_model_default_params()
        placement, params = options.placement, self.params
        params.n_gpu_layers = gpu_layers(options)
        params.load_mode = _LOAD_MODES[options.load_mode]
        params.use_extra_bufts = not has_amx()
        devices = select_devices(placement)
        if placement.devices is not None:
            self._devices = (ctypes.c_void_p * (len(devices) + 1))(*(device.pointer for device in devices))
            params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        if devices:  # without any llama.cpp splits nothing, and would refuse some of these
            self._split(options, len(devices))
        overrides = [*_tensor_overrides(options), *more_overrides]
        if overrides:
            self._tensors = (_Override * (len(overrides) + 1))(*(_Override(*pair) for pair in overrides))
            params.tensor_buft_overrides = ctypes.cast(self._tensors, ctypes.c_void_p)
        if options.kv_overrides:
            self._keys = _kv_overrides(options.kv_overrides)
            params.kv_overrides = self._keys

    def _split(self, options: ModelOptions, n_devices: int) -> None:
        placement, params, n_max = options.placement, self.params, int(llama_cpp.llama_max_devices())
        if placement.main_gpu >= n_devices:
            expected = f"0 to {n_devices - 1}"
            raise ConfigError(f"-mg/--main-gpu got {placement.main_gpu}, expected {expected} (see --list-devices)")
        if len(placement.tensor_split) > n_devices:
            found = f"{len(placement.tensor_split)} proportions"
            raise ConfigError(f"-ts/--tensor-split got {found}, expected at most one for each of {n_devices} devices")
        params.split_mode, params.main_gpu = _SPLIT_MODES[placement.split_mode], placement.main_gpu
        if placement.tensor_split:
            self._proportions = (ctypes.c_float * n_max)(*placement.tensor_split)
            params.tensor_split = self._proportions


def has_amx() -> bool:
    """Whether this build has AMX kernels, and the CPU the instructions.

    They end the process with a segmentation fault in many builds (llama.cpp issue 20824: the tile configuration is
    optimized away), so they are not used; with them go the other rewritten weight formats (``use_extra_bufts``).
    """
    return b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info()


def _tensor_overrides(options: ModelOptions) -> list[tuple[bytes, int]]:
    """Patterns and buffer types of ``-ot``. Raises ``ConfigError`` for a type that there is not."""
    wanted = options.placement.tensor_overrides
    known = buffer_types() if wanted else {}
    for pattern, name in wanted:
        if name not in known:
            expected = f"one of {', '.join(known)} behind the ="
            raise ConfigError(f"-ot/--override-tensor got {pattern}={name}, expected {expected}")
    return [(pattern.encode("utf-8"), known[name]) for pattern, name in wanted]


def _kv_overrides(overrides: Sequence[KvOverride]) -> ctypes.Array[llama_cpp.llama_model_kv_override]:
    """llama.cpp's array, with an empty key at its end."""
    made = (llama_cpp.llama_model_kv_override * (len(overrides) + 1))()
    for entry, override in zip(made, overrides, strict=False):
        entry.key, value = override.key.encode("utf-8"), override.value
        if isinstance(value, bool):
            entry.tag, entry.value.val_bool = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
        elif isinstance(value, int):
            entry.tag, entry.value.val_i64 = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT, value
        elif isinstance(value, float):
            entry.tag, entry.value.val_f64 = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
        else:
            entry.tag, entry.value.val_str = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode("utf-8")
    return made


def physical_cores() -> int:
    """Physical cores, llama.cpp's default number of threads, within the CPUs that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = set()
    for cpu in allowed:
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings").read_text())
        except OSError:  # not Linux, or hidden by a container: no telling cores from threads
            return len(allowed)
    return len(siblings)


def _threads(asked: int | None, default: int) -> int:
    if asked is None:
        return default
    return asked if asked > 0 else os.cpu_count() or 1


def gpu_layers(options: ModelOptions) -> int:
    """llama.cpp's ``n_gpu_layers``: negative is all. A plan turns ``auto`` into a number before loading."""
    return int(_GPU_LAYERS.get(options.n_gpu_layers, options.n_gpu_layers))


def context_length(asked: int | None, trained: int) -> int:
    """Tokens of a context: as asked, 0 as trained, None as trained but at most ``CONTEXT_CAP``."""
    if asked is None:
        return min(trained, CONTEXT_CAP)
    return asked or trained


def physical_batch(options: ModelOptions, n_ctx: int) -> int:
    """Tokens in one pass."""
    return min(options.n_ubatch, options.n_batch, n_ctx)


def context_params(options: ModelOptions, n_ctx: int, n_rows_max: int) -> llama_cpp.llama_context_params:
    """What a context of ``n_ctx`` tokens for each sequence is made with; ``sizing`` asks for its size with the same.

    Several sequences share one cache, unless ``kv_unified`` is off.
    """
    params: llama_cpp.llama_context_params = llama_cpp.llama_context_default_params()
    params.n_ctx = n_ctx * options.n_sequences
    params.n_batch = params.n_ubatch = physical_batch(options, n_ctx)
    params.n_seq_max, params.kv_unified = options.n_sequences, options.kv_unified and options.n_sequences > 1
    params.n_outputs_max = n_rows_max
    threads = _threads(options.n_threads, physical_cores())
    params.n_threads, params.n_threads_batch = threads, _threads(options.n_threads_batch, threads)
    params.flash_attn_type = _FLASH_ATTN[options.flash_attn]
    params.type_k, params.type_v = _GGML_TYPES[options.cache_type_k], _GGML_TYPES[options.cache_type_v]
    rope = options.rope
    params.rope_scaling_type = _ROPE_SCALINGS[rope.scaling]
    params.rope_freq_base, params.rope_freq_scale = rope.freq_base, rope.freq_scale
    params.yarn_ext_factor, params.yarn_attn_factor = rope.yarn_ext_factor, rope.yarn_attn_factor
    params.yarn_beta_slow, params.yarn_beta_fast = rope.yarn_beta_slow, rope.yarn_beta_fast
    params.yarn_orig_ctx = rope.yarn_orig_ctx
    params.offload_kqv, params.swa_full = options.placement.kv_offload, options.swa_full
    params.no_perf = True
    return params
