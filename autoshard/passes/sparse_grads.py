"""Rewrite: the gradient of an embedding travels as the rows that were looked up, where the plan says so ([Note: Sparse gradients]).

Every graph asks for such a parameter's mean in this way, also one that has its whole gradient: the other processes cannot know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from autoshard.ops.layout import Layout
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage

EMBEDDING_BACKWARD = torch.ops.aten.embedding_dense_backward.default


@dataclass(frozen=True)
class SparseGrads:
    name: ClassVar[str] = "sparse_grads"
    stage: ClassVar[Stage] = "joint"
    requires: ClassVar[frozenset[str]] = frozenset({"names"})
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        for node in graphs.calls(gm, graphs.REDUCE_GRAD):
            if node.args[4] in context.plan.sparse:
                _by_rows(node)
        return gm


def _by_rows(node: Node) -> None:
    gradient, shape, dtype, text, name = node.args
    assert isinstance(gradient, Node)
    layout, rows, padding = Layout.parse(str(text)), (gradient, None), -1
    if graphs.is_call(gradient, EMBEDDING_BACKWARD) and len(gradient.users) == 1 and not gradient.args[4]:
        rows, padding = gradient.args[:2], gradient.args[3]  # type: ignore[assignment]
    carried: Any = layout.reduce or graphs.example(gradient).dtype
    node.target = graphs.REDUCE_SPARSE
    node.args = (*rows, shape, dtype, name, padding, carried, layout.copies, layout.replicas)
    if not gradient.users:
        node.graph.erase_node(gradient)
