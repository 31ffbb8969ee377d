"""Rewrite: one bucket a group of parameters, direction and step, in the plan's order; of gradients several, if the plan says so,
those first that backward has first.

[Note: Order of collectives]
Every process must issue the same collectives in the same order, and each compiles alone. So the order comes
from the plan and from nothing else: gathers of a forward in the order of first use, reductions in its reverse, gathers
of a backward in the reverse of the order of last use, but for those that a region begins with (`Plan.order_of_calls`); of two steps the
second behind the first. Where a local graph would use groups in another order, its gathers
move up and its reductions move down. What is whole on every process has no gather, and stays where it is used.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from autoshard.errors import PassError
from autoshard.ops import wire
from autoshard.ops.layout import Layout
from autoshard.ops.sparse import LOOK_UP_ROWS, REDUCE_ROWS
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage
from autoshard.passes.gather_twice import FOR_CALL
from autoshard.plan import Plan

Key = tuple[float, Any, Any]  # (position of the group, layout, dtypes)


@dataclass(frozen=True)
class Bucket:
    """mb: a group is cut into buckets of at most this many megabytes; 0: as the plan says."""

    mb: float = 0.0

    def __post_init__(self) -> None:
        if not self.mb >= 0:  # nan is not
            raise PassError(f"passes: bucket{{mb={self.mb}}} is not legal; legal: 0 or more")

    name: ClassVar[str] = "bucket"
    stage: ClassVar[Stage] = "split"
    requires: ClassVar[frozenset[str]] = frozenset({"names", "merged"})
    provides: ClassVar[frozenset[str]] = frozenset({"buckets"})
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        backward = context.phase == "backward"
        order = context.plan.order_of_last_use if backward else _but(context.plan, gm, LOOK_UP_ROWS)
        gathers = self._grouped(gm, graphs.UNSHARD, 3, order, context, reverse=backward)
        buckets = [_gather(gm, members) for members in gathers]
        _order_up([b for b in buckets if Layout.parse(str(b.args[4])).sharded])
        order, whole = context.plan.order, _but(context.plan, gm, REDUCE_ROWS)
        low_rank = self._grouped(gm, graphs.MEAN_LOW_RANK, 4, order, context, reverse=True)
        reduced = self._grouped(gm, graphs.REDUCE_GRAD, 4, whole, context, reverse=True)
        rank = context.plan.rank_of
        sparse = [[n] for n in sorted(graphs.calls(gm, REDUCE_ROWS), key=lambda n: -rank[str(n.args[4])])]

        def turn(members: list[Node]) -> int:
            return (whole if graphs.is_call(members[0], graphs.REDUCE_GRAD) else order)[str(members[0].args[4])]

        last: Node | None = None
        for members in sorted([*low_rank, *reduced, *sparse], key=lambda m: -turn(m)):
            put = _PUT[members[0].target]
            last = put(gm, members, last, turn(members))
        return gm

    def _grouped(
        self, gm: GraphModule, op: Any, name_at: int, order: dict[str, int], context: Context, reverse: bool
    ) -> list[list[Node]]:
        groups: dict[Key, list[Node]] = defaultdict(list)
        for node in graphs.calls(gm, op):
            turns = context.plan.order_of_calls if FOR_CALL in node.meta else order
            position = turns[str(node.args[name_at])]
            groups[position, node.args[name_at - 1], _dtypes(node)].append(node)
        keys = sorted(groups, key=lambda k: (k[1], str(k[2])), reverse=reverse)  # as what of a group is used last is reduced first
        keys.sort(key=lambda k: (-k[0] if reverse else k[0], _step(op, k[1])))
        rank = context.plan.rank_of
        ordered = [sorted(groups[k], key=lambda n: rank[n.args[name_at]], reverse=reverse) for k in keys]  # type: ignore[index]
        most = [self.mb * 1e6 or _most(op, str(layout), context.plan) for _, layout, _ in keys]
        return [part for members, limit in zip(ordered, most) for part in _cut(members, limit)]


def _but(plan: Plan, gm: GraphModule, op: Any) -> dict[str, int]:
    """The order of groups, but for what is a head's too: that is used last, if its rows go by themselves, by this op."""
    rows = {name for node in graphs.calls(gm, op) for name in graphs.serves(node)}
    return plan.order | dict.fromkeys((name for name in plan.tied if name in rows), len(plan.groups))


def _most(op: Any, layout: str, plan: Plan) -> int:
    """Bytes of one bucket, by the plan: it cuts gradients, but for the rows that are summed between nodes, of which processes have more
    or less."""
    if op is not graphs.REDUCE_GRAD:
        return 0
    if Layout.parse(layout).sharded:
        return plan.shared_bucket if not plan.node else 0
    return plan.bucket


def _dtypes(node: Node) -> tuple[torch.dtype, ...]:
    """Of rows and of the whole, or that which a gradient travels in and that of its rows: a gradient to which something was added
    (`widen_held`) may itself be wider than others, on one process alone."""
    given, made = _first(node.args[0]).dtype, _first(node).dtype
    if graphs.is_call(node, graphs.UNSHARD):
        return given, made
    carried = Layout.parse(str(node.args[3])).travels(given)
    return (carried, made) if graphs.is_call(node, graphs.REDUCE_GRAD) else (carried,)


def _cut(members: list[Node], most: float) -> list[list[Node]]:
    """Runs of members of at most so many bytes each, of what is whole: rows are not as many on every process."""
    return [[members[i] for i in run] for run in wire.runs([_bytes(node) for node in members], most)]


def _bytes(node: Node) -> int:
    """Of a gathered copy, or of that which a gradient is one of."""
    if graphs.is_call(node, graphs.UNSHARD):
        return _first(node).nbytes
    copied = Layout.parse(str(node.args[3])).compute or _first(node).dtype
    return _first(node.args[0]).numel() * copied.itemsize


def _first(given: Any) -> torch.Tensor:
    """What it stands for, or the first of several."""
    value = graphs.example(given[0]) if isinstance(given, (list, tuple)) else graphs.example(given)
    return value[0] if isinstance(value, list) else value


def _step(op: Any, layout: str) -> bool:
    """Of two steps, which one comes first: gathers go inside of nodes after they went between them, reductions before."""
    return (Layout.parse(layout).turns > 1) == (op is graphs.UNSHARD)


def _gather(gm: GraphModule, members: list[Node]) -> Node:
    """One unshard_bucket where the first of its members stood; their inputs are graph inputs, or of a first step."""
    at = graphs.positions(gm.graph)
    first = min(members, key=at.__getitem__)
    shapes, ndims = wire.flat_shapes([m.args[1] for m in members])  # type: ignore[misc]
    shards = [_as_early_as(m.args[0], first, at) for m in members]
    with gm.graph.inserting_before(first):
        bucket = gm.graph.call_function(
            graphs.UNSHARD_BUCKET,
            (shards, _names(members, 3), shapes, ndims, first.args[2]),
        )
    bucket.meta["serves"] = _served(members)
    _hand_out(gm, bucket, members)
    return bucket


def _as_early_as(shard: Any, first: Node, at: dict[Node, int]) -> Node:
    """Moves what makes a shard of graph inputs (a detach, or a gather between nodes), as far as it stands behind, before
    `first`."""
    assert isinstance(shard, Node)
    for node in graphs.sources_behind([shard], first, at):
        first.prepend(node)
        at[node] = at[first]  # in front of it from now on
    return shard


def _reduce(gm: GraphModule, members: list[Node], after: Node | None, group: int) -> Node:
    """One reduce_bucket where the last gradient is there, and not before the reduction that precedes it."""
    at = graphs.positions(gm.graph)
    last = max([*members, *([after] if after else [])], key=at.__getitem__)
    dependent = [node for node in graphs.dependents(gm, members) if at[node] < at[last]]
    shapes, ndims = wire.flat_shapes([m.args[1] for m in members])  # type: ignore[misc]
    grads = [m.args[0] for m in members]
    with gm.graph.inserting_after(last):
        bucket = gm.graph.call_function(
            graphs.REDUCE_BUCKET,
            (
                grads,
                _names(members, 4),
                shapes,
                ndims,
                members[0].args[2],
                members[0].args[3],
            ),
        )
    bucket.meta["group"], bucket.meta["serves"] = group, _served(members)
    last = _hand_out(gm, bucket, members)
    for node in dependent:
        last.append(node)
        last = node
    return last


def _approximate(gm: GraphModule, members: list[Node], after: Node | None, group: int) -> Node:
    """One mean_low_rank of them all, where the last gradient is there, and not before the reduction that precedes it."""
    at = graphs.positions(gm.graph)
    last = max([*members, *([after] if after else [])], key=at.__getitem__)
    with gm.graph.inserting_after(last):
        given: list[Any] = [[m.args[i][0] for m in members] for i in range(3)]  # type: ignore[index]
        bucket = gm.graph.call_function(graphs.MEAN_LOW_RANK, (*given, members[0].args[3], _names(members, 4)))
    bucket.meta["group"], bucket.meta["serves"] = group, _served(members)
    results = [_item(m, i) for i in range(3) for m in members]
    dependent = graphs.dependents(gm, results)
    last = _hand_out(gm, bucket, results)
    for node in dependent:
        last.append(node)
        last = node
    for member in members:
        gm.graph.erase_node(member)
    return last


def _alone(gm: GraphModule, members: list[Node], after: Node | None, group: int) -> Node:
    """The one, whose collectives are its own, not before the reduction that precedes it."""
    (last,), at = members, graphs.positions(gm.graph)
    if after is not None and at[after] > at[last]:
        for node in (*members, *graphs.dependents(gm, members)):
            after.append(node)
            after = last = node
    return last


Put = Callable[[GraphModule, list[Node], "Node | None", int], Node]
_PUT: dict[Any, Put] = {graphs.REDUCE_GRAD: _reduce, graphs.MEAN_LOW_RANK: _approximate, REDUCE_ROWS: _alone}


def _item(several: Node, index: int) -> Node:
    """The node that takes this item of a call's results; a new one, if nobody does."""
    for user in several.users:
        if user.args[1] == index:
            return user
    with several.graph.inserting_after(several):
        item = several.graph.call_function(operator.getitem, (several, index))
    item.meta["val"] = graphs.example(several)[index]
    return item


def _names(members: Sequence[Node], at: int) -> str:
    return " ".join(str(m.args[at]) for m in members)


def _served(members: Sequence[Node]) -> tuple[str, ...]:
    return tuple(name for member in members for name in graphs.serves(member))


def _hand_out(gm: GraphModule, bucket: Node, members: list[Node]) -> Node:
    """Gives each member's users their item of the bucket; returns the last item."""
    bucket.meta["val"] = [graphs.example(m) for m in members]
    last = bucket
    for i, member in enumerate(members):
        with gm.graph.inserting_after(last):
            item = gm.graph.call_function(operator.getitem, (bucket, i))
        item.meta.update(member.meta)
        member.replace_all_uses_with(item)
        gm.graph.erase_node(member)
        last = item
    return last


def _order_up(buckets: list[Node]) -> None:
    """Moves gathers up until they stand in the given order."""
    for earlier, later in zip(reversed(buckets[:-1]), reversed(buckets[1:])):
        at = graphs.positions(later.graph)
        if at[earlier] > at[later]:
            for shard in earlier.all_input_nodes:
                _as_early_as(shard, later, at)
            later.prepend(earlier)
