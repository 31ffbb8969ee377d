"""Rewrite: where the plan has nodes, an unshard becomes two, between nodes and inside of them, and a reduction two the other way.

What lies between is padded: the chunks of all processes that have one's place on their nodes. The sum of a node's gradients is
rounded to what they travel in. At stage 3 backward makes what lies between again, or finds it saved (hpZ): the pass that tags
gathered copies sees two of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from autoshard.ops.layout import Layout
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage


@dataclass(frozen=True)
class TwoLevels:
    name: ClassVar[str] = "two_levels"
    stage: ClassVar[Stage] = "joint"
    requires: ClassVar[frozenset[str]] = frozenset({"names"})
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        if context.plan.node:
            for node in graphs.calls(gm, graphs.UNSHARD):
                _gather_twice(node)
            for node in graphs.calls(gm, graphs.REDUCE_GRAD):
                _reduce_twice(node)
        return gm


def _gather_twice(node: Node) -> None:
    rows, shape, text, name = node.args
    layout = Layout.parse(str(text))
    if layout.node:
        across, inside = layout.levels()
        between = inside.with_chunk(tuple(shape))  # type: ignore[arg-type]
        first = _before(node, (rows, list(between), str(across), name), graphs.example(node).new_empty(between))
        node.args = (first, shape, str(inside), name)


def _reduce_twice(node: Node) -> None:
    gradient, shape, dtype, text, name = node.args
    layout = Layout.parse(str(text))
    if layout.node:
        across, inside = layout.levels()
        whole = graphs.example(gradient)  # type: ignore[arg-type]
        between, summed = inside.with_chunk(tuple(whole.shape)), layout.reduce or whole.dtype
        first = _before(node, (gradient, list(between), summed, str(inside), name), whole.new_empty(between, dtype=summed))
        node.args = (first, shape, dtype, str(across), name)


def _before(node: Node, args: tuple[Any, ...], value: Any) -> Node:
    """A call of the same operator in front of this one."""
    with node.graph.inserting_before(node):
        first = node.graph.call_function(node.target, args)  # type: ignore[arg-type]
    first.meta.update(node.meta, val=value)
    return first
