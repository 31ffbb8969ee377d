"""How much of a line's rate gathers and reductions reach, by the size of their messages; writes bench/results/messages.md.

    python bench/messages.py [--rates 1000,200] [--hosts 2]

Hosts are network namespaces with one process of one thread each. Of every size as many are under way in a row as carry 12.8 MB, as
in a step whose links never rest. The share is of the bytes that a process must send at the line's rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import netns  # noqa: E402
import run as side_by_side  # noqa: E402

from autoshard import torch_internals  # noqa: E402
from autoshard.ops.direct import EXCHANGE_DIRECT, GATHER_DIRECT, SWAP_DIRECT  # noqa: E402

KIB = 2**10
SIZES = [KIB << doublings for doublings in range(7, 14)]  # bytes of the whole tensor: 128 KiB to 8 MiB
TOTAL, ROUNDS = 12_800_000, 7
functional = torch.ops._c10d_functional
Seconds = dict[str, list[float]]  # of one collective, by size


def measure() -> Seconds:
    """What this process finds, together with the others."""
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    group = dist.new_group(backend=torch_internals.gloo_in_turn()).group_name
    found: Seconds = {}
    for size in SIZES:
        whole = torch.randn(size // 4 // world * world)
        rows, each = whole[: whole.numel() // world].clone(), [whole.numel() // world] * world
        calls: dict[str, Callable[[], Tensor]] = {
            "all_gather": lambda rows=rows: functional.all_gather_into_tensor(rows, world, group),  # type: ignore[misc]
            "all_to_all": lambda whole=whole, each=each: functional.all_to_all_single(whole, each, each, group),  # type: ignore[misc]
            "all_reduce": lambda whole=whole: functional.all_reduce(whole, "sum", group),  # type: ignore[misc]
            "gather_direct": lambda rows=rows: GATHER_DIRECT(rows, world, group),  # type: ignore[misc]
            "exchange_direct": lambda whole=whole: EXCHANGE_DIRECT(whole, world, group),  # type: ignore[misc]
        }
        if world == 2:
            calls["swap_direct"] = lambda whole=whole: SWAP_DIRECT(whole, group)  # type: ignore[misc]
        for name, call in calls.items():
            found.setdefault(name, []).append(statistics.median(_in_a_row(call, TOTAL // size + 1) for _ in range(ROUNDS)))
    return found


def _in_a_row(call: Callable[[], Tensor], count: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for flying in [call() for _ in range(count)]:
        functional.wait_tensor(flying)
    return (time.perf_counter() - start) / count


def shares(seconds: Seconds, world: int, mbit: int) -> dict[str, list[float]]:
    """Of the line's rate; an all-reduce sends everything twice, a swap all of it at once."""
    def share(name: str, size: int, taken: float) -> float:
        sent = (2 if name in ("all_reduce", "swap_direct") else 1) * size * (world - 1) / world
        return sent / (mbit * 1e6 / 8) / taken

    return {name: [share(name, size, s) for size, s in zip(SIZES, row)] for name, row in seconds.items()}


def markdown(found: dict[int, dict[str, list[float]]], machine: str) -> str:
    """The table."""
    sizes = [f"{s // KIB} KiB" if s < KIB * KIB else f"{s // KIB // KIB} MiB" for s in SIZES]
    lines = [
        "# What a line carries, by the size of messages\n",
        f"{machine}. Written by `python bench/messages.py`: the share of the line's rate that collectives reach, several in a row,",
        "by the bytes of the whole tensor that each gathers or reduces. The direct ones are sends of each process to each.\n",
        f"| Mbit/s | collective | {' | '.join(sizes)} |",
        f"|---:|---|{'---:|' * len(sizes)}",
    ]
    for mbit, by_name in found.items():
        lines += [f"| {mbit} | {name} | {' | '.join(f'{s:.2f}' for s in row)} |" for name, row in by_name.items()]
    return "\n".join([*lines, ""])


def main() -> int:
    """The command line; with RANK set, one process of the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", default="1000,200", help="Mbit/s, with commas between")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "messages.md")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        seconds = measure()
        if dist.get_rank() == 0:
            asked.out.write_text(json.dumps(seconds))
        dist.barrier()
        time.sleep(0.5)  # gloo's threads may still hold Python objects of the last work
        os._exit(0)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        for mbit in map(int, asked.rates.split(",")):
            command = [sys.executable, __file__, "--out", str(out)]
            if code := netns.run(netns.Job(command, asked.hosts, mbit, env={"PYTHONPATH": str(HERE.parent)})):
                return code
            found[mbit] = shares(json.loads(out.read_text()), asked.hosts, mbit)
    machine = side_by_side.machine("network namespaces")
    text = markdown(found, f"{machine.cpu}, {machine.cores} cores, {asked.hosts} hosts of one process, torch {machine.torch}, gloo, {machine.date}")
    asked.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
