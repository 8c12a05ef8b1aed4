"""What this machine has to give: memory and cores, as the limits of a container leave them. Standard library only."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
CPUS = Path("/sys/devices/system/cpu")
UNLIMITED = 1 << 60


def available_memory() -> int:
    """Bytes that can be taken now without swapping."""
    free = _meminfo().get("MemAvailable", 0) or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _number(CGROUP / "memory.max")
    if limit < UNLIMITED:
        free = min(free, max(limit - _number(CGROUP / "memory.current"), 0))
    return free


def total_memory() -> int:
    """Bytes of main memory, or of this container's share."""
    total = _meminfo().get("MemTotal", 0) or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, _number(CGROUP / "memory.max"))


def cores() -> int:
    """Cores that this process may use; a container's quota is rounded down, but to one at least."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError, IndexError):
        quota, period = (CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(int(quota) // int(period), 1))
    return count


def core_shares(count: int) -> list[tuple[int, ...]]:
    """The cores of this process in `count` equal parts; memory nodes and pairs of hyperthreads stay together.

    With fewer cores than parts, neighbours share one. Empty parts where the system can't tell: no limits.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [()] * count
    found = sorted(os.sched_getaffinity(0), key=_place)[: cores()]
    n = len(found)
    return [tuple(found[i * n // count : max((i + 1) * n // count, i * n // count + 1)]) for i in range(count)]


def _place(core: int) -> tuple[int, int, int]:
    """(memory node, physical core, number)"""
    directory = CPUS / f"cpu{core}"
    nodes = sorted(int(path.name[4:]) for path in directory.glob("node[0-9]*"))
    return nodes[0] if nodes else 0, _number(directory / "topology/core_id"), core


def gpu_shares(count: int) -> list[str]:
    """The GPU of each of `count` processes as CUDA_VISIBLE_DEVICES has it; they take turns when there are fewer."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [path.name[6:] for path in sorted(Path("/dev").glob("nvidia[0-9]*"))] if given is None else given.split(",")
    return [gpus[i % len(gpus)] if gpus else "" for i in range(count)]


def huge_pages() -> str:
    """The kernel's policy for transparent huge pages: always, madvise or never; "" = not known."""
    with contextlib.suppress(OSError, IndexError):
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().split("[")[1].split("]")[0]
    return ""


def processor() -> str:
    """The name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def accelerators() -> list[str]:
    """Drivers of GPUs that are there: "cuda", "rocm"."""
    found = []
    if Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists():
        found.append("cuda")
    if Path("/dev/kfd").exists():
        found.append("rocm")
    return found


def compilers() -> list[str]:
    """Paths of the compilers that could build the kernels."""
    return [path for name in ("g++", "clang++", "nvcc", "hipcc") if (path := shutil.which(name))]


def _meminfo() -> dict[str, int]:
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            found[name] = int(rest.split()[0]) * 1024
    return found


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return UNLIMITED
