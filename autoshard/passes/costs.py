"""What the cost model needs to know of a plan's groups, before there is a graph."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autoshard.cost_model import step
from autoshard.dtypes import dtype_named
from autoshard.inventory import Inventory, ParameterInfo, floating, is_trained
from autoshard.ops import wire
from autoshard.ops.layout import MUCH, Layout, cut_along, dimension_of, goes_low_rank, layout_of, thin
from autoshard.ops.low_rank import residue_shapes
from autoshard.ops.sparse import message_bytes
from autoshard.plan import ParameterGroup, Plan
from autoshard.units import counted


def costs_of(plan: Plan, inventory: Inventory) -> list[step.GroupCost]:
    """One for each of the plan's groups."""
    infos = {p.name: p for p in inventory.parameters}
    return [_cost(plan, g, [infos[n] for n in g.parameters]) for g in plan.groups]


def _cost(plan: Plan, group: ParameterGroup, infos: Sequence[ParameterInfo]) -> step.GroupCost:
    layout = layout_of(group, plan, "+".join)
    sparse = [p for p in infos if p.name in plan.sparse]
    trained = [p for p in infos if is_trained(p)]
    used = [p for p in infos if (p.used or p.later) and not (p in sparse and layout.sharded)]
    thinned = {p.name for p in trained if plan.low_rank and goes_low_rank(p.shape, plan.low_rank)}
    reduced = [p for p in trained if p.name not in thinned and p.name not in plan.sparse]
    return step.GroupCost(
        held=sum(_padded(p, layout) * p.itemsize for p in infos) // layout.size,
        trained=sum(_padded(p, layout) * p.itemsize for p in trained) // layout.size,
        whole=sum(p.elements * _computed(plan, p) for p in used),
        brought=sum(_padded(p, layout) * _computed(plan, p) for p in used),
        gradients=sum(p.elements * _computed(plan, p) for p in trained if p.name not in plan.sparse),
        reduced=sum(_padded(p, layout) * _travels(plan, p) for p in reduced),
        parameter_degree=group.degrees.parameter,
        optimizer_degree=group.degrees.optimizer,
        replicas=plan.world // group.degrees.optimizer,
        reduction=group.reduction,
        compressed=_is_compressed(plan, trained),
        buckets=_buckets(plan, reduced) if group.degrees.optimizer == 1 else (),
        direct=plan.direct and group.degrees.optimizer > 1,
        direct_sums=plan.direct_sums,
        message=plan.message,
        node=plan.node if group.degrees.optimizer > 1 else 0,
        apart=_apart(plan, layout, [p for p in infos if not (p in sparse and layout.sharded)]),
        low_rank=sum(p.elements for p in trained if p.name in thinned),
        thin=sum(thin(p.shape, plan.low_rank) for p in trained if p.name in thinned),
        rows=tuple(rows_of(plan, p) for p in infos if p.name in plan.by_rows),
        otherwise=(
            sum(_padded(p, layout) * _computed(plan, p) for p in used if layout.cutting(p.shape).dim),
            sum(_padded(p, layout) * _travels(plan, p) for p in reduced if layout.cutting(p.shape).dim),
        ),
        residue=sum(math.prod(shape) for p in trained if p.name in thinned for shape in residue_shapes(p.shape, plan.low_rank)),
    )


def rows_of(plan: Plan, p: ParameterInfo) -> step.Rows:
    """Of an embedding of which only rows travel, by the first batch."""
    found = math.ceil(step.rows_among(p.looked_up, p.shape[0])) * math.prod(p.shape[1:])
    summed = found * reduced_itemsize(plan, p) if is_trained(p) else 0
    return step.Rows(message_bytes(p.shape[0]), found * _computed(plan, p), summed)


def whole_bytes(plan: Plan, p: ParameterInfo) -> tuple[int, int]:
    """Of one parameter's gathered copy, and of its gradient where that is summed; 0 of what is not trained."""
    return p.elements * _computed(plan, p), p.elements * reduced_itemsize(plan, p) if is_trained(p) else 0


def scarce_rows(plan: Plan, inventory: Inventory) -> str:
    """What is to be said where half as much again travels, or more, because parameters have few rows for as many processes as share them;
    "" elsewhere."""
    size, shared = plan.shard_size, [p for p in inventory.parameters if plan.group_of[p.name].degrees.optimizer > 1]
    costs = [cost for cost in costs_of(plan, inventory) if cost.optimizer_degree > 1] if shared else []
    brought, whole = sum(cost.brought for cost in costs), sum(cost.whole for cost in costs)
    if brought < MUCH * whole or not whole:
        return ""
    worst = max(shared, key=lambda p: (_padded(p, layout_of(plan.group_of[p.name], plan, "+".join)) - p.elements) * _computed(plan, p))
    rows, shard = _shares(worst, size), _evenly(worst, plan.world)
    mesh = f"; with mesh={{'replicate': {plan.world // shard}, 'shard': {shard}}} it is cut evenly" if shard > 1 else ""
    held = f"{size - rows} hold none of it" if rows < size else f"some hold {-(-rows // size)} of them, others fewer or none"
    return (
        f"{worst.name} has {counted(rows, 'row', 'rows')} for {size} processes: {held}, and "
        f"{brought / whole:.1f} times as many bytes travel as parameters have{mesh}"
    )


def all_rows_apart(plan: Plan, inventory: Inventory) -> str:
    """What is to be said where most bytes are of parameters with no more rows than processes share: no more of these can have some of
    them."""
    shared = [p for p in inventory.parameters if plan.group_of[p.name].degrees.optimizer > 1]
    few = [p for p in shared if max(cut_along(p.shape)) <= plan.shard_size]
    if not few or 2 * sum(p.elements for p in few) < sum(p.elements for p in shared):
        return ""
    most = max(few, key=lambda p: p.elements)
    return f"{most.name} has {counted(_shares(most, plan.shard_size), 'row', 'rows')}, which as many processes share already"


def _shares(p: ParameterInfo, size: int) -> int:
    """How many so many processes may have of it: as many as the dimension has along which it is cut."""
    return p.shape[dimension_of(p.shape, size)]


def _evenly(p: ParameterInfo, world: int) -> int:
    """The most processes that share it evenly, of those that so many can be parted into."""
    return max(size for size in range(1, world + 1) if world % size == 0 and _shares(p, size) % size == 0)


def _padded(p: ParameterInfo, layout: Layout) -> int:
    """Elements of all processes, if each had as many as the one that has the most: so they travel."""
    return layout.size * math.prod(layout.cutting(p.shape).with_chunk(p.shape)) if layout.sharded else p.elements


def _computed(plan: Plan, p: ParameterInfo) -> int:
    """Bytes an element of the gathered copy; whole numbers stay what they are."""
    return dtype_named(plan.compute).itemsize if plan.compute and floating(p.dtype) else p.itemsize


def reduced_itemsize(plan: Plan, p: ParameterInfo) -> int:
    """Bytes an element of a gradient where it is summed."""
    return dtype_named(plan.reduce).itemsize if plan.reduce else _computed(plan, p)


def _travels(plan: Plan, p: ParameterInfo) -> int:
    """The same on its way there."""
    wide = reduced_itemsize(plan, p)
    return min(wide, dtype_named(plan.compression).itemsize) if plan.compression else wide


def _is_compressed(plan: Plan, trained: Sequence[ParameterInfo]) -> bool:
    """Whether a gradient travels in fewer bits than it is summed in."""
    return any(_travels(plan, p) < reduced_itemsize(plan, p) for p in trained)


def _buckets(plan: Plan, reduced: Sequence[ParameterInfo]) -> tuple[int, ...]:
    """Bytes of the gradients that are reduced together; they come in the reverse of the order of use."""
    backwards = list(reversed(reduced))
    runs = wire.runs([p.elements * _computed(plan, p) for p in backwards], plan.bucket)
    return tuple(_bucket(plan, [backwards[i] for i in run]) for run in runs)


def _bucket(plan: Plan, run: Sequence[ParameterInfo]) -> int:
    """Of one. Where each process adds up a part of it, the parts are equal."""
    in_parts = _is_compressed(plan, run) or (plan.direct_sums and plan.world > 2)
    part = (plan.world if in_parts else 1) * max((_travels(plan, p) for p in run), default=1)
    return math.ceil(sum(p.elements * _travels(plan, p) for p in run) / part) * part


def _apart(plan: Plan, layout: Layout, infos: Sequence[ParameterInfo]) -> tuple[int, ...]:
    """Bytes of each parameter that is gathered by itself, though it is not the only one."""
    if not layout.apart or len(infos) < 2:
        return ()
    infos = [p for p in infos if not layout.cutting(p.shape).dim]
    shapes = tuple(p.shape for p in infos)
    if layout.node:
        layout, inside = layout.levels()
        shapes = tuple(inside.with_chunk(shape) for shape in shapes)
    found = wire.apart(shapes, layout, layout.compute or getattr(torch, infos[0].dtype)) if infos else ()
    return tuple(infos[i].elements * _computed(plan, infos[i]) for i in found)
