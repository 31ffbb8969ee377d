"""How long it takes to decide what a deep model computes again in backward, on one thread.

    python bench/decide.py [--layers 4,48] [--regions]

Llamas of so many blocks, planned for one process on the meta device as `autoshard plan` does: the model captured, its step
simulated as it is; then the decision for a budget of 0.8 of that peak: what blocks could save, each candidate simulated, and the choice
of one for each. Then all that `fit` does with that budget, where steps are simulated with what was chosen, and with one of 0.6, which is below
what is possible for the deep one, so that the least peak is looked for. The
choice alone is for as many blocks as the most, of candidates that all differ. Writes bench/results/decide.md.

--regions: instead, how low the predicted peak of the deepest comes with a large batch, where what enters each block is saved and
where regions of blocks are. Writes bench/results/regions.md.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import run as side_by_side  # noqa: E402
import zoo  # noqa: E402

from autoshard import Config  # noqa: E402
from autoshard.candidates import LEVELS  # noqa: E402
from autoshard.capture import capture  # noqa: E402
from autoshard.cost_model.cluster import Cluster  # noqa: E402
from autoshard.cost_model.hardware import DEVICES  # noqa: E402
from autoshard.cost_model.optimizer import NAMED  # noqa: E402
from autoshard.forecast import Forecaster  # noqa: E402
from autoshard.passes.choose_blocks import blocks_of  # noqa: E402
from autoshard.passes.choose_recompute import Block, Option, choose_with_spare  # noqa: E402
from autoshard.passes.choose_zero import Circumstances, make_plan  # noqa: E402
from autoshard.prediction import Prediction  # noqa: E402

BATCH, LARGE = 4, 32
BUDGETS = (0.8, 0.6)
CANDIDATES = 2 * (3 * LEVELS + 2)  # corners, levels and fills, with copies dropped and kept


def taken(what: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Seconds, and what it gave."""
    start = time.perf_counter()
    found = what(*args)
    return time.perf_counter() - start, found


def decided(layers: int, codegen: Any) -> Iterator[tuple[str, float]]:
    """(what, seconds) of each step of a decision."""
    with torch.device("meta"):
        model = zoo.llama(layers).train()
    seconds, captured = taken(capture, model, zoo.MODELS["llama"][1](BATCH, None))
    yield "the model is captured", seconds
    forecaster = Forecaster(captured, NAMED["adamw"], Cluster(1, 1, DEVICES["cpu"]), codegen)
    where = Circumstances(forecaster.cluster, None)
    seconds, plan = taken(make_plan, captured.inventory, Config(zero=0, codegen=codegen), where, forecaster)
    yield "its step is simulated", seconds
    budgets = [int(share * plan.predicted.peak_bytes) for share in BUDGETS]
    seconds, blocks = taken(forecaster.blocks, plan)
    yield f"what its blocks save is decided, for {BUDGETS[0]} of that peak", seconds + taken(choose_with_spare, blocks, budgets[0])[0]
    for share, budget in zip(BUDGETS, budgets):
        seconds, _ = taken(forecaster.fit, plan, budget)
        yield f"steps are simulated with that, until one fits {share} of it, or none can", seconds


def lowest(layers: int) -> Iterator[tuple[str, Prediction]]:
    """(what, prediction) of the whole step, of what enters each block, and of the least peak."""
    with torch.device("meta"):
        model = zoo.llama(layers).train()
    captured = capture(model, zoo.MODELS["llama"][1](LARGE, None))
    forecaster = Forecaster(captured, NAMED["adamw"], Cluster(1, 1, DEVICES["cpu"]), "eager")
    plan = make_plan(captured.inventory, Config(zero=0, codegen="eager"), Circumstances(forecaster.cluster, None), forecaster)
    full = replace(plan, recompute=tuple((block, "full") for block in blocks_of(plan.group_of, plan.stacks)))
    yield "what torch saves", plan.predicted
    yield "what enters each block", forecaster(full).predicted
    yield "what enters regions, the least peak", forecaster.fit(plan, 0).predicted


def regions(layers: int) -> str:
    """The table of them."""
    lines = [
        f"Predicted peaks of a Llama of {layers} blocks with a batch of {LARGE}, one process, AdamW, torch {torch.__version__}, in MB.",
        "Written by `python bench/decide.py --regions`.\n",
        "| saved | peak | above parameters and AdamW's state | step, times that of the first |",
        "|---|---:|---:|---:|",
    ]
    first = 0.0
    for what, predicted in lowest(layers):
        first = first or predicted.step_seconds or 0.0
        held = predicted.memory["parameters"] + predicted.memory["optimizer"]
        above = (predicted.peak_bytes - held) / 1e6
        lines.append(f"| {what} | {predicted.peak_bytes / 1e6:.0f} | {above:.0f} | {(predicted.step_seconds or 0.0) / first:.2f} |")
    return "\n".join([*lines, ""])


def chosen(layers: int) -> float:
    """Seconds of the choice alone."""
    draw = random.Random(0)

    def option(i: int) -> Option:
        saved = draw.randrange(1 << 24, 1 << 28)
        return Option(f"save {i}", saved, saved + draw.randrange(1 << 26), draw.random() / saved)

    blocks = [Block(f"layers.{i}", tuple(map(option, range(CANDIDATES)))) for i in range(layers)]
    least, most = (sum(f(o.saved for o in b.options) for b in blocks) for f in (min, max))
    return taken(choose_with_spare, blocks, (least + most) // 2)[0]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", default="4,48", help="how many blocks, with commas between")
    parser.add_argument("--regions", action="store_true", help="how low the peak comes")
    said = parser.parse_args()
    several = [int(layers) for layers in said.layers.split(",")]
    torch.set_num_threads(1)
    if said.regions:
        write("regions.md", regions(max(several)))
    else:
        write("decide.md", decisions(several))


def write(name: str, text: str) -> None:
    """A result, into its file and on the screen."""
    (HERE / "results" / name).write_text(text)
    print(text)


def decisions(several: list[int]) -> str:
    """How long all steps take for each of so many blocks."""
    machine = side_by_side.machine("this machine")
    columns = {f"{layers} blocks, {codegen}": dict(decided(layers, codegen)) for layers in several for codegen in ("eager", "inductor")}
    steps = next(iter(columns.values()))
    lines = [
        f"How long it takes to decide for a Llama, in seconds of one thread: {machine.cpu}, torch {machine.torch},",
        f"{machine.date}. Written by `python bench/decide.py`.\n",
        f"| | {' | '.join(columns)} |",
        "|---" + "|---:" * len(columns) + "|",
        *(f"| {what} | {' | '.join(f'{column[what]:.1f}' for column in columns.values())} |" for what in steps),
        "",
        f"The choice alone, for {max(several)} blocks of {CANDIDATES} candidates each, whose bytes all differ: {chosen(max(several)):.2f} s.\n",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
