"""What the cost model needs to know of a plan's groups, before there is a graph."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autoshard.cost_model import step
from autoshard.dtypes import dtype_named
from autoshard.inventory import Inventory, ParameterInfo, floating
from autoshard.ops import wire
from autoshard.ops.layout import goes_low_rank, layout_of, thin
from autoshard.ops.low_rank import residue_shapes
from autoshard.plan import ParameterGroup, Plan


def costs_of(plan: Plan, inventory: Inventory) -> list[step.GroupCost]:
    """One for each of the plan's groups."""
    infos = {p.name: p for p in inventory.parameters}
    return [_cost(plan, g, [infos[n] for n in g.parameters]) for g in plan.groups]


def _cost(plan: Plan, group: ParameterGroup, infos: Sequence[ParameterInfo]) -> step.GroupCost:
    itemsize = max((p.itemsize for p in infos), default=4)
    compute = _itemsize(plan.compute, itemsize)
    trained = [p for p in infos if p.trained and p.used and floating(p.dtype)]
    thinned = [p for p in trained if plan.low_rank and goes_low_rank(p.shape, plan.low_rank)]
    sparse = [p for p in trained if p.name in plan.sparse]
    return step.GroupCost(
        elements=sum(p.elements for p in infos),
        trained=sum(p.elements for p in trained),
        itemsize=itemsize,
        compute_itemsize=compute,
        reduce_itemsize=_itemsize(plan.reduce, compute),
        parameter_degree=group.degrees.parameter,
        gradient_degree=group.degrees.gradient,
        optimizer_degree=group.degrees.optimizer,
        replicas=plan.world // group.degrees.optimizer,
        reduction=group.reduction,
        compress_itemsize=_itemsize(plan.compression, 0),
        buckets=_buckets(0 if group.degrees.optimizer > 1 else plan.bucket, [p for p in trained if p not in thinned and p not in sparse], compute),
        direct=plan.direct and group.degrees.optimizer > 1,
        direct_sums=plan.direct_sums,
        message=plan.message,
        node=plan.node if group.degrees.optimizer > 1 else 0,
        apart=_apart(plan, group, infos),
        low_rank=sum(p.elements for p in thinned),
        thin=sum(thin(p.shape, plan.low_rank) for p in thinned),
        sparse=sum(p.elements for p in sparse),
        rows=tuple(p.looked_up * p.elements // p.shape[0] for p in sparse),
        residue=sum(math.prod(shape) for p in thinned for shape in residue_shapes(p.shape, plan.low_rank)),
    )


def _buckets(most: int, reduced: Sequence[ParameterInfo], itemsize: int) -> tuple[int, ...]:
    """Elements of the gradients that are reduced together; they come in the reverse of the order of use."""
    backwards = [p.elements for p in reversed(reduced)]
    return tuple(sum(backwards[i] for i in run) for run in wire.runs([n * itemsize for n in backwards], most))


def _apart(plan: Plan, group: ParameterGroup, infos: Sequence[ParameterInfo]) -> tuple[int, ...]:
    """Elements of each parameter that is gathered by itself, though it is not the only one."""
    layout, shapes = layout_of(group, plan, "+".join), tuple(p.shape for p in infos)
    if not layout.apart or len(infos) == 1:
        return ()
    if layout.node:
        layout, inside = layout.levels()
        shapes = tuple(inside.with_chunk(shape) for shape in shapes)
    return tuple(infos[i].elements for i in wire.apart(shapes, layout, layout.compute or getattr(torch, infos[0].dtype)))


def _itemsize(name: str, otherwise: int) -> int:
    return dtype_named(name).itemsize if name else otherwise
