"""Rewrite: a gradient to which what waited since `no_sync` is added is reduced as the sum is, in the dtype that gradients travel in.

autograd gives the gradient of a copy in the copy's dtype: with `precision="bf16"` the sum of all microbatches would be rounded to
that, though it travels in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from autoshard.ops.layout import Layout
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage


@dataclass(frozen=True)
class WidenHeld:
    name: ClassVar[str] = "widen_held"
    stage: ClassVar[Stage] = "joint"
    requires: ClassVar[frozenset[str]] = frozenset({"names"})
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = False

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        for node in graphs.calls(gm, graphs.COMPLETE_GRAD):
            readers = list(node.users)
            if len(readers) == 1 and graphs.is_call(readers[0], graphs.REDUCE_GRAD, graphs.MEAN_LOW_RANK):
                _widen(node, readers[0])
        return gm


def _widen(node: Node, reader: Node) -> None:
    """A mean of low rank has its layout where a reduction has it, and is as wide as the gradient but for a compute dtype."""
    layout = Layout.parse(str(reader.args[3]))
    if layout.reduce and (layout.compute or graphs.is_call(reader, graphs.REDUCE_GRAD)):
        node.update_arg(2, layout.reduce)
        value = graphs.example(node)
        node.meta["val"] = value.new_empty(value.shape, dtype=layout.reduce)
