"""Peak memory against step time of three ways to save less for backward, on one process of one thread.

    python bench/recompute.py [--models llama,gpt2] [--codegen inductor] [--batch 8] [--closest]

torch's own `activation_memory_budget`; `torch.utils.checkpoint` around the first so many blocks; and autoshard with the peaks of
these as its budgets (and 0.5 %), with all that torch saves, and with the least that is possible. Each point has a process of its
own, which compiles, tells its peak, and waits; then all take a few steps in turn, over and over, so that all ways meet the
same noise; a process takes 0.7 GB and more. Of a point's steps the median is taken. Writes bench/results/recompute.md, .json and .png.

--closest: only where torch's ways are closest to ours, those that save the most, several processes of each, of ours with
that peak as its budget, and of ours with 3 % less: how far apart processes of one way are, and the ways. No checkpointed block is the same
program as torch's budget of 1.0. Writes bench/results/recompute_closest.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
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
import report  # noqa: E402
import turns  # noqa: E402
import worker  # noqa: E402
import zoo  # noqa: E402

import autoshard  # noqa: E402
from autoshard.capture import capture  # noqa: E402
from autoshard.cost_model.cluster import Cluster, measured_here  # noqa: E402
from autoshard.cost_model.optimizer import NAMED  # noqa: E402
from autoshard.forecast import Forecaster  # noqa: E402
from autoshard.passes.choose_zero import Circumstances, make_plan  # noqa: E402

TORCH_BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05, 0.0)
ROUNDS, WARM_UP, STEPS = 7, 2, 3
CLOSEST = ("1.0", "0.8")  # of torch's budgets
LESS = 0.97  # of a peak
PROCESSES = 4  # of each of the closest
EQUAL = 1.005  # peaks that differ by less are the same
WAYS = {"autoshard": "autoshard, by budget", "torch": "activation_memory_budget", "checkpoint": "checkpoint of blocks"}


@dataclass(frozen=True)
class Point:
    """way: how; setting: a plan's file, a budget or a number of blocks. budget, predicted: bytes, where there are such."""

    model: str
    way: str
    setting: str
    label: str
    budget: int = 0
    predicted: int = 0


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The list of the most modules that are alike."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len)


class Planner:
    """Of one model's plans for this machine. folder: where plans are written."""

    def __init__(self, name: str, codegen: str, batch: int, folder: Path) -> None:
        make, data = zoo.MODELS[name]
        with torch.device("meta"):
            model = make().train()
        here = Cluster(1, 1, measured_here("cpu"))
        self.name, self.folder, self.blocks = name, folder, len(blocks_of(model))
        self.forecaster = Forecaster(capture(model, data(batch, None)), NAMED["adamw"], here, codegen)
        config = autoshard.Config(zero=0, codegen=codegen)  # type: ignore[arg-type]
        self.plan = make_plan(self.forecaster.captured.inventory, config, Circumstances(here, None), self.forecaster)

    def within(self, budget: int) -> Point:
        """Ours with this budget, in bytes."""
        made = self.forecaster.fit(self.plan, budget)
        file = self.folder / f"{self.name}{budget}.json"
        file.write_text(made.to_json())
        return Point(self.name, "autoshard", str(file), f"{budget / 1e6:.1f} MB", budget, made.predicted.peak_bytes)

    def rival(self, way: str, setting: str) -> Point:
        """One of torch's ways."""
        return Point(self.name, way, setting, f"{setting} blocks" if way == "checkpoint" else setting)

    def rivals(self) -> list[Point]:
        """All of torch's ways."""
        found = [self.rival("torch", str(b)) for b in TORCH_BUDGETS]
        return found + [self.rival("checkpoint", str(n)) for n in range(self.blocks + 1)]

    def steps(self, count: int) -> list[int]:
        """So many budgets, from all that torch saves down to the least that is possible."""
        top, floor = self.plan.predicted.peak_bytes, self.forecaster.fit(self.plan, 0).predicted.peak_bytes
        return [floor + (top - floor) * i // (count - 1) for i in reversed(range(count))]

    def budgets(self, peaks: Sequence[int]) -> list[int]:
        """Those of ours beside torch's ways with these peaks, the highest first; peaks that are equal have one."""
        top, floor = self.steps(2)
        found = [top]
        for peak in sorted(peaks, reverse=True):
            budget = int(peak * EQUAL)
            if floor <= budget and budget * EQUAL < found[-1]:
                found.append(budget)
        return [*found, floor]


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


def serve(point: Point, codegen: str, batch: int) -> None:
    """In a process of its own: prints the peak when it is ready, then seconds of some steps for each line that it reads."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the harness waits for all
    made = contender(point, codegen)
    inputs: Any = zoo.MODELS[point.model][1](batch, torch.Generator().manual_seed(0))
    for _ in range(WARM_UP):
        made.step(inputs)
    turns.answer(peak=worker.held_bytes(made) + worker.step_growth(made, inputs))
    for _ in turns.told():
        turns.answer(seconds=[worker._timed(made, inputs)[0] for _ in range(STEPS)])


class Served:
    """A point's process. peak: bytes. seconds: of all its steps."""

    def __init__(self, point: Point, codegen: str, batch: int) -> None:
        command = [sys.executable, __file__, "--point", json.dumps(asdict(point)), "--codegen", codegen, "--batch", str(batch)]
        self.point = point
        self.player = turns.Player(command, {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"})
        self.peak, self.seconds = int(self.player.answered()["peak"]), list[float]()
        print(f"{point.model} {point.way} {point.label}: {self.peak / 1e6:.1f} MB", flush=True)

    def take_steps(self) -> None:
        """Some more."""
        self.seconds += self.player.play()["seconds"]

    def end(self) -> None:
        """Of the process."""
        self.player.end()
        self.player.process.wait()


def _take_turns(served: list[Served]) -> None:
    """Until all have taken their steps."""
    for _ in range(ROUNDS):
        for one in served:
            one.take_steps()
    for one in served:
        one.end()


def run(name: str, codegen: str, batch: int) -> list[dict[str, Any]]:
    """Every point of a model."""
    with tempfile.TemporaryDirectory() as folder:
        planner = Planner(name, codegen, batch, Path(folder))
        rivals = [Served(point, codegen, batch) for point in planner.rivals()]
        budgets = planner.budgets([one.peak for one in rivals])
        served = [*(Served(planner.within(budget), codegen, batch) for budget in budgets), *rivals]
    _take_turns(served)
    return [_row(one.point, one.peak, statistics.median(one.seconds)) for one in served]


def closest(name: str, codegen: str, batch: int) -> list[str]:
    """A table's rows: of each of torch's ways, of ours at its peak and below it the processes' step times, by the median of torch's."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        planner = Planner(name, codegen, batch, Path(folder))
        for setting in CLOSEST:
            theirs = [Served(planner.rival("torch", setting), codegen, batch) for _ in range(PROCESSES)]
            points = [planner.within(int(theirs[0].peak * share)) for share in (EQUAL, LESS)]
            ours = [[Served(point, codegen, batch) for _ in range(PROCESSES)] for point in points]
            _take_turns([one for several in zip(theirs, *ours) for one in several])
            found += _compared(theirs, *ours)
    return found


def _compared(theirs: list[Served], *ours: list[Served]) -> list[str]:
    """A row each."""
    found = []
    unit = statistics.median(_steps(theirs))
    for served in (theirs, *ours):
        ratios = [step / unit for step in _steps(served)]
        point, peak = served[0].point, max(one.peak for one in served) / 1e6
        each = ", ".join(f"{r:.3f}" for r in ratios)
        found.append(f"| {point.model} | {WAYS[point.way]} | {point.label} | {peak:.1f} | {statistics.median(ratios):.3f} | {each} |")
    return found


def _steps(served: list[Served]) -> list[float]:
    """Each process's step, the fastest first."""
    return sorted(statistics.median(one.seconds) for one in served)


def _write_closest(models: list[str], codegen: str, batch: int) -> None:
    head = [
        f"Step times of those of torch's ways that save the most, and of ours with a budget of that peak (and 0.5 %) and of {LESS:.0%} of it, "
        f"{PROCESSES} processes each, on {report.cpu_name()} with {os.cpu_count()} cores, torch {torch.__version__}, one thread each, {codegen}, "
        f"batch {batch}, as ratios to the median of torch's. Written by `python bench/recompute.py --closest`.",
        "",
        "| model | way | setting | peak MB | median | each process |",
        "|---|---|---|---:|---:|---|",
    ]
    rows = [row for name in models for row in closest(name, codegen, batch)]
    (HERE / "results" / "recompute_closest.md").write_text("\n".join([*head, *rows, ""]))
    print("\n".join(rows))


def _row(point: Point, peak: int, step: float) -> dict[str, Any]:
    return {"model": point.model, "way": point.way, "label": point.label, "predicted": point.predicted, "peak": peak, "step": step}


def least(what: str, within: str, most: float, rows: list[dict[str, Any]]) -> float:
    """The least step time, or peak, that autoshard has where the other one is no more than that."""
    return min((r[what] for r in rows if r["way"] == "autoshard" and r[within] <= most * EQUAL), default=float("nan"))


def _ratio(ratio: float) -> str:
    return "none" if math.isnan(ratio) else f"{ratio:.2f}x"


def table(rows: list[dict[str, Any]], codegen: str, batch: int) -> str:
    """Markdown: a table for each model, times as ratios to the point that saves all, of autoshard."""
    lines = [
        f"Peak and step time on {report.cpu_name()} with {os.cpu_count()} cores, torch {torch.__version__}, one process of "
        f"one thread, {codegen}, batch {batch}. Times are ratios to autoshard's with the highest budget; the last columns are "
        "autoshard's time at no more than that way's peak, and its peak in no more than that way's time (both to 0.5 %), divided by "
        "that way's; none: that way is faster. Written by `python bench/recompute.py`.",
    ]
    for model in dict.fromkeys(r["model"] for r in rows):
        own = [r for r in rows if r["model"] == model]
        unit = next(r["step"] for r in own if r["way"] == "autoshard")
        lines += ["", f"## {model}", "", "| way | setting | peak MB | predicted | time | our time at its peak | our peak in its time |"]
        lines += ["|---|---|---:|---:|---:|---:|---:|"]
        for r in own:
            off = f"{r['predicted'] / r['peak'] - 1:+.1%}" if r["predicted"] else ""
            ratios = (least(a, b, r[b], own) / r[a] for a, b in (("step", "peak"), ("peak", "step")))
            ours = " | ".join(map(_ratio, ratios) if r["way"] != "autoshard" else ("", ""))
            peak, time = f"{r['peak'] / 1e6:.1f}", f"{r['step'] / unit:.2f}"
            lines.append(f"| {WAYS[r['way']]} | {r['label']} | {peak} | {off} | {time} | {ours} |")
    return "\n".join([*lines, ""])


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """A frontier a way, a picture a model."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(r["model"] for r in rows))
    figure = Figure(figsize=(5 * len(models), 4), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models):
        own = [r for r in rows if r["model"] == model]
        unit = next(r["step"] for r in own if r["way"] == "autoshard")
        for way, name in WAYS.items():
            found = sorted((r["peak"] / 1e6, r["step"] / unit) for r in own if r["way"] == way)
            axes.plot(*zip(*found), marker="o", label=name)
        axes.set(title=model, xlabel="measured peak, MB", ylabel="step time, 1 = autoshard saving all")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(WAYS))
    figure.savefig(file, dpi=120)


def main() -> None:
    """Everything, or one point for the process that started this one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="llama,gpt2")
    parser.add_argument("--codegen", default="inductor")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--closest", action="store_true")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        serve(Point(**json.loads(arguments.point)), arguments.codegen, arguments.batch)
        return
    if arguments.closest:
        _write_closest(arguments.models.split(","), arguments.codegen, arguments.batch)
        return
    rows = [row for name in arguments.models.split(",") for row in run(name, arguments.codegen, arguments.batch)]
    results = HERE / "results"
    (results / "recompute.json").write_text(json.dumps(rows, indent=1) + "\n")
    (results / "recompute.md").write_text(table(rows, arguments.codegen, arguments.batch))
    draw(rows, results / "recompute.png")
    print(table(rows, arguments.codegen, arguments.batch))


if __name__ == "__main__":
    main()
