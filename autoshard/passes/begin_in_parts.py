"""Rewrite: the gradient that backward has first, where a matmul makes it and two processes swap what they have, is computed and sent in
parts.

Until it is there the link has nothing to do, and mostly it is a head's, the largest that there is. Its first part is there much sooner.
Of what comes behind it nothing would start sooner: the link is busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from autoshard.errors import PassError
from autoshard.ops.direct import SUM_SWAPPED, SWAP_DIRECT
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage

_aten = torch.ops.aten
_MM = _aten.mm.default
_KEPT = ("part", "part_of", "group", "serves", "nn_module_stack", "stack_trace")


@dataclass(frozen=True)
class BeginInParts:
    """parts: how many, where a gradient has as many bytes as the plan lets wait for each other, or more (`Plan.bucket`). Each costs a
    message; of a head of 2 MB at 1 Gbit/s two were measured to spare about half of what four do, and eight no more."""

    parts: int = 4

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise PassError(f"passes: begin_in_parts{{parts={self.parts}}} is not legal; legal: 1 or more")

    name: ClassVar[str] = "begin_in_parts"
    stage: ClassVar[Stage] = "split"
    requires: ClassVar[frozenset[str]] = frozenset({"collectives"})
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = False  # a matmul of fewer rows may add up in another order

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        first = next(filter(graphs.reduces, gm.graph.nodes), None)
        views = [] if first is None else _views_of_matmul(first)
        if first is not None and views and 0 < context.plan.bucket <= graphs.example(views[-1]).nbytes:
            _part(gm, first, views, self.parts)
            graphs.fill_examples(gm)
        return gm


def _views_of_matmul(swap: Node) -> list[Node]:
    """What is swapped, what that is a view of, and so on to a matmul; none where it is not all that this gives, as it lies, or has other
    readers."""
    flat = swap.args[0]
    if swap.target is not SWAP_DIRECT or not isinstance(flat, Node) or graphs.made_by(flat).target is not _MM:
        return []
    views = [flat]
    while views[-1].target is not _MM:
        views += views[-1].all_input_nodes
    whole = graphs.example(flat).numel() == graphs.example(views[-1]).numel()
    return views if whole and all(len(node.users) == 1 for node in views[1:]) else []


def _part(gm: GraphModule, swap: Node, views: list[Node], count: int) -> None:
    """Puts so many matmuls and swaps in the place of these."""
    (flat, *_, matmul), (wait,) = views, swap.users
    (total,) = wait.users
    assert total.target is SUM_SWAPPED  # as `logical` has it
    sent, brought = list[Node](), list[Node]()
    with gm.graph.inserting_before(flat):
        for rows in _in_parts(matmul, count):
            sent.append(_like(flat, _aten.view.default, rows, [-1]))
            brought.append(_like(wait, graphs.WAIT, _like(swap, SWAP_DIRECT, sent[-1], swap.args[1])))
        found = _like(total, SUM_SWAPPED, brought, sent, *total.args[2:])
    total.replace_all_uses_with(found)
    for node in (total, wait, swap, *views):
        gm.graph.erase_node(node)


def _in_parts(matmul: Node, count: int) -> Iterator[Node]:
    """So many of its rows after the other."""
    left, right = matmul.args
    rows = graphs.example(matmul).shape[0]
    each = -(-rows // count)
    for at in range(0, rows, each):
        part = _like(matmul, _aten.slice.Tensor, left, 0, at, min(at + each, rows))
        yield _like(matmul, _MM, part, right)


def _like(node: Node, op: Any, *args: Any) -> Node:
    """A call of `op`, of the same bucket and module. What else torch remembers of a call is of its own arguments."""
    made = node.graph.call_function(op, args)
    made.meta.update({key: node.meta[key] for key in _KEPT if key in node.meta})
    return made
