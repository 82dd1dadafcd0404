"""How much RAM a process may still take: what the system can give without swapping, within every cgroup's limit.

Page cache that the system would drop counts as free, so weights that llama.cpp maps from a file that was read before
are not counted twice. Swap does not count: weights and caches are touched at every token.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60  # bytes; cgroup v1 writes about 2^63 for "none"


@dataclass(frozen=True, slots=True)
class Ram:
    """Bytes of RAM: ``free`` to take, ``total``; ``source`` says which limit binds, for people."""

    free: int
    total: int
    source: str


def available_ram() -> Ram | None:
    """RAM at hand now, or None where the system does not say."""
    return {"win32": _windows, "darwin": _macos}.get(sys.platform, linux_ram)()


def linux_ram(root: Path = Path("/")) -> Ram | None:
    """``MemAvailable``, or less where a cgroup (v1 or v2, this process's or any above it) allows less.

    ``root`` is the folder that holds ``proc`` and ``sys``.
    """
    try:
        text = (root / "proc/meminfo").read_text("ascii", "replace")
    except OSError:
        return None
    fields = {name: 1024 * int(kib) for name, kib in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
    if "MemTotal" not in fields:
        return None
    free = fields.get("MemAvailable", fields.get("MemFree", 0) + fields.get("Cached", 0))  # Linux before 3.14
    ram = Ram(free, fields["MemTotal"], "RAM")
    return min([ram, *_cgroup_rooms(root)], key=lambda room: room.free)


def _cgroup_rooms(root: Path) -> Iterator[Ram]:
    for folder in _cgroup_folders(root):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),  # v2
            ("memory.high", "memory.current"),  # v2: above it every allocation waits
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),  # v1
        ):
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and usage is not None and limit < _NO_LIMIT:
                free = min(limit, max(0, limit - usage + _droppable(folder)))
                yield Ram(free, limit, f"RAM (cgroup {limit_name})")


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Folders of this process's memory cgroup and of all above it; inside a container only its own is there."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        inside = [part for part in path.split("/") if part not in ("", "..")]
        yield from (mount.joinpath(*inside[:depth]) for depth in range(len(inside), -1, -1))


def _droppable(folder: Path) -> int:
    """Bytes of page cache that the cgroup was charged for and would drop."""
    try:
        text = (folder / "memory.stat").read_text("ascii", "replace")
    except OSError:
        return 0
    fields = {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
    prefix = "total_" if "total_inactive_file" in fields else ""  # v1: with the groups below it
    return fields.get(f"{prefix}inactive_file", 0) + fields.get(f"{prefix}active_file", 0)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):  # no such file; "max"
        return None


def _macos() -> Ram | None:
    try:
        pages = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, timeout=5, check=True).stdout
        size = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "hw.memsize"], capture_output=True, text=True, timeout=5, check=True
        ).stdout
        return Ram(parse_vm_stat(pages), int(size), "RAM")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def parse_vm_stat(text: str) -> int:
    """Bytes that macOS can give without swapping, from what ``vm_stat`` prints. Raises ``ValueError``."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = {name: int(count) for name, count in re.findall(r"^Pages ([\w -]+): +(\d+)\.", text, re.MULTILINE)}
    if size is None or "free" not in pages:
        raise ValueError("vm_stat printed something else")
    return int(size[1]) * sum(pages.get(name, 0) for name in ("free", "inactive", "speculative", "purgeable"))


class _MemoryStatus(ctypes.Structure):
    """Windows' MEMORYSTATUSEX."""

    _fields_ = (
        ("dwLength", ctypes.c_ulong),
        ("dwMemoryLoad", ctypes.c_ulong),
        ("ullTotalPhys", ctypes.c_ulonglong),
        ("ullAvailPhys", ctypes.c_ulonglong),
        ("ullTotalPageFile", ctypes.c_ulonglong),
        ("ullAvailPageFile", ctypes.c_ulonglong),
        ("ullTotalVirtual", ctypes.c_ulonglong),
        ("ullAvailVirtual", ctypes.c_ulonglong),
        ("ullAvailExtendedVirtual", ctypes.c_ulonglong),
    )


def _windows() -> Ram | None:
    status = _MemoryStatus(dwLength=ctypes.sizeof(_MemoryStatus))
    kernel = getattr(ctypes, "windll", None)
    if kernel is None or not kernel.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return Ram(int(status.ullAvailPhys), int(status.ullTotalPhys), "RAM")
