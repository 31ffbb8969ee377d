"""Rewrite: the gradient that backward has first, where two processes swap what they have, is sent in parts, and computed in these if a
matmul makes it.

Until it is there the link has nothing to do, and mostly it is a head's, the largest that there is. Its first part is there much sooner.
Of what comes behind it nothing would start sooner: the link is busy. All processes send as many parts, whatever makes the gradient: on
one of them something may have been added to it, that waited there (`no_sync`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from autoshard.errors import PassError
from autoshard.ops.direct import SUM_SWAPPED, SWAP_DIRECT
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage

_aten = torch.ops.aten
_MM, _SLICE = _aten.mm.default, _aten.slice.Tensor
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
        if first is not None and first.target is SWAP_DIRECT and len(graphs.serves(first)) == 1:
            flat: Any = first.args[0]
            if 0 < context.plan.bucket <= graphs.example(flat).nbytes:
                _part(gm, first, flat, self.parts)
                graphs.fill_examples(gm)
        return gm


def _part(gm: GraphModule, swap: Node, flat: Node, count: int) -> None:
    """Puts so many swaps in the place of this one, of as many rows of the gradient each."""
    (wait,) = swap.users
    (total,) = wait.users
    assert total.target is SUM_SWAPPED  # as `logical` has it
    numbers, rows = graphs.example(flat).numel(), next(iter(_shape(total)), 1)
    each = -(-rows // count) * (numbers // rows)
    views = _views_of_matmul(flat)
    computed = views if views and each % graphs.example(views[-1]).shape[1] == 0 else []
    with gm.graph.inserting_before(swap):
        parts = (_rows(flat, computed, at, min(at + each, numbers)) for at in range(0, numbers, each))
        flying = [_like(swap, SWAP_DIRECT, part, swap.args[1]) for part in parts]
    with gm.graph.inserting_before(total):
        brought, sent = [_like(wait, graphs.WAIT, one) for one in flying], [one.args[0] for one in flying]
        found = _like(total, SUM_SWAPPED, brought, sent, *total.args[2:])
    total.replace_all_uses_with(found)
    for node in (total, wait, swap, *computed):
        gm.graph.erase_node(node)


def _shape(total: Node) -> tuple[int, ...]:
    """Of the gradient that is cut out of a sum, as `wire.unpack_shards` has it: the parameter's own."""
    (split,) = total.users
    (item,) = split.users
    (whole,) = item.users
    return tuple(graphs.example(whole).shape)


def _views_of_matmul(flat: Node) -> list[Node]:
    """What is swapped, what that is a view of, and so on to a matmul; none where it is not all that this gives, as it lies, or has other
    readers."""
    if graphs.made_by(flat).target is not _MM:
        return []
    views = [flat]
    while views[-1].target is not _MM:
        views.append(views[-1].args[0])  # type: ignore[arg-type]
    whole = graphs.example(flat).numel() == graphs.example(views[-1]).numel()
    return views if whole and all(len(node.users) == 1 for node in views[1:]) else []


def _rows(flat: Node, computed: list[Node], begin: int, end: int) -> Node:
    """These numbers of what is swapped: cut out of it, or whole rows of the matmul that it is a view of, where they are computed so."""
    if not computed:
        return _like(flat, _SLICE, flat, 0, begin, end)
    matmul = computed[-1]
    (left, right), width = matmul.args, graphs.example(matmul).shape[1]
    part = _like(matmul, _SLICE, left, 0, begin // width, end // width)
    return _like(flat, _aten.view.default, _like(matmul, _MM, part, right), [-1])


def _like(node: Node, op: Any, *args: Any) -> Node:
    """A call of `op`, of the same bucket and module. What else torch remembers of a call is of its own arguments."""
    made = node.graph.call_function(op, args)
    made.meta.update({key: node.meta[key] for key in _KEPT if key in node.meta})
    return made
