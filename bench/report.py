"""The results of a comparison: docs/performance.md, with a table for each rate and in words which targets hold, and a plot.

python bench/report.py            # the text and the plots again from the figures
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from reference import MODELS, Reference  # noqa: E402
from worker import TIMED, TURN, WARM_UP, Measured  # noqa: E402

from autoshard.units import counted  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
TEXT = RESULTS.parent.parent / "docs" / "performance.md"
FP32 = 4  # bytes of a parameter
# Of its peer's step, at most: by rate (Mbit/s) and stage. Elsewhere no slower than the best peer of that stage.
TARGETS = {(1000, "autoshard0", "ddp"): 1 / 1.5, (1000, "autoshard3", "fsdp2"): 1 / 1.8}
PEERS = {
    "autoshard0": ("ddp", "ddp_compiled"),
    "autoshard1": ("deepspeed_zero1",),
    "autoshard2": ("deepspeed_zero2",),
    "autoshard3": ("fsdp2", "fsdp2_compiled", "deepspeed_zero3"),
}
BOUND_TARGET = {1000: 1.25}
HEAD = "| contender | median step s | ratio to ddp | ratio to fsdp2 | bound s | ratio to it | peak MB per rank | first step s |"


def cpu_name() -> str:
    """What the processor calls itself."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


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
    """One job's step times: contenders that took turns, at one rate (0: unlimited), on so many hosts."""

    mbit: int
    measured: list[Measured]
    model: str = "llama"
    hosts: int = 2

    @property
    def reference(self) -> Reference:
        """What was trained."""
        return MODELS[self.model]

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


@dataclass(frozen=True)
class Results:
    """Everything that is measured in one run of the driver."""

    machine: Machine
    memory: list[Measured]
    steps: list[Steps]
    skipped: list[str]
    failures: list[str]

    @property
    def by_rate(self) -> list[Steps]:
        """A job a rate, the fastest links first."""
        return sorted(self.steps, key=lambda job: -job.mbit or -math.inf)

    def memory_of(self, name: str) -> Measured | None:
        """The contender's job of its own, if it succeeded."""
        return next((m for m in self.memory if m.name == name), None)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Results:
        """The inverse of dataclasses.asdict."""
        steps = [Steps(**{**s, "measured": [Measured(**m) for m in s["measured"]]}) for s in value["steps"]]
        memory = [Measured(**m) for m in value["memory"]]
        return Results(Machine(**value["machine"]), memory, steps, value["skipped"], value["failures"])


def travels(name: str, inside: float) -> float:
    """How often all parameters go over a link each way in a step, as (n-1)/n of their bytes, at least, where gradients are dense: these
    twice in an all-reduce, or once and parameters once; at stage 3 those of the blocks once more for backward."""
    return 0 if name == "compute" else 2 + inside if "fsdp2" in name or name.endswith("3") else 2


def bound(job: Steps, name: str) -> float | None:
    """Seconds that no step with dense gradients can go below: the compute alone, or its bytes at the line's rate."""
    return statistics.median(found) if (found := _bounds(job, name)) else None


def to_bound(job: Steps, name: str) -> list[float]:
    """The rounds' ratios to it; none where there is no bound."""
    return [took / least for took, least in zip(job.of(name).seconds, _bounds(job, name))]


def _bounds(job: Steps, name: str) -> list[float]:
    """In each round."""
    if not job.has("compute"):
        return []
    model = job.reference
    sent = travels(name, model.inside) * model.parameters * FP32 * (job.hosts - 1) / job.hosts
    return [max(alone, sent / (job.mbit * 1e6 / 8) if job.mbit else 0.0) for alone in job.of("compute").seconds]


def write(folder: Path) -> str:
    """The text of all figures in a folder, and a plot beside each: docs/performance.md where these are the published ones."""
    published = folder.resolve() == RESULTS
    files = sorted(folder.glob("step_time*.json"), key=lambda file: (len(file.stem), file.stem))
    found = {file: Results.from_json(json.loads(file.read_text())) for file in files}
    for file, results in found.items():
        if results.steps:
            draw(results, file.with_suffix(".png"))
    text = markdown({f"{'../bench/results/' if published else ''}{f.stem}": r for f, r in found.items()})
    (TEXT if published else folder / "performance.md").write_text(text)
    return text


def draw(results: Results, path: Path) -> None:
    """Step times by contender, a panel a rate; the bound of each as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(results.steps), 4), layout="constrained")
    for axes, job in zip(figure.subplots(1, len(results.steps), squeeze=False)[0], results.by_rate):
        names = [measured.name for measured in job.measured]
        axes.barh(names, [statistics.median(m.seconds) for m in job.measured], color=["C0" if "auto" in n else "0.7" for n in names])
        for i, name in enumerate(names):
            if (least := bound(job, name)) is not None:
                axes.plot([least, least], [i - 0.4, i + 0.4], color="C3")
        axes.set_title(rate_text(job.mbit))
        axes.set_xlabel("seconds a step; red: the bound of dense gradients")
        axes.invert_yaxis()
    figure.savefig(path, dpi=120)


def spread(ratios: Sequence[float]) -> str:
    """The middle half of the rounds' ratios: how sure the median is."""
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{low:.2f} to {high:.2f}"


def rate_text(mbit: int) -> str:
    """A rate in words."""
    return f"{mbit} Mbit/s" if mbit else "unlimited rate"


def markdown(found: dict[str, Results]) -> str:
    """The whole text. found: by where their plot is."""
    parts = [_preamble()]
    for plot, results in found.items():
        parts += [_heading(results), f"![Step times]({plot}.png)"]
        for job in results.by_rate:
            parts.append(f"### At {rate_text(job.mbit)}\n\n{_table(results, job)}")
            parts.append(_targets(results, job))
        parts.append(_losses(results))
        parts += _list("Skipped", results.skipped) + _list("Failed", results.failures)
    return "\n\n".join(parts) + "\n"


def _heading(results: Results) -> str:
    m, hosts = results.machine, results.steps[0].hosts if results.steps else 0
    first = results.steps[0].measured[0] if results.steps else Measured("")
    rounds, turn = len(first.seconds), len(first.losses) // (WARM_UP + len(first.seconds))
    words = results.steps[0].reference.words if results.steps else "nothing"
    return (
        f"## {words[0].upper()}{words[1:]}, {hosts} hosts\n\n"
        f"{m.cpu}, {m.cores} cores; {m.hosts}, one process of one thread each; "
        f"torch {m.torch}, {m.backend}; {m.date}; {rounds} rounds of {counted(turn, 'step', 'steps')} each."
    )


def _preamble() -> str:
    return (
        "# Step time and memory against DDP, FSDP2 and DeepSpeed\n\n"
        "Written by `python bench/run.py`; the figures are in bench/results/step_time*.json.\n\n"
        "4 x 128 tokens a rank, AdamW, gradients clipped to norm 1. Contenders take turns of "
        f"{TURN} steps, of whose last {TIMED} the median is the round's time (a job's connections are never idle, on which TCP would begin "
        "slowly; tables of rounds of one step each, or of two, of which the second was timed, are older), "
        f"in rounds that are timed after {WARM_UP} others; a step's time is that of the slowest rank, a ratio is the "
        "median of the rounds' own ratios (at the targets also the middle half of them). `compute` is the "
        "compiled model without any communication. torch's ways, DeepSpeed and autoshard have processes of their own, so none has "
        "what another one sets for its process (figures from before 2026-11-25 have all in one). Peak MB (10^6 bytes, the larger rank) is what is held between steps, "
        "DDP's flat buckets included, plus the most that a step's allocations add. The first step counts "
        "construction and compilation with empty caches, in a job of its own at unlimited rate. The bound is what no step with dense "
        "gradients can go below: `compute`, or its bytes over the line's rate (a model's gradients and parameters once each way, those of "
        "its blocks once more at stage 3). autoshard's send less where of an embedding only the rows travel that are looked "
        "up, and where stage 3 keeps gathered copies, so theirs is lower. How much of a link hides depends on the processors, which carry what it carries "
        "([beside.md](../bench/results/beside.md): compute alone beside as many bytes): where the 4.2 M Llama is measured on a "
        "Xeon below, two cores of an AMD EPYC, on which `compute` is 0.142 s, took 0.653 of ddp and 0.414 of fsdp2 at 1000 Mbit/s, 1.31 and 1.02 x "
        "the bounds (2026-11-30, 12 rounds). At stage 0 no gradient leaves before backward begins, there 0.047 s into the step "
        "([timeline.md](../bench/results/timeline.md)), and with the 0.130 s that the line takes from then on that is 1.25 x the bound before "
        "an optimizer has stepped. For machines "
        "as they were calibrated `auto` has both kinds of groups ([stages.md](../bench/results/stages.md)), 1.26 x. Two slower ones took "
        "0.780 and 0.534, 1.17 and 1.38 x the bounds (2026-11-28, 5 rounds). Tables of days before 2026-11-30 are of the code before "
        "backward's first gradient went in parts, those of days before 2026-11-29 of the code before "
        "a backward did without gradients of logits that nobody differentiates, and before rows of embeddings travelled at stages 1 to 3. "
        "Tables that do not say what cores their hosts are on are of hosts that shared all, where now and then two computations have one "
        "core and threads that only move bytes the other; and of the code before a job's first call measured its processors, without which "
        "it kept no copies of stage 3 at 1000 Mbit/s and took another stage for the fastest there."
    )


def _table(results: Results, job: Steps) -> str:
    rows = [HEAD, "|---|---:|---:|---:|---:|---:|---:|---:|"]
    return "\n".join([*rows, *(_row(results, job, measured) for measured in job.measured)])


def _row(results: Results, job: Steps, measured: Measured) -> str:
    alone, least = results.memory_of(measured.name), bound(job, measured.name)
    cells = [
        measured.name,
        f"{statistics.median(measured.seconds):.3f}",
        f"{job.ratio(measured.name, 'ddp'):.2f}",
        f"{job.ratio(measured.name, 'fsdp2'):.2f}",
        f"{least:.3f}" if least else "",
        f"{statistics.median(to_bound(job, measured.name)):.2f}" if least else "",
        f"{alone.peak / 1e6:.1f}" if alone and alone.peak else "not measured",
        f"{alone.first_step:.1f}" if alone and alone.first_step else "not measured",
    ]
    return f"| {' | '.join(cells)} |"


def _targets(results: Results, job: Steps) -> str:
    """What was aimed at, as sentences."""
    lines = [_time_target(job, ours, peer) for ours, peers in PEERS.items() for peer in peers if job.has(ours, peer)]
    lines += [_memory_target(results, "autoshard3", p) for p in ("fsdp2", "fsdp2_compiled") if job.has("autoshard3", p)]
    lines += [_bound_target(job, ours) for ours in (*PEERS, "autoshard_auto") if job.has(ours, "compute")]
    if job.has("autoshard_auto"):
        lines.append(_fastest(job))
    return "\n".join(f"- {line}" for line in lines)


def _bound_target(job: Steps, ours: str) -> str:
    ratios, limit = to_bound(job, ours), BOUND_TARGET.get(job.mbit)
    ratio = statistics.median(ratios)
    if limit is None:
        return f"{ours} takes {ratio:.2f} x the bound of dense gradients ({spread(ratios)})."
    verdict = "holds" if ratio <= limit else "does not hold"
    return f"{ours} takes at most {limit:g} x the bound of dense gradients: {verdict} ({ratio:.2f}, {spread(ratios)})."


def _fastest(job: Steps) -> str:
    """One is faster if the middle half of ratios to it begins above 1."""
    others = (m.name for m in job.measured if m.name not in ("autoshard_auto", "compute"))
    faster = [name for name in others if statistics.quantiles(job.ratios("autoshard_auto", name), n=4)[0] > 1]
    return f"autoshard_auto is the fastest, or as fast: {'does not hold (' + ', '.join(faster) + ')' if faster else 'holds'}."


def _time_target(job: Steps, ours: str, peer: str) -> str:
    limit, ratio = TARGETS.get((job.mbit, ours, peer), 1.0), job.ratio(ours, peer)
    verdict = "holds" if ratio <= limit else "does not hold"
    return f"{ours} takes at most {limit:.3g} x the step of {peer}: {verdict} ({ratio:.3f}, {spread(job.ratios(ours, peer))})."


def _memory_target(results: Results, ours: str, peer: str) -> str:
    a, b = results.memory_of(ours), results.memory_of(peer)
    if not (a and b and a.peak and b.peak):
        return f"{ours} takes no more memory than {peer}: not measured."
    verdict = "holds" if a.peak <= b.peak else "does not hold"
    against = f"{a.peak / 1e6:.1f} against {b.peak / 1e6:.1f} MB"
    return f"{ours} takes no more memory than {peer}: {verdict} ({against})."


def _losses(results: Results) -> str:
    lines = ["### Losses after the last step", ""]
    for job in results.steps:
        last = ", ".join(f"{m.name} {m.losses[-1]:.5f}" for m in job.measured)
        lines.append(f"- {rate_text(job.mbit)}, {len(job.measured[0].losses)} steps: {last}")
    return "\n".join(lines)


def _list(title: str, lines: Sequence[str]) -> list[str]:
    return [f"### {title}\n\n" + "\n".join(f"- {line}" for line in lines)] if lines else []


if __name__ == "__main__":
    print(write(RESULTS))
