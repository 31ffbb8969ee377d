"""Rewrite: takes unshards out of the graph that AOTAutograd traces; `put_unshards` puts them into the one that it gives.

[Note: Whole inputs] Differentiating `unshard` needs no trace: its gradient is `reduce_grad`. But it is an operator of ours,
at which a trace of forward and backward takes milliseconds, and a model has one a parameter. So AOTAutograd is given whole
parameters, of which the graph takes copies (a result of the model that is a parameter is then not its input's memory, as
what `unshard` gives is not). What it traced gets rows as inputs again, unshards where the copies are, and a `reduce_grad`
behind each gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from autoshard.ops.layout import Layout
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage
from autoshard.torch_internals import Tracing, gradient_places, input_position

EXPAND = torch.ops.aten.expand.default
COPY = torch.ops.aten.clone.default
WHOLE = "autoshard_whole"  # in the meta of an input that is to be whole: its value, and what `unshard` takes besides rows
_STANDS = "autoshard_unshard"  # among what torch keeps of a copy's meta in a trace
_KEPT = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "partitioner_tag", "custom")


@dataclass(frozen=True)
class TakeWhole:
    name: ClassVar[str] = "take_whole"
    stage: ClassVar[Stage] = "traced"
    requires: ClassVar[frozenset[str]] = frozenset({"merged"})
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        for node in gm.graph.find_nodes(op="placeholder"):
            if node.users and all(graphs.is_call(user, graphs.UNSHARD) for user in node.users):
                _take(node)
        return gm


def _take(node: Node) -> None:
    """The input will be what its unshards give, trained where the rows are."""
    unshards = list(node.users)
    value = unshards[0].meta["example_value"].detach().requires_grad_(node.meta["example_value"].requires_grad)
    node.meta[WHOLE] = value, unshards[0].args[1:]
    for unshard in unshards:
        unshard.target, unshard.args = COPY, (node,)
        unshard.meta["custom"] = {**unshard.meta.get("custom", {}), _STANDS: True}


def stands_for_unshard(node: Node) -> bool:
    """Whether a node of what AOTAutograd traced is one of these copies."""
    return node.target is COPY and _STANDS in node.meta.get("custom", {})


@dataclass(frozen=True)
class Whole:
    """What a whole input stands for: rows (fake), and what `unshard` takes besides. value: the input (fake)."""

    rows: torch.Tensor
    value: torch.Tensor
    arguments: tuple[Any, ...]

    @property
    def sharded(self) -> bool:
        """False if every process has all rows."""
        return Layout.parse(self.arguments[1]).sharded

    def reduction(self) -> tuple[Any, ...]:
        """What `reduce_grad` takes besides the gradient."""
        _, layout, name = self.arguments
        return list(self.rows.shape), self.rows.dtype, layout, name


def wholes(gm: GraphModule, inputs: Sequence[Any]) -> dict[int, Whole]:
    """The graph's whole inputs, by position. inputs: rows in their places."""
    found = {i: n.meta[WHOLE] for i, n in enumerate(gm.graph.find_nodes(op="placeholder")) if WHOLE in n.meta}
    like = Tracing.here().like
    return {i: Whole(like(inputs[i]), like(value), arguments) for i, (value, arguments) in found.items()}


def put_unshards(gm: GraphModule, wholes: dict[int, Whole]) -> None:
    """Makes of a joint (or inference) graph of whole inputs one whose inputs are rows, and gradients too."""
    gradients, at = gradient_places(gm.graph), graphs.positions(gm.graph)
    reduced: dict[int, Node] = {}
    for place in gm.graph.find_nodes(op="placeholder"):
        position = input_position(place)
        if position not in wholes:
            continue
        told = _put_unshard(place, wholes[position], at)
        gradient = _results(gm)[gradients[position]] if position in gradients else None
        if gradient is not None:
            reduced[gradients[position]] = _reduce(gm, gradient, wholes[position], told)
    gm.graph.output_node().args = (tuple(reduced.get(i, result) for i, result in enumerate(_results(gm))),)


def _put_unshard(place: Node, whole: Whole, at: dict[Node, int]) -> dict[str, Any]:
    """For all readers of the input, of which Inductor may have taken copies out; where in the model the first one is."""
    users, value = list(place.users), place.meta["val"]
    place.meta["val"] = whole.rows.detach()
    if not users:
        return {}
    first = min(users, key=at.__getitem__)
    told = {key: first.meta[key] for key in _KEPT if key in first.meta}
    with place.graph.inserting_before(first):
        unshard = place.graph.call_function(graphs.UNSHARD, (place, *whole.arguments))
    unshard.meta.update(told, val=value)
    for user in users:
        if graphs.is_call(user, COPY):
            user.replace_all_uses_with(unshard)
            place.graph.erase_node(user)
        else:
            user.replace_input_with(place, unshard)
    return told


def _results(gm: GraphModule) -> Sequence[Node | None]:
    return gm.graph.output_node().args[0]  # type: ignore[return-value]


def _reduce(gm: GraphModule, gradient: Node, whole: Whole, told: dict[str, Any]) -> Node:
    """Rows of a gradient, right behind it."""
    behind = gm.graph.find_nodes(op="placeholder")[-1] if gradient.op == "placeholder" else gradient
    with gm.graph.inserting_after(behind):
        reduced = gm.graph.call_function(graphs.REDUCE_GRAD, (gradient, *whole.reduction()))
    reduced.meta.update(told, val=whole.rows.detach(), partitioner_tag="is_backward")
    if not all(isinstance(size, int) for size in gradient.meta["val"].shape):
        reduced.replace_input_with(gradient, _of_known_sizes(gradient, whole.value, reduced))
    return reduced


def _of_known_sizes(gradient: Node, parameter: torch.Tensor, reader: Node) -> Node:
    """Its sizes are the parameter's, though a trace whose inputs may be of any size can have them as expressions of these: of a linear layer behind
    what flattens images."""
    with gradient.graph.inserting_before(reader):
        known = gradient.graph.call_function(EXPAND, (gradient, list(parameter.shape)))
    known.meta.update(reader.meta, val=gradient.meta["val"].expand(parameter.shape))
    return known
