"""Rewrite: moves unshards out of activation-checkpoint regions; a region takes whole parameters as its inputs.

A region says which activations to compute again. Which parameters to gather again is the plan's to say (`regather`),
and a parameter that several regions share is gathered once only if its unshards stand beside each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage

REGION = torch.ops.higher_order.tag_activation_checkpoint


@dataclass(frozen=True)
class HoistUnshards:
    name: ClassVar[str] = "hoist_unshards"
    stage: ClassVar[Stage] = "traced"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        hoist_unshards(gm)
        return gm


def hoist_unshards(gm: GraphModule) -> None:
    """Done to a graph in place. A region inside a region gives to the outer one first."""
    for graph in (*graphs.nested(gm), gm):
        for call in graph.graph.find_nodes(op="call_function", target=REGION):
            body = graphs.region(graph, call)
            _hoist(graph, call, body)
            body.recompile()


def _hoist(gm: GraphModule, call: Node, body: GraphModule) -> None:
    """Copies the body's expressions of parameters in front of the call, and gives it what they yield."""
    inputs, expressions = body.graph.find_nodes(op="placeholder"), _expressions(body)
    outer = dict(zip(inputs, call.args[1:]))
    for node in expressions:
        with gm.graph.inserting_before(call):
            outer[node] = gm.graph.node_copy(node, outer.__getitem__)  # type: ignore[arg-type]
    for node in expressions:
        if any(user not in expressions for user in node.users):
            inputs.append(_as_input(body, node, inputs[-1]))
            outer[inputs[-1]] = outer[node]
    for node in reversed(expressions):
        body.graph.erase_node(node)
    used = [node for node in inputs if node.users]
    for node in set(inputs) - set(used):
        body.graph.erase_node(node)
    call.args = (call.args[0], *(outer[node] for node in used))


def _expressions(body: GraphModule) -> dict[Node, None]:
    """Everything between the region's inputs and the whole parameters that it uses, in graph order."""
    found = set(graphs.calls(body, graphs.UNSHARD, graphs.HOLD, graphs.LOW_RANK, graphs.ADD_HELD))
    todo = list(found)
    while todo:
        sources = {n for n in todo.pop().all_input_nodes if n.op != "placeholder"} - found
        found |= sources
        todo.extend(sources)
    return dict.fromkeys(node for node in body.graph.nodes if node in found)


def _as_input(body: GraphModule, node: Node, last: Node) -> Node:
    """A new input of the region, after its `last` one, that takes the node's place."""
    with body.graph.inserting_after(last):
        given = body.graph.placeholder(f"whole_{node.name}")
    given.meta.update(node.meta)
    node.replace_all_uses_with(given)
    return given
