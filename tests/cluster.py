"""Real gloo processes for tests, started once a session and reused: starting one costs seconds."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT = 240.0  # seconds that one task may take
COLLECT_EVERY = 8  # tasks, which leave models in cycles
MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "bert", "vit", "t5")]
IMPORTED = ["torch._inductor.compile_fx", "autoshard", "tests.parity", *MODELS, "tests.warm"]  # once, for all that are started

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(IMPORTED)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch
    import torch.distributed as dist

    from autoshard.runtime.processes import build_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    build_mesh("cpu", (("shard", world),), 60.0)  # or a short timeout of one test would be that of all that follow
    for number in itertools.count(1):
        if (task := pipe.recv()) is None:
            return
        answer = _answer(*task)
        pipe.send(answer)
        if answer[0] == "error":
            time.sleep(1)  # for others to read what it has said
            return  # who waits for it in a collective loses it
        torch.compiler.reset()
        if number % COLLECT_EVERY == 0:
            gc.collect()
            gc.freeze()  # what torch keeps of all that was compiled, or each look at what is alive would go through it


def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "value", function(*args)
    except BaseException as error:  # sent to the test, which raises it
        return "error", (type(error).__name__, str(error), traceback.format_exc())


class WorkerError(Exception):
    """What a process raised: `kind` is the name of the exception's class."""

    def __init__(self, rank: int, kind: str, text: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {text}\n{trace}")
        self.kind, self.text = kind, text


class Cluster:
    """`world` processes in one gloo group."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._start()

    def _start(self) -> None:
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.world):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, self.world, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def answers(self, function: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
        """("value", result) or ("error", (class, text, trace)) of each rank. After an error or a hang
        the processes are replaced, since collectives may be left half done."""
        for pipe in self._pipes:
            pipe.send((function, args))
        got = [pipe.recv() if pipe.poll(TIMEOUT) else ("error", ("Hang", "no answer", "")) for pipe in self._pipes]
        if any(kind == "error" for kind, _ in got):
            self.stop()
            self._start()
        return got

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The result of `function(*args)` on each rank; WorkerError if one raised."""
        got = self.answers(function, *args)
        for rank, (kind, value) in enumerate(got):
            if kind == "error":
                raise WorkerError(rank, *value)
        return [value for _, value in got]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
