"""Rewrite: buffers that a step changes (BatchNorm's statistics) become rank 0's on every process.

As DDP, but at the change itself instead of before the next forward, so state_dict, evaluation and a
checkpoint see the same values on every process. One message for each dtype.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage
from autoshard.torch_internals import written_position


@dataclass(frozen=True)
class SyncBuffers:
    name: ClassVar[str] = "sync_buffers"
    stage: ClassVar[Stage] = "joint"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset({"buffers"})
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        if context.plan.buffers != "broadcast" or context.plan.leaves_alone:
            return gm
        for copies in _mutations(gm, context).values():
            _replicate(gm, copies, context)
        return gm


def _mutations(gm: GraphModule, context: Context) -> dict[torch.dtype, list[Node]]:
    """The in-place writes to buffers, by dtype."""
    found = defaultdict(list)
    for node in graphs.calls(gm, graphs.WRITE):
        target = node.args[0]
        if isinstance(target, Node) and written_position(target) in context.buffers:
            found[graphs.example(target).dtype].append(node)
    return found


def _replicate(gm: GraphModule, copies: list[Node], context: Context) -> None:
    values = [copy.args[1] for copy in copies]
    with gm.graph.inserting_before(copies[-1]):
        bucket = gm.graph.call_function(graphs.REPLICATE_BUFFERS, (values, context.everyone))
        bucket.meta["val"] = [graphs.example(c.args[0]) for c in copies]  # type: ignore[arg-type]
        bucket.meta["serves"] = tuple(context.buffers[written_position(c.args[0])] for c in copies)  # type: ignore[index,arg-type]
        for i, copy in enumerate(copies):
            item = gm.graph.call_function(operator.getitem, (bucket, i))
            item.meta["val"] = bucket.meta["val"][i]
            copy.update_arg(1, item)
    for copy in copies:
        copies[-1].append(copy)
