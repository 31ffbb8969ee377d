"""Compares what autoshard predicts with what is measured; writes docs/accuracy.md and autoshard/cost_model/accuracy.json.

    python bench/accuracy.py [--only llama,mlp,rank0] [--quick] [--device cpu]
    python bench/accuracy.py --again h100            # predicts anew what was measured on that GPU, which need not be here

With `--only`, the other rows stay those of earlier runs on a machine of this kind; rows of other devices always stay. On a GPU, which
is taken where there is one, steps of one process are measured, and the memory of rank 0 of many.

Each configuration is measured in fresh processes of one thread. Predictions are made beforehand, from the model on the
meta device and from `autoshard calibrate` of as many processes, over the same links. On four processes only memory is
compared: four on two cores measure little. Machines like this one are faster and slower by turns, so each model has a calibration
just before it, and probes, rows of what `calibrate` measured, are repeated between the steps: the error without what they say
of the machine stands beside the error. Where they say that the machine was another than at its calibration, the configuration is measured
again, whatever its error; if it stays another, it is calibrated anew. The run in which the machine was most as it was counts. A GPU is
calibrated once.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "accuracy.md"
RECORD = HERE.parent / "autoshard" / "cost_model" / "accuracy.json"
sys.path.insert(0, str(HERE))

import accuracy_page  # noqa: E402
import netns  # noqa: E402
import run as side_by_side  # noqa: E402
import zoo  # noqa: E402
from compared import KEPT, NODE, TRIES, Case, Compared, Links, Results  # noqa: E402
from told import SECONDS, Told  # noqa: E402

from autoshard.cost_model.cluster import Cluster  # noqa: E402
from autoshard.cost_model.collectives import Group, seconds  # noqa: E402
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

# Rows of calibrate's tables that say how fast the machine is: the width of a matmul, the numbers of a sum of two tensors, and of a gather.
PROBE, PROBE_MEMORY, PROBE_LINK = 512, 1 << 20, 1 << 19
STATE = ("parameters", "optimizer", "buffers", "inputs")
LIMITED = 1000  # Mbit/s, where the links are limited
LIBRARIES = 10**9  # bytes of a GPU that a process takes beside its tensors
Prediction = tuple[dict[str, float], dict[str, int], Plan]  # as of `predict`
SIZES = {"llama": 4, "gpt2": 4, "bert": 4, "vit": 8, "conv": 16, "mlp": 512}  # batches
ON_GPU = {**{model: 8 * batch for model, batch in SIZES.items()}, "wide": 32, "half": 32}


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
    alone += [("llama", "eager", "adamw"), ("conv", "eager", "adamw"), ("half", "eager", "adamw"), ("wide", "eager", "sgd")]
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
        here = next(iter(clusters.values()), None) if case.kind != "cpu" else None
        device = device_named_like(case.device, here.device.memory) if here else device_called(case.kind)
        return Cluster(max(1, case.world // NODE), min(NODE, case.world), device)
    cluster = clusters[case.links]
    return replace(cluster, per_node=case.world // cluster.nodes)


def predict(case: Case, cluster: Cluster) -> Prediction:
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
    found["saved"] = saved(program)
    if plan.predicted.reserved is not None:
        found["reserved"] = plan.predicted.reserved
    if case.timed:
        found["step"] = plan.predicted.step_seconds or 0.0
    if case.timed and case.kind == "cpu":
        found |= {"share": share(program, took), **_probes(cluster.device)}
    if case.timed and case.world > 1 and case.kind == "cpu":
        where = Group(case.world, cluster.nodes)
        found["link probe"] = seconds("gather_direct", 4 * PROBE_LINK, where, cluster.device)
        found["waits"] = plan.predicted.seconds["waiting"] / found["step"]
        found["busy"] = plan.predicted.communication_seconds / found["step"]
    return found, memory, plan


def saved(program: Program) -> int:
    """Bytes between forward and backward, beside what is held between steps."""
    behind = next(i for i, operation in enumerate(program.operations) if operation.half != "forward")
    return sum(program.open.number(p.bytes) for p in program.pieces if 0 <= p.made < behind <= p.last)


def _probes(device: Device) -> dict[str, float]:
    """Seconds that these rows of its tables take."""
    matmul = look_up(device.tables["matmul.fp32"], 2 * PROBE**3)
    return {"probe": float(matmul), "memory probe": float(look_up(device.tables["pointwise"], passing(8, 4, on_cpu=True) * PROBE_MEMORY))}


def share(program: Program, took: StepTime) -> float:
    """Of the seconds of a step's kernels, the part of those that are counted by FLOPs."""
    spans = [s for s in took.timeline.spans if s.stream == "compute"]
    kinds = [work_of(program.operations[s.operation]).kind for s in spans]
    matmuls = sum(s.end - s.start for s, kind in zip(spans, kinds) if kind in BY_FLOPS)
    return matmuls / (sum(s.end - s.start for s in spans) + took.optimizer + took.overhead)


def measure(case: Case, plan: Plan, scratch: Path) -> dict[str, float]:
    """The same, measured in processes of its own, which go by the plan."""
    launch(_program(case, plan, scratch), (1 if case.lone else case.world, case.mbit), scratch, case.kind)
    found: dict[str, float] = json.loads((scratch / "measured.json").read_text())
    return found


def _program(case: Case, plan: Plan, scratch: Path) -> list[str]:
    """What a process of a case runs."""
    (scratch / "plan.json").write_text(plan.to_json())
    return [str(HERE / "accuracy_worker.py"), json.dumps(asdict(case)), str(scratch / "plan.json"), str(scratch / "measured.json")]


def _together(case: Case) -> tuple[int, int]:
    """What has a calibration in common."""
    return (list(zoo.MODELS).index(case.model) if case.kind == "cpu" else 0), case.mbit


def compare(cases: Sequence[Case], scratch: Path, date: str) -> Iterable[Compared]:
    """Each case, after a calibration for all of them."""
    clusters = calibrated(scratch, dict.fromkeys(c.links for c in cases if not c.lone), cases[0].kind)
    if cases[0].kind != "cpu" and clusters:
        cluster_file(cases[0].device).write_text(next(iter(clusters.values())).to_yaml())
    for found in (_one_by_one if cases[0].kind == "cpu" else _beside_each_other)(cases, clusters, scratch, date):
        step = f", step {found.error('step'):+.1%}, machine {found.slower:.2f}" if found.case.timed else ""
        print(f"{found.case}: peak {found.error('peak'):+.1%}{step}", flush=True)
        yield found


def _one_by_one(cases: Sequence[Case], clusters: dict[Links, Cluster], scratch: Path, date: str) -> Iterable[Compared]:
    for case in cases:
        found = _in_tries(case, clusters, scratch, date)
        if not found.alike:  # for as long as it was looked at
            print(f"{case}: the machine takes {found.slower:.2f} times as long: it is calibrated anew", flush=True)
            clusters |= calibrated(scratch, [case.links])
            found = min(found, _in_tries(case, clusters, scratch, date), key=lambda one: abs(one.slower - 1))
        yield found


def _in_tries(case: Case, clusters: dict[Links, Cluster], scratch: Path, date: str) -> Compared:
    predicted, categories, plan = predict(case, cluster_of(case, clusters))
    return as_calibrated(lambda: Compared(case, predicted, measure(case, plan, scratch), date, categories))


def _beside_each_other(cases: Sequence[Case], clusters: dict[Links, Cluster], scratch: Path, date: str) -> Iterable[Compared]:
    """Predicted at once, and compiled as many at once as fit: a GPU waits for little else. Then their steps are measured one after
    the other. RuntimeError at the end if some failed."""
    where = [cluster_of(case, clusters) for case in cases]
    predictions: dict[Case, Prediction] = {}
    failed: list[str] = []
    with ProcessPoolExecutor(len(cases), multiprocessing.get_context("spawn"), _see_no_gpu) as pool:
        for case, found in {case: pool.submit(predict, case, cluster) for case, cluster in zip(cases, where)}.items():
            if error := found.exception():
                failed.append(f"{case}: {error!r}")
            else:
                predictions[case] = found.result()
    for some in _fitting(predictions, where[0].device.memory):
        folders = {case: scratch / str(cases.index(case)) for case in some}
        with contextlib.ExitStack() as ended:
            workers = {case: _told(case, predictions[case][2], folder) for case, folder in folders.items()}
            for worker in workers.values():
                ended.callback(worker.stop)
            for case, error in _in_turn(workers):
                if error:
                    failed.append(error)
                    continue
                predicted, categories, plan = predictions[case]
                yield Compared(case, predicted, json.loads((folders[case] / "measured.json").read_text()), date, categories, digest(plan))
    if failed:
        raise RuntimeError("\n".join(failed))


def _in_turn(workers: Mapping[Case, Told]) -> Iterator[tuple[Case, str]]:
    """Has each measure when all are ready: those that have, and those that failed with what they said."""
    ready: list[Case] = []
    for case, worker in workers.items():
        if error := _failure(worker.wait_until_ready):
            yield case, error
        else:
            ready.append(case)
    print(f"{len(ready)} of {len(workers)} compiled", flush=True)
    for case in ready:
        yield case, _failure(workers[case].measure)


def _failure(act: Callable[[], object]) -> str:
    """Of what a process does: what it said, if it failed."""
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return ""


def digest(plan: Plan) -> str:
    """Of all that a job does by it: not of what is predicted of it, nor of why."""
    done = {name: value for name, value in json.loads(plan.to_json()).items() if name not in ("predicted", "why")}
    return hashlib.sha256(json.dumps(done, sort_keys=True).encode()).hexdigest()[:16]


def again(row: Compared, cluster: Cluster) -> Compared | None:
    """The same measurement beside what is predicted now; None if another plan would be measured."""
    predicted, categories, plan = predict(row.case, cluster_of(row.case, {row.case.links: cluster}))
    return replace(row, predicted=predicted, categories=categories) if digest(plan) == row.plan else None


def _see_no_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _fitting(predictions: Mapping[Case, Prediction], memory: int) -> Iterable[list[Case]]:
    """The cases in groups that are on a GPU together, each beside what CUDA and its libraries take."""
    some: list[Case] = []
    left = memory
    for case, (predicted, _, _) in predictions.items():
        needed = int(1.2 * predicted["reserved"]) + LIBRARIES
        if some and needed > left:
            yield some
            some, left = [], memory
        some, left = [*some, case], left - needed
    yield some


def _told(case: Case, plan: Plan, folder: Path) -> Told:
    """A process that compiles a case, and measures it when it is told to."""
    folder.mkdir()
    return Told([*_program(case, plan, folder), "--told"], environment(folder, case.kind), folder / "errors")


def as_calibrated(compare_once: Callable[[], Compared]) -> Compared:
    """The one of several measurements in which the machine was most as it was when it was calibrated."""
    found: list[Compared] = []
    while len(found) < TRIES:
        found.append(compare_once())
        if found[-1].alike:
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
    if mbit:
        code = netns.run(netns.Job([sys.executable, *program], world, mbit, env=_variables(scratch, kind), timeout=SECONDS))
        if code:
            raise RuntimeError(f"{' '.join(program)}: exit status {code}")
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    command = [sys.executable, *launcher, *program]
    found = subprocess.run(command, env=environment(scratch, kind), timeout=SECONDS, stderr=subprocess.PIPE, text=True)
    if found.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {found.returncode}\n{found.stderr}")


def environment(scratch: Path, kind: str) -> dict[str, str]:
    """Of a process that sees such devices."""
    return {**os.environ, **_variables(scratch, kind)}


def _variables(scratch: Path, kind: str) -> dict[str, str]:
    found = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
    return {**found, "CUDA_VISIBLE_DEVICES": ""} if kind == "cpu" else {**found, "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def bands(compared: Sequence[Compared]) -> dict[str, dict[str, list[float]]]:
    """{"cpu eager": {"memory": [least, most], "time": ...}}: what accuracy.json holds, by the cost model's name for a device."""
    found: dict[str, dict[str, list[float]]] = {}
    for device, codegen in itertools.product(dict.fromkeys(c.case.device for c in compared), ("eager", "inductor")):
        rows = [c for c in compared if (c.case.device, c.case.codegen) == (device, codegen)]
        timed = [c for c in rows if c.case.timed]
        reserved = [c.error("reserved") for c in rows if "reserved" in c.measured]
        for name, values in (("memory", [c.error("peak") for c in rows]), ("reserved", reserved), ("time", [c.raw for c in timed])):
            if values:
                found.setdefault(f"{device} {codegen}", {})[name] = [round(min(values), 4), round(max(values), 4)]
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    kinds = "models, linked for jobs over limited links, and rank0 for those of which only that is there; with commas between"
    parser.add_argument("--only", default="", help=kinds)
    parser.add_argument("--quick", action="store_true", help="a third of the configurations")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--again", metavar="GPU", help="as the cost model calls it: predict anew what was measured on it")
    asked = parser.parse_args()
    if asked.again:
        predict_again(asked.again)
        return 0
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds none here")
    device = device_called(asked.device).name
    wanted = [c for c in cases(asked.quick, device) if is_wanted(c, asked.only)]
    if any(c.mbit for c in wanted) and (impossible := netns.why_impossible()):
        print(f"no limited links: {impossible}", flush=True)
        wanted = [c for c in wanted if not c.mbit]
    kind, file = machine_of(asked.device), file_of(device)
    rows = earlier(file, kind, wanted) if asked.only else []
    note = Results.load(file).note if rows else ""
    scratch = Path(tempfile.mkdtemp(prefix="autoshard-accuracy-"))
    try:
        for _, alike in itertools.groupby(sorted(wanted, key=_together), _together):
            for found in compare(list(alike), scratch, side_by_side.machine("this machine").date):
                rows = sorted([*rows, found], key=lambda c: _together(c.case))
                Results(kind, rows, note).save(file)  # should the next one fail
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    publish()
    print(PAGE.read_text())
    return 0


def predict_again(device: str) -> None:
    """All rows of a GPU, by the calibration that was kept. ValueError if some have another plan now."""
    file, cluster = file_of(device), Cluster.load(cluster_file(device))
    known = Results.load(file)
    rows = [again(row, cluster) for row in known.rows]
    if others := [str(row.case) for row, now in zip(known.rows, rows) if now is None]:
        raise ValueError(f"to be measured again, since their plans are others now: {', '.join(others)}")
    replace(known, rows=[row for row in rows if row]).save(file)
    publish()


def is_wanted(case: Case, only: str) -> bool:
    """Whether `--only` says so."""
    said = only.split(",")
    return not only or case.model in said or ("linked" in said and case.mbit > 0) or (case.lone and "rank0" in said)


def machine_of(kind: str) -> str:
    """This machine, in words."""
    machine = side_by_side.machine("this machine")
    if kind == "cuda":
        return f"{torch.cuda.get_device_name(0)}, torch {machine.torch}"
    return f"{machine.cpu}, {machine.cores} cores, torch {machine.torch}, gloo"


def file_of(device: str) -> Path:
    """Where results of a device are."""
    return RESULTS / ("accuracy.json" if device == "cpu" else f"accuracy_{device.replace(' ', '_')}.json")


def cluster_file(device: str) -> Path:
    """Where the calibration of a GPU is."""
    return RESULTS / f"cluster_{device.replace(' ', '_')}.yaml"


def earlier(file: Path, kind: str, again: Sequence[Case]) -> list[Compared]:
    """What was measured before on a machine of this kind, but for the cases that are measured `again`."""
    known = Results.load(file) if file.exists() else Results(kind, [])
    return [row for row in known.rows if row.case not in again] if known.machine == kind else []


def publish() -> None:
    """The page that shows what was measured on all devices, and the bands of predictions."""
    files = sorted(RESULTS.glob("accuracy*.json"), key=lambda file: (len(file.stem), file.stem))
    results = [found for found in map(Results.load, files) if found.rows]
    PAGE.write_text(accuracy_page.page(results))
    RECORD.write_text(json.dumps(bands([row for found in results for row in found.rows]), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
