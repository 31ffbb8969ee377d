"""Compares what autoshard predicts with what is measured; writes docs/accuracy.md and autoshard/cost_model/accuracy.json.

    python bench/accuracy.py [--only llama,mlp,rank0] [--quick] [--device cpu]

With `--only`, the other rows stay those of earlier runs on a machine of this kind; rows of other devices always stay. On a GPU, which
is taken where there is one, steps of one process are measured, and the memory of rank 0 of many.

Each configuration is measured in fresh processes of one thread. Predictions are made beforehand, from the model on the
meta device and from `autoshard calibrate` of as many processes, over the same links. On four processes only memory is
compared: four on two cores measure little. Machines like this one are faster and slower by turns, so each model has a calibration
just before it, and two probes, rows of what `calibrate` measured, are repeated between the steps: the error without what they say
of the machine stands beside the error. Where they say that the machine was another than at its calibration, the configuration is measured
again, whatever its error, and the run in which the machine was most as it was counts. A GPU is calibrated once.
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
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "accuracy.md"
RECORD = HERE.parent / "autoshard" / "cost_model" / "accuracy.json"
sys.path.insert(0, str(HERE))

import netns  # noqa: E402
import run as side_by_side  # noqa: E402
import zoo  # noqa: E402

import autoshard  # noqa: E402
from autoshard.cost_model.cluster import Cluster  # noqa: E402
from autoshard.cost_model.hardware import DEVICES, Device, device_named_like  # noqa: E402
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
NODE = 8  # processes on each node of a job of which only rank 0 is there
SIZES = {"llama": 4, "gpt2": 4, "bert": 4, "vit": 8, "conv": 16, "mlp": 512}  # batches
ON_GPU = {**{model: 8 * batch for model, batch in SIZES.items()}, "wide": 32}
ALIKE, TRIES = 0.1, 3  # how much slower or faster than at its calibration a machine is the same; how often one is looked for
Links = tuple[int, int]  # processes, Mbit/s


@dataclass(frozen=True)
class Case:
    """One configuration. lone: only rank 0 of the job is there. device: the cost model's name for it."""

    model: str
    batch: int
    world: int = 1
    zero: int = 0
    codegen: str = "eager"
    optimizer: str = "adamw"
    precision: str | None = None
    mbit: int = 0
    lone: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        precision = f" {self.precision}" if self.precision else ""
        rate = f", {self.mbit} Mbit/s" if self.mbit else ""
        where = f"{'rank 0 of ' if self.lone else ''}{self.world}"
        return f"{self.model} x{self.batch}, ZeRO-{self.zero} on {where}, {self.codegen}, {self.optimizer}{precision}{rate}"

    @property
    def kind(self) -> str:
        """What torch calls such devices."""
        return "cpu" if self.device == "cpu" else "cuda"

    @property
    def timed(self) -> bool:
        """Whether its step time is compared."""
        return self.world in TIMED_ON and not self.lone

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
    the optimizer steps, seconds of a step; on CPUs those of the probes, and the share of a step's kernels that are counted by FLOPs; on
    GPUs bytes reserved, and those of libraries. date: of the measurement."""

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
        """How many times as long as when it was calibrated the machine took just then for what the step is made of; 1 where that was
        not asked."""
        if "probe" not in self.measured:
            return 1.0
        matmuls, memory = (self.measured[name] / self.predicted[name] for name in ("probe", "memory probe"))
        return self.predicted["share"] * matmuls + (1 - self.predicted["share"]) * memory

    def error(self, what: str) -> float:
        """By how much of itself the measured value is off the predicted one; of the step, on a machine as it was calibrated."""
        off = self.slower if what == "step" else 1.0
        return self.measured[what] / off / self.predicted[what] - 1


@dataclass(frozen=True)
class Results:
    """What was compared on one device. machine: that it is in, in words."""

    machine: str
    rows: list[Compared]

    @staticmethod
    def load(file: Path) -> Results:
        """Those that `save` left."""
        known = json.loads(file.read_text())
        return Results(known["machine"], [Compared(**{**row, "case": Case(**row["case"])}) for row in known["rows"]])

    def save(self, file: Path) -> None:
        """As JSON."""
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")


def cases(quick: bool, device: str = "cpu") -> list[Case]:
    """The configurations on a device; a third of them if quick."""
    if device != "cpu":
        return _on_gpu(device)[:: 3 if quick else 1]
    found = []
    for model, batch in SIZES.items():
        found.append(Case(model, batch, codegen="inductor"))
        found.append(Case(model, batch, 2, 3))
        if quick:
            continue
        found.append(Case(model, 2 * batch))
        found.append(Case(model, batch, 2, 2, optimizer="sgd"))
        found.append(Case(model, 2 * batch, 2, 1, "inductor"))
        found.append(Case(model, batch, 2, 0, "inductor", optimizer="sgd"))
    if not quick:
        found += [Case(model, SIZES[model], 4, zero) for model, zero in (("llama", 3), ("mlp", 2), ("vit", 1))]
        found += [Case(model, SIZES[model], 2, 3, "inductor") for model in ("llama", "gpt2")]
        found += [Case(model, batch, 2, 3, precision="bf16") for model, batch in (("llama", 1), ("mlp", 32), ("vit", 1))]
        limited = (("llama", 3, "eager"), ("llama", 0, "inductor"), ("gpt2", 1, "eager"), ("mlp", 2, "inductor"))
        found += [Case(model, SIZES[model], 2, zero, codegen, mbit=LIMITED) for model, zero, codegen in limited]
        lone = (("llama", 64, 3, "eager"), ("llama", 8, 1, "inductor"), ("gpt2", 8, 2, "inductor"), ("vit", 64, 1, "eager"))
        found += [Case(model, SIZES[model], world, zero, codegen, lone=True) for model, world, zero, codegen in lone]
    return found


def _on_gpu(device: str) -> list[Case]:
    """Those of one GPU: steps of one process, and what rank 0 of 8 and 64 holds."""
    alone = [(model, "inductor", "adamw") for model in ON_GPU]
    alone += [("llama", "eager", "adamw"), ("conv", "eager", "adamw"), ("wide", "eager", "adamw"), ("wide", "eager", "sgd")]
    lone = [("llama", 8, 1, "inductor"), ("gpt2", 8, 2, "eager"), ("wide", 8, 3, "inductor")]
    lone += [("llama", 64, 3, "inductor"), ("vit", 64, 2, "eager"), ("wide", 64, 3, "eager")]
    found = [Case(model, ON_GPU[model], codegen=codegen, optimizer=optimizer, device=device) for model, codegen, optimizer in alone]
    found += [Case(model, ON_GPU[model], world, zero, codegen, lone=True, device=device) for model, world, zero, codegen in lone]
    return [*found, Case("wide", ON_GPU["wide"], 64, 3, precision="bf16", lone=True, device=device)]


def device_called(kind: str) -> Device:
    """The one here that torch calls "cpu" or "cuda", with the figures of its preset."""
    if kind == "cpu":
        return DEVICES["cpu"]
    found = torch.cuda.get_device_properties(0)
    return device_named_like(found.name, found.total_memory)


def cluster_of(case: Case, clusters: dict[Links, Cluster]) -> Cluster:
    """The machines that a case is predicted for: as they were calibrated, but where rank 0 is alone, and has no links."""
    if case.lone:
        return Cluster(max(1, case.world // NODE), min(NODE, case.world), device_called(case.kind))
    cluster = clusters[case.links]
    return replace(cluster, per_node=case.world // cluster.nodes)


def predict(case: Case, cluster: Cluster) -> tuple[dict[str, float], dict[str, int], Plan]:
    """What the plan says, without running anything: figures, bytes at the peak by category; and the plan."""
    torch.compiler.reset()
    make, inputs = zoo.MODELS[case.model]
    with torch.device("meta"):
        model = make().train()
    forecast = forecaster(model, inputs(case.batch, None), case.config(), cluster, NAMED[case.optimizer])
    where = circumstances(case.config(), cluster)
    plan = make_plan(forecast.captured.inventory, case.config(), where, forecast, forecast.fit)
    memory = plan.predicted.memory
    program, curve, took, _ = forecast.simulated(plan)
    at_the_step = dict(zip(CATEGORIES, curve.at()[-1]))
    found: dict[str, float] = {"held": sum(memory.get(c, 0) for c in STATE), "peak": plan.predicted.peak_bytes}
    found |= {category: int(at_the_step[category]) for category in KEPT}  # type: ignore[index]
    if plan.predicted.reserved is not None:
        found["reserved"] = plan.predicted.reserved
    if case.timed:
        found["step"] = plan.predicted.step_seconds or 0.0
    if case.timed and case.kind == "cpu":
        found |= {"share": share(program, took), **_probes(cluster.device)}
    return found, memory, plan


def _probes(device: Device) -> dict[str, float]:
    """Seconds that these rows of its tables take."""
    matmul = look_up(device.tables["matmul.fp32"], 2 * PROBE**3)
    return {"probe": float(matmul), "memory probe": float(look_up(device.tables["pointwise"], passing(8, 4, "cpu") * PROBE_MEMORY))}


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
    launch(worker, (1 if case.lone else case.world, case.mbit), scratch, case.kind)
    found: dict[str, float] = json.loads(out.read_text())
    return found


def _together(case: Case) -> tuple[int, int]:
    """What has a calibration in common."""
    return (list(zoo.MODELS).index(case.model) if case.kind == "cpu" else 0), case.mbit


def compare(cases: Sequence[Case], scratch: Path, date: str) -> Iterable[Compared]:
    """Each case, after a calibration for all of them."""
    clusters = calibrated(scratch, dict.fromkeys(c.links for c in cases if not c.lone), cases[0].kind)
    for case in cases:
        predicted, categories, plan = predict(case, cluster_of(case, clusters))
        found = as_calibrated(lambda: Compared(case, predicted, measure(case, plan, scratch), date, categories))  # noqa: B023 - called here
        step = f", step {found.error('step'):+.1%}, machine {found.slower:.2f}" if case.timed else ""
        print(f"{case}: peak {found.error('peak'):+.1%}{step}", flush=True)
        yield found


def as_calibrated(compare_once: Callable[[], Compared]) -> Compared:
    """The one of several measurements in which the machine was most as it was when it was calibrated."""
    found: list[Compared] = []
    while len(found) < TRIES:
        found.append(compare_once())
        if abs(found[-1].slower - 1) <= ALIKE:
            break
    return min(found, key=lambda one: abs(one.slower - 1))


def calibrated(scratch: Path, wanted: Iterable[Links], kind: str = "cpu") -> dict[Links, Cluster]:
    """This machine as so many processes find it, over links of such a rate."""
    found = {}
    for links in wanted:
        out = scratch / f"cluster{links}.yaml"
        launch(["-m", "autoshard", "calibrate", "--out", str(out)], links, scratch, kind)
        found[links] = Cluster.load(out)
    return found


def launch(program: Sequence[str], links: Links, scratch: Path, kind: str = "cpu") -> None:
    """Runs a program of Python, one process a host where links are limited. kind: of devices that it sees."""
    world, mbit = links
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
    if kind == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if mbit:
        code = netns.run(netns.Job([sys.executable, *program], world, mbit, env=environment, timeout=900))
        if code:
            raise RuntimeError(f"{' '.join(program)}: exit status {code}")
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    command = [sys.executable, *launcher, *program]
    subprocess.run(command, check=True, env={**os.environ, **environment}, timeout=900, stderr=subprocess.DEVNULL)


def bands(compared: Sequence[Compared]) -> dict[str, dict[str, list[float]]]:
    """{"cpu eager": {"memory": [least, most], "time": ...}}: what accuracy.json holds, by the cost model's name for a device."""
    found: dict[str, dict[str, list[float]]] = {}
    for device, codegen in itertools.product(dict.fromkeys(c.case.device for c in compared), ("eager", "inductor")):
        rows = [c for c in compared if (c.case.device, c.case.codegen) == (device, codegen)]
        timed = [c for c in rows if c.case.timed]
        for name, values in (("memory", [c.error("peak") for c in rows]), ("time", [c.raw for c in timed])):
            if values:
                found.setdefault(f"{device} {codegen}", {})[name] = [round(min(values), 4), round(max(values), 4)]
    return found


INTRODUCTION = f"""\
{{machine}}, {{dates}}. Written by `make bench-accuracy`. MB are 10^6 bytes of the worst rank; *held* is what lies there between
steps (parameters, optimizer state, buffers, the batch), *grads* what the optimizer finds, *peak* the most that exists at once
in a step. An error is measured / predicted - 1. Predictions come from the model on the meta device and, for time, from
`autoshard calibrate`, run before each model's configurations; nothing of the model was run for them. *Machine*: how many times
as long as in that calibration a matmul and a sum of two tensors took between the steps that were timed, each by its share of the
step; the last column is the error without it. Where that was off by more than {ALIKE:.0%}, the configuration was measured again, {TRIES} times at
most, and the run in which the machine was most as it had been counts, whatever its error.

*Rank 0 of* so many is one process with a fake process group. It holds and allocates what rank 0 of such a job, with {NODE} processes a
node, would; nothing is sent. So there are no times; collectives are over when they have begun, and what only the transport holds
meanwhile, which predictions have (at stage 3 above all), is not there; values mean nothing. Beside what is predicted it holds, for each
sharded parameter, copies of the job's list of ranks, 4 bytes a process, which guards of torch.compile keep.
"""
ON_A_GPU = """\
{machine}, {dates}. What the columns have in common with those above is the same, by CUDA's caching allocator: *peak* is the most that it
had given out in a step, *reserved* the most that it then had from the driver, after its cache had been emptied between two steps.
*Libraries*: what it had given out between steps that is no tensor's, such as the workspaces of cuBLAS, and what it adds to round up;
that is not predicted, and not in peak and reserved here, which take up so much more. Steps are timed by the GPU's clock, and predicted from
`autoshard calibrate`, run on it before all of them.
"""


def page(results: Sequence[Results]) -> str:
    """docs/accuracy.md: the CPU's table, and one of each GPU."""
    return "\n".join(["# Predicted and measured\n", *(line for found in results for line in _section(found))])


def _section(found: Results) -> Iterable[str]:
    dates, device = " and ".join(sorted({c.date for c in found.rows})), found.rows[0].case.device
    on_cpu = device == "cpu"
    if not on_cpu:
        yield f"## {device}\n"
    yield (INTRODUCTION if on_cpu else ON_A_GPU).format(machine=found.machine, dates=dates)
    columns = "| configuration | held MB | measured | grads MB | measured | peak MB | measured | error |"
    columns += "" if on_cpu else " reserved MB | measured | error | libraries MB |"
    columns += " step ms | measured | error |" + (" machine | without |" if on_cpu else "")
    yield columns
    yield "|---|" + "---:|" * (columns.count("|") - 2)
    yield from map(_row, found.rows)
    yield ""
    yield from _summary(found.rows)
    yield ""


def _row(c: Compared) -> str:
    on_cpu = c.case.kind == "cpu"
    memory = "".join(f" {c.predicted[k] / 1e6:.2f} | {c.measured[k] / 1e6:.2f} |" for k in ("held", "gradients", "peak"))
    memory += f" {c.error('peak'):+.1%} |"
    if not on_cpu:
        memory += f" {c.predicted['reserved'] / 1e6:.2f} | {c.measured['reserved'] / 1e6:.2f} | {c.error('reserved'):+.1%} |"
        memory += f" {c.measured['libraries'] / 1e6:.2f} |"
    if not c.case.timed:
        return f"| {c.case} |{memory}" + " |" * (5 if on_cpu else 3)
    step = f" {c.predicted['step'] * 1e3:.0f} | {c.measured['step'] * 1e3:.0f} | {c.raw:+.1%} |"
    return f"| {c.case} |{memory}{step}" + (f" {c.slower:.2f} | {c.error('step'):+.1%} |" if on_cpu else "")


def _summary(compared: Sequence[Compared]) -> Iterable[str]:
    timed, on_cpu = [c for c in compared if c.case.timed], compared[0].case.kind == "cpu"
    yield _bound("Peak memory", [c.error("peak") for c in compared], 0.03, 0.08)
    if not on_cpu:
        yield _bound("Reserved memory", [c.error("reserved") for c in compared], 0.03, 0.08)
    if timed:
        yield _bound("Step time", [c.raw for c in timed], 0.10, 0.25)
    if timed and on_cpu:
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
    parser.add_argument("--only", default="", help="models, and rank0 for jobs of which only that is there; with commas between")
    parser.add_argument("--quick", action="store_true", help="a third of the configurations")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds none here")
    device = device_called(asked.device).name
    wanted = [c for c in cases(asked.quick, device) if is_wanted(c, asked.only)]
    if any(c.mbit for c in wanted) and (impossible := netns.why_impossible()):
        print(f"no limited links: {impossible}", flush=True)
        wanted = [c for c in wanted if not c.mbit]
    kind, file = machine_of(asked.device), file_of(device)
    rows = earlier(file, kind, wanted) if asked.only else []
    scratch = Path(tempfile.mkdtemp(prefix="autoshard-accuracy-"))
    try:
        for _, alike in itertools.groupby(sorted(wanted, key=_together), _together):
            for found in compare(list(alike), scratch, side_by_side.machine("this machine").date):
                rows = sorted([*rows, found], key=lambda c: _together(c.case))
                Results(kind, rows).save(file)  # should the next one fail
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    publish()
    print(PAGE.read_text())
    return 0


def is_wanted(case: Case, only: str) -> bool:
    """Whether `--only` says so."""
    said = only.split(",")
    return not only or case.model in said or (case.lone and "rank0" in said)


def machine_of(kind: str) -> str:
    """This machine, in words."""
    machine = side_by_side.machine("this machine")
    if kind == "cuda":
        return f"{torch.cuda.get_device_name(0)}, torch {machine.torch}"
    return f"{machine.cpu}, {machine.cores} cores, torch {machine.torch}, gloo"


def file_of(device: str) -> Path:
    """Where results of a device are."""
    return RESULTS / ("accuracy.json" if device == "cpu" else f"accuracy_{device.replace(' ', '_')}.json")


def earlier(file: Path, kind: str, again: Sequence[Case]) -> list[Compared]:
    """What was measured before on a machine of this kind, but for the cases that are measured `again`."""
    known = Results.load(file) if file.exists() else Results(kind, [])
    return [row for row in known.rows if row.case not in again] if known.machine == kind else []


def publish() -> None:
    """The page that shows what was measured on all devices, and the bands of predictions."""
    files = sorted(RESULTS.glob("accuracy*.json"), key=lambda file: (len(file.stem), file.stem))
    results = [found for found in map(Results.load, files) if found.rows]
    PAGE.write_text(page(results))
    RECORD.write_text(json.dumps(bands([row for found in results for row in found.rows]), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
