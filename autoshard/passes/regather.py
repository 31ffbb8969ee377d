"""Rewrite: says for each gathered copy whether backward keeps it (ZeRO-1, 2) or gathers it again (ZeRO-3), all of it or from
what a node keeps (hpZ).

[Note: Mixed with copies] All processes must gather the same again. torch's partitioner computes again what is cheaper to compute
than to keep, by sizes, and batches differ: rows that were looked up in a parameter it keeps where they are few, and where they are
many it looks them up again, in a copy that no other process gathers. So where backward reads nothing of a copy itself, what forward
computes of it and of other values is not computed again, whatever its size. What is made of parameters and buffers alone is as large
everywhere, and may be; so may what a region of activation checkpointing, or the plan's policy for a block, says is. What is made of a
copy and these element by element, such as a masked or a cast weight, always is: it would be kept whole in the copy's place.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from autoshard import torch_internals
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage
from autoshard.passes.recompute import backward_of

_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass(frozen=True)
class Regather:
    name: ClassVar[str] = "regather"
    stage: ClassVar[Stage] = "joint"
    requires: ClassVar[frozenset[str]] = frozenset({"names"})
    provides: ClassVar[frozenset[str]] = frozenset({"regather"})
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        copies = []
        for node in graphs.calls(gm, graphs.UNSHARD):
            degrees = context.plan.group_of[str(node.args[3])].degrees
            first = any(graphs.is_call(u, graphs.UNSHARD) for u in node.users)
            # A whole parameter is an input of both graphs: "recomputing" it is taking it again. Of others nobody but the plan decides:
            # torch's partitioner, told to spare memory, would by sizes.
            kept = degrees.parameter < degrees.optimizer and (first or degrees.parameter == 1)
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE
            if degrees.parameter > 1 and not first:
                copies.append(node)
        keep_mixed(gm, copies, graphs.inputs_at(gm, {*context.parameters, *context.buffers}))
        return gm


def keep_mixed(joint: GraphModule, copies: Collection[Node], fixed: Collection[Node]) -> None:
    """Tags what forward computes of copies that backward would gather again for nothing else. See [Note: Mixed with copies]. An
    inference graph stays as it is. fixed: inputs that are parameters or buffers."""
    backward = backward_of(joint) if copies else set()
    fixed = {*fixed, *copies, *graphs.calls(joint, graphs.UNSHARD)}
    touched, dropped = {copy for copy in copies if not _reads(backward, copy)}, {*copies}
    for node in joint.graph.nodes if backward else ():
        given = {source for source in node.all_input_nodes if isinstance(source.meta.get("val"), (Tensor, tuple, list))}
        if node.op != "call_function" or node in backward or node in fixed or not given:
            continue
        if given <= fixed:
            fixed.add(node)
        if node in fixed and given & dropped and _is_elementwise(node):
            dropped.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        if given & touched:
            if node in fixed or _is_same(node) or node.meta.get("recompute") in _AGAIN:
                touched.add(node)
            else:
                for result in _results(node):
                    result.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_elementwise(node: Node) -> bool:
    """Whether a node gives a view, or computes each number from one of each input, the same each time."""
    if torch_internals.is_view(node.target) or node.target in graphs.CASTS:
        return True
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _results(node: Node) -> Collection[Node]:
    """The tensors that a node gives, which can be saved; a list of several cannot."""
    return [node] if isinstance(node.meta.get("val"), Tensor) else node.users


def _reads(backward: Collection[Node], copy: Node) -> bool:
    """Whether backward reads a copy, or a view of it."""
    return any(user in backward or _is_same(user) and _reads(backward, user) for user in copy.users)


def _is_same(node: Node) -> bool:
    """Whether a node gives a view of what it is given, or one of several."""
    return node.target is operator.getitem or torch_internals.is_view(node.target)
