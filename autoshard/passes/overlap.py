"""Rewrite: gathers start one bucket ahead of their use, reductions are waited for two buckets later.

A first schedule: it hides communication behind the computation next to it. With two reductions on their way the
link never waits for the computation, and no more than their buckets are held.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
        buckets = _messages([node for node in gm.graph.nodes if graphs.gathers(node)])
        waits = [next(iter(bucket[-1].users)) for bucket in buckets]
        ahead = self.ahead * _steps(gm, buckets)
        head = next(reversed(gm.graph.find_nodes(op="placeholder")), None)
        for i, bucket in enumerate(buckets):
            target = waits[i - ahead] if i >= ahead else head
            assert target is not None  # what is gathered is an input
            at = graphs.positions(gm.graph)
            if at[bucket[-1]] > at[target]:
                _move_after(_chain(bucket, target, at), target)
            if i < ahead:
                head = bucket[-1]

    def _wait_late(self, gm: GraphModule) -> None:
        """Moves the wait of each reduction, and what is done with what it brought, behind the start of a later one or to the
        end. Where a second collective takes the first's result, that is waited for later still."""
        buckets = _messages([node for node in gm.graph.nodes if graphs.reduces(node)])
        end, settled = gm.graph.output_node(), set[Node]()
        for i, bucket in reversed(list(enumerate(buckets))):
            waits = [next(iter(start.users)) for start in bucket]
            dependents = set(graphs.dependents(gm, waits)) | set(waits)
            chain = [node for node in gm.graph.nodes if node in dependents and node not in settled]
            settled.update(chain)
            later = [b for b in buckets[i + self.behind :] if not dependents.intersection(b)]
            if later:
                at, target = graphs.positions(gm.graph), later[0][-1]
                _move_after([node for node in chain if at[node] < at[target]], target)
            else:
                for node in chain:
                    end.prepend(node)
                end = chain[0]


def _steps(gm: GraphModule, buckets: Sequence[list[Node]]) -> int:
    """In how many steps parameters are gathered: two where a gather takes what another one brought."""
    first = set(graphs.dependents(gm, buckets[0])) if buckets else set()
    return 2 if any(first.intersection(bucket) for bucket in buckets[1:]) else 1


def _messages(starts: Sequence[Node]) -> list[list[Node]]:
    """These collectives, in graph order, those together that carry parts of one bucket over one group."""
    return [list(bucket) for _, bucket in itertools.groupby(starts, lambda n: (n.meta["part"], n.target, n.args[-1]))]


def _chain(gathers: Sequence[Node], limit: Node, at: dict[Node, int]) -> list[Node]:
    """The gathers and the copies that feed them, as far as they stand after `limit`."""
    found: set[Node] = set()
    todo = list(gathers)
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
