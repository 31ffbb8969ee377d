"""Compares autoshard with DDP, FSDP2 and DeepSpeed on this machine; writes docs/performance.md and bench/results/step_time*.{json,png}.

    python bench/run.py [--quick] [--only ddp,fsdp2,autoshard0,autoshard3] [--model gpt2] [--hosts 4] [--rates 1000]

Hosts of one process and one thread each, first with unlimited links, then with links of 1000 and of 200 Mbit/s.
Without the right to make network namespaces only the unlimited half runs, on the loopback. Exits with 1 if a
contender failed or did not train the same thing as DDP.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import contenders  # noqa: E402
import netns  # noqa: E402
import report  # noqa: E402
from reference import MODELS  # noqa: E402
from report import Machine, Results, Steps  # noqa: E402
from worker import Measured  # noqa: E402

RATES = (0, 1000, 200)
FIRST_PORT = 29541
# What every job measures too, for ratios to it.
BASELINES = ("ddp", "fsdp2")
LOSS_TOLERANCE = 1e-3


@dataclass
class Driver:
    """Starts the jobs one after the other. scratch: compile caches and what workers write."""

    model: str
    hosts: int
    rounds: int
    scratch: Path
    namespaces: bool
    timeout: float
    per_host: int = 1
    count: int = 0
    failures: list[str] = field(default_factory=list)

    def job(self, names: Sequence[str], mbit: int, caches: str, *options: str) -> list[Measured] | None:
        """Runs one job; None, and a line in `failures`, if it failed."""
        self.count += 1
        out = self.scratch / f"{self.count}.json"
        arguments = [",".join(names), "--caches", str(self.scratch / caches), "--out", str(out), *options]
        command = [sys.executable, str(HERE / "worker.py"), *arguments]
        print(f"\n== {','.join(names)} {' '.join(options)} at {report.rate_text(mbit)}", flush=True)
        port = FIRST_PORT + self.count
        job = netns.Job(command, self.hosts, mbit, port, _environment(self.model), self.timeout, self.per_host)
        code = netns.run(job) if self.namespaces else netns.run_on_loopback(job)
        if code:
            why = "ran out of time" if code == netns.TIMED_OUT else f"exit status {code}"
            self.failures.append(f"{', '.join(names)} at {report.rate_text(mbit)}: {why}")
            return None
        return [Measured(**entry) for entry in json.loads(out.read_text())]

    def memory(self, names: Sequence[str]) -> dict[str, Measured]:
        """Peak memory and cold first step, a fresh job and cold caches for each; without those that fail."""
        jobs = {name: self.job([name], 0, f"cold-{name}", "--memory") for name in names}
        return {name: measured[0] for name, measured in jobs.items() if measured}

    def steps(self, names: Sequence[str], mbit: int) -> list[Steps]:
        """Step times at one rate."""
        measured = self.job(names, mbit, "shared", "--steps", str(self.rounds))
        return [Steps(mbit, measured, self.model, self.hosts)] if measured else []


def _environment(model: str) -> dict[str, str]:
    """The workers' environment: one thread each, the model, and the packages that this process imports."""
    path = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return {"OMP_NUM_THREADS": "1", "BENCH_MODEL": model, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def diverged(steps: Sequence[Steps]) -> list[str]:
    """What did not train the same as DDP, with the first loss that is further away than tolerated."""
    found = []
    for run in steps:
        for measured in run.measured:
            where = _first_apart(measured.losses, run.of("ddp").losses)
            if where is not None and measured.name != "compute":
                loss, expected = measured.losses[where], run.of("ddp").losses[where]
                rate = report.rate_text(run.mbit)
                found.append(
                    f"{measured.name} at {rate}: loss {loss:.6f} in step {where}, DDP's {expected:.6f}"
                )
    return found


def _first_apart(losses: Sequence[float], expected: Sequence[float]) -> int | None:
    """Where two runs' losses part; a NaN is apart from everything."""
    pairs = enumerate(zip(losses, expected))
    return next((i for i, (a, b) in pairs if not abs(a - b) <= LOSS_TOLERANCE), None)


def machine(hosts: str) -> Machine:
    """What the figures were taken on."""
    cores = os.cpu_count() or 0
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return Machine(report.cpu_name(), cores, torch.__version__, "gloo", date, hosts)


def _measure(asked: argparse.Namespace, scratch: Path) -> Results:
    wanted = asked.only.split(",") if asked.only else list(contenders.CONTENDERS)
    wanted = [*(b for b in BASELINES if b not in wanted), *wanted]
    absent = {n: why for n in wanted if (why := contenders.why_absent(n))}
    impossible = netns.why_impossible()
    driver = Driver(asked.model, asked.hosts, 5 if asked.quick else asked.rounds, scratch, not impossible, asked.timeout)
    skipped = [f"{name}: {why}" for name, why in absent.items()]
    possible = [n for n in wanted if n not in absent]
    memory = {} if asked.no_memory else driver.memory(possible)
    steps: list[Steps] = []
    for mbit in map(int, asked.rates.split(",")):
        if mbit and impossible:
            skipped.append(f"{report.rate_text(mbit)}: no network namespaces here ({impossible})")
        else:
            steps += driver.steps(possible if asked.no_memory else list(memory), mbit)
    hosts = "network namespaces" if not impossible else "processes on the loopback"
    cores = "each on cores of its own" if len(netns.all_cores()) >= asked.hosts else "of which several share a core"
    failures = [*driver.failures, *diverged(steps)]
    return Results(machine(f"{hosts}, {cores}"), list(memory.values()), steps, skipped, failures)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 timed rounds")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds")
    parser.add_argument(
        "--only", default="", help="contenders, with commas between; ddp and fsdp2 always run"
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="llama")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="Mbit/s, with commas between; 0: unlimited")
    parser.add_argument("--no-memory", action="store_true", help="step times only")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that one job may take")
    parser.add_argument(
        "--results", type=Path, default=HERE / "results", help="folder for figures and plots"
    )
    asked = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="autoshard-bench-"))
    try:
        results = _measure(asked, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    asked.results.mkdir(parents=True, exist_ok=True)
    what = "" if asked.model == "llama" else f"_{asked.model}"
    what += "" if asked.hosts == 2 else f"_{asked.hosts}_hosts"
    (asked.results / f"step_time{what}.json").write_text(json.dumps(asdict(results), indent=1) + "\n")
    print(f"\n{report.write(asked.results)}")
    for failure in results.failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
