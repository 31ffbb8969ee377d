"""Jobs of fresh processes, for what must be seen from outside: exits, deaths, hangs, command lines."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import CONTEXT, free_port

ROOT = Path(__file__).parent.parent
Wait, Kill = Callable[[float], int], Callable[[], None]

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


def launch(world: int, body: str, timeout: float = 90.0, fresh: bool = False) -> list[Ended]:
    """Runs `PRELUDE` and `body` in `world` processes with torchrun's variables; raises if one hangs. fresh: by an interpreter of their
    own, whose end is to be seen, else by copies of one that has imported all, which are there at once."""
    port = free_port()
    script = PRELUDE + textwrap.dedent(body)
    start = _interpreter if fresh else _copy
    # Files, not pipes: a process whose pipe nobody empties stops, and with it all others.
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(world)]
        running = [start(script, _variables(rank, world, port), output) for rank, output in enumerate(outputs)]
        try:
            codes = [wait(timeout) for wait, _ in running]
        finally:
            for _, kill in running:
                kill()
        return [Ended(code, output.read_text()) for code, output in zip(codes, outputs)]


def _interpreter(script: str, variables: dict[str, str], output: Path) -> tuple[Wait, Kill]:
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, **variables}, stdout=file, stderr=subprocess.STDOUT
        )
    return lambda timeout: process.wait(timeout=timeout), process.kill


def _copy(script: str, variables: dict[str, str], output: Path) -> tuple[Wait, Kill]:
    process = CONTEXT.Process(target=_run, args=(script, {**os.environ, **variables}, output), daemon=True)
    process.start()

    def wait(timeout: float) -> int:
        process.join(timeout)
        if process.exitcode is None:
            raise TimeoutError(f"a process did not end within {timeout} s: {output.read_text()}")
        return process.exitcode

    return wait, process.kill


def _run(script: str, environment: dict[str, str], output: Path) -> None:
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})
    except Exception as error:
        sys.last_value = error
        raise
    finally:
        atexit._run_exitfuncs()  # as an interpreter does; a copy does not


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
