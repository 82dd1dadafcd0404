"""What the figures were measured on: the machine, the library, the files."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from pathlib import Path

from specli import gguf_file
from specli.free_memory import available_ram
from specli.profile import load_profile, profile_path, save_profile

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_BLOCK = 1 << 22  # bytes


def reset_peak() -> None:
    """Let the next ``peak_bytes`` count from now, where the system allows (Linux); else it counts from the start."""
    try:
        _CLEAR.write_text("5", "ascii")
    except OSError:
        return


def peak_bytes() -> int | None:
    """The most RAM that this process has held since ``reset_peak``, mapped files included; None where nobody knows."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text("ascii", "replace"), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return 1024 * int(found[1])
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def hardware() -> dict[str, object]:
    """The machine in words and numbers, JSON types only; memory in bytes."""
    ram = available_ram()
    return {
        "cpu": _cpu_name(),
        "logical_cores": os.cpu_count(),
        "ram": None if ram is None else ram.total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def load_average() -> float | None:
    """Processes that wanted a core during the last minute; None where the system does not count them."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def file_hash(path: Path) -> str:
    """SHA-256 of a GGUF file (all shards of a split one), read once and kept by size and time of change."""
    shards = [header.path for header in gguf_file.check_loadable(gguf_file.read_header(path), "target")]
    kept_at = profile_path("sha256", *shards)
    kept = load_profile(kept_at)
    if kept is not None and isinstance(known := kept.get("sha256"), str):
        return known
    digest = hashlib.sha256()
    for shard in shards:
        with shard.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    save_profile(kept_at, {"sha256": digest.hexdigest()})
    return digest.hexdigest()


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        text = ""
    found = re.search(r"^(?:model name|Model)\s*: (.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()
