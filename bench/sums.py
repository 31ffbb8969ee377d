"""What sums of gradients take, by gloo's all-reduces and by sends of each process to each; writes bench/results/sums.md.

    python bench/sums.py [--mbit 1000] [--hosts 2]

Hosts are network namespaces with one process of one thread each. Of every size as many gradients are summed, one after the other, as
make 16 MB: alone, and each behind matmuls that take as long as the line needs for it, as in a backward, whose reductions are waited for
two gradients later. Forms take turns, so that all see the machine alike. Beside matmuls the time is that of all less that of the
matmuls alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import netns  # noqa: E402
import run as side_by_side  # noqa: E402

from autoshard import torch_internals  # noqa: E402
from autoshard.ops.direct import EXCHANGE_DIRECT, GATHER_DIRECT, SUM_DIRECT, SUM_SWAPPED, SWAP_DIRECT  # noqa: E402

MIB = 2**20
SIZES = [MIB // 4, MIB, 4 * MIB]  # bytes of one gradient
TOTAL, ROUNDS, BEHIND = 16 * MIB, 15, 2
functional = torch.ops._c10d_functional
Form = Callable[[Tensor, int, str], Iterator[Tensor]]  # yields what it has to wait for
Seconds = dict[str, list[tuple[float, float]]]  # of a form, by size: alone, and what it adds to matmuls


def copied(grad: Tensor, world: int, group: str) -> Iterator[Tensor]:
    """Put into a bucket, divided there, and copied once more by the all-reduce."""
    flat = torch.cat([grad.view(1, -1)], 1).view(-1).div_(world)
    yield functional.all_reduce(flat, "sum", group)


def in_place(grad: Tensor, world: int, group: str) -> Iterator[Tensor]:
    """Divided on the way into the bucket, and reduced there."""
    yield functional.all_reduce_(grad / world, "sum", group)


def direct(grad: Tensor, world: int, group: str) -> Iterator[Tensor]:
    """Sent from where it lies; sums are divided."""
    if world == 2:
        brought = SWAP_DIRECT(grad, group)
        yield brought
        SUM_SWAPPED([brought], [grad], world, group)
        return
    brought = EXCHANGE_DIRECT(grad, world, group)
    yield brought
    yield GATHER_DIRECT(SUM_DIRECT([brought], [grad], world, world, grad.dtype, group), world, group)


FORMS: dict[str, Form] = {"all_reduce": copied, "all_reduce in place": in_place, "direct": direct}


def summed(grads: list[Tensor], form: Form, world: int, group: str, compute: Callable[[], object]) -> float:
    """Seconds of summing all, each behind a `compute`."""
    dist.barrier()
    start = time.perf_counter()
    under_way: deque[tuple[Iterator[Tensor], Tensor]] = deque()
    for grad in grads:
        compute()
        parts = form(grad, world, group)
        under_way.append((parts, next(parts)))
        if len(under_way) > BEHIND:
            _go_on(under_way)
    while under_way:
        _go_on(under_way)
    return time.perf_counter() - start


def _go_on(under_way: deque[tuple[Iterator[Tensor], Tensor]]) -> None:
    """Waits for the oldest; what it then waits for is the youngest."""
    parts, flying = under_way.popleft()
    functional.wait_tensor(flying)
    more = next(parts, None)
    if more is not None:
        under_way.append((parts, more))


def matmuls(seconds: float) -> Callable[[], object]:
    """Some that take so long."""
    a = torch.randn(256, 256)
    for _ in range(50):
        a @ a
    start = time.perf_counter()
    for _ in range(200):
        a @ a
    count = max(1, round(seconds / ((time.perf_counter() - start) / 200)))
    return lambda: [a @ a for _ in range(count)]


def measure(mbit: int) -> Seconds:
    """What this process finds, together with the others."""
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    group = dist.new_group(backend=torch_internals.gloo_in_turn()).group_name
    found: Seconds = {}
    for size in SIZES:
        grads = [torch.randn(size // 4) for _ in range(TOTAL // size)]
        line = 2 * size * (world - 1) / world / (mbit * 1e6 / 8) if mbit else 2e-3
        beside, nothing = matmuls(line), lambda: None
        rounds: dict[str, list[tuple[float, float]]] = {}
        for _ in range(ROUNDS):
            dist.barrier()
            start = time.perf_counter()
            for _ in grads:
                beside()
            alone = time.perf_counter() - start
            for name, form in FORMS.items():
                taken = summed(grads, form, world, group, nothing), summed(grads, form, world, group, beside) - alone
                rounds.setdefault(name, []).append(taken)
        for name, each in rounds.items():
            found.setdefault(name, []).append(tuple(statistics.median(column) for column in zip(*each)))  # type: ignore[arg-type]
    return found


def markdown(found: Seconds, machine: str, mbit: int, world: int) -> str:
    """The table."""
    least = 2 * TOTAL * (world - 1) / world / (mbit * 1e6 / 8) if mbit else 0.0
    sizes = [f"{s / MIB:g} MiB" for s in SIZES]
    lines = [
        "# Sums of gradients, by gloo's all-reduces and by sends of each process to each\n",
        f"{machine}. Written by `python bench/sums.py`: milliseconds for {TOTAL // MIB} MiB in gradients of a size, alone, and what they add to",
        f"matmuls that take as long as the line needs ({least * 1e3:.0f} ms).\n",
        f"| form | {' | '.join(f'{s}, alone | beside' for s in sizes)} |",
        f"|---|{'---:|---:|' * len(sizes)}",
    ]
    lines += [f"| {name} | {' | '.join(f'{a * 1e3:.0f} | {b * 1e3:.0f}' for a, b in row)} |" for name, row in found.items()]
    return "\n".join([*lines, ""])


def main() -> int:
    """The command line; with RANK set, one process of the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "sums.md")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        seconds = measure(asked.mbit)
        if dist.get_rank() == 0:
            asked.out.write_text(json.dumps(seconds))
        dist.barrier()
        time.sleep(0.5)  # gloo's threads may still hold Python objects of the last work
        os._exit(0)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seconds.json"
        command = [sys.executable, __file__, "--out", str(out), "--mbit", str(asked.mbit)]
        if code := netns.run(netns.Job(command, asked.hosts, asked.mbit, env={"PYTHONPATH": str(HERE.parent)})):
            return code
        found = json.loads(out.read_text())
    machine = side_by_side.machine("network namespaces")
    said = f"{machine.cpu}, {machine.cores} cores, {asked.hosts} hosts of one process at {asked.mbit} Mbit/s, torch {machine.torch}, gloo, {machine.date}"
    text = markdown(found, said, asked.mbit, asked.hosts)
    asked.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
