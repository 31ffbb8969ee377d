"""docs/accuracy.md, of what was compared."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from compared import ALIKE, KEPT, NODE, TRIES, Compared, Results  # noqa: E402

INTRODUCTION = f"""\
{{machine}}, {{dates}}. Written by `make bench-accuracy`. MB are 10^6 bytes of rank 0, which has the most; *held* is what lies there between
steps (parameters, optimizer state, buffers, the batch), *grads* what the optimizer finds, *saved* what exists beside what is held
when forward is done, *peak* the most that exists at once in a step. An error is measured / predicted - 1. Predictions come from the model on the meta device and, for time, from
`autoshard calibrate`, run before each model's configurations; nothing of the model was run for them. A row is of the stage that it names,
with nothing computed again. *Machine*: how many times
as long as in that calibration a matmul, a sum of two tensors and, of several processes, a gather took between the steps that were timed,
each by its share of the step (and no less than the gather, where a link that is slower takes longer than that for all that a step
sends); the last column is the error without it. Where that was off by more than {ALIKE:.0%}, the configuration was measured
again, {TRIES} times at most; where it stayed off, the machine was calibrated anew, and the configuration predicted and measured again. The run in which
the machine was most as it had been counts, whatever its error.

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
    if found.note:
        yield f"{found.note}\n"
    columns = "| configuration | held MB | measured | grads MB | measured | saved MB | measured | peak MB | measured | error |"
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
    memory = "".join(_megabytes(c, what) for what in ("held", "gradients", "saved", "peak"))
    memory += f" {c.error('peak'):+.1%} |"
    if not on_cpu:
        memory += f" {c.predicted['reserved'] / 1e6:.2f} | {c.measured['reserved'] / 1e6:.2f} | {c.error('reserved'):+.1%} |"
        memory += f" {c.measured['libraries'] / 1e6:.2f} |"
    if not c.case.timed:
        return f"| {c.case} |{memory}" + " |" * (5 if on_cpu else 3)
    step = f" {c.predicted['step'] * 1e3:.0f} | {c.measured['step'] * 1e3:.0f} | {c.raw:+.1%} |"
    return f"| {c.case} |{memory}{step}" + (f" {c.slower:.2f} | {c.error('step'):+.1%} |" if on_cpu else "")


def _megabytes(c: Compared, what: str) -> str:
    """Of both; nothing where that was not measured yet."""
    return f" {c.predicted[what] / 1e6:.2f} | {c.measured[what] / 1e6:.2f} |" if what in c.measured else " | |"


def _summary(compared: Sequence[Compared]) -> Iterable[str]:
    timed, on_cpu = [c for c in compared if c.case.timed], compared[0].case.kind == "cpu"
    yield _bound("Peak memory", [c.error("peak") for c in compared], 0.03, 0.08)
    if saved := [c.error("saved") for c in compared if "saved" in c.measured]:
        yield _bound("Saved for backward", saved, 0.03, 0.08)
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
