"""Rewrite: the gathers that a training forward starts with take what the optimizer's step has sent. See [Note: Early gathers].

These are those of the buckets that are on their way before anything is computed: the first, and as many as the plan gathers ahead.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, GraphModule, Node

from autoshard.ops.early import GATHER_EARLY, Early, Recipe
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage


@dataclass(frozen=True)
class EarlyGathers:
    name: ClassVar[str] = "early_gathers"
    stage: ClassVar[Stage] = "split"
    requires: ClassVar[frozenset[str]] = frozenset({"collectives"})
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        if context.early is not None and context.phase == "forward" and (gathers := _first(gm, 1 + context.plan.ahead)):
            _take(gm, gathers, context.early)
        return gm


def _take(gm: GraphModule, gathers: Sequence[Node], early: Early) -> None:
    """What the step has sent in the place of what these gathers bring."""
    sources = graphs.sources(gathers)
    packing = [node for node in gm.graph.nodes if node in sources]
    rows = [node for node in packing if node.op == "placeholder"]
    _, size, group = gathers[0].args
    recipe = Recipe(_alone(packing, [gather.all_input_nodes[0] for gather in gathers]), gathers[0].target, size, group)  # type: ignore[arg-type]
    with gm.graph.inserting_before(gathers[0]):
        taken = gm.graph.call_function(GATHER_EARLY, (rows, early.name, early.learn(recipe)))
        taken.meta["val"] = [graphs.example(gather) for gather in gathers]
        taken.meta["serves"] = tuple(name for gather in gathers for name in graphs.serves(gather))
        for i, gather in enumerate(gathers):
            item = gm.graph.call_function(operator.getitem, (taken, i))
            item.meta.update(gather.meta)
            gather.replace_all_uses_with(item)
    for node in reversed([*packing, *gathers]):
        if node.op != "placeholder" and not node.users:
            gm.graph.erase_node(node)


def _first(gm: GraphModule, buckets: int) -> list[Node]:
    """The gathers of so many buckets, as far as they go over one group and take nothing but rows; not the second of two steps."""
    gathers = [node for node in gm.graph.nodes if graphs.gathers(node)]
    parts = list(dict.fromkeys(node.meta["part"] for node in gathers))[:buckets]
    return [
        node
        for node in gathers
        if node.meta["part"] in parts
        and node.args[1:] == gathers[0].args[1:]
        and not graphs.follows_another(node)
    ]


def _alone(nodes: Sequence[Node], results: Sequence[Node]) -> GraphModule:
    """A graph of these nodes, inputs among them, that gives a list of these results."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {}
    graph.output([copies[result] for result in results])
    return GraphModule({}, graph)
