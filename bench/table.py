"""Some contenders at several rates, in one table: what the smaller benches share."""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import run as side_by_side  # noqa: E402
from reference import MODELS  # noqa: E402
from report import rate_text  # noqa: E402
from worker import Measured  # noqa: E402


@dataclass(frozen=True)
class Comparison:
    """What is compared. file: of the results, in bench/results, and of the bench. base: whose step the others' are divided by. pause:
    milliseconds in which a loop does something else after each step. memory: peaks are measured too. model: of reference.py."""

    file: str
    title: str
    names: Sequence[str]
    base: str
    rates: str
    per_host: int = 1
    pause: int = 0
    memory: bool = False
    model: str = "llama"


def _rows(measured: Sequence[Measured], base: str, mbit: int, peaks: Mapping[str, Measured]) -> list[str]:
    """A line for each contender: its step, the median of the rounds' ratios to the base, its peak if known, and the last loss."""
    seconds = next(m.seconds for m in measured if m.name == base)
    found = []
    for one in measured:
        ratio = statistics.median(a / b for a, b in zip(one.seconds, seconds))
        step = 1e3 * statistics.median(one.seconds)
        peak = f" {(peaks[one.name].peak or 0) / 1e6:.1f} |" if one.name in peaks else ""
        found.append(f"| {rate_text(mbit)} | {one.name} | {step:.0f} | {ratio:.2f} |{peak} {one.losses[-1]:.4f} |")
    return found


def main(compared: Comparison, doc: str | None) -> int:
    """The command line of such a bench."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", default=compared.rates, help="Mbit/s, with commas between; 0: unlimited")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=compared.per_host)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix=f"autoshard-{compared.file}-"))
    driver = side_by_side.Driver(compared.model, asked.hosts, asked.rounds, scratch, True, 1800.0, asked.per_host)
    lines: list[str] = []
    try:
        peaks = driver.memory(compared.names) if compared.memory else {}
        for mbit in map(int, asked.rates.split(",")):
            measured = driver.job(compared.names, mbit, "shared", "--steps", str(asked.rounds), "--pause", str(compared.pause))
            lines += _rows(measured, compared.base, mbit, peaks) if measured else []
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _write(compared, asked, lines)
    for failure in driver.failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if driver.failures else 0


def _model(name: str) -> str:
    return "the small Llama of docs/performance.md" if name == "llama" else MODELS[name].words


def _write(compared: Comparison, asked: argparse.Namespace, lines: Sequence[str]) -> None:
    machine = side_by_side.machine("network namespaces")
    processes = "one process" if asked.per_host == 1 else f"{asked.per_host} processes"
    text = "\n".join([
        f"# {compared.title}\n",
        f"{machine.cpu}, {machine.cores} cores, {asked.hosts} hosts of {processes}, torch {machine.torch}, gloo, {machine.date}.",
        f"Written by `python bench/{compared.file}.py`: {_model(compared.model)}, medians of {asked.rounds} rounds on the",
        f"slowest process, and of the rounds' own ratios to {compared.base}; the loss after all steps."
        + (" *Peak*: in MB (10^6 bytes), of a job of each by itself." if compared.memory else "")
        + (f" After each step {compared.pause} ms pass that do not count." if compared.pause else "")
        + "\n",
        f"| rate | | step, ms | ratio |{' peak |' * compared.memory} loss |",
        f"|---|---|---:|---:|{'---:|' * compared.memory}---:|",
        *lines,
        "",
    ])
    (HERE / "results" / f"{compared.file}.md").write_text(text)
    print(text)
