"""Rewrite: gathers start as many groups ahead of their use as the plan says, reductions are waited for when those of as many groups are
on their way and the next is about to be packed. What is looked up in embeddings of which only rows travel comes first, since it is short
and first used.

With those of two groups on their way the link never waits for the computation, and no more than their buckets are held beside the one that
is packed. Where a group's go over several groups of processes, one after the other, each of these counts. Gathers of saved values start as
many of these ahead, but no sooner than as many groups, of which one's backward begins when that of the one before is reduced: there may be
few of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from autoshard.errors import PassError
from autoshard.ops.sparse import ASK_ROWS, LOOK_UP_ROWS
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage
from autoshard.plan import Plan


@dataclass(frozen=True)
class Overlap:
    """ahead: how many groups before their use gathers start. behind: reductions of how many groups are on their way at once, at most.
    Both 0: as the plan says."""

    ahead: int = 0
    behind: int = 0

    def __post_init__(self) -> None:
        for name in ("ahead", "behind"):
            if getattr(self, name) < 0:
                raise PassError(f"passes: overlap{{{name}={getattr(self, name)}}} is not legal; legal: 0 or more")

    name: ClassVar[str] = "overlap"
    stage: ClassVar[Stage] = "split"
    requires: ClassVar[frozenset[str]] = frozenset({"collectives"})
    provides: ClassVar[frozenset[str]] = frozenset({"overlap"})
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        head = _look_up_first(gm, context.plan)
        self._prefetch(gm, context.plan, head)
        if context.phase == "backward":
            self._prefetch_parts(gm, self.ahead or context.plan.ahead)
            _wait_late(gm, self.behind or context.plan.behind)
        return gm

    def _prefetch(self, gm: GraphModule, plan: Plan, head: Node | None) -> None:
        together = _by_group(_messages([node for node in gm.graph.nodes if graphs.gathers(node)]), plan)
        waits = [next(iter(buckets[0][-1].users)) for buckets in together]
        ahead = (self.ahead or plan.ahead) * (2 if any(graphs.follows_another(buckets[0][0]) for buckets in together) else 1)
        for i, buckets in enumerate(together):
            target = waits[i - ahead] if i >= ahead else head
            for bucket in buckets:
                assert target is not None  # what is gathered is an input
                at = graphs.positions(gm.graph)
                if at[bucket[-1]] > at[target]:
                    _move_after(graphs.sources_behind(bucket, target, at), target)
                target = max(target, bucket[-1], key=graphs.positions(gm.graph).__getitem__)
            if i < ahead:
                head = buckets[-1][-1]

    def _prefetch_parts(self, gm: GraphModule, ahead: int) -> None:
        parts = [node for node in gm.graph.nodes if graphs.gathers_part(node)]
        first = {node.meta["group"]: node for node in reversed(gm.graph.nodes) if graphs.reduces(node)}
        begun, head = list(reversed(first.values())), next(reversed(gm.graph.find_nodes(op="placeholder")), None)
        for i, start in reversed(list(enumerate(parts))):
            at = graphs.positions(gm.graph)
            before = [node for node in begun if at[node] < at[start]]
            limits = [head, *before[-1 - ahead : -ahead], *(next(iter(part.users)) for part in parts[:i][-ahead:][: i >= ahead])]
            target = max((limit for limit in limits if limit is not None), key=at.__getitem__)
            _move_after(graphs.sources_behind([start], target, at), target)


def _wait_late(gm: GraphModule, behind: int) -> None:
    """Moves the wait of each reduction, and what is done with what it brought, to where a later one is packed, or to the end. Where a
    second collective takes the first's result, that is waited for later still."""
    buckets = _messages([node for node in gm.graph.nodes if graphs.reduces(node)])
    keys = [_turn(bucket[0]) for bucket in buckets]
    turns = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    end, settled = gm.graph.output_node(), set[Node]()
    for i, bucket in reversed(list(enumerate(buckets))):
        waits = [next(iter(start.users)) for start in bucket]
        dependents = set(graphs.dependents(gm, waits)) | set(waits)
        chain = [node for node in gm.graph.nodes if node in dependents and node not in settled]
        settled.update(chain)
        least, (own, *_) = turns[keys[i]] + behind, keys[i]
        later = [b for b, key in zip(buckets, keys) if turns[key] >= least and key[0] != own and not dependents.intersection(b)]
        at = graphs.positions(gm.graph)
        place = min([end, *(_place_before(b, bucket[-1], at) for b in later[:1])], key=at.__getitem__)
        for node in chain:
            if at[node] < at[place]:
                place.prepend(node)
        end = chain[0] if at[chain[0]] < at[place] else place


def _place_before(later: list[Node], started: Node, at: dict[Node, int]) -> Node:
    """In front of what packs a later reduction, so that what is done with the one that started there is over by then; or behind its start,
    if it was packed before, or is the second of its part, whose first is then on its way."""
    pack = next(node for node in at if node.meta.get("part") == later[0].meta["part"])
    return pack if at[pack] > at[started] and not _takes_another(later[0]) else later[-1].next


def _look_up_first(gm: GraphModule, plan: Plan) -> Node | None:
    """Asks for embeddings' rows in the plan's order and then looks them up; what only backward reads is waited for at the end of
    forward. The last of these nodes, or of the inputs."""
    head: Node | None = next(reversed(gm.graph.find_nodes(op="placeholder")), None)
    for op in (ASK_ROWS, LOOK_UP_ROWS):
        for node in sorted(graphs.calls(gm, op), key=lambda n: plan.rank_of[graphs.serves(n)[0]]):
            assert head is not None  # what it asks of is an input
            at = graphs.positions(gm.graph)
            _move_after(graphs.sources_behind([node], head, at), head)
            head = max(head, node, key=graphs.positions(gm.graph).__getitem__)
    for wait in (user for asked in graphs.calls(gm, ASK_ROWS) for user in asked.users):
        if all(user.op == "output" for user in wait.users):
            gm.graph.output_node().prepend(wait)
    return head


def _messages(starts: Sequence[Node]) -> list[list[Node]]:
    """These collectives, in graph order, those together that carry parts of one bucket over one group."""

    return [list(bucket) for _, bucket in itertools.groupby(starts, lambda node: (node.meta["part"], *_turn(node)))]


def _by_group(buckets: Sequence[list[Node]], plan: Plan) -> list[list[list[Node]]]:
    """Neighbours that are of one group, and of one step where there are two: such as are cut along different dimensions. What is gathered
    once more is not beside itself."""
    found: list[list[list[Node]]] = []
    last: tuple[str, bool] | None = None
    for bucket in buckets:
        serves = graphs.serves(bucket[0])
        key = plan.group_of[serves[0]].name, graphs.follows_another(bucket[0])
        again = found and any(set(serves) & set(graphs.serves(other[0])) for other in found[-1])
        if key != last or again:
            found.append([])
        found[-1].append(bucket)
        last = key
    return found


def _turn(start: Node) -> tuple[Any, ...]:
    """Equal for those of a group's collectives that are its first over some processes, or its second: they have one turn."""
    return start.meta["group"], start.meta["part_of"], start.target, start.args[-1], _takes_another(start)


def _takes_another(collective: Node) -> bool:
    """Whether it takes what another one of the same bucket brought."""
    todo, seen = list(collective.all_input_nodes), set[Node]()
    while todo:
        node = todo.pop()
        if node in seen or node.meta.get("part") != collective.meta["part"]:
            continue
        if graphs.reduces(node):
            return True
        seen.add(node)
        todo.extend(node.all_input_nodes)
    return False


def _move_after(chain: list[Node], target: Node) -> None:
    for node in chain:
        target.append(node)
        target = node
