"""Rewrite: gathers start one bucket ahead of their use, reductions are waited for two buckets later.

A first schedule: it hides communication behind the computation next to it. With two reductions on their way the
link never waits for the computation, and no more than their buckets are held.
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
    """ahead: how many buckets before its use a gather starts. behind: how many reductions start before one is
    waited for."""

    ahead: int = 1
    behind: int = 2

    def __post_init__(self) -> None:
        for name in ("ahead", "behind"):
            if getattr(self, name) < 1:
                raise PassError(f"passes: overlap{{{name}={getattr(self, name)}}} is not legal; legal: 1 or more")

    name: ClassVar[str] = "overlap"
    stage: ClassVar[Stage] = "split"
    requires: ClassVar[frozenset[str]] = frozenset({"collectives"})
    provides: ClassVar[frozenset[str]] = frozenset({"overlap"})
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        self._prefetch(gm)
        if context.phase == "backward":
            self._wait_late(gm)
        return gm

    def _prefetch(self, gm: GraphModule) -> None:
        gathers = graphs.calls(gm, graphs.GATHER)
        waits = [next(iter(g.users)) for g in gathers]
        head = next(reversed(gm.graph.find_nodes(op="placeholder")), None)
        for i, gather in enumerate(gathers):
            target = waits[i - self.ahead] if i >= self.ahead else head
            assert target is not None  # what is gathered is an input
            at = graphs.positions(gm.graph)
            if at[gather] > at[target]:
                _move_after(_chain(gather, target, at), target)
            if i < self.ahead:
                head = gather

    def _wait_late(self, gm: GraphModule) -> None:
        """Moves the wait of each reduction, and the copies out of it, behind the start of a later one or to the end."""
        starts = graphs.calls(gm, *graphs.REDUCTIONS)
        output = gm.graph.output_node()
        for i, start in enumerate(starts):
            wait = next(iter(start.users))
            chain = [wait, *graphs.dependents(gm, [wait])]
            later = [s for s in starts[i + self.behind :] if s not in chain]
            if later:
                at = graphs.positions(gm.graph)
                _move_after([node for node in chain if at[node] < at[later[0]]], later[0])
            else:
                for node in chain:
                    output.prepend(node)


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
