"""Puts the predicted timeline of a step beside the executed one; writes bench/results/timeline.md and timeline.png.

    python bench/timeline.py [--rates 1000,200] [--stages 0,3] [--model llama] [--codegen inductor]

Two hosts of one process and one thread each, over links of those rates, calibrated once a rate. Executed is what torch's
profiler saw on rank 0, in the step of median length of the middle job: when each collective was on the link, and when the model
waited for one. Several jobs, since what one waits for is a small difference of large times and changes from job to job.

The profiler takes this process's thread some milliseconds a step, which a step that waits for the link anyway waits less. So what one
waits that nobody watches is what the profiler saw, with that back: watched it computes `watched - waits`, which is `watching` more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import accuracy  # noqa: E402
import run as side_by_side  # noqa: E402
import zoo  # noqa: E402
from compared import Case, Links  # noqa: E402

from autoshard import planning  # noqa: E402
from autoshard.cost_model.cluster import Cluster  # noqa: E402
from autoshard.cost_model.optimizer import NAMED  # noqa: E402
from autoshard.passes.choose_zero import make_plan  # noqa: E402
from autoshard.plan import Plan  # noqa: E402

RESULTS = HERE / "results"
SEND = "recv"  # what each process sends to each shows as one, see `timeline_worker.steps_of`
BY_SENDS = ("_direct", "_rows")  # how the names of collectives that go that way end
JOBS = 5  # of each case, by turns
LEAST = 1e-4  # seconds; a shorter wait is a call that found everything there
CLOSE = 0.15  # of what was predicted: how far off exposed communication is to be at most
Interval = tuple[float, float]  # seconds from the start of the step


@dataclass(frozen=True)
class Line:
    """A step: its collectives in order, when each was on the link (of executed sends: from when they were issued until they were
    waited for), and when compute waited. The optimizer's step is in seconds only."""

    seconds: float
    names: tuple[str, ...]
    flights: tuple[Interval, ...]
    waits: tuple[Interval, ...]

    @property
    def exposed(self) -> float:
        """Seconds that compute waited."""
        return sum(end - start for start, end in self.waits)


@dataclass(frozen=True)
class Job:
    """Steps of one start: of rank 0 the one of median length that was watched; of one that nobody watched what it waits, the mean over
    ranks, and its seconds, those of rank 0."""

    executed: Line
    exposed: float
    plain: float


@dataclass(frozen=True)
class Compared:
    """A step as it was predicted and as it was executed, by several jobs."""

    case: Case
    predicted: Line
    jobs: tuple[Job, ...]

    @property
    def middle(self) -> Job:
        """The one that waited the median of all."""
        return sorted(self.jobs, key=lambda job: job.exposed)[len(self.jobs) // 2]

    @property
    def plain(self) -> float:
        """Seconds of a step that no profiler watched, the median of the jobs."""
        return statistics.median(job.plain for job in self.jobs)


def predict(case: Case, cluster: Cluster) -> tuple[Line, Plan]:
    """What the simulator says, and of which plan."""
    torch.compiler.reset()
    make, inputs = zoo.MODELS[case.model]
    with torch.device("meta"):
        model = make().train()
    forecaster = planning.forecaster(model, inputs(case.batch, None), case.config(), cluster, NAMED[case.optimizer])
    circumstances = planning.circumstances(case.config(), cluster)
    plan = make_plan(forecaster.captured.inventory, case.config(), circumstances, forecaster)
    program, _, took, _ = forecaster.simulated(plan)
    link = [s for s in took.timeline.spans if s.stream == "link"]
    names = tuple(program.operations[s.operation].name.split(".")[1] for s in link)
    waits = tuple(_gaps(took.timeline.spans, took.timeline.seconds))
    return Line(took.seconds, names, tuple((s.start, s.end) for s in link), waits), plan


def _gaps(spans: Iterable[Any], end: float) -> Iterable[Interval]:
    """Between two kernels compute does nothing but wait, and behind the last one."""
    before = 0.0
    for span in (s for s in spans if s.stream == "compute"):
        if span.start - before > LEAST:
            yield before, span.start
        before = span.end
    if end - before > LEAST:
        yield before, end


def measure(case: Case, plan: Plan, scratch: Path) -> Job:
    """One start of a job with that plan."""
    out, pinned = scratch / "timeline.json", scratch / "plan.json"
    pinned.write_text(plan.to_json())
    worker = [str(HERE / "timeline_worker.py"), json.dumps(asdict(case)), str(pinned), str(out)]
    accuracy.launch(worker, (2, case.mbit), scratch)
    ranks = json.loads(out.read_text())
    steps = sorted(map(_line, ranks[0]["steps"]), key=lambda step: step.seconds)
    return Job(steps[len(steps) // 2], statistics.mean(map(_unwatched, ranks)), ranks[0]["plain"])


def _unwatched(rank: dict[str, Any]) -> float:
    """Seconds that a step waits which nobody watches, see above."""
    steps = [_line(step) for step in rank["steps"]]
    watched, waits = (statistics.median(found) for found in ([s.seconds for s in steps], [s.exposed for s in steps]))
    return float(rank["plain"] - (watched - waits - rank["watching"]))


def _line(step: dict[str, Any]) -> Line:
    waits = tuple((start, end) for _, start, end in step["waits"] if end - start > LEAST)
    return Line(step["seconds"], tuple(name for name, _, _ in step["flights"]), tuple(_served(step["flights"])), waits)


def _served(flights: Iterable[tuple[str, float, float]]) -> Iterable[Interval]:
    """The profiler sees them from when they are issued; the link carries out one after the other. Of sends nothing says when they were
    on the link: one that is waited for late was through long before."""
    busy = 0.0
    for name, issued, end in flights:
        if name == SEND:
            yield issued, end
        else:
            yield max(issued, busy), end
            busy = end


def compare(cases: Sequence[Case], cluster: Cluster, scratch: Path) -> list[Compared]:
    """Cases over one kind of link, all predicted before anything runs; their jobs by turns."""
    predicted = [predict(case, cluster) for case in cases]
    rounds = [[measure(case, plan, scratch) for case, (_, plan) in zip(cases, predicted)] for _ in range(JOBS)]
    return [Compared(case, line, jobs) for case, (line, _), jobs in zip(cases, predicted, zip(*rounds))]


def markdown(found: Sequence[Compared], machine: str) -> str:
    """The tables."""
    lines = [
        "# Timelines, predicted and executed\n",
        f"{machine}; two network namespaces on cores of their own, one process of one thread each. Written by `python bench/timeline.py`. Exposed",
        "is the time that a process waits for collectives, and so for the other one, also where it asks for one and the thread that serves those",
        "before is at work: the mean of both, of each the median over steps that torch's profiler watched, with what that takes of the thread back,",
        "which it waits less for the link; the step beside it was not",
        f"watched. Of each, {JOBS} jobs by turns: the middle one, and from which to which they are. The tables of collectives and the plots are",
        "of rank 0, in a step that was watched.",
        "What goes by sends of each process to each the profiler sees from when it was issued until it was waited for, which may be",
        "long after it was there.\n",
        f"| configuration | step ms | measured | error | exposed ms | measured | all jobs | error | exposed within {CLOSE:.0%} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for c in found:
        step = f"{c.predicted.seconds * 1e3:.0f} | {c.plain * 1e3:.0f} | {c.plain / c.predicted.seconds - 1:+.1%}"
        waited = [job.exposed * 1e3 for job in c.jobs]
        spread = f"{c.middle.exposed * 1e3:.0f} | {min(waited):.0f} to {max(waited):.0f}"
        exposed = f"{c.predicted.exposed * 1e3:.0f} | {spread} | {_off(c)}"
        lines.append(f"| {c.case} | {step} | {exposed} | {'holds' if _is_close(c) else 'does not hold'} |")
    lines += ["", "![Timelines](timeline.png)", ""]
    for c in found:
        lines += [f"## {c.case}\n", *_collectives(c), ""]
    return "\n".join(lines)


def _off(c: Compared) -> str:
    return f"{c.middle.exposed / c.predicted.exposed - 1:+.1%}" if c.predicted.exposed else "-"


def _is_close(c: Compared) -> bool:
    return abs(c.middle.exposed - c.predicted.exposed) <= max(CLOSE * c.predicted.exposed, LEAST)


def _collectives(c: Compared) -> Iterable[str]:
    """In the order in which they were predicted to be issued. What goes by sends begins when it is issued, everything else behind what was
    issued before it: so each of these two has an order of its own, which must be the predicted one."""
    seen = list(zip(c.middle.executed.names, c.middle.executed.flights))
    sends, others = (iter([one for one in seen if (one[0] == SEND) is by_sends]) for by_sends in (True, False))
    yield "| | collective | on the link at ms, predicted | executed | sends: issued to waited for |"
    yield "|---:|---|---:|---:|---:|"
    for i, (name, predicted) in enumerate(zip(c.predicted.names, c.predicted.flights)):
        by_sends = name.endswith(BY_SENDS)
        executed, flight = next(sends if by_sends else others, ("nothing", (0.0, 0.0)))
        if not (by_sends and executed == SEND) and not name.startswith(executed):
            raise RuntimeError(f"{c.case}: executed {c.middle.executed.names}, predicted {c.predicted.names}")
        cells = ("", _text(flight)) if by_sends else (_text(flight), "")
        yield f"| {i + 1} | {name} | {_text(predicted)} | {' | '.join(cells)} |"
    if left := [name for name, _ in itertools.chain(sends, others)]:
        raise RuntimeError(f"{c.case}: executed {left} beside what was predicted")


def _text(interval: Interval) -> str:
    return f"{interval[0] * 1e3:.0f} to {interval[1] * 1e3:.0f}"


def draw(found: Sequence[Compared], path: Path) -> None:
    """A panel a case: what the link did and when compute waited, predicted above executed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.7 * len(found)), layout="constrained")
    for axes, c in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found):
        for row, (line, shade) in enumerate(((c.predicted, "C0"), (c.middle.executed, "C2"))):
            for i, (name, (start, end)) in enumerate(zip(line.names, line.flights)):
                alpha = 0.25 if name == SEND else 0.5 if i % 2 else 0.9
                axes.barh(3 * row, end - start, left=start, height=0.9, color=shade, alpha=alpha)
            for start, end in line.waits:
                axes.barh(3 * row + 1, end - start, left=start, height=0.9, color="C3")
            axes.axvline(line.seconds, color=shade)
        axes.set_yticks([0, 1, 3, 4], ["predicted: link", "waits", "executed: link", "waits"])
        axes.set_title(str(c.case), fontsize=9)
        axes.invert_yaxis()
    axes.set_xlabel("seconds of the step; pale: sends, from when they were issued until they were waited for")
    figure.savefig(path, dpi=120)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", default="1000,200", help="Mbit/s, with commas between; 0: unlimited")
    parser.add_argument("--stages", default="0,3", help="of ZeRO, with commas between")
    parser.add_argument("--model", default="llama", choices=sorted(zoo.MODELS))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--codegen", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for timeline.md and timeline.png")
    asked = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="autoshard-timeline-"))
    found = []
    try:
        for rate in map(int, asked.rates.split(",")):
            links: Links = (2, rate)
            cluster = accuracy.calibrated(scratch, [links])[links]
            cases = [Case(asked.model, asked.batch, 2, int(stage), asked.codegen, mbit=rate) for stage in asked.stages.split(",")]
            found += compare(cases, cluster, scratch)
            print(markdown(found[-len(cases) :], "this machine"), flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    machine = side_by_side.machine("two network namespaces")
    text = markdown(found, f"{machine.cpu}, {machine.cores} cores, torch {machine.torch}, gloo, {machine.date}")
    (asked.results / "timeline.md").write_text(text)
    draw(found, asked.results / "timeline.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
