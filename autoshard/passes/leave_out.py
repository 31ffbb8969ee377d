"""Rewrite: a backward without the gradients of results that nobody differentiated.

[Note: Results that nobody uses] A model may give logits beside its loss, a decoder its keys and values. A loop that differentiates
only the loss gives the others no gradient. Where it runs without a compiler nothing is computed for them; of a compiled graph, autograd
makes zeros of their size for its backward, which adds them to the gradients that there are. For logits that is as much memory as they
take themselves, at the very peak, and gigabytes for a large vocabulary.

So a compiled graph tells autograd to make none (`torch_internals.leave_undefined`), and its backward is compiled when it is first
called, for the gradients that there are then (`autoshard.backwards`): a sum with zeros is its other summand, a view of zeros or a cast
nothing at all. Anything else that takes zeros is given some: a matmul may need a gather, and what is communicated must not depend on what
one process's loop differentiates.

This is no pass of the pipeline, which users may choose: a program for gradients that are not there has no other form.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autoshard import torch_internals
from autoshard.passes import graphs

_ADD = torch.ops.aten.add.Tensor
_FULL, _PERMUTE = torch.ops.aten.full.default, torch.ops.aten.permute.default
# Zeros remain zeros in these; so they do in views.
_KEEPS = (
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.slice_backward.default,
    torch.ops.aten.select_backward.default,
)


def leave_out(gm: GraphModule, tangents: Sequence[Node]) -> None:
    """Takes these inputs out of a joint or backward graph, where they are zero."""
    zeros = dict.fromkeys(tangents)
    for node in list(gm.graph.nodes):
        given = [n for n in node.all_input_nodes if n in zeros]
        if given and _stays_zero(node, zeros):
            zeros[node] = None
        elif given and (other := _other_summand(node, zeros)) is not None:
            node.replace_all_uses_with(other)
            gm.graph.erase_node(node)
        else:
            for zero in given:
                node.replace_input_with(zero, _filled(zero, node))
    for zero in reversed(zeros):
        gm.graph.erase_node(zero)
    graphs.fill_examples(gm)  # of sizes
    gm.recompile()


def is_added(tangent: Node) -> bool:
    """Whether all that a graph does with it is to add it to other gradients."""
    found = graphs.reached([tangent], lambda node: [user for user in node.users if _stays_zero(user, {node})])
    ends = {user for node in found for user in node.users} - found
    return all(_other_summand(end, found) is not None for end in ends)


def _stays_zero(node: Node, zeros: Collection[Node]) -> bool:
    if node.op != "call_function" or not all(n in zeros for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor)):
        return False
    return node.target in (_ADD, *_KEEPS) or torch_internals.is_view(node.target)


def _other_summand(node: Node, zeros: Collection[Node]) -> Node | None:
    """What a sum with zeros is: its other summand, if that is like it."""
    if node.target is not _ADD:
        return None
    first, second = node.args
    other = second if first in zeros else first
    if other in zeros or not isinstance(other, Node) or (other is second and node.kwargs.get("alpha", 1) != 1):
        return None
    return other if _alike(graphs.example(other), graphs.example(node)) else None


def _alike(some: Tensor, others: Tensor) -> bool:
    return (some.shape, some.dtype) == (others.shape, others.dtype)


def _filled(zero: Node, user: Node) -> Node:
    """Zeros in the place of an input of `user`, which lie as it does."""
    like, graph = graphs.example(zero), user.graph
    order = torch_internals.order_of_strides(like)
    meta = {key: value for key, value in user.meta.items() if key != "tensor_meta"}
    with graph.inserting_before(user):
        sizes = torch_internals.sizes_in(graph, [like.shape[d] for d in order])
        made = graph.call_function(_FULL, (sizes, 0), {"dtype": like.dtype, "device": like.device})
        made.meta = meta | {"val": like.new_zeros([like.shape[d] for d in order])}
        if order == sorted(order):
            return made
        places = [order.index(d) for d in range(like.dim())]
        turned = graph.call_function(_PERMUTE, (made, places))
    turned.meta = meta | {"val": graphs.example(made).permute(places)}
    return turned
