"""What a process keeps of the memory that it frees."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ROUNDS = """
import resource, torch
from autoshard.runtime.freed_memory import keep_freed_memory
kept = keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    before = faults()
    values = [torch.ones(2**18) for _ in range(64)]
    return faults() - before
[step() for _ in range(3)]
print(kept, min(step() for _ in range(5)))
"""


def _rounds(**environment: str) -> tuple[bool, int]:
    """Whether it keeps it, and page faults of a round that takes and frees 64 MiB."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", ROUNDS]
    out = subprocess.run(command, env=bare | environment, check=True, capture_output=True, text=True, timeout=120).stdout.split()
    return out[0] == "True", int(out[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's own")
def test_a_round_faults_nothing_in_again() -> None:
    """Without, all 16,384 pages are, but where something that stays happens to lie at the end of the heap."""
    kept, faults = _rounds()
    assert kept and faults < 500


@pytest.mark.full
def test_who_says_what_glibc_does_is_asked() -> None:
    assert _rounds(MALLOC_TRIM_THRESHOLD_="131072")[0] is False
