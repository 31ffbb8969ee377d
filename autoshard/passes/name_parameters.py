"""Rewrite: writes each parameter's name into its `unshard`, so that later passes can look it up in the plan.

The trace leaves the name empty: with it, blocks of one class could not share Dynamo's guards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from autoshard import torch_internals
from autoshard.errors import PassError, UnsupportedError
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage


@dataclass(frozen=True)
class NameParameters:
    name: ClassVar[str] = "name_parameters"
    stage: ClassVar[Stage] = "traced"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset({"names"})
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        inputs = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        refuse_nested(gm)
        written = graphs.written(gm)
        for node in graphs.calls(gm, graphs.UNSHARD):
            if written(node):
                raise _refused_write(node)
            source = _source(node)
            if source not in inputs or inputs[source] not in context.parameters:
                raise PassError(f"name_parameters: {node.format_node()} does not unshard a graph input")
            node.args = (*node.args[:3], context.parameters[inputs[source]])
        for node in graphs.calls(gm, graphs.LOW_RANK):
            node.update_arg(4, node.args[0].args[3])  # type: ignore[union-attr]
        if not context.plan.leaves_alone:
            refuse_direct_uses({node: context.parameters[i] for node, i in inputs.items() if i in context.parameters})
        return gm


def refuse_nested(gm: GraphModule) -> None:
    """Of a graph: `unshard` inside of graphs that it calls."""
    for inner in graphs.nested(gm):
        for node in graphs.calls(inner, graphs.UNSHARD)[:1]:
            raise UnsupportedError(
                f"a region of its own uses parameters of {torch_internals.module_path(node) or 'the model'!r}: of higher-order "
                "operators only torch.utils.checkpoint is supported yet, with the pass hoist_unshards"
            )


def refuse_direct_uses(parameters: dict[Node, str]) -> None:
    """Of inputs that are parameters, with their names: the gradient of a use without `unshard` would be of rows, and not reduced."""
    for node, name in parameters.items():
        if not all(graphs.leads_to(user, graphs.UNSHARD) for user in node.users):
            raise UnsupportedError(
                f"forward uses parameter {name!r} other than through its module (by model.parameters(), or in torch.func.functional_call, say), "
                "which is not supported; a penalty on weights belongs into the loop or the optimizer's weight_decay, an average of them behind "
                "its step"
            )


def _refused_write(unshard: Node) -> UnsupportedError:
    return UnsupportedError(
        f"forward writes to {unshard.args[0]} in place (an embedding's max_norm, say); "
        "on a gathered copy that write would be lost"
    )


def _source(unshard: Node) -> Node:
    """The graph input whose rows these are, through to_local and detach."""
    node = unshard.args[0]
    while isinstance(node, Node) and graphs.callee(node).endswith(("to_local", "detach")):
        node = node.args[0]
    assert isinstance(node, Node)
    return node
