"""How much memory a job may still take here, beside what it has."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from autoshard.runtime import processes

CGROUP = Path("/sys/fs/cgroup")  # of this container, where there is one
MEMINFO = Path("/proc/meminfo")


def available_memory(device: torch.device) -> int:
    """Bytes that this process can still take: of the GPU, with what torch has of it and does not use; or its share of what the
    host, or the container, has for all of its processes, as many as the launcher says."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    limits = [_of_host(), _of_container()]
    return min(limit for limit in limits if limit is not None) // (processes.said_of_this_node() or 1)


def _of_host() -> int:
    """What the kernel says can be had: pages that hold files can, though they are not free."""
    for line in _lines(MEMINFO):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")


def _of_container() -> int | None:
    """What is left of a limit; None where there is none."""
    most, now = (next(iter(_lines(CGROUP / name)), "max") for name in ("memory.max", "memory.current"))
    if not most.isdigit() or not now.isdigit():
        return None
    files = [int(line.split()[1]) for line in _lines(CGROUP / "memory.stat") if line.startswith("inactive_file ")]
    return max(0, int(most) - int(now) + sum(files))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # another kernel, or nothing that limits
        return []
