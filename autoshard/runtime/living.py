"""Which process of which machine this is, and whether such a one lives."""

from __future__ import annotations

import os
from pathlib import Path

_PROCESSES = Path("/proc")
_ENDED_OR_STOPPED = frozenset("ZXxT")


def mark() -> str:
    """Of this process, for others on its machine; "" where the system does not say who lives (it is Linux that does)."""
    own = _state_and_start(os.getpid())
    return f"{_machine()}/{os.getpid()}/{own[1]}" if own is not None else ""


def lives(marked: str) -> bool:
    """Whether the process of a `mark` is there, and goes on. False of one on another machine, or in another container, of which nothing
    is known."""
    machine, _, of = marked.rpartition("/")[0].rpartition("/")
    found = _state_and_start(int(of)) if of.isdecimal() and machine == _machine() else None
    return found is not None and found[0] not in _ENDED_OR_STOPPED and marked.endswith(f"/{found[1]}")


def _machine() -> str:
    """This boot of this machine, and what its numbers of processes count in."""
    try:
        return f"{(_PROCESSES / 'sys/kernel/random/boot_id').read_text().strip()}/{(_PROCESSES / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def _state_and_start(of: int) -> tuple[str, str] | None:
    """How a process is, and when it began: another one may get its number."""
    try:
        behind_the_name = (_PROCESSES / str(of) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return behind_the_name[0], behind_the_name[19]
