"""Rewrite: regions that Dynamo traced once for several calls (torch.compiler.nested_compile_region) stand in the place
of their calls.

Blocks that are alike are outlined later, from the operations: a region says what the user or Dynamo took for alike, which
need not be blocks, and hides the unshards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage

REGION = torch.ops.higher_order.invoke_subgraph


@dataclass(frozen=True)
class InlineRegions:
    name: ClassVar[str] = "inline_regions"
    stage: ClassVar[Stage] = "traced"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        inline_regions(gm)
        return gm


def inline_regions(gm: GraphModule) -> None:
    """Puts the operations of every region in front of its calls, which go; in the graphs inside of this one too."""
    for graph in (*graphs.nested(gm), gm):
        named = [_inline(graph, call) for call in graph.graph.find_nodes(op="call_function", target=REGION)]
        for name in dict.fromkeys(named):
            delattr(graph, name)
        if named:
            graph.recompile()


def _inline(gm: GraphModule, call: Node) -> str:
    """The name under which the graph had the region, which nobody calls by it now."""
    where: Any = call.args[0]
    graphs.inline_body(gm, call, graphs.region(gm, call), call.args[2:])  # type: ignore[arg-type]
    gm.graph.erase_node(where)
    return str(where.target)
