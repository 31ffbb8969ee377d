"""Rewrite: says for each gathered copy whether backward keeps it (ZeRO-1, 2) or gathers it again (ZeRO-3), all of it or from
what a node keeps (hpZ).

[Note: Mixed with copies] All processes must gather the same again. torch's partitioner computes again what is cheaper to compute
than to keep, by sizes, and batches differ: rows that were looked up in a parameter it keeps where they are few, and where they are
many it looks them up again, in a copy that no other process gathers. So where backward reads nothing of a copy itself, what forward
computes of it and of other values is not computed again, whatever its size. What is made of parameters alone is as large
everywhere, and may be; so may what a region of activation checkpointing, or the plan's policy for a block, says is.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

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
            # A whole parameter is an input of both graphs: "recomputing" it is taking it again.
            if degrees.parameter > 1 or degrees.optimizer == 1:
                kept = degrees.parameter < degrees.optimizer and first
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE
            if degrees.parameter > 1 and not first:
                copies.append(node)
        keep_mixed(gm, copies)
        return gm


def keep_mixed(joint: GraphModule, copies: Collection[Node]) -> None:
    """Tags what forward computes of copies that backward would gather again for nothing else. See [Note: Mixed with copies]. An
    inference graph stays as it is."""
    backward = backward_of(joint)
    of_parameters = {*copies, *graphs.calls(joint, graphs.UNSHARD)}
    touched = {copy for copy in copies if not _reads(backward, copy)}
    for node in joint.graph.nodes if backward else ():
        given = {source for source in node.all_input_nodes if isinstance(source.meta.get("val"), (Tensor, tuple, list))}
        if node.op != "call_function" or node in backward or node in of_parameters or not given:
            continue
        if given <= of_parameters:
            of_parameters.add(node)
        if given & touched:
            if node in of_parameters or _is_same(node) or node.meta.get("recompute") in _AGAIN:
                touched.add(node)
            else:
                for result in _results(node):
                    result.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _results(node: Node) -> Collection[Node]:
    """The tensors that a node gives, which can be saved; a list of several cannot."""
    return [node] if isinstance(node.meta["val"], Tensor) else node.users


def _reads(backward: Collection[Node], copy: Node) -> bool:
    """Whether backward reads a copy, or a view of it."""
    return any(user in backward or _is_same(user) and _reads(backward, user) for user in copy.users)


def _is_same(node: Node) -> bool:
    """Whether a node gives a view of what it is given, or one of several."""
    return node.target is operator.getitem or torch_internals.is_view(node.target)
