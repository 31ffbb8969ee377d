"""The results of a comparison as Markdown: a table for each rate, and in words which targets hold.

python bench/report.py bench/results/step_time.json            # the text again from the figures
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from worker import WARM_UP, Measured  # noqa: E402

ZERO0_TARGET = 1.1
HEAD = "| contender | median step s | ratio to ddp | ratio to fsdp2 | peak MB per rank | first step s |"


@dataclass(frozen=True)
class Machine:
    """Where the figures come from."""

    cpu: str
    cores: int
    torch: str
    backend: str
    date: str
    hosts: str


@dataclass(frozen=True)
class Steps:
    """One job's step times: contenders that took turns, at one rate (0: unlimited)."""

    mbit: int
    measured: list[Measured]

    def of(self, name: str) -> Measured:
        """The contender of this name."""
        return next(m for m in self.measured if m.name == name)

    def has(self, *names: str) -> bool:
        """True if all of these took part."""
        return set(names) <= {m.name for m in self.measured}

    def ratios(self, name: str, to: str) -> list[float]:
        """One contender's step over another's in the same round, for each round."""
        return [a / b for a, b in zip(self.of(name).seconds, self.of(to).seconds)]

    def ratio(self, name: str, to: str) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios(name, to))

    def spread(self, name: str, to: str) -> str:
        """The middle half of the rounds' ratios: how sure the median is."""
        low, _, high = statistics.quantiles(self.ratios(name, to), n=4)
        return f"{low:.2f} to {high:.2f}"


@dataclass(frozen=True)
class Results:
    """Everything that is measured in one run of the driver."""

    machine: Machine
    memory: list[Measured]
    steps: list[Steps]
    skipped: list[str]
    failures: list[str]

    def memory_of(self, name: str) -> Measured | None:
        """The contender's job of its own, if it succeeded."""
        return next((m for m in self.memory if m.name == name), None)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Results:
        """The inverse of dataclasses.asdict."""
        steps = [Steps(s["mbit"], [Measured(**m) for m in s["measured"]]) for s in value["steps"]]
        memory = [Measured(**m) for m in value["memory"]]
        return Results(Machine(**value["machine"]), memory, steps, value["skipped"], value["failures"])


def rate_text(mbit: int) -> str:
    """A rate in words."""
    return f"{mbit} Mbit/s" if mbit else "unlimited rate"


def markdown(results: Results) -> str:
    """The whole text."""
    parts = [_preamble(results)]
    for mbit in sorted({s.mbit for s in results.steps}):
        jobs = [s for s in results.steps if s.mbit == mbit]
        parts.append(f"## At {rate_text(mbit)}\n\n{_table(results, jobs)}")
        parts.append(_targets(results, jobs))
    parts.append(_losses(results))
    parts += _list("Skipped", results.skipped) + _list("Failed", results.failures)
    return "\n\n".join(parts) + "\n"


def _preamble(results: Results) -> str:
    m = results.machine
    rounds = max((len(c.seconds) for s in results.steps for c in s.measured), default=0)
    return (
        "# Step time and memory against DDP, FSDP2 and DeepSpeed\n\n"
        f"{m.cpu}, {m.cores} cores; {m.hosts}, one process of one thread each; "
        f"torch {m.torch}, {m.backend}; {m.date}. "
        "Written by `python bench/run.py`; the figures are in step_time.json.\n\n"
        "The reference model is a Llama of 4.2 M fp32 parameters (4 layers, hidden 256), 4 x 128 tokens a "
        "rank, AdamW, gradients clipped to norm 1. Contenders take turns step by step, "
        f"{rounds} timed rounds after {WARM_UP}; a step's time is that of the slower rank, a ratio is the "
        "median of the rounds' own ratios (at the targets also the middle half of them). `compute` is the "
        "compiled model without any communication. DeepSpeed runs in a job of its own beside ddp and fsdp2, "
        "and its ratios are to those. Peak MB (10^6 bytes, the larger rank) is what is held between steps, "
        "DDP's flat buckets included, plus the most that a step's allocations add. The first step counts "
        "construction and compilation with empty caches, in a job of its own at unlimited rate."
    )


def _table(results: Results, jobs: Sequence[Steps]) -> str:
    rows = [HEAD, "|---|---:|---:|---:|---:|---:|"]
    seen: set[str] = set()
    for job in jobs:
        for measured in job.measured:
            if measured.name not in seen:
                rows.append(_row(results, job, measured))
            seen.add(measured.name)
    return "\n".join(rows)


def _row(results: Results, job: Steps, measured: Measured) -> str:
    alone = results.memory_of(measured.name)
    cells = [
        measured.name,
        f"{statistics.median(measured.seconds):.3f}",
        f"{job.ratio(measured.name, 'ddp'):.2f}",
        f"{job.ratio(measured.name, 'fsdp2'):.2f}",
        f"{alone.peak / 1e6:.1f}" if alone and alone.peak else "not measured",
        f"{alone.first_step:.1f}" if alone and alone.first_step else "not measured",
    ]
    return f"| {' | '.join(cells)} |"


def _targets(results: Results, jobs: Sequence[Steps]) -> str:
    """The targets, and the same against the compiled peers, as sentences."""
    lines = []
    for job in jobs:
        for peer in ("ddp", "ddp_compiled"):
            if job.has("autoshard0", peer):
                lines.append(_time_target(job, "autoshard0", peer, ZERO0_TARGET))
        for peer in ("fsdp2", "fsdp2_compiled"):
            if job.has("autoshard3", peer):
                lines.append(_time_target(job, "autoshard3", peer, 1.0))
                lines.append(_memory_target(results, "autoshard3", peer))
    return "\n".join(f"- {line}" for line in lines)


def _time_target(job: Steps, ours: str, peer: str, limit: float) -> str:
    ratio = job.ratio(ours, peer)
    spread = job.spread(ours, peer)
    verdict = "holds" if ratio <= limit else "does not hold"
    return f"{ours} takes at most {limit:g} x the step of {peer}: {verdict} ({ratio:.2f}, {spread})."


def _memory_target(results: Results, ours: str, peer: str) -> str:
    a, b = results.memory_of(ours), results.memory_of(peer)
    if not (a and b and a.peak and b.peak):
        return f"{ours} takes no more memory than {peer}: not measured."
    verdict = "holds" if a.peak <= b.peak else "does not hold"
    against = f"{a.peak / 1e6:.1f} against {b.peak / 1e6:.1f} MB"
    return f"{ours} takes no more memory than {peer}: {verdict} ({against})."


def _losses(results: Results) -> str:
    lines = ["## Losses after the last step", ""]
    for job in results.steps:
        last = ", ".join(f"{m.name} {m.losses[-1]:.5f}" for m in job.measured)
        lines.append(f"- {rate_text(job.mbit)}, {len(job.measured[0].losses)} steps: {last}")
    return "\n".join(lines)


def _list(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines)] if lines else []


if __name__ == "__main__":
    print(markdown(Results.from_json(json.loads(Path(sys.argv[1]).read_text()))))
