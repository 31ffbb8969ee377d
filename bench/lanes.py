"""What a connection of its own for each direction is worth ([Note: Lanes] in `autoshard/ops/direct.py`): two hosts swap parts of a
gradient beside a computation, as a backward does.

    python bench/lanes.py     # writes bench/results/lanes.md; needs root and iproute2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import netns  # noqa: E402
import run as side_by_side  # noqa: E402

from autoshard import torch_internals  # noqa: E402

BYTES, COMPUTED = 15_300_000, 0.126  # of the 4.2 M Llama of bench/run.py: what its gradients take, and its backward
PARTS, MBIT, TIMES, JOBS = (8, 30), 1000, 40, 2
LANES = {"one for both": False, "one a direction": True}
ALONE = "nothing computed"


def work(seconds: float, a: torch.Tensor) -> None:
    """Computes until this thread has run for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        torch.mm(a, a)


def swap(group: Any, whole: torch.Tensor, place: torch.Tensor, parts: int, lanes: bool, computed: float) -> float:
    """Seconds of one swap, each part of which is there when as much of the computation is through."""
    own, other = dist.get_rank(), 1 - dist.get_rank()
    a, works = torch.ones(256, 256), []
    dist.barrier()
    start = time.perf_counter()
    for part, brought in zip(whole.chunk(parts), place.chunk(parts)):
        work(computed / parts, a)
        works += [group.recv([brought], other, int(lanes and own < other)), group.send([part], other, int(lanes and own > other))]
    for one in works:
        one.wait()
    return time.perf_counter() - start


def serve(out: Path) -> None:
    """One host: medians in milliseconds, by what is compared."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = torch_internals.group_named(dist.new_group(backend=torch_internals.gloo_in_turn()).group_name)
    job = partial(swap, group, torch.ones(BYTES // 4), torch.zeros(BYTES // 4))  # a step's memory was touched before, too
    ways = {ALONE: partial(job, PARTS[-1], True, 0.0)}
    ways |= {f"{parts} parts, {name}": partial(job, parts, lanes, COMPUTED) for parts in PARTS for name, lanes in LANES.items()}
    # Of each way all in a row: connections that were idle begin slowly, and a job's are not.
    taken = {name: [way() for _ in range(TIMES)] for name, way in ways.items()}
    if dist.get_rank() == 0:
        out.write_text(json.dumps({name: 1e3 * statistics.median(seconds[TIMES // 5 :]) for name, seconds in taken.items()}))
    dist.barrier()
    dist.destroy_process_group()


def measure(scratch: Path) -> dict[str, float]:
    """Of several jobs the medians: connections differ."""
    found = []
    for _ in range(JOBS):
        out = scratch / "milliseconds.json"
        if code := netns.run(netns.Job([sys.executable, __file__, "--out", str(out)], mbit=MBIT, env={"PYTHONPATH": str(HERE.parent)})):
            sys.exit(code)
        found.append(json.loads(out.read_text()))
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def table(took: dict[str, float]) -> str:
    """Markdown."""
    machine = side_by_side.machine("network namespaces")
    lines = [
        f"Two hosts of one process swap {BYTES / 1e6:.1f} MB each at {MBIT} Mbit/s beside {COMPUTED * 1e3:.0f} ms of computation: milliseconds, "
        f"medians of {JOBS} jobs of {TIMES}. {machine.cpu}, {machine.cores} cores, torch {machine.torch}, gloo, {machine.date}. Written by "
        "`python bench/lanes.py`.",
        "",
        "| parts | nothing computed | one connection | one a direction | ratio |",
        "|---:|---:|---:|---:|---:|",
    ]
    for parts in PARTS:
        both, apart = (took[f"{parts} parts, {name}"] for name in LANES)
        lines.append(f"| {parts} | {took[ALONE]:.0f} | {both:.0f} | {apart:.0f} | {apart / both:.2f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """All of it; with RANK set, one host of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "lanes.md")
    asked = parser.parse_args()
    if "RANK" in os.environ:
        serve(asked.out)
        return
    with tempfile.TemporaryDirectory() as scratch:
        written = table(measure(Path(scratch)))
    asked.out.write_text(written)
    print(written)


if __name__ == "__main__":
    main()
