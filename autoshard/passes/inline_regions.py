"""Rewrite: regions that Dynamo traced once for several calls (torch.compiler.nested_compile_region) stand in the place
of their calls.

Blocks that are alike are outlined later, from the operations: a region says what the user or Dynamo took for alike, which
need not be blocks, and hides the unshards.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

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
    """Puts the operations of every region, and of the regions in it, in front of its calls, which go."""
    calls = gm.graph.find_nodes(op="call_function", target=REGION)
    bodies = {call.args[0].target: graphs.body(gm, call.args[0].target) for call in calls}
    for body in {id(b): b for b in bodies.values()}.values():
        inline_regions(body)
    for call in calls:
        _inline(gm, call, bodies[call.args[0].target])
    for name in bodies:
        delattr(gm, str(name))


def _inline(gm: GraphModule, call: Node, body: GraphModule) -> None:
    names = _submodules(gm, body, call.name)
    copies: dict[Node, Node] = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[2:]))  # type: ignore[arg-type]
    given = set(copies.values())
    with gm.graph.inserting_before(call):
        results = gm.graph.graph_copy(body.graph, copies)
    for copy in set(copies.values()) - given:
        copy.meta["nn_module_stack"] = call.meta.get("nn_module_stack", {})  # that of the region is its first call's
        if copy.op in ("get_attr", "call_module"):
            copy.target = names[str(copy.target)]
    _hand_out(gm, call, results)


def _submodules(gm: GraphModule, body: GraphModule, prefix: str) -> dict[str, str]:
    """What the body has by name, made the graph's own; the new names by the old."""
    names = {}
    for name, value in (*body.named_children(), *body.named_parameters(recurse=False), *body.named_buffers(recurse=False)):
        names[name] = f"{prefix}_{name}"
        setattr(gm, names[name], value)
    return names


def _hand_out(gm: GraphModule, call: Node, results: object) -> None:
    """Gives each user of the call, an item of its results, what was put in the place."""
    where = call.args[0]
    for item in list(call.users):
        assert item.target is operator.getitem and isinstance(results, (tuple, list))
        item.replace_all_uses_with(results[item.args[1]])  # type: ignore[index]
        gm.graph.erase_node(item)
    gm.graph.erase_node(call)
    assert isinstance(where, Node)
    gm.graph.erase_node(where)
