"""Which process of which machine this is, and whether such a one lives."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

_PROCESSES = Path("/proc")
_ENDED, _STOPPED = frozenset("ZXx"), "T"


def mark() -> str:
    """Of this process, for others on its machine; "" where the system does not say who lives (it is Linux that does)."""
    try:
        shown = (_PROCESSES / "self").readlink().name == str(os.getpid())  # not where it is of other numbers than this process has
    except OSError:
        return ""
    start = _state_and_start(os.getpid())[1] if shown else ""
    return f"{_machine()}/{os.getpid()}/{start}" if start and _machine() else ""


def lives(marked: str) -> bool:
    """Whether the process of a `mark` is there, and goes on. False of one on another machine, or in another container, of which nothing
    is known."""
    return _is_here(marked) and _state(marked) not in (*_ENDED, _STOPPED, "")


def has_ended(marked: str) -> bool:
    """Whether the process of a `mark` is not there any more. False of one of which nothing is known."""
    return _is_here(marked) and _state(marked) in _ENDED


def _is_here(marked: str) -> bool:
    return bool(_machine()) and marked.rsplit("/", 2)[0] == _machine()


def _state(marked: str) -> str:
    """Of one of this machine, in the system's letters; "" where it does not say."""
    _, number, start = marked.rsplit("/", 2)
    state, began = _state_and_start(int(number))
    return state if began in (start, "") else "X"


@functools.cache
def _machine() -> str:
    """This boot of this machine, which others may have been copied from, and what its numbers of processes count in."""
    try:
        boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()
        return f"{'-'.join(platform.node().split())}/{boot}/{(_PROCESSES / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def _state_and_start(of: int) -> tuple[str, str]:
    """How a process is, and when it began: another one may get its number. ("X", "") if there is none, ("", "") if that cannot be seen."""
    try:
        behind_the_name = (_PROCESSES / str(of) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", ""
    except OSError:
        return "", ""
    return behind_the_name[0], behind_the_name[19]
