"""The measured peak of a step beside its memory budget and its predicted peak, for five kinds of models on one process.

    python bench/budgets.py [--models llama,gpt2,bert,vit,conv] [--codegens inductor,eager] [--batch 8]

Budgets go from all that torch saves down to the least that is possible, in equal steps. Each plan has a process of its own. Writes
bench/results/budgets.md, and exits with 1 if a peak is above its budget, more than 3 % off its prediction, or higher than one of a
larger budget.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import recompute  # noqa: E402
import report  # noqa: E402

BUDGETS = 8  # of a model
WITHIN = 0.03  # of the predicted peak
SAME = 1.001  # peaks that differ by less are the same: a few small tensors that a step happens to hold


@dataclass(frozen=True)
class Peak:
    """Of one plan; bytes."""

    model: str
    codegen: str
    budget: int
    predicted: int
    measured: int


def measure(model: str, codegen: str, batch: int) -> list[Peak]:
    """One plan after the other, the largest budget first."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        planner = recompute.Planner(model, codegen, batch, Path(folder))
        for budget in planner.steps(BUDGETS):
            point = planner.within(budget)
            served = recompute.Served(point, codegen, batch)
            served.end()
            found.append(Peak(model, codegen, budget, point.predicted, served.peak))
    return found


def failures(peaks: Sequence[Peak]) -> list[str]:
    """What does not hold, of the peaks of one model."""
    found = []
    for peak, before in zip(peaks, (None, *peaks)):
        what = f"{peak.model}, {peak.codegen}, {_mb(peak.budget)} MB: {_mb(peak.measured)} MB"
        if peak.measured > peak.budget * SAME:
            found.append(f"{what} is above the budget")
        if abs(peak.measured / peak.predicted - 1) > WITHIN:
            found.append(f"{what} is not within {WITHIN:.0%} of the predicted {_mb(peak.predicted)}")
        if before is not None and peak.measured > before.measured * SAME:
            found.append(f"{what} is more than with a larger budget")
    return found


def markdown(peaks: Sequence[Peak], failed: Sequence[str], batch: int) -> str:
    """A line for each model and codegen: budget, and measured against predicted."""
    lines = [
        "# Measured peaks under memory budgets",
        "",
        f"{report.cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}; one process, batch {batch}. Each entry is a budget "
        "in MB, the measured peak, and how far that is from the predicted one. Written by `python bench/budgets.py`.",
        "",
    ]
    for codegen in dict.fromkeys(p.codegen for p in peaks):
        own = [p for p in peaks if p.codegen == codegen]
        models = list(dict.fromkeys(p.model for p in own))
        lines += [f"## {codegen}", "", f"| {' | '.join(models)} |", f"|{'---|' * len(models)}"]
        columns = [[_entry(p) for p in own if p.model == model] for model in models]
        lines += [f"| {' | '.join(row)} |" for row in zip(*columns)] + [""]
    worst = max(abs(p.measured / p.predicted - 1) for p in peaks)
    said = [f"- {what}" for what in failed] or ["- No peak is above its budget, and none rises as the budget falls."]
    return "\n".join([*lines, *said, f"- The farthest from its prediction is {worst:.2%} off.", ""])


def _entry(peak: Peak) -> str:
    return f"{_mb(peak.budget)}: {_mb(peak.measured)} ({peak.measured / peak.predicted - 1:+.1%})"


def _mb(number: int) -> str:
    return f"{number / 1e6:.1f}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="llama,gpt2,bert,vit,conv")
    parser.add_argument("--codegens", default="inductor,eager")
    parser.add_argument("--batch", type=int, default=8)
    asked = parser.parse_args()
    series = [measure(model, codegen, asked.batch) for codegen in asked.codegens.split(",") for model in asked.models.split(",")]
    failed = [what for peaks in series for what in failures(peaks)]
    text = markdown([peak for peaks in series for peak in peaks], failed, asked.batch)
    (HERE / "results" / "budgets.md").write_text(text)
    print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
