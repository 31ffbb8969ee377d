"""Rewrite: gathers start one bucket ahead of their use, reductions are waited for at the end.

A first schedule: it hides communication behind the computation next to it and holds two gathered buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from autoshard.errors import PassError
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage


@dataclass(frozen=True)
class Overlap:
    """ahead: how many buckets before its use a gather starts."""

    ahead: int = 1

    def __post_init__(self) -> None:
        if self.ahead < 1:
            raise PassError(f"passes: overlap{{ahead={self.ahead}}} is not legal; legal: 1 or more")

    name: ClassVar[str] = "overlap"
    stage: ClassVar[Stage] = "split"
    requires: ClassVar[frozenset[str]] = frozenset({"collectives"})
    provides: ClassVar[frozenset[str]] = frozenset({"overlap"})
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        self._prefetch(gm)
        if context.phase == "backward":
            _wait_late(gm)
        return gm

    def _prefetch(self, gm: GraphModule) -> None:
        gathers = graphs.calls(gm, graphs.GATHER)
        waits = [next(iter(g.users)) for g in gathers]
        head = gm.graph.find_nodes(op="placeholder")[-1]
        for i, gather in enumerate(gathers):
            target = waits[i - self.ahead] if i >= self.ahead else head
            at = graphs.positions(gm.graph)
            if at[gather] > at[target]:
                _move_after(_chain(gather, target, at), target)
            if i < self.ahead:
                head = gather


def _chain(gather: Node, limit: Node, at: dict[Node, int]) -> list[Node]:
    """The gather and the copies that feed it, as far as they stand after `limit`."""
    found: set[Node] = set()
    todo = [gather]
    while todo:
        node = todo.pop()
        if node.op == "placeholder" or node in found or at[node] <= at[limit]:
            continue
        found.add(node)
        todo.extend(node.all_input_nodes)
    return sorted(found, key=at.__getitem__)


def _move_after(chain: list[Node], target: Node) -> None:
    for node in chain:
        target.append(node)
        target = node


def _wait_late(gm: GraphModule) -> None:
    """Moves the waits of reductions, and the copies out of them, to the end of the graph."""
    output = gm.graph.output_node()
    for start in graphs.calls(gm, *graphs.REDUCTIONS):
        wait = next(iter(start.users))
        for node in [wait, *graphs.dependents(gm, [wait])]:
            output.prepend(node)
