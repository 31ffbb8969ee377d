"""Plans and runs as tables for people, 80 columns wide. Names of modules are no markup."""

from __future__ import annotations

import io
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.cost_model.allocator import EXPANDABLE
from autoshard.passes.group_parameters import WHOLE
from autoshard.passes.manager import PassRun
from autoshard.plan import THROUGH, Plan, verbs_of
from autoshard.units import bytes_text, counted

WIDTH = 80
MUCH_LESS = 0.05  # of what is reserved
_OF_MEMORY = ("activations", "temporaries")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Report:
    """What a model does and did; `str` and `print` give the tables.

    compiled: share of the model's parameters that some compiled graph holds. steps: how optimizers step, by class. phases:
    seconds by name.
    """

    plan: Plan
    compiled: float = 1.0
    steps: tuple[tuple[str, str], ...] = ()
    phases: tuple[tuple[str, float], ...] = ()
    passes: tuple[PassRun, ...] = ()

    def __str__(self) -> str:
        return rendered([*plan_tables(self.plan), *self._run_tables()])

    def _run_tables(self) -> list[RenderableType]:
        lines: list[RenderableType] = [
            Text(f"Parameters in compiled graphs: {self.compiled:.1%}", style="bold")
        ]
        lines += [Text(f"{name} steps: {how}") for name, how in self.steps]
        if self.phases:
            spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.phases)
            lines.append(Text(f"First step: {spent}"))
        if self.passes:
            lines.append(_passes_table(self.passes))
        return lines


def _passes_table(passes: Sequence[PassRun]) -> Table:
    table = Table(title="Passes", title_justify="left", box=None, pad_edge=False)
    for column in ("pass", "graph", "ms", "ops changed"):
        table.add_column(column, justify="right" if column == "ms" else "left")
    for run in passes:
        table.add_row(Text(run.name), run.phase, f"{run.seconds * 1e3:.1f}", _changes(run.changed))
    return table


def _changes(changed: dict[str, int]) -> str:
    """Changes of the ops that sharding is about; those around them are in the dump."""
    ours = {op: n for op, n in changed.items() if op.startswith(("autoshard.", "_c10d_functional."))}
    return ", ".join(f"{n:+d} {op.split('.')[1]}" for op, n in ours.items()) or "-"


def rendered(parts: Sequence[RenderableType], width: int = WIDTH) -> str:
    """The parts as plain text, no line wider than `width`."""
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, color_system=None)
    for part in parts:
        console.print(part)
    return out.getvalue().rstrip("\n")


def plan_tables(plan: Plan) -> list[RenderableType]:
    """The tables of a plan, for a console."""
    return [
        Text(_headline(plan), style="bold"),
        *_uncovered(plan),
        Text(""),
        _groups_table(plan),
        *_what_degrees_are(plan),
        Text(""),
        *_recompute_part(plan),
        *_kept_in_parts(plan),
        _memory_table(plan),
        *_peak_lines(plan),
        *_fits(plan),
        Text(""),
        *_time_part(plan),
        *_traffic_part(plan),
        *_unmodelled(plan),
        *_why(plan),
    ]


def _headline(plan: Plan) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in plan.axes)
    stages = sorted({g.degrees.stage for g in plan.groups if g.degrees.optimizer > 1})
    stage = "plain data parallel" if not stages else f"ZeRO-{stages[-1]}"
    if len(stages) > 1 and stages[-1] == 3:
        kept = sum(g.degrees.optimizer > 1 and g.degrees.parameter == 1 for g in plan.groups)
        stage += f" ({counted(kept, 'gathered copy', 'gathered copies')} kept for backward)"
    if plan.leaves_alone:
        stage = "one process, left alone"
    precision = f", {plan.compute} compute" if plan.compute else ""
    precision += f", gradients in {plan.compression}" if plan.compression else ""
    precision += f", PowerSGD of rank {plan.low_rank}" if plan.low_rank else ""
    nodes = f", nodes of {plan.node}" if plan.node else ""
    nodes += " that keep copies" if plan.node and any(g.degrees.parameter == plan.node for g in plan.groups) else ""
    return f"Plan {plan.hash}: {counted(plan.world, 'process', 'processes')} ({axes}), {stage}{precision}{nodes}"


def _groups_table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("parameter group", overflow="fold")
    for column in ("x", "tensors", "degrees p/g/o"):
        table.add_column(column, justify="right", no_wrap=True)
    blocks_together = sorted(plan.groups, key=lambda g: g.name != WHOLE)
    shown = ((g.name, (str(len(g.parameters)), str(g.degrees), g.ranks)) for g in blocks_together)
    for names, (tensors, degrees, ranks) in _folded(shown):
        where = f" on ranks {','.join(map(str, ranks))}" if ranks else ""
        table.add_row(Text(_span(names) + where), str(len(names)), tensors, degrees)
    return table


def _what_degrees_are(plan: Plan) -> list[RenderableType]:
    if plan.world == 1:
        return []
    what = "parameters from forward to backward, gradients, and rows with the optimizer's state"
    return [Text(f"Degrees p/g/o: how many processes share {what}.", style="dim")]


def _folded(rows: Iterable[tuple[str, _T]]) -> Iterator[tuple[list[str], _T]]:
    """Rows that follow each other as one where they differ in the last number of their names alone, which goes up by one."""

    def key(place: tuple[int, tuple[str, _T]]) -> tuple[object, ...]:
        at, (name, row) = place
        before, number, after = _parted(name)
        return before, after, number - at, row

    for _, run in itertools.groupby(enumerate(rows), key=key):
        names, alike = zip(*(named for _, named in run))
        yield list(names), alike[0]


def _parted(name: str) -> tuple[str, int, str]:
    """What is before a name's last number, that, and what is behind it; -1 where there is none."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], int(found[2]), found[3]) if found else (name, -1, "")


def _span(names: Sequence[str]) -> str:
    """"layers.{0..3}" for names that differ by their last number."""
    if len(names) == 1:
        return names[0]
    (before, first, after), (_, last, _) = _parted(names[0]), _parted(names[-1])
    return f"{before}{{{first}..{last}}}{after}"


def _recompute_part(plan: Plan) -> list[RenderableType]:
    if not plan.recompute:
        return []
    table = Table(box=None, pad_edge=False)
    table.add_column("recomputed in backward", overflow="fold")
    table.add_column("but for", overflow="fold")
    for names, policy in _folded(plan.recompute):
        table.add_row(Text(_span(names)), _SAID.get(policy, ", ".join(verbs_of(policy))))
    return [table, Text("")]


def _kept_in_parts(plan: Plan) -> list[RenderableType]:
    """One line for values that differ by their digests alone."""
    if not plan.partition_activations:
        return []
    table = Table(box=None, pad_edge=False)
    table.add_column("kept in parts for backward", overflow="fold")
    table.add_column("values", justify="right")
    for what, count in Counter(name.rpartition(" ")[0] or name for name in plan.partition_activations).items():
        table.add_row(Text(what), str(count))
    return [table, Text("")]


_SAID = {"full": "-", THROUGH: "-, nor what leaves it", "selective": "attention and every second matmul"}


def _memory_table(plan: Plan) -> Table:
    predicted = plan.predicted
    table = Table(box=None, pad_edge=False)
    table.add_column("memory of a process at the peak" if predicted.place else "memory of a process")
    table.add_column("", justify="right")
    for category, size in predicted.memory.items():
        if size:
            table.add_row(category, bytes_text(size))
    table.add_row("in all" if predicted.place else "known so far", bytes_text(predicted.peak_bytes), style="bold")
    if predicted.reserved is not None:
        how = ", whose segments expand" if predicted.expandable else ""
        table.add_row(f"reserved by CUDA's allocator{how}", bytes_text(predicted.reserved))
    for unknown in predicted.unknown:
        if unknown in _OF_MEMORY:
            table.add_row(unknown, "not modelled")
    return table


def _peak_lines(plan: Plan) -> list[RenderableType]:
    """Where the peak is, and how sure that is."""
    predicted = plan.predicted
    if not predicted.place:
        return []
    if predicted.of_a_part:
        return [Text(f"The peak of the first graph is at {predicted.place}; what comes behind the graph break is not in it.")]
    peaks = [round(predicted.peak_bytes * (1 + e)) for e in predicted.error or ()]
    never = "Never compared with a measurement on this kind of device."
    least = peaks[0] if peaks else 0  # nothing is reserved that is less than what is held
    reserved = [bytes_text(max(least, round((predicted.reserved or 0) * (1 + e)))) for e in predicted.reserved_error or ()]
    more = [_sure("Reserved were", reserved, "What is reserved so was never compared with a measurement.")] if predicted.reserved and peaks else []
    measured = _sure("Measured peaks were", list(map(bytes_text, peaks)), never)
    return [Text(f"The peak is at {predicted.place}."), *_accumulating(plan), measured, *more, *_expanding(plan)]


def _expanding(plan: Plan) -> list[RenderableType]:
    """What another setting of the allocator would spare, if it is much."""
    reserved, expanding = plan.predicted.reserved or 0, plan.predicted.expanding
    if expanding is None or expanding > (1 - MUCH_LESS) * reserved:
        return []
    return [Text(f"With {EXPANDABLE} set it would reserve {bytes_text(expanding)} (not compared with a measurement).")]


def _accumulating(plan: Plan) -> list[RenderableType]:
    more = (plan.predicted.accumulating or 0) - plan.predicted.peak_bytes
    if more <= 0:
        return []
    text = f"Where gradients are added up over several batches it is {bytes_text(more)} higher, or more inside no_sync; see Config.accumulation."
    return [Text(text)]


def _fits(plan: Plan) -> list[RenderableType]:
    """Whether the step fits into the budget; of one that was not simulated only that it does not is known."""
    predicted = plan.predicted
    if predicted.budget is None:
        return []
    over, budget = predicted.footprint - predicted.budget, f"{bytes_text(predicted.budget)}, what a process may use."
    if predicted.of_a_part:
        return [Text(f"A step takes at least {bytes_text(predicted.footprint)} of {budget}", style="yellow")]
    if over > 0:
        return [Text(f"The step takes {bytes_text(over)} more than {budget}", style="yellow")]
    return [Text(f"The step fits into {budget}")] if predicted.place else []


def _sure(measured: str, between: Sequence[str], never: str) -> Text:
    """How far predictions like this were off; `never` if `between` is empty, since nothing is known."""
    text = f"{measured} between {between[0]} and {between[1]} for predictions like this." if between else never
    return Text(text, style="dim")


def _time_part(plan: Plan) -> list[RenderableType]:
    """The step's seconds, and how sure they are."""
    predicted = plan.predicted
    if predicted.step_seconds is None:
        return []
    table = Table(box=None, pad_edge=False)
    table.add_column("time of a step")
    table.add_column("ms", justify="right")
    for part, seconds in predicted.seconds.items():
        table.add_row(part, f"{seconds * 1e3:.2f}")
    table.add_row("in all", f"{predicted.step_seconds * 1e3:.2f}", style="bold")
    if predicted.of_a_part:
        return [table, Text("Of the first graph alone, and of the whole optimizer's step."), Text("")]
    between = [f"{predicted.step_seconds * (1 + e) * 1e3:.2f} ms" for e in predicted.seconds_error or ()]
    never = "Times from figures like this device's were never compared with a measurement."
    return [table, _sure("Measured steps took", between, never), Text("")]


def _traffic_part(plan: Plan) -> list[RenderableType]:
    if not plan.predicted.traffic:
        return [Text("No communication.")]
    table = Table(title="Collectives of a process in a step", title_justify="left", box=None, pad_edge=False)
    for column in ("collective", "in"):
        table.add_column(column, overflow="fold")
    for column in ("messages", "bytes sent", "wire time"):
        table.add_column(column, justify="right", overflow="fold")
    for t in plan.predicted.traffic:
        table.add_row(
            t.collective, t.phase, str(t.messages), bytes_text(t.bytes), f"{t.seconds * 1e3:.2f} ms"
        )
    return [table]


def _unmodelled(plan: Plan) -> list[RenderableType]:
    """What is unknown beside what the table of memory says of it."""
    unknown = [u for u in plan.predicted.unknown if u not in _OF_MEMORY]
    return not_modelled(unknown)


def not_modelled(unknown: Collection[str]) -> list[RenderableType]:
    """A line of what predictions leave out, if there is such."""
    return [Text(f"Not modelled: {', '.join(unknown)}.", style="dim")] if unknown else []


def _why(plan: Plan) -> list[RenderableType]:
    table = Table.grid(padding=(0, 1, 0, 0))
    for reason in plan.why:
        table.add_row("-", Text(reason))
    return [Text(""), table]


def _uncovered(plan: Plan) -> list[RenderableType]:
    if plan.covered == 1:
        return []
    text = (
        f"Warning: the first captured graph holds {plan.covered:.1%} of the parameters' elements; "
        "the rest is unused, or behind a graph break."
    )
    return [Text(text, style="yellow")]
