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

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autoshard import torch_internals
from autoshard.passes import graphs

_ADD, _CLONE = torch.ops.aten.add.Tensor, torch.ops.aten.clone.default
_FULL, _PERMUTE, _EXPAND = torch.ops.aten.full.default, torch.ops.aten.permute.default, torch.ops.aten.expand.default
# Zeros remain zeros in these; so they do in views.
_KEEPS = (
    _CLONE,
    torch.ops.aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.slice_backward.default,
    torch.ops.aten.select_backward.default,
)


def leave_out(gm: GraphModule, absent: Sequence[Node]) -> None:
    """Takes these inputs, tangents, out of a joint or backward graph, where they are zero."""
    zeros = dict.fromkeys(absent)
    for node in list(gm.graph.nodes):
        given = [n for n in node.all_input_nodes if n in zeros]
        if given and _stays_zero(node, zeros):
            zeros[node] = None
        elif given and (other := _other_summand(node, zeros)) is not None:
            _put(node, other)
        elif given and graphs.is_call(node, graphs.BLOCK_BACKWARD):
            saved, tangents, *more = node.args
            node.args = (saved, [None if n in zeros else n for n in tangents], *more)
        else:
            for zero in given:
                node.replace_input_with(zero, _filled(zero, node))
    for zero in reversed(zeros):
        gm.graph.erase_node(zero)
    graphs.fill_examples(gm)  # of sizes
    gm.recompile()


def without(gm: GraphModule, absent: Sequence[int]) -> GraphModule:
    """A copy of a backward graph, which lacks these of its inputs."""
    copied = graphs.duplicate(gm)
    inputs = copied.graph.find_nodes(op="placeholder")
    leave_out(copied, [inputs[i] for i in absent])
    return copied


def is_added(tangent: Node, inside: Callable[[Node], GraphModule]) -> bool:
    """Whether all that a graph does with it is to add it to other gradients. inside: the graph of a block's backward, of its call."""
    found = graphs.reached([tangent], lambda node: [user for user in node.users if _stays_zero(user, {node})])
    ends = {user for node in found for user in node.users} - found
    return all(_is_added_in(end, found, inside) for end in ends)


def _is_added_in(node: Node, zeros: Collection[Node], inside: Callable[[Node], GraphModule]) -> bool:
    if not graphs.is_call(node, graphs.BLOCK_BACKWARD):
        return _other_summand(node, zeros) is not None
    inputs = inside(node).graph.find_nodes(op="placeholder")
    given = graphs.given_to_backward(node)
    return all(is_added(inner, inside) for inner, outer in zip(inputs, given, strict=True) if outer in zeros)


def _stays_zero(node: Node, zeros: Collection[Node]) -> bool:
    """True of one tensor that is zero if these are."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return False
    if not all(n in zeros for n in node.all_input_nodes if not isinstance(n.meta.get("val"), torch.SymInt)):
        return False
    return node.target in (_ADD, *_KEEPS) or torch_internals.is_view(node.target)


def _other_summand(node: Node, zeros: Collection[Node]) -> Node | None:
    """What a sum with zeros is: its other summand, if that lies like it or a copy does."""
    if node.target is not _ADD:
        return None
    first, second = node.args
    other = second if first in zeros else first
    if other in zeros or not isinstance(other, Node) or (other is second and node.kwargs.get("alpha", 1) != 1):
        return None
    made, found = graphs.example(node), graphs.example(other)
    if (str(found.shape), found.dtype) != (str(made.shape), made.dtype):
        return None
    return other if _layout(found) == _layout(made) or _layout(made) == _layout(made.new_empty(made.shape)) else None


def _layout(tensor: Tensor) -> list[tuple[str, str]]:
    """Sizes and strides, as text: to compare open ones would be to assume something of them."""
    return [(str(size), str(stride)) for size, stride in zip(tensor.shape, tensor.stride()) if str(size) != "1"]


def _put(total: Node, other: Node) -> None:
    """Of a sum, its other summand; a copy where that lies in another way, since a view of the sum may need it as it lies."""
    if _layout(graphs.example(other)) != _layout(graphs.example(total)):
        with total.graph.inserting_before(total):
            laid_out = total.graph.call_function(_CLONE, (other,), {"memory_format": torch.contiguous_format})
        laid_out.meta.update(total.meta)
        other = laid_out
    total.replace_all_uses_with(other)
    total.graph.erase_node(total)


def _filled(zero: Node, user: Node) -> Node:
    """Zeros in the place of an input of `user`, which lie as it does: how what that gives lies may depend on it."""
    like, graph = graphs.example(zero), user.graph
    order = torch_internals.order_of_strides(like)
    places = [order.index(d) for d in range(like.dim())]
    shape = [1 if str(stride) == "0" else size for size, stride in zip(like.shape, like.stride())]
    with graph.inserting_before(user):
        sizes, whole = torch_internals.sizes_in(graph, [shape[d] for d in order]), torch_internals.sizes_in(graph, like.shape)
        made = graph.call_function(_FULL, (sizes, 0), {"dtype": like.dtype, "device": like.device})
        turned = graph.call_function(_PERMUTE, (made, places))
        spread = graph.call_function(_EXPAND, (turned, whole))
    for node in (made, turned, spread):
        node.meta = {key: value for key, value in user.meta.items() if key not in ("val", "tensor_meta")}
    made.meta["val"] = like.new_zeros([shape[d] for d in order])
    turned.meta["val"] = made.meta["val"].permute(places)
    spread.meta["val"] = turned.meta["val"].expand(like.shape)
    return _simplest(made, turned, spread)


def _simplest(made: Node, *views: Node) -> Node:
    """The last of these; views that change nothing are taken out."""
    for view in views:
        if str(graphs.example(view).stride()) == str(graphs.example(made).stride()):
            view.replace_all_uses_with(made)
            view.graph.erase_node(view)
        else:
            made = view
    return made
