"""Free RAM as the system and its cgroups tell it, from files that look like theirs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from specli.free_memory import available_ram, linux_ram, parse_vm_stat

KIB, GIB = 1024, 1 << 30
MEMINFO = "MemTotal:       25165824 kB\nMemFree:         1000 kB\nMemAvailable:   16777216 kB\nCached:  2000 kB\n"
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               12345.
Pages active:                            400000.
Pages inactive:                           54321.
Pages speculative:                         1000.
Pages wired down:                         90000.
Pages purgeable:                            200.
"File-backed pages":                      99999.
Pages stored in compressor:              300000.
"""


def system(root: Path, meminfo: str = MEMINFO, cgroup: str = "0::/\n", **files: str) -> Path:
    """A root folder with /proc and /sys/fs/cgroup; ``files`` by path below the latter."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(meminfo)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def free(root: Path) -> int:
    ram = linux_ram(root)
    assert ram is not None
    return ram.free


def test_without_limits_it_is_what_linux_can_give(tmp_path: Path) -> None:
    ram = linux_ram(system(tmp_path))
    assert (ram.free, ram.total, ram.source) == (16 * GIB, 24 * GIB, "RAM")


def test_old_kernels_do_not_say_what_is_available(tmp_path: Path) -> None:
    assert free(system(tmp_path, "MemTotal: 9000 kB\nMemFree: 1000 kB\nCached: 2000 kB\n")) == 3000 * KIB


def test_a_v2_limit_binds_and_page_cache_counts_as_free(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        **{
            "memory.max": f"{4 * GIB}\n",
            "memory.current": f"{3 * GIB}\n",
            "memory.stat": f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\n",
        },
    )
    ram = linux_ram(root)
    assert (ram.free, ram.total, ram.source) == (4 * GIB - 3 * GIB + 3 * GIB // 2, 4 * GIB, "RAM (cgroup memory.max)")


def test_limits_above_the_own_group_bind_too(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        cgroup="0::/user.slice/app.scope\n",
        **{
            "user.slice/app.scope/memory.max": "max\n",
            "user.slice/app.scope/memory.current": "5\n",
            "user.slice/memory.high": f"{2 * GIB}\n",
            "user.slice/memory.current": f"{GIB}\n",
        },
    )
    assert free(root) == GIB


def test_a_v1_limit_binds_even_where_the_path_is_the_hosts(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        cgroup="9:name=systemd:/\n4:cpu,memory:/docker/0123abc\n0::/\n",
        **{
            "memory/memory.limit_in_bytes": f"{GIB}\n",
            "memory/memory.usage_in_bytes": f"{GIB // 2}\n",
            "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 4}\ntotal_active_file 0\n",
        },
    )
    assert free(root) == GIB // 2 + GIB // 4


def test_v1_writes_a_huge_number_for_no_limit(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "5\n"}
    assert free(system(tmp_path, cgroup="4:memory:/\n", **files)) == 16 * GIB


def test_a_full_group_has_nothing_left_not_less(tmp_path: Path) -> None:
    assert free(system(tmp_path, **{"memory.max": "1000\n", "memory.current": "2000\n"})) == 0


@pytest.mark.parametrize("cgroup", ["", "nonsense\n", "0::\n", "0::/../../etc\n", "\x00\n"])
def test_odd_cgroup_files_are_no_limit(tmp_path: Path, cgroup: str) -> None:
    assert free(system(tmp_path, cgroup=cgroup)) == 16 * GIB


@pytest.mark.parametrize("meminfo", ["", "MemFree: 12 kB\n"])
def test_a_system_that_does_not_say(tmp_path: Path, meminfo: str) -> None:
    assert linux_ram(system(tmp_path, meminfo)) is None
    assert linux_ram(tmp_path / "nowhere") is None


def test_macos() -> None:
    assert parse_vm_stat(VM_STAT) == 16384 * (12345 + 54321 + 1000 + 200)
    with pytest.raises(ValueError, match="something else"):
        parse_vm_stat("vm_stat: not permitted")


@pytest.mark.skipif(sys.platform not in ("linux", "darwin", "win32"), reason="no way to ask")
def test_this_machine() -> None:
    ram = available_ram()
    assert ram is not None
    assert 0 < ram.free <= ram.total
