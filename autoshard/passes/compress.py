"""Rewrite: gradients travel in fewer bits, where the plan says so, and are summed in those that they would have travelled in.

The transport would sum in the bits that travel. So each process is sent its part of all gradients, and sums it itself; what is
whole on several processes is then sent round, rounded once more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from autoshard.dtypes import dtype_named
from autoshard.ops.layout import Layout
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage


@dataclass(frozen=True)
class Compress:
    name: ClassVar[str] = "compress"
    stage: ClassVar[Stage] = "split"
    requires: ClassVar[frozenset[str]] = frozenset({"names"})
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = False

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        if context.plan.compression:
            for op, at in ((graphs.REDUCE_GRAD, 3), (graphs.REDUCE_BUCKET, 5)):
                for node in graphs.calls(gm, op):
                    self._compress(node, at, context.plan.compression)
        return gm

    def _compress(self, node: Node, at: int, name: str) -> None:
        layout, given = Layout.parse(str(node.args[at])), node.args[0]
        first: Any = given[0] if isinstance(given, (list, tuple)) else given
        dtype, narrow = layout.travels(graphs.example(first).dtype), dtype_named(name)
        if dtype.is_floating_point and dtype.itemsize > narrow.itemsize:
            node.update_arg(at, str(replace(layout, compress=narrow, reduce=dtype)))
