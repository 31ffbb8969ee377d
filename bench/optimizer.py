"""One step of AdamW on sharded parameters, against torch's on plain tensors of the same size and on DTensors.

    python bench/optimizer.py                      # writes bench/results/optimizer.md

A job of two processes of one thread each. What is "in a job" are the parameters of a model that went through its first call and a
backward, so that all that surrounds a job's step is in it; the others step as they would in a process without autoshard. Steps of all
contenders take turns, both processes at once. The ratio of a start is the median of those of paired steps of its first process; jobs
are started anew several times, since where memory happens to lie is worth 10 % of a step for as long as it lies there.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import AdamW, Optimizer

sys.path.insert(0, str(Path(__file__).parent))

import report  # noqa: E402

import autoshard  # noqa: E402
from autoshard.torch_internals import step_without_hooks  # noqa: E402

WORLD = 2
RESULT = Path(__file__).parent / "results" / "optimizer.md"
BLOCK = [(256, 256)] * 4 + [(704, 256)] * 2 + [(256, 704)] + [(256,)] * 2  # of a Llama
MODELS: dict[str, list[tuple[int, ...]]] = {
    "12 blocks, 9.6 M": [(1024, 256), *BLOCK * 12, (1024, 256)],
    "80 small blocks, 4 M": [(64,) if i % 2 else (768, 64) for i in range(80 * 2)] + [(64,)] * 640,
    "one tensor, 16 M": [(4096, 4096)],
}
Make = Callable[[Iterable[Tensor]], Optimizer]
Shapes = list[tuple[int, ...]]
Seconds = dict[str, list[float]]  # of a contender's steps


class Parameters(nn.Module):
    """A model that is nothing else."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        """A number to which each of them gives a gradient."""
        return torch.stack([(p * x).sum() for p in self.all]).sum()


def plain(shapes: Shapes) -> list[nn.Parameter]:
    """As large as this process's rows, with gradients."""
    found = dtensors(shapes)
    made = [nn.Parameter(p.data.to_local()) for p in found]
    for p, whole in zip(made, found):
        p.grad = whole.grad.to_local()
    return made


def dtensors(shapes: Shapes) -> list[nn.Parameter]:
    """Sharded by rows, with gradients."""
    mesh = init_device_mesh("cpu", (WORLD,))
    made = []
    for shape in shapes:
        value, grad = (distribute_tensor(torch.randn(shape), mesh, [Shard(0)], src_data_rank=None) for _ in range(2))
        made.append(nn.Parameter(value))
        made[-1].grad = grad
    return made


def _in_a_job(make: Make) -> Callable[[Shapes], Callable[[], object]]:
    return lambda shapes: functools.partial(_step, *job(shapes, make))


def _step(_: nn.Module, optimizer: Optimizer) -> None:
    """While there is the model."""
    optimizer.step()


def job(shapes: Shapes, make: Make) -> tuple[nn.Module, Optimizer]:
    """A model of these, all of which are sharded, behind a backward."""
    config = autoshard.Config(zero=3, replicate_below=0, codegen="eager", verbose=False)
    model = Parameters(shapes)
    optimizer = make(model.parameters())
    torch.compile(model, backend=autoshard.backend(config))(torch.randn(())).backward()
    return model, optimizer


def _alone(given: Callable[[Shapes], list[nn.Parameter]], **options: bool) -> Callable[[Shapes], Callable[[], object]]:
    def contender(shapes: Shapes) -> Callable[[], object]:
        optimizer = AdamW(given(shapes), **options)
        return functools.partial(_step_by_torch, optimizer)

    return contender


def _step_by_torch(optimizer: Optimizer) -> None:
    """As where autoshard's hooks are not: with what torch itself puts around a step, a name for its profiler."""
    with record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
        step_without_hooks(optimizer)


BASE = "torch AdamW(fused=True), plain tensors of local size"
CONTENDERS: dict[str, Callable[[Shapes], Callable[[], object]]] = {
    BASE: _alone(plain, fused=True),
    "torch AdamW, DTensors": _alone(dtensors),
    "torch AdamW(fused=True), DTensors": _alone(dtensors, fused=True),
    "torch AdamW, in a job": _in_a_job(AdamW),
    "autoshard.optim.AdamW, in a job": _in_a_job(autoshard.optim.AdamW),
    "the first once more, made last": _alone(plain, fused=True),  # how far alike ones are apart here
}


def measure(shapes: Shapes, rounds: int) -> Seconds:
    """Of all contenders, in turns of another order each, the same in both processes: who steps behind whom shows."""
    steps = [(name, make(shapes)) for name, make in CONTENDERS.items()]
    seconds: Seconds = {name: [] for name in CONTENDERS}
    orders = random.Random(0)
    for turn in range(rounds + 3):
        for name, step in orders.sample(steps, len(steps)):
            dist.barrier()
            start = time.perf_counter()
            step()
            if turn >= 3:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def page(starts: list[dict[str, Seconds]]) -> str:
    """Of the same models and contenders in each start."""
    lines = [
        "# One step of AdamW",
        "",
        f"On rows of {WORLD} processes of one thread, fp32; ms, and in brackets the ratio to the first line's step of the same turn: the median "
        f"of {len(starts)} starts of a job, and the least and the most of them. In a job: with all that surrounds its steps.",
        f"Written by `python bench/optimizer.py` on {report.cpu_name()} with {os.cpu_count()} cores, "
        f"torch {torch.__version__}.",
        "",
        "| | " + " | ".join(MODELS) + " |",
        "|---|" + "---:|" * len(MODELS),
    ]
    for name in CONTENDERS:
        lines.append(f"| {name} | {' | '.join(_cell([start[model] for start in starts], name) for model in MODELS)} |")
    return "\n".join(lines) + "\n"


def _cell(starts: list[Seconds], name: str) -> str:
    ratios = [statistics.median(a / b for a, b in zip(seconds[name], seconds[BASE])) for seconds in starts]
    spread = f", {min(ratios):.2f} to {max(ratios):.2f}" if name != BASE else ""
    median = statistics.median(statistics.median(seconds[name]) for seconds in starts)
    return f"{median * 1e3:.2f} ({statistics.median(ratios):.2f}{spread})"


def _process(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    found = {name: measure(shapes, rounds) for name, shapes in MODELS.items()}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def start(rounds: int) -> dict[str, Seconds]:
    """All steps of one job, by model."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, (folder, rounds), WORLD)
        return json.loads((Path(folder) / "found.json").read_text())  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=7, help="takes 150 s each on two cores")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    RESULT.write_text(page([start(options.rounds) for _ in range(options.starts)]))
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
