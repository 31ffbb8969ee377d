"""Rewrite: each `unshard_parameter` becomes `unshard` of this process's rows. It is no pass that one could leave out: no other
knows a parameter before it."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from autoshard.ops.unshard_parameter import unshard_parameter
from autoshard.passes import graphs


def expand_unshards(gm: GraphModule) -> None:
    """Done in place to a graph of Dynamo's and to those inside of it."""
    for graph in (*graphs.nested(gm), gm):
        found = graph.graph.find_nodes(op="call_function", target=unshard_parameter)
        for node in found:
            _expand(graph, node)
        if found:
            graph.recompile()


def _expand(gm: GraphModule, node: Node) -> None:
    parameter, layout = node.args
    assert isinstance(parameter, Node)
    value: torch.Tensor = parameter.meta["example_value"]
    with gm.graph.inserting_before(node):
        rows = _rows(gm, parameter, value, node) if isinstance(value, DTensor) else parameter
    node.target, node.args = graphs.UNSHARD, (rows, list(value.shape), layout, "")


def _rows(gm: GraphModule, parameter: Node, value: DTensor, like: Node) -> Node:
    rows = gm.graph.call_method("to_local", (parameter,))
    rows.meta.update(like.meta)
    with torch.no_grad():
        rows.meta["example_value"] = value.to_local()
    return rows
