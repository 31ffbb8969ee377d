"""Rewrite: gathers start one bucket ahead of their use, reductions are waited for at the end.

A first schedule: it hides communication behind the computation next to it and holds two gathered buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage


@dataclass(frozen=True)
class Overlap:
    """ahead: how many buckets before its use a gather starts."""

    ahead: int = 1

    name: ClassVar[str] = "overlap"
    stage: ClassVar[Stage] = "split"
    requires: ClassVar[frozenset[str]] = frozenset({"collectives"})
    provides: ClassVar[frozenset[str]] = frozenset({"overlap"})
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        self._prefetch(gm)
        _wait_late(gm)
        return gm

    def _prefetch(self, gm: GraphModule) -> None:
        gathers = graphs.calls(gm, graphs.GATHER)
        waits = [next(iter(g.users)) for g in gathers]
        for i, gather in enumerate(gathers):
            target = waits[i - self.ahead] if i >= self.ahead else None
            at = graphs.positions(gm.graph)
            if target is not None and at[gather] <= at[target]:
                continue
            _move_after(gm, _chain(gather, target, at), target)


def _chain(gather: Node, limit: Node | None, at: dict[Node, int]) -> list[Node]:
    """The gather and the copies that feed it, as far as they stand after `limit`."""
    found: set[Node] = set()
    todo = [gather]
    while todo:
        node = todo.pop()
        if node.op == "placeholder" or node in found or (limit and at[node] <= at[limit]):
            continue
        found.add(node)
        todo.extend(node.all_input_nodes)
    return sorted(found, key=at.__getitem__)


def _move_after(gm: GraphModule, chain: list[Node], target: Node | None) -> None:
    """Moves a chain behind `target`, or to the head of the graph but behind the gathers that are there."""
    if target is None:
        target = _end_of_head(gm)
    for node in chain:
        if node is not target:
            target.append(node)
            target = node


def _end_of_head(gm: GraphModule) -> Node:
    inputs = gm.graph.find_nodes(op="placeholder")
    return inputs[-1]


def _wait_late(gm: GraphModule) -> None:
    """Moves the waits of reductions, and the copies out of them, to the end of the graph."""
    output = gm.graph.output_node()
    for start in graphs.calls(gm, *graphs.REDUCTIONS):
        wait = next(iter(start.users))
        for node in [wait, *graphs.dependents(gm, [wait])]:
            output.prepend(node)
