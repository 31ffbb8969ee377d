"""Steps where rows travel in one step over all processes, and where they go between hosts and inside of them by themselves.

    python bench/hierarchy.py [--rates 0,1000] [--hosts 2] [--per-host 2]

Hosts are network namespaces with several processes of one thread each; on two cores four of them compute at half the speed. All
contenders take turns step by step in one job, as in bench/run.py. Writes bench/results/hierarchy.md.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import contenders  # noqa: E402
import run as side_by_side  # noqa: E402
from report import rate_text  # noqa: E402
from worker import Measured  # noqa: E402

BASE = "fsdp2"
NAMES = ("ddp", BASE, *contenders.HIERARCHIES)


def rows(measured: list[Measured], mbit: int) -> list[str]:
    """A line for each contender: its step, and the median of the rounds' ratios to the base."""
    base = next(m for m in measured if m.name == BASE)
    found = []
    for one in measured:
        ratio = statistics.median(a / b for a, b in zip(one.seconds, base.seconds))
        found.append(f"| {rate_text(mbit)} | {one.name} | {1e3 * statistics.median(one.seconds):.0f} | {ratio:.2f} |")
    return found


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", default="0,1000", help="Mbit/s, with commas between; 0: unlimited")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="autoshard-hierarchy-"))
    driver = side_by_side.Driver("llama", asked.hosts, asked.rounds, scratch, True, 1800.0, asked.per_host)
    lines = []
    try:
        for mbit in map(int, asked.rates.split(",")):
            measured = driver.job(NAMES, mbit, "shared", "--steps", str(asked.rounds))
            lines += rows(measured, mbit) if measured else []
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    machine = side_by_side.machine("network namespaces")
    text = "\n".join([
        "# Between hosts, and inside of them\n",
        f"{machine.cpu}, {machine.cores} cores, {asked.hosts} hosts of {asked.per_host} processes, torch {machine.torch}, gloo, {machine.date}.",
        "Written by `python bench/hierarchy.py`: the small Llama of docs/performance.md, medians of rounds on the slowest process, and of the",
        f"rounds' own ratios to {BASE}.\n",
        "| rate | | step, ms | ratio |",
        "|---|---|---:|---:|",
        *lines,
        "",
    ])
    (HERE / "results" / "hierarchy.md").write_text(text)
    print(text)
    for failure in driver.failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if driver.failures else 0


if __name__ == "__main__":
    sys.exit(main())
