"""What holds for the whole process: its CPUs, its priority, NUMA. Done before llama.cpp starts its threads.

Threads inherit the CPUs of the process, in builds with OpenMP and without. llama.cpp's own thread pools, which could
give target and draft different CPUs and set how long to poll, are not used: see ``cli.arguments``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import llama_cpp

from specli.config import ModelOptions, ProcessOptions
from specli.engine.devices import list_devices
from specli.engine.parameters import has_amx
from specli.errors import ConfigError

_NICENESS = {-1: 5, 1: -5, 2: -10, 3: -20}  # --prio -> setpriority, as llama.cpp's set_process_priority
_NUMA = {"distribute": 1, "isolate": 2, "numactl": 3}  # enum ggml_numa_strategy
_UNUSED = {"split_mode": "-sm", "tensor_split": "-ts", "main_gpu": "-mg"}


def prepare(options: ProcessOptions) -> list[str]:
    """Apply ``options``; notices of what could not be done. Raises ``ConfigError`` for CPUs that are not there."""
    notices = []
    if options.cpus is not None:
        _use_cpus(options.cpus)
    if options.priority:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS[options.priority])
        except (OSError, AttributeError) as error:
            reason = getattr(error, "strerror", None) or "this system has no setpriority"
            notices.append(f"--prio {options.priority} could not be set: {reason}")
    if options.numa is not None:
        llama_cpp.llama_backend_init()
        llama_cpp.llama_numa_init(_NUMA[options.numa])
    return notices


def _use_cpus(cpus: frozenset[int]) -> None:
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("-C and -Cr were given, but this system cannot bind a process to CPUs; leave them out")
    allowed = os.sched_getaffinity(0)
    wanted = cpus & allowed
    if not wanted:
        expected = f"some of {_ranges(allowed)}, which this process may use"
        raise ConfigError(f"-C/--cpu-mask or -Cr/--cpu-range got CPUs {_ranges(cpus)}, expected {expected}")
    os.sched_setaffinity(0, wanted)


def _ranges(cpus: frozenset[int] | set[int]) -> str:
    """``0-3,8``."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def unused_kernels() -> Iterator[str]:
    """One line where the library has kernels that would end the process."""
    if has_amx():
        yield (
            "this llama.cpp was built with AMX kernels, which end the process on many machines: neither they nor "
            "repacked weights are used; a build without them is faster (README, Install)"
        )


def without_effect(models: Sequence[ModelOptions]) -> Iterator[str]:
    """One line for the flags that ask for devices where there is none."""
    plain = ModelOptions(models[0].path).placement
    flags = {
        flag
        for options in models
        for name, flag in _UNUSED.items()
        if getattr(options.placement, name) != getattr(plain, name)
    }
    flags |= {"-ngl" for options in models if options.n_gpu_layers not in ("auto", "0")}
    if flags and not list_devices():
        yield f"{', '.join(sorted(flags))} without effect: this llama.cpp has no device but the CPU"
