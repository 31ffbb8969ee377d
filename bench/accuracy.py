"""Compares what autoshard predicts with what is measured; writes docs/accuracy.md and autoshard/cost_model/accuracy.json.

    python bench/accuracy.py [--only llama,mlp] [--quick]

With `--only`, the rows of other models stay those of earlier runs on a machine of this kind.

Each configuration is measured in fresh processes of one thread. Predictions are made beforehand, from the model on the
meta device and from `autoshard calibrate` of as many processes, over the same links. On four processes only memory is
compared: four on two cores measure little. Machines like this one are faster and slower by turns, so each model has a calibration
just before it, and two probes, rows of what `calibrate` measured, are repeated between the steps: the error without what they say
of the machine stands beside the error. Where they say that the machine was another than at its calibration, the configuration is measured
again, whatever its error, and the run in which the machine was most as it was counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "accuracy.json"
sys.path.insert(0, str(HERE))

import netns  # noqa: E402
import run as side_by_side  # noqa: E402
import zoo  # noqa: E402

import autoshard  # noqa: E402
from autoshard.cost_model.cluster import Cluster  # noqa: E402
from autoshard.cost_model.kernels import BY_FLOPS, look_up, passing  # noqa: E402
from autoshard.cost_model.liveness import CATEGORIES  # noqa: E402
from autoshard.cost_model.optimizer import NAMED  # noqa: E402
from autoshard.cost_model.program import Program  # noqa: E402
from autoshard.cost_model.step_time import StepTime  # noqa: E402
from autoshard.cost_model.work import work_of  # noqa: E402
from autoshard.passes.choose_zero import make_plan  # noqa: E402
from autoshard.plan import Plan  # noqa: E402
from autoshard.planning import circumstances, forecaster  # noqa: E402

# Rows of calibrate's tables that say how fast the machine is: the width of a matmul, the numbers of a sum of two tensors.
PROBE, PROBE_MEMORY = 512, 1 << 20
STATE = ("parameters", "optimizer", "buffers", "inputs")
KEPT = ("parameters", "optimizer", "gradients")  # what can be measured by itself
TIMED_ON = (1, 2)
LIMITED = 1000  # Mbit/s, where the links are limited
ALIKE, TRIES = 0.1, 3  # how much slower or faster than at its calibration a machine is the same; how often one is looked for
Links = tuple[int, int]  # processes, Mbit/s


@dataclass(frozen=True)
class Case:
    """One configuration."""

    model: str
    batch: int
    world: int = 1
    zero: int = 0
    codegen: str = "eager"
    optimizer: str = "adamw"
    precision: str | None = None
    mbit: int = 0

    def __str__(self) -> str:
        precision = f" {self.precision}" if self.precision else ""
        rate = f", {self.mbit} Mbit/s" if self.mbit else ""
        return f"{self.model} x{self.batch}, ZeRO-{self.zero} on {self.world}, {self.codegen}, {self.optimizer}{precision}{rate}"

    @property
    def links(self) -> Links:
        """Whose calibration its time is predicted from."""
        return min(self.world, max(TIMED_ON)), self.mbit

    def config(self) -> autoshard.Config:
        """What the job and the plan are told."""
        options: dict[str, Any] = {"zero": self.zero, "codegen": self.codegen, "precision": self.precision}
        return autoshard.Config(**options, optimizer=self.optimizer, verbose=False)


@dataclass(frozen=True)
class Compared:
    """Predicted and measured: bytes held between steps, bytes at the peak, bytes of parameters, optimizer state and gradients when
    the optimizer steps, seconds of a step and of the probes; and the share of a step's kernels that are counted by FLOPs. date:
    of the measurement."""

    case: Case
    predicted: dict[str, float]
    measured: dict[str, float]
    date: str
    categories: dict[str, int] = field(default_factory=dict)

    @property
    def raw(self) -> float:
        """By how much of itself the measured step is off the predicted one, the machine's turns in it: what users will see."""
        return self.measured["step"] / self.predicted["step"] - 1

    @property
    def slower(self) -> float:
        """How many times as long as when it was calibrated the machine took just then for what the step is made of."""
        matmuls, memory = (self.measured[name] / self.predicted[name] for name in ("probe", "memory probe"))
        return self.predicted["share"] * matmuls + (1 - self.predicted["share"]) * memory

    def error(self, what: str) -> float:
        """By how much of itself the measured value is off the predicted one; of the step, on a machine as it was calibrated."""
        off = self.slower if what == "step" else 1.0
        return self.measured[what] / off / self.predicted[what] - 1


def cases(quick: bool) -> list[Case]:
    """The configurations; a third of them if quick."""
    sizes = {"llama": 4, "gpt2": 4, "bert": 4, "vit": 8, "conv": 16, "mlp": 512}
    found = []
    for model, batch in sizes.items():
        found.append(Case(model, batch, codegen="inductor"))
        found.append(Case(model, batch, 2, 3))
        if quick:
            continue
        found.append(Case(model, 2 * batch))
        found.append(Case(model, batch, 2, 2, optimizer="sgd"))
        found.append(Case(model, 2 * batch, 2, 1, "inductor"))
        found.append(Case(model, batch, 2, 0, "inductor", optimizer="sgd"))
    if not quick:
        found += [Case(model, sizes[model], 4, zero) for model, zero in (("llama", 3), ("mlp", 2), ("vit", 1))]
        found += [Case(model, sizes[model], 2, 3, "inductor") for model in ("llama", "gpt2")]
        found += [Case(model, batch, 2, 3, precision="bf16") for model, batch in (("llama", 1), ("mlp", 32), ("vit", 1))]
        limited = (("llama", 3, "eager"), ("llama", 0, "inductor"), ("gpt2", 1, "eager"), ("mlp", 2, "inductor"))
        found += [Case(model, sizes[model], 2, zero, codegen, mbit=LIMITED) for model, zero, codegen in limited]
    return found


def predict(case: Case, clusters: dict[Links, Cluster]) -> tuple[dict[str, float], dict[str, int], Plan]:
    """What the plan says, without running anything, and the plan."""
    torch.compiler.reset()
    make, inputs = zoo.MODELS[case.model]
    with torch.device("meta"):
        model = make().train()
    cluster = clusters[case.links]
    cluster = replace(cluster, per_node=case.world // cluster.nodes)
    forecast = forecaster(model, inputs(case.batch, None), case.config(), cluster, NAMED[case.optimizer])
    where = circumstances(case.config(), cluster)
    plan = make_plan(forecast.captured.inventory, case.config(), where, forecast, forecast.fit)
    memory = plan.predicted.memory
    program, curve, took, _ = forecast.simulated(plan)
    at_the_step = dict(zip(CATEGORIES, curve.at()[-1]))
    found = {"held": sum(memory.get(c, 0) for c in STATE), "peak": plan.predicted.peak_bytes, "share": share(program, took)}
    found |= {"probe": float(look_up(cluster.device.tables["matmul.fp32"], 2 * PROBE**3))}
    found |= {"memory probe": float(look_up(cluster.device.tables["pointwise"], passing(8, 4, "cpu") * PROBE_MEMORY))}
    found |= {category: int(at_the_step[category]) for category in KEPT}  # type: ignore[index]
    return {**found, "step": plan.predicted.step_seconds or 0.0}, memory, plan


def share(program: Program, took: StepTime) -> float:
    """Of the seconds of a step's kernels, the part of those that are counted by FLOPs."""
    spans = [s for s in took.timeline.spans if s.stream == "compute"]
    kinds = [work_of(program.operations[s.operation]).kind for s in spans]
    matmuls = sum(s.end - s.start for s, kind in zip(spans, kinds) if kind in BY_FLOPS)
    return matmuls / (sum(s.end - s.start for s in spans) + took.optimizer + took.overhead)


def measure(case: Case, plan: Plan, scratch: Path) -> dict[str, float]:
    """The same, measured in processes of its own, which go by the plan."""
    out, pinned = scratch / "measured.json", scratch / "plan.json"
    pinned.write_text(plan.to_json())
    worker = [str(HERE / "accuracy_worker.py"), json.dumps(asdict(case)), str(pinned), str(out)]
    launch(worker, (case.world, case.mbit), scratch)
    found: dict[str, float] = json.loads(out.read_text())
    return found


def _together(case: Case) -> tuple[int, int]:
    """What has a calibration in common."""
    return list(zoo.MODELS).index(case.model), case.mbit


def compare(cases: Sequence[Case], scratch: Path, date: str) -> list[Compared]:
    """Each case, after a calibration for all of them."""
    clusters, compared = calibrated(scratch, dict.fromkeys(c.links for c in cases)), []
    for case in cases:
        predicted, categories, plan = predict(case, clusters)
        found = as_calibrated(case, lambda: Compared(case, predicted, measure(case, plan, scratch), date, categories))  # noqa: B023 - called here
        compared.append(found)
        errors = f"peak {found.error('peak'):+.1%}, step {found.error('step'):+.1%}, machine {found.slower:.2f}"
        print(f"{case}: {errors}", flush=True)
    return compared


def as_calibrated(case: Case, compare_once: Callable[[], Compared]) -> Compared:
    """The one of several measurements in which the machine was most as it was when it was calibrated."""
    found: list[Compared] = []
    while len(found) < (TRIES if case.world in TIMED_ON else 1):
        found.append(compare_once())
        if abs(found[-1].slower - 1) <= ALIKE:
            break
    return min(found, key=lambda one: abs(one.slower - 1))


def calibrated(scratch: Path, wanted: Iterable[Links]) -> dict[Links, Cluster]:
    """This machine as so many processes find it, over links of such a rate."""
    found = {}
    for links in wanted:
        out = scratch / f"cluster{links}.yaml"
        launch(["-m", "autoshard", "calibrate", "--out", str(out)], links, scratch)
        found[links] = Cluster.load(out)
    return found


def launch(program: Sequence[str], links: Links, scratch: Path) -> None:
    """Runs a program of Python, one process a host where links are limited."""
    world, mbit = links
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
    if mbit:
        code = netns.run(netns.Job([sys.executable, *program], world, mbit, env=environment, timeout=900))
        if code:
            raise RuntimeError(f"{' '.join(program)}: exit status {code}")
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    command = [sys.executable, *launcher, *program]
    subprocess.run(command, check=True, env={**os.environ, **environment}, timeout=900, stderr=subprocess.DEVNULL)


def bands(compared: Sequence[Compared]) -> dict[str, dict[str, list[float]]]:
    """{"cpu eager": {"memory": [least, most], "time": ...}}: what accuracy.json holds."""
    found: dict[str, dict[str, list[float]]] = {}
    for codegen in ("eager", "inductor"):
        rows = [c for c in compared if c.case.codegen == codegen]
        timed = [c for c in rows if c.case.world in TIMED_ON]
        for name, values in (("memory", [c.error("peak") for c in rows]), ("time", [c.raw for c in timed])):
            if values:
                found.setdefault(f"cpu {codegen}", {})[name] = [round(min(values), 4), round(max(values), 4)]
    return found


def markdown(compared: Sequence[Compared], machine: str) -> str:
    """docs/accuracy.md."""
    lines = [
        "# Predicted and measured\n",
        f"{machine}, {' and '.join(sorted({c.date for c in compared}))}. Written by `make bench-accuracy`. MB are 10^6 bytes of the worst rank; *held* is what lies there between",
        "steps (parameters, optimizer state, buffers, the batch), *grads* what the optimizer finds, *peak* the most that exists at once",
        "in a step. An error is measured / predicted - 1. Predictions come from the model on the meta device and, for time, from",
        "`autoshard calibrate`, run before each model's configurations; nothing of the model was run for them. *Machine*: how many times",
        "as long as in that calibration a matmul and a sum of two tensors took between the steps that were timed, each by its share of the",
        f"step; the last column is the error without it. Where that was off by more than {ALIKE:.0%}, the configuration was measured again, {TRIES} times at",
        "most, and the run in which the machine was most as it had been counts, whatever its error.\n",
        "| configuration | held MB | measured | grads MB | measured | peak MB | measured | error | step ms | measured | error | machine | without |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for c in compared:
        memory = "".join(f" {c.predicted[k] / 1e6:.2f} | {c.measured[k] / 1e6:.2f} |" for k in ("held", "gradients", "peak"))
        step = f" {c.predicted['step'] * 1e3:.0f} | {c.measured['step'] * 1e3:.0f} | {c.raw:+.1%} |"
        step += f" {c.slower:.2f} | {c.error('step'):+.1%} |"
        lines.append(f"| {c.case} |{memory} {c.error('peak'):+.1%} |{step if c.case.world in TIMED_ON else ' | | | | |'}")
    return "\n".join([*lines, "", *_summary(compared), ""])


def _summary(compared: Sequence[Compared]) -> Iterable[str]:
    timed = [c for c in compared if c.case.world in TIMED_ON]
    yield _bound("Peak memory", [c.error("peak") for c in compared], 0.03, 0.08)
    yield _bound("Step time", [c.raw for c in timed], 0.10, 0.25)
    yield _bound("Step time without the machine's turns", [c.error("step") for c in timed], 0.10, 0.25)
    for what in ("held", *KEPT):
        exact = sum(abs(c.measured[what] - c.predicted[what]) < 1e4 for c in compared)
        yield f"- Bytes {'held' if what == 'held' else f'of {what}'} agree to 10 kB in {exact} of {len(compared)}."


def _bound(what: str, errors: Sequence[float], median: float, worst: float) -> str:
    found = sorted(map(abs, errors))
    middle, most = statistics.median(found), found[-1]
    holds = "holds" if middle <= median and most <= worst else "does not hold"
    return (
        f"- {what}: {middle:.1%} at the median, {most:.1%} at worst over {len(found)} configurations "
        f"(to hold: {median:.0%} and {worst:.0%}): {holds}."
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="models, with commas between")
    parser.add_argument("--quick", action="store_true", help="a third of the configurations")
    asked = parser.parse_args()
    wanted = [c for c in cases(asked.quick) if not asked.only or c.model in asked.only.split(",")]
    if impossible := netns.why_impossible():
        print(f"no limited links: {impossible}", flush=True)
        wanted = [c for c in wanted if not c.mbit]
    machine = side_by_side.machine("this machine")
    kind = f"{machine.cpu}, {machine.cores} cores, torch {machine.torch}, gloo"
    compared = earlier(kind, wanted) if asked.only else []
    scratch = Path(tempfile.mkdtemp(prefix="autoshard-accuracy-"))
    try:
        for _, alike in itertools.groupby(sorted(wanted, key=_together), _together):
            compared = sorted(compared + compare(list(alike), scratch, machine.date), key=lambda c: _together(c.case))
            write(compared, kind)  # should the next one fail
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(markdown(compared, kind))
    return 0


def earlier(kind: str, again: Sequence[Case]) -> list[Compared]:
    """What was measured before on a machine of this kind, but for the cases that are measured `again`."""
    if not RESULTS.exists() or (known := json.loads(RESULTS.read_text()))["machine"] != kind:
        return []
    rows = [Compared(**{**row, "case": Case(**row["case"])}) for row in known["rows"]]
    return [row for row in rows if row.case not in again]


def write(compared: Sequence[Compared], kind: str) -> None:
    """The results, the page that shows them, and the bands of predictions."""
    (HERE.parent / "docs" / "accuracy.md").write_text(markdown(compared, kind))
    RESULTS.write_text(json.dumps({"machine": kind, "rows": [asdict(c) for c in compared]}, indent=1) + "\n")
    record = HERE.parent / "autoshard" / "cost_model" / "accuracy.json"
    record.write_text(json.dumps(bands(compared), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
