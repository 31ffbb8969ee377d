"""Sweeps as tables for people, 80 columns wide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.open_sizes import BATCH
from autoshard.plan import Plan, verbs_of
from autoshard.report import not_modelled
from autoshard.sweep import MOST, PROCESSES, Sweep
from autoshard.units import bytes_text, counted

_UP_TO = 64  # the largest batch that is shown where all fit

Sizes = dict[str, int]


def sweep_tables(
    sweep: Sweep, batches: Sequence[int] | None = None, sequences: Sequence[int] | None = None
) -> list[RenderableType]:
    """A table for each number of processes, with a line for each batch and sequence. None: batches doubled while they fit, the sequence
    that was traced."""
    traced = sweep.open.sizes
    lengths: list[Sizes] = [{"sequence": s} for s in sequences or [traced.get("sequence", 0)] if s] or [{}]
    return [
        Text(f"traced at {', '.join(f'{name} {size}' for name, size in traced.items())}", style="dim"),
        *(part for world in sweep.worlds for part in _of_world(sweep, world, lengths, batches)),
        Text(""),
        *(_largest(sweep, world, lengths) for world in sweep.worlds if sweep.budget is not None),
        *_reserved(sweep),
        *_longer(sweep, lengths),
        *_bands(sweep),
        *not_modelled(dict.fromkeys(what for way in sweep.ways for what in way.unknown)),
        *_reasons(sweep),
    ]


def _of_world(sweep: Sweep, world: int, lengths: Sequence[Sizes], batches: Sequence[int] | None) -> list[RenderableType]:
    head = f"{counted(world, 'process', 'processes')}, the batch is one process's"
    return [Text(""), Text(head, style="bold"), _table(sweep, world, lengths, batches)]


def _table(sweep: Sweep, world: int, lengths: Sequence[Sizes], batches: Sequence[int] | None) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("batch", *lengths[0], "ZeRO", "recompute", "peak", "step ms", "samples/s", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for length in lengths:
        for cells, fits in _lines(sweep, world, batches or _doubled(sweep, world, length), length):
            table.add_row(*cells, style="" if fits else "dim")
    return table


def _doubled(sweep: Sweep, world: int, length: Sizes) -> list[int]:
    """1, 2, 4 and so on, and the largest that fits; of those that the trace holds for."""
    most = _UP_TO if sweep.budget is None else sweep.largest(**length, processes=world) or sweep.open.traced[BATCH]
    batches = sorted({most, *(1 << i for i in range(most.bit_length()))})
    return [batch for batch, valid in zip(batches, sweep.valid(batch=batches, **length)) if valid]


def _lines(sweep: Sweep, world: int, batches: Sequence[int], length: Sizes) -> Iterable[tuple[list[str], bool]]:
    swept = sweep.at(batch=batches, **length, processes=world)
    for batch, way, peak, seconds, fits in zip(batches, swept.way, swept.peak, swept.seconds, swept.fits):
        plan = sweep.ways[way].plan
        yield [
            str(batch),
            *map(str, length.values()),
            _zero(plan),
            _recomputed(plan),
            bytes_text(int(peak)),
            f"{seconds * 1e3:.2f}",
            _rate(batch * world / seconds),
            f"behind {plan.behind}" * (plan.behind < Plan.behind) if fits else "too large",
        ], bool(fits)


def _zero(plan: Plan) -> str:
    """The stage, and over how many processes where these are not all."""
    return f"{plan.stage} over {plan.part}" if plan.part else str(plan.stage)


def _reasons(sweep: Sweep) -> list[RenderableType]:
    """Those that all ways of a number of processes have, what was asked for and is not so, say, and on how many where not on all."""
    of: dict[str, list[int]] = {}
    for world in sweep.worlds:
        first, *others = [way.plan.why for way in sweep.ways if way.plan.world == world]
        for why in first:
            if all(why in other for other in others):
                of.setdefault(why, []).append(world)
    where = {why: f"on {', '.join(map(str, worlds))}: " if len(worlds) < len(sweep.worlds) else "" for why, worlds in of.items()}
    return [Text(f"- {where[why]}{why}") for why in of]


def _recomputed(plan: Plan) -> str:
    """The policy of the blocks, "save 7" where it is one that saves so many results; "by block" where they differ."""
    policies = {policy for _, policy in plan.recompute}
    if len(policies) > 1:
        return "by block"
    policy = policies.pop() if policies else "-"
    verbs = Counter(verbs_of(policy).values())
    return " ".join(f"{verb} {count}" for verb, count in verbs.items()) or policy


def _rate(samples: float) -> str:
    return f"{samples:,.0f}" if samples >= 100 else f"{samples:.3g}"


def _largest(sweep: Sweep, world: int, lengths: Sequence[Sizes]) -> Text:
    assert sweep.budget is not None
    where = f" on {counted(world, 'process', 'processes')}" if sweep.worlds[1:] else ""
    most = [_most(sweep, {**sizes, PROCESSES: world}) + "".join(f" at {n} {s}" for n, s in sizes.items()) for sizes in lengths]
    return Text(f"The largest batch that fits into {bytes_text(sweep.budget)}{where}: {', '.join(most)}.", style="bold")


def _most(sweep: Sweep, sizes: Sizes) -> str:
    """The largest batch, with what it is the largest of where memory has no part in that."""
    batch = sweep.largest(**sizes)
    if batch == MOST:
        return f"{batch} or more"
    held = sweep.valid(batch=np.arange(batch + 1, MOST + 1), **sizes).any()
    return str(batch) if held else f"{batch} (the trace holds for no larger one)"


def _reserved(sweep: Sweep) -> list[RenderableType]:
    """That more has to fit than is shown."""
    if sweep.budget is None or not any(way.program for way in sweep.ways):
        return []
    return [Text("What CUDA's allocator reserves, which is more than the peak, has to fit.", style="dim")]


def _longer(sweep: Sweep, lengths: Sequence[Sizes]) -> list[RenderableType]:
    """That a trace does not know how many positions there are."""
    if all(length.get("sequence", 0) <= sweep.open.sizes.get("sequence", 0) for length in lengths):
        return []
    return [Text("Whether the model has positions for sequences longer than the traced one is not looked at.", style="dim")]


def _bands(sweep: Sweep) -> list[RenderableType]:
    """How far predictions like these were off."""
    if sweep.error is None:
        return [Text("Never compared with a measurement on this kind of device.", style="dim")]
    (least, most), times = sweep.error, sweep.seconds_error
    peaks = f"Measured peaks were {least:+.1%} to {most:+.1%}"
    if times is None:
        return [Text(f"{peaks} off such predictions. Times from such figures were never compared.", style="dim")]
    text = f"{peaks}, steps {times[0]:+.0%} to {times[1]:+.0%} off such predictions."
    return [Text(text, style="dim")]
