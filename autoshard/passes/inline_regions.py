"""Rewrite: regions that Dynamo traced once for several calls (torch.compiler.nested_compile_region) stand in the place
of their calls.

Blocks that are alike are outlined later, from the operations: a region says what the user or Dynamo took for alike, which
need not be blocks, and hides the unshards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule

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
    """Puts the operations of every region, and of the regions in it, in front of its calls, which go."""
    calls = gm.graph.find_nodes(op="call_function", target=REGION)
    bodies = [graphs.region(gm, call) for call in calls]
    for body in {id(b): b for b in bodies}.values():
        inline_regions(body)
    for call, body in zip(calls, bodies):
        where: Any = call.args[0]
        graphs.inline_body(gm, call, body, call.args[2:])  # type: ignore[arg-type]
        gm.graph.erase_node(where)
    if calls:
        gm.delete_all_unused_submodules()  # one that is called once torch inlines itself, and leaves it behind
