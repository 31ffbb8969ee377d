"""Rewrite: a parameter that is used several times (tied, shared) is unsharded once, so its gradient is reduced once.

Done before autograd, which then sums the gradients of all uses in front of the one `reduce_grad`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from autoshard import torch_internals
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage


@dataclass(frozen=True)
class MergeUnshards:
    name: ClassVar[str] = "merge_unshards"
    stage: ClassVar[Stage] = "traced"
    requires: ClassVar[frozenset[str]] = frozenset({"names"})
    provides: ClassVar[frozenset[str]] = frozenset({"merged"})
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        first: dict[tuple[object, ...], Node] = {}
        grad_enabled: object = torch.is_grad_enabled()  # as it is where the graph begins
        inference = 0
        for node in list(gm.graph.nodes):
            inference += graphs.entered(node, "inference_mode")
            if node.target is torch_internals.SET_GRAD_ENABLED:
                grad_enabled = node.args[0]
            elif graphs.is_call(node, graphs.UNSHARD):
                source = node.args[0]
                detached = isinstance(source, Node) and source.target == "detach"
                _merge(gm, node, first, (node.args[3], grad_enabled, inference, detached))
            elif graphs.is_call(node, graphs.ADD_HELD):
                _merge(gm, node, first, ("held", node.args[0]))
            elif graphs.is_call(node, graphs.LOW_RANK):
                _merge(gm, node, first, ("low rank", node.args[0]))
        return gm


def _merge(
    gm: GraphModule, node: Node, first: dict[tuple[object, ...], Node], key: tuple[object, ...]
) -> None:
    """The first call with this key stands for all of them.

    Uses under no_grad, or in inference mode, have another key than those with gradients, since the first one's mode holds for
    the node; so have uses whose gradient is held. What was held is added once, however often a parameter is used.
    """
    kept = first.setdefault(key, node)
    if kept is not node:
        node.replace_all_uses_with(kept)
        _erase_with_source(gm, node)


def _erase_with_source(gm: GraphModule, node: Node) -> None:
    """Erases the call and the to_local that only it used. Not by dead code elimination: a graph before
    functionalization has in-place ops whose results nobody reads (`num_batches_tracked.add_(1)`)."""
    source = node.args[0]
    gm.graph.erase_node(node)
    while isinstance(source, Node) and source.op != "placeholder" and not source.users:
        node, source = source, source.args[0]
        gm.graph.erase_node(node)
