"""Jobs of fresh processes, for what must be seen from outside: exits, deaths, hangs, command lines."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.cluster import free_port

ROOT = Path(__file__).parent.parent

PRELUDE = """
import os, sys, time, torch, autoshard
from torch import nn
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
def compiled(model=model, **config):
    config = {"codegen": "eager", "verbose": False, "replicate_below": 0, "zero": 3} | config
    return torch.compile(model, backend=autoshard.backend(autoshard.Config(**config)))
"""


@dataclass(frozen=True)
class Ended:
    """How one process ended."""

    code: int
    output: str


def launch(world: int, body: str, timeout: float = 90.0) -> list[Ended]:
    """Runs `PRELUDE` and `body` in `world` processes with torchrun's variables; raises if one hangs."""
    port = free_port()
    script = PRELUDE + textwrap.dedent(body)
    # Files, not pipes: a process whose pipe nobody empties stops, and with it all others.
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world)]
        running = [_start(script, rank, world, port, file) for rank, file in enumerate(files)]
        try:
            for process in running:
                process.wait(timeout=timeout)
        finally:
            for process in running:
                process.kill()
        return [Ended(p.returncode, _text(f)) for p, f in zip(running, files)]


def _start(script: str, rank: int, world: int, port: int, output: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, **_variables(rank, world, port)},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _variables(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
