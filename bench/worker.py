"""One process of a measurement, started on every host by run.py or by any launcher like torchrun.

    worker.py ddp,autoshard0 --steps 15 --out steps.json           # step times, contenders side by side
    worker.py autoshard0 --memory --out memory.json                # peak memory and first step, one contender

[Note: Side by side] All contenders take turns, six steps each a round, of which the last four are timed; the round's time is their
median. A job's steps follow each other, and the first ones of a turn find connections that were idle while others had theirs, on
which TCP begins slowly. So noise of the machine and of the network hits all alike, and the ratio of two times of one round means
something. Those of one project are in one process group, with processes of their own beside those of the others: what a project
sets for its whole process (DeepSpeed changes torch, autoshard keeps freed memory) the others do not have.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

sys.path.insert(0, str(Path(__file__).parent))

import contenders  # noqa: E402
import reference  # noqa: E402
import turns  # noqa: E402

WARM_UP = 3  # the first step compiles, the second may rebuild buckets or recompile, the third settles caches
TURN, TIMED = 6, 4  # steps of a turn, and its last ones that are timed; see [Note: Side by side]
EXIT_SECONDS = 0.5
PORTS_APART = 1000  # of what sides meet on


@dataclass
class Measured:
    """What was measured of one contender. Seconds and bytes are those of the worst rank, loss is the mean.

    peak: held + the most that a step has allocated on top. held: what is there between two steps.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first_step: float | None = None
    held: int | None = None
    peak: int | None = None


def measure_steps(names: Sequence[str], options: Sequence[str]) -> list[Measured]:
    """Steps of each contender after the warm-up, taking turns. options: of the command line. See [Note: Side by side]."""
    # The program as it was called: one that adds contenders of its own has them in the sides' processes too.
    sides: dict[str, list[str]] = {}
    for name in names:
        sides.setdefault(contenders.side_of(name), []).append(name)
    port = int(os.environ["MASTER_PORT"])
    players = []
    for number, members in enumerate(sides.values()):
        command = [sys.executable, sys.argv[0], ",".join(members), "--told", *options]
        players.append(turns.Player(command, {**os.environ, "MASTER_PORT": str(port + PORTS_APART * (number + 1))}))
    return _play(players, names)


def _play(players: Sequence[turns.Player], names: Sequence[str]) -> list[Measured]:
    rounds = min(int(player.answered()["rounds"]) for player in players)
    for _ in range(rounds):
        for player in players:
            player.play()
    found: dict[str, Measured] = {}
    for player in players:
        player.end()
        found |= {entry["name"]: Measured(**entry) for entry in player.answered()["measured"]}
    return [found[name] for name in names]


def take_turns(names: Sequence[str], rounds: int, pause: float) -> None:
    """Of one side, in a process that is told when: a turn of each contender, with a pause of so many seconds after each step."""
    runs = [(Measured(name), contenders.POSSIBLE[name]()) for name in names]
    turns.answer(rounds=WARM_UP + rounds)
    for number in turns.told():
        if number == WARM_UP:
            _quiet_collector()
        for measured, contender in runs:
            for step in range(TURN):
                seconds, loss = _timed(contender, reference.batch(TURN * number + step, dist.get_rank()))
                time.sleep(pause)
                measured.losses.append(loss)
                if number >= WARM_UP and step >= TURN - TIMED:
                    measured.seconds.append(seconds)
        turns.answer()
    for measured, _ in runs:
        steps = _over_ranks(measured.seconds, dist.ReduceOp.MAX)
        measured.seconds = [statistics.median(steps[i : i + TIMED]) for i in range(0, len(steps), TIMED)]
        measured.losses = _mean_over_ranks(measured.losses)
    turns.answer(measured=[asdict(measured) for measured, _ in runs])


def _quiet_collector() -> None:
    """Keeps garbage collections from walking all contenders' heaps, which no real job holds at once."""
    gc.collect()
    gc.freeze()


def _timed(contender: contenders.Contender, tokens: Tensor) -> tuple[float, float]:
    """The seconds of one step from the moment that all ranks are ready, and its loss."""
    dist.barrier()
    start = time.perf_counter()
    loss = contender.step(tokens)
    return time.perf_counter() - start, float(loss)


def measure_memory(name: str) -> Measured:
    """Peak bytes of a step, and seconds from nothing to the end of the first step; takes a fresh process."""
    measured = Measured(name)
    dist.barrier()
    start = time.perf_counter()
    contender = contenders.POSSIBLE[name]()
    for number in range(WARM_UP):
        loss = contender.step(reference.batch(number, dist.get_rank()))
        measured.losses.append(float(loss))
        if number == 0:
            measured.first_step = time.perf_counter() - start
    del loss
    held = held_bytes(contender)
    held_and_grown = held + step_growth(contender, reference.batch(WARM_UP, dist.get_rank()))
    first, held, peak = _over_ranks([measured.first_step, held, held_and_grown], dist.ReduceOp.MAX)
    measured.first_step, measured.held, measured.peak = first, int(held), int(peak)
    measured.losses = _mean_over_ranks(measured.losses)
    return measured


def held_bytes(contender: contenders.Contender, device: str = "cpu") -> int:
    """Bytes of all storages on such devices that are alive between steps: state, and buffers that a system keeps for itself.

    All tensors that Python knows of, rather than those of the model and its optimizer, because flat buffers
    and copies that a system keeps elsewhere are memory too.
    """
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and _has_bytes(thing, device):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()) + _ddp_buckets(contender)


def _has_bytes(tensor: Tensor, device: str) -> bool:
    """True for tensors with memory of their own there: not DTensors (their local tensor counts) nor fake ones."""
    if is_traceable_wrapper_subclass(tensor) or isinstance(tensor, torch._subclasses.FakeTensor):
        return False
    return (
        tensor.device.type == device
        and tensor.layout == torch.strided
        and not torch._is_functional_tensor(tensor)
    )


def _ddp_buckets(contender: contenders.Contender) -> int:
    """DDP's reducer keeps its flat buckets in C++, where no tensor of Python shows them."""
    model: Any = getattr(contender.model, "_orig_mod", contender.model)
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    logged = model._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
    return sum(int(size) for size in str(sizes).split(","))


def step_growth(contender: contenders.Contender, tokens: Tensor) -> int:
    """The most bytes by which one step goes above where it started."""
    return max(total for _, total in grown(contender, tokens))


def grown(contender: contenders.Contender, tokens: Tensor, mark: str = "") -> list[tuple[bool, int]]:
    """Bytes above where one step started after each of the allocator's own events, and whether that was behind a span of torch's
    profiler of this name."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        contender.step(tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    if not memory:
        raise RuntimeError("the profiler recorded no memory events")
    marked = min((float(e["ts"]) for e in events if e.get("name") == mark), default=math.inf)
    in_order = sorted(memory, key=lambda e: float(e["ts"]))
    totals = itertools.accumulate(int(e["args"]["Bytes"]) for e in in_order)
    return [(float(e["ts"]) > marked, total) for e, total in zip(in_order, totals)]


def _over_ranks(values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
    together = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(together, how)
    return together.tolist()


def _mean_over_ranks(values: Sequence[float]) -> list[float]:
    return [v / dist.get_world_size() for v in _over_ranks(values, dist.ReduceOp.SUM)]


def _start(caches: Path | None) -> None:
    """Joins the group. Each rank has compile caches of its own, as hosts have."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # One code object is compiled once for every contender here; a job has one.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.accumulated_recompile_limit = 1024
    if caches is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / f"rank{os.environ['RANK']}")
    dist.init_process_group("gloo")


def _report(results: Sequence[Measured], out: Path) -> None:
    """Rank 0 writes the results and prints a line each."""
    if int(os.environ["RANK"]) != 0:
        return
    out.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
    for r in results:
        seconds = (
            f"{statistics.median(r.seconds):.4f} s a step" if r.seconds else f"{r.peak} bytes at the peak"
        )
        print(f"{r.name}: {seconds}, last loss {r.losses[-1]:.5f}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("contenders", help=f"of {', '.join(contenders.CONTENDERS)}; with commas between")
    parser.add_argument("--steps", type=int, default=15, help="timed rounds, after the warm-up")
    parser.add_argument("--pause", type=float, default=0.0, help="milliseconds after each of them")
    parser.add_argument("--memory", action="store_true", help="peak memory of one contender instead")
    parser.add_argument("--caches", type=Path, help="folder for compile caches; empty for a cold first step")
    parser.add_argument("--out", type=Path, required=True, help="JSON file that rank 0 writes")
    parser.add_argument("--told", action="store_true", help=argparse.SUPPRESS)  # one side, which takes turns with others
    asked = parser.parse_args()
    names = asked.contenders.split(",")
    if asked.memory and len(names) != 1:
        parser.error("--memory takes one contender: another one's tensors would be counted")
    if not (asked.memory or asked.told):
        options = ["--steps", str(asked.steps), "--pause", str(asked.pause), "--out", str(asked.out)]
        _report(measure_steps(names, options + (["--caches", str(asked.caches)] if asked.caches else [])), asked.out)
        return
    _start(asked.caches)
    if asked.memory:
        _report([measure_memory(names[0])], asked.out)
    else:
        take_turns(names, asked.steps, asked.pause / 1e3)
    dist.barrier()
    sys.stdout.flush()
    # gloo's threads may still hold Python objects of the last work; leave them time before the teardown
    time.sleep(EXIT_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main()
