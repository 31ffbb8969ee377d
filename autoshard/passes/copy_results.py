"""Rewrite: what a model gives of a parameter is a copy of it.

[Note: Parameters as results] A forward may give `self.weight.clone()`, which a loop compares with what a step makes of the weight. To
autograd's trace the whole parameter is memory of its own, so Inductor takes that clone out as one too many; but what `unshard` gives
of what every process has whole is the parameter itself, and the result would change with the next step. So each result has a copy,
of a view too.

This is no pass of the pipeline, which users may choose: it is done to each graph that has unshards.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autoshard import torch_internals
from autoshard.ops.layout import Layout
from autoshard.passes import graphs

_CLONE = torch.ops.aten.clone.default


def copy_results(gm: GraphModule) -> None:
    """In a joint graph, or an inference graph."""
    output = gm.graph.output_node()
    output.args = map_arg(output.args, lambda result: _copied(result) if _lies_in_whole(result) else result)


def _lies_in_whole(node: Node) -> bool:
    """Whether it is a parameter that every process has whole, or lies in that."""
    if graphs.is_call(node, graphs.UNSHARD):
        return not Layout.parse(str(node.args[2])).sharded
    same = node.target is operator.getitem or torch_internals.is_view(node.target)
    return (same or graphs.is_call(node, *graphs.IDENTITIES)) and isinstance(node.args[0], Node) and _lies_in_whole(node.args[0])


def _copied(node: Node) -> Node:
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(_CLONE, (node,))
    copy.meta.update(node.meta)
    return copy
