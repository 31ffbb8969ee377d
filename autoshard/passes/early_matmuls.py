"""Rewrite: a matmul stays where it is, though what it is added to comes much later.

Inductor makes one call of a matmul and the sum that it goes into, where the sum is. The gradient of an embedding that is
tied to the head is such a sum: its first part belongs to the start of backward, its second to the end, and with both in one
call the gradient of the logits, mostly the largest tensor there is, would be kept through all of backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage

_ADD, _MM = torch.ops.aten.add.Tensor, torch.ops.aten.mm.default


@dataclass(frozen=True)
class EarlyMatmuls:
    """Sums in three dimensions are not what Inductor looks for; the views around them cost nothing."""

    name: ClassVar[str] = "early_matmuls"
    stage: ClassVar[Stage] = "split"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        at = graphs.positions(gm.graph)
        for add in [add for add in graphs.calls(gm, _ADD) if _waits(add, at)]:
            graphs.inline(gm, add, graphs.traced(add, _in_three_dimensions))
        return gm


def _waits(add: Node, at: dict[Node, int]) -> bool:
    """Whether the sum would take a matmul along to where its other part is."""
    parts = add.args
    if not all(isinstance(p, Node) for p in parts) or add.kwargs:
        return False
    first, second = sorted((p for p in parts if isinstance(p, Node)), key=at.__getitem__)
    return _alone(first) and not _alone(second) and first.meta["val"].shape == second.meta["val"].shape


def _alone(node: Node) -> bool:
    """A matmul that only this sum uses."""
    return node.target is _MM and len(node.users) == 1


def _in_three_dimensions(first: Tensor, second: Tensor) -> Tensor:
    return (first.unsqueeze(0) + second.unsqueeze(0)).squeeze(0)
