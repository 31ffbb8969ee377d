"""Rewrite: regions that Dynamo traced once for several calls (torch.compiler.nested_compile_region) stand in the place
of their calls.

Blocks that are alike are outlined later, from the operations: a region says what the user took for alike, which need not be
blocks, and hides the unshards.

[Note: No regions] Nothing here makes blocks regions, though Dynamo goes through a model of 48 in half of the time where they are. torch (2.13)
takes the first's graph for another's where that is frozen, hooked, called in no_grad or autocast, tied, or has another module
where the first had nn.Identity, and does not say so.
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
        calls = graph.graph.find_nodes(op="call_function", target=REGION)
        for call in calls:
            _inline(graph, call)
        for name in _left_behind(graph):
            delattr(graph, name)
        if calls:
            graph.recompile()


def _inline(gm: GraphModule, call: Node) -> None:
    where: Any = call.args[0]
    graphs.inline_body(gm, call, graphs.region(gm, call), call.args[2:])  # type: ignore[arg-type]
    gm.graph.erase_node(where)


def _left_behind(gm: GraphModule) -> list[str]:
    """The graphs that no node names: regions that were inlined, here or, those that are called once, by torch."""
    named = {str(node.target) for node in gm.graph.nodes if node.op in ("get_attr", "call_module")}
    return [name for name, inner in gm.named_children() if isinstance(inner, GraphModule) and name not in named]
