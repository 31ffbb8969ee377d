"""Rewrite: what backward needs of an input that forward overwrites is taken from a copy of it, made before that.

[Note: Overwritten inputs] A buffer that forward reads and then changes (a moving average, the vectors of spectral norm) has its new
value when backward comes. What backward computes again from it would begin with that: torch's partitioner (2.13) looks only for
buffers that backward changes too, and gradients are wrong without a word. Such a copy is a saved tensor, and small as buffers are.
BatchNorm reads its statistics too, but what it gives in training does not depend on them: they are copied only where it is computed again,
since autograd refuses a saved tensor that was written to, as by a second forward in front of the backward.

This is no pass of the pipeline, which users may choose: it is done wherever a graph is parted.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from autoshard.cost_model.work import op_name
from autoshard.passes import graphs
from autoshard.passes.recompute import SAVE, backward_of, needed

_CLONE = torch.ops.aten.clone.default


def keep_overwritten(joint: GraphModule) -> None:
    """In a joint graph whose writes to its inputs are copies at its end."""
    overwritten = {copy.args[0]: None for copy in graphs.calls(joint, graphs.WRITE)}
    if not overwritten or not (backward := backward_of(joint)):
        return
    wanted = backward | needed(backward)
    for value in overwritten:
        assert isinstance(value, Node)
        readers = [user for user in value.users if user in wanted and not _needs_no_copy(user)]
        if readers:
            copy = _copied(joint.graph, value)
            for reader in readers:
                reader.replace_input_with(value, copy)


def _needs_no_copy(reader: Node) -> bool:
    """Whether what it gives does not depend on the buffer, and backward has no call of it."""
    return "batch_norm" in op_name(reader) and reader.meta.get("recompute") in (None, SAVE)


def _copied(graph: Graph, value: Node) -> Node:
    with graph.inserting_after(next(reversed(graph.find_nodes(op="placeholder")))):
        copy = graph.call_function(_CLONE, (value,))
    copy.meta.update(val=graphs.example(value), recompute=SAVE)
    return copy
