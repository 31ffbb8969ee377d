"""Rewrite: a graph of which the DTensors that come in are only asked for this process's rows takes those rows instead.

AOTAutograd takes each DTensor apart and puts it together again, in every one of its traces and in every step; the rows
alone are tensors as any others. What calls the graph gives them, and makes DTensors of their gradients
(`runtime.dtensors.taking_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage

ROWS = "autoshard_rows"  # in the meta of an input that takes rows


@dataclass(frozen=True)
class TakeRows:
    name: ClassVar[str] = "take_rows"
    stage: ClassVar[Stage] = "traced"
    requires: ClassVar[frozenset[str]] = frozenset({"names"})
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        for node in gm.graph.find_nodes(op="placeholder"):
            whole = node.meta.get("example_value")
            if isinstance(whole, DTensor) and node.users and all(map(_takes_rows, node.users)):
                _take(gm, node, whole.requires_grad)
        return gm


def takers(gm: GraphModule) -> dict[int, Tensor]:
    """The inputs that take rows, by position: what the trace had of them, leaves that are trained where the DTensors are."""
    found = {i: n for i, n in enumerate(gm.graph.find_nodes(op="placeholder")) if ROWS in n.meta}
    return {i: n.meta["example_value"].detach().requires_grad_(n.meta[ROWS]) for i, n in found.items()}


def _takes_rows(user: Node) -> bool:
    """True of the to_local in what a module shows for a parameter; what a user does with a DTensor stays."""
    plain = len(user.args) == 1 and not user.kwargs
    return plain and graphs.callee(user).endswith("to_local") and all(map(_is_ours, user.users))


def _is_ours(reader: Node) -> bool:
    if graphs.callee(reader) == "detach":
        return all(map(_is_ours, reader.users))
    return graphs.is_call(reader, graphs.UNSHARD, graphs.ADD_HELD)


def _take(gm: GraphModule, node: Node, trained: bool) -> None:
    for call in list(node.users):
        node.meta["example_value"] = call.meta["example_value"]
        call.replace_all_uses_with(node)
        gm.graph.erase_node(call)
    node.meta[ROWS] = trained
