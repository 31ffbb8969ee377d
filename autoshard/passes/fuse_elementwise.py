"""Rewrite: elementwise operations that stand together become one kernel each.

On a GPU each of them alone is bound by the memory that it reads and writes; together they read and write once. Their
operator has the operations themselves too, and runs them anywhere else.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, GraphModule, Node

from autoshard.kernels.places import Unsupported
from autoshard.kernels.region import operator_of, region_of
from autoshard.passes.base import Context, Stage
from autoshard.passes.choose_elementwise import Region, choose


@dataclass(frozen=True)
class FuseElementwise:
    """Where kernels are generated for a device."""

    name: ClassVar[str] = "fuse_elementwise"
    stage: ClassVar[Stage] = "code"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = False  # values are not rounded between operations

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        for region in choose(gm.graph, context.fuses) if context.fuses else ():
            _fuse(gm, region)
        return gm


def _fuse(gm: GraphModule, region: Region) -> None:
    given, results, kept = region.given(), region.results(), region.kept_views()
    try:
        made = region_of(_alone(region, given, results), region.space)
    except Unsupported:
        return  # it stays as it is
    with gm.graph.inserting_before(region.last.next):
        call = gm.graph.call_function(operator_of(made), (given,))
        items = [gm.graph.call_function(operator.getitem, (call, i)) for i in range(len(results))]
    call.meta.update(region.last.meta)  # the user's line
    call.meta["val"] = [n.meta["val"] for n in results]
    call.meta["kernel"] = "reduction" if region.space.reduces else "pointwise"
    call.meta["source"] = made.name, made.text
    for node, item in zip(results, items):
        item.meta.update(node.meta)
        node.replace_all_uses_with(item)
    for view in kept:
        items[-1].append(view)  # behind the kernel
        items.append(view)
    for node in reversed([n for n in region.nodes if n not in kept]):
        gm.graph.erase_node(node)


def _alone(region: Region, given: list[Node], results: list[Node]) -> GraphModule:
    """The operations as a graph of their own, which gives a list."""
    graph = Graph()
    copies = {}
    for node in given:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["val"] = node.meta["val"]
    for node in region.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output([copies[n] for n in results])
    graph.eliminate_dead_code()  # views that stay outside
    return GraphModule({}, graph)
