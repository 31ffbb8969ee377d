"""Rewrite: where backward calls a block again, it gathers that block's parameters for the call, and once more for the block's backward.

The call is at the beginning of a region's backward, the block's own comes behind those of the blocks after it: else the copies of all of
the region's blocks would be whole at once, of which each may be larger than what leaves a block. What a plan keeps from forward is
there in any case. See [Note: Regions] in `repeat_blocks`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from autoshard import torch_internals
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage

FOR_CALL = "gathered_for_call"  # in the meta of an unshard: it is for the call of a block in backward, not for the block's backward


@dataclass(frozen=True)
class GatherTwice:
    name: ClassVar[str] = "gather_twice"
    stage: ClassVar[Stage] = "split"
    requires: ClassVar[frozenset[str]] = frozenset({"names"})
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        twice = set[Node]()
        for call in graphs.calls(gm, graphs.REPEAT_BLOCK):
            made = dict[Node, Node]()
            tensors, *more = call.args
            call.args = ([_anew(t, call, made) for t in tensors], *more)  # type: ignore[union-attr,arg-type]
            twice.update(made)
        _move_to_use(gm, twice)
        return gm


def _anew(node: Node, call: Node, made: dict[Node, Node]) -> Node:
    """What stands for a node of this call: another of what is gathered, and of what is made of that as it lies; else itself."""
    if node in made or not _is_of_copy(node):
        return made.get(node, node)
    given = {source: _anew(source, call, made) for source in node.all_input_nodes}
    unshard = graphs.is_call(node, graphs.UNSHARD)
    if not unshard and all(one is other for one, other in given.items()):
        return node
    with node.graph.inserting_before(call):
        made[node] = node.graph.node_copy(node, given.__getitem__)
    if unshard:
        made[node].meta[FOR_CALL] = True
    return made[node]


def _is_of_copy(node: Node) -> bool:
    return graphs.is_call(node, *graphs.LOGICAL) or torch_internals.is_view(node.target)


def _move_to_use(gm: GraphModule, nodes: Collection[Node]) -> None:
    """Moves what stood in front of a call to where it is still used; what is not goes."""
    for node in reversed(list(gm.graph.nodes)):
        if node in nodes and not node.users:
            gm.graph.erase_node(node)
        elif node in nodes:
            min(node.users).prepend(node)
