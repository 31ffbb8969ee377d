"""Peak memory against step time of three ways to save less for backward, on one process of one thread.

    python bench/recompute.py [--models llama,gpt2] [--codegen inductor] [--batch 8]

autoshard with memory budgets from all that torch saves down to the least that is possible; torch's own
`activation_memory_budget`; and `torch.utils.checkpoint` around the first so many blocks. Every point is measured in fresh
processes, the whole list over and over so that all ways meet the same noise; of a point's rounds the median is taken.
Writes bench/results/recompute.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import contenders  # noqa: E402
import worker  # noqa: E402
import zoo  # noqa: E402

import autoshard  # noqa: E402
from autoshard.cost_model.optimizer import NAMED  # noqa: E402

BUDGETS = 8
TORCH_BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05, 0.0)
ROUNDS, WARM_UP, STEPS = 3, 3, 9
WAYS = {"autoshard": "autoshard, by budget", "torch": "activation_memory_budget", "checkpoint": "checkpoint of blocks"}


@dataclass(frozen=True)
class Point:
    """way: how; setting: a plan's file, a budget or a number of blocks. predicted: bytes, where somebody predicts."""

    model: str
    way: str
    setting: str
    label: str
    predicted: int = 0


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The list of the most modules that are alike."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len)


def points(name: str, codegen: str, batch: int, folder: Path) -> list[Point]:
    """All that is measured of one model."""
    make, data = zoo.MODELS[name]
    with torch.device("meta"):
        model = make().train()
    inputs = data(batch, None)

    def plan(**options: Any) -> autoshard.Plan:
        return autoshard.plan(model, inputs, autoshard.Config(zero=0, codegen=codegen, **options))

    top = plan(recompute="none").predicted.peak_bytes
    floor = min(plan(recompute="full").predicted.peak_bytes, top)
    found = []
    for i in range(BUDGETS):
        budget = floor + (top - floor) * i // (BUDGETS - 1)
        made = plan(memory_budget=budget)
        file = folder / f"{name}{i}.json"
        file.write_text(made.to_json())
        found.append(Point(name, "autoshard", str(file), f"{budget / 1e6:.1f} MB", made.predicted.peak_bytes))
    found += [Point(name, "torch", str(b), str(b)) for b in TORCH_BUDGETS]
    return found + [Point(name, "checkpoint", str(n), f"{n} blocks") for n in range(len(blocks_of(model)) + 1)]


def contender(point: Point, codegen: str) -> contenders.Contender:
    """The model as this point has it."""
    torch.manual_seed(0)
    model = zoo.MODELS[point.model][0]().train()
    optimizer = NAMED["adamw"](list(model.parameters()))
    backend: Any = "inductor" if codegen == "inductor" else "aot_eager_decomp_partition"
    if point.way == "autoshard":
        backend = autoshard.backend(autoshard.Config(plan=point.setting, codegen=codegen, verbose=False))  # type: ignore[arg-type]
    elif point.way == "torch":
        torch._functorch.config.activation_memory_budget = float(point.setting)
    else:
        for block in list(blocks_of(model))[: int(point.setting)]:
            block.forward = _checkpointed(block.forward)
    return zoo.contender(model, optimizer, backend)


def _checkpointed(forward: Any) -> Any:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def measure(point: Point, codegen: str, batch: int) -> dict[str, float]:
    """Bytes at the peak and seconds of the median step, in this process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the harness waits for all
    made = contender(point, codegen)
    inputs: Any = zoo.MODELS[point.model][1](batch, torch.Generator().manual_seed(0))
    for _ in range(WARM_UP):
        made.step(inputs)
    peak = worker.held_bytes(made) + worker.step_growth(made, inputs)
    return {"peak": peak, "step": statistics.median(worker._timed(made, inputs)[0] for _ in range(STEPS))}


def in_a_process(point: Point, codegen: str, batch: int) -> dict[str, float]:
    """`measure` in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, __file__, "--point", json.dumps(asdict(point)), "--out", out.name]
        command += ["--codegen", codegen, "--batch", str(batch)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
        found: dict[str, float] = json.loads(Path(out.name).read_text())
        return found


def run(models: list[str], codegen: str, batch: int) -> list[dict[str, Any]]:
    """Every point of every model, by rounds."""
    with tempfile.TemporaryDirectory() as folder:
        todo = [p for name in models for p in points(name, codegen, batch, Path(folder))]
        seen: dict[Point, list[dict[str, float]]] = defaultdict(list)
        for round_ in range(ROUNDS):
            for point in todo:
                seen[point].append(in_a_process(point, codegen, batch))
                print(f"round {round_ + 1}: {point.model} {point.way} {point.label}: {seen[point][-1]}", flush=True)
    return [
        {**asdict(p), "peak": max(f["peak"] for f in found), "step": statistics.median(f["step"] for f in found)}
        for p, found in seen.items()
    ]


def table(rows: list[dict[str, Any]], codegen: str, batch: int) -> str:
    """Markdown: a table for each model, times as ratios to the point that saves all, of autoshard."""
    lines = [
        f"Peak and step time on {platform.machine()} with {os.cpu_count()} cores, torch {torch.__version__}, one process of "
        f"one thread, {codegen}, batch {batch}. Times are ratios to autoshard's with the highest budget. Written by "
        "`python bench/recompute.py`.",
    ]
    for model in dict.fromkeys(r["model"] for r in rows):
        own = [r for r in rows if r["model"] == model]
        unit = [r["step"] for r in own if r["way"] == "autoshard"][-1]
        lines += ["", f"## {model}", "", "| way | setting | peak MB | predicted | time |", "|---|---|---:|---:|---:|"]
        for r in own:
            off = f"{r['predicted'] / r['peak'] - 1:+.1%}" if r["predicted"] else ""
            lines.append(f"| {WAYS[r['way']]} | {r['label']} | {r['peak'] / 1e6:.1f} | {off} | {r['step'] / unit:.2f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Everything, or one point for the process that started this one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="llama,gpt2")
    parser.add_argument("--codegen", default="inductor")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        found = measure(Point(**json.loads(arguments.point)), arguments.codegen, arguments.batch)
        Path(arguments.out).write_text(json.dumps(found))
        return
    rows = run(arguments.models.split(","), arguments.codegen, arguments.batch)
    results = HERE / "results"
    (results / "recompute.json").write_text(json.dumps(rows, indent=1) + "\n")
    (results / "recompute.md").write_text(table(rows, arguments.codegen, arguments.batch))
    print(table(rows, arguments.codegen, arguments.batch))


if __name__ == "__main__":
    main()
