"""One step of AdamW on sharded parameters, against torch's on plain tensors of the same size and on DTensors.

    python bench/optimizer.py                      # writes bench/results/optimizer.md

Steps of all contenders take turns in one process of a fake group of two, in which nothing is sent; each figure is the median
of the ratios of paired steps.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import AdamW, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard

WORLD = 2
RESULT = Path(__file__).parent / "results" / "optimizer.md"
BLOCK = [(256, 256)] * 4 + [(704, 256)] * 2 + [(256, 704)] + [(256,)] * 2  # of a Llama
MODELS: dict[str, list[tuple[int, ...]]] = {
    "12 blocks, 9.6 M": [(1024, 256), *BLOCK * 12, (1024, 256)],
    "80 small blocks, 4 M": [(64,) if i % 2 else (768, 64) for i in range(80 * 2)] + [(64,)] * 640,
    "one tensor, 16 M": [(4096, 4096)],
}
CONTENDERS: dict[str, tuple[bool, Callable[[Iterable[torch.Tensor]], Optimizer]]] = {
    "torch AdamW(fused=True), plain tensors of local size": (False, lambda ps: AdamW(ps, fused=True)),
    "torch AdamW, DTensors": (True, AdamW),
    "torch AdamW(fused=True), DTensors": (True, lambda ps: AdamW(ps, fused=True)),
    "autoshard.optim.AdamW, DTensors": (True, autoshard.optim.AdamW),
}


def parameters(shapes: list[tuple[int, ...]], sharded: bool) -> list[nn.Parameter]:
    """With gradients; DTensors, or plain tensors as large as this process's rows of them."""
    mesh = init_device_mesh("cpu", (WORLD,))
    made = []
    for shape in shapes:
        value, grad = (distribute_tensor(torch.randn(shape), mesh, [Shard(0)], src_data_rank=None) for _ in range(2))
        parameter = nn.Parameter(value if sharded else value.to_local())
        parameter.grad = grad if sharded else grad.to_local()
        made.append(parameter)
    return made


def measure(shapes: list[tuple[int, ...]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender's steps, in turns."""
    optimizers = {name: make(parameters(shapes, sharded)) for name, (sharded, make) in CONTENDERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for turn in range(rounds + 3):
        for name, optimizer in optimizers.items():
            start = time.perf_counter()
            optimizer.step()
            if turn >= 3:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def report(found: dict[str, dict[str, list[float]]]) -> str:
    lines = [
        "# One step of AdamW",
        "",
        f"On rows of {WORLD} processes, fp32, {torch.get_num_threads()} threads; ms, the median, and in brackets the median ratio "
        "to the first line's step of the same turn.",
        f"Written by `python bench/optimizer.py` on {platform.processor() or platform.machine()} with {os.cpu_count()} cores, "
        f"torch {torch.__version__}.",
        "",
        "| | " + " | ".join(found) + " |",
        "|---|" + "---:|" * len(found),
    ]
    for name in CONTENDERS:
        cells = [_cell(seconds[name], seconds[next(iter(CONTENDERS))]) for seconds in found.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(ours: list[float], base: list[float]) -> str:
    ratio = statistics.median(a / b for a, b in zip(ours, base))
    return f"{statistics.median(ours) * 1e3:.2f} ({ratio:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    torch.manual_seed(0)
    RESULT.write_text(report({name: measure(shapes, rounds) for name, shapes in MODELS.items()}))
    print(RESULT.read_text())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
