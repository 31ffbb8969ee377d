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
    """The inputs that take rows, by position, as the trace had them."""
    places = enumerate(gm.graph.find_nodes(op="placeholder"))
    return {i: node.meta["example_value"] for i, node in places if ROWS in node.meta}


def _takes_rows(user: Node) -> bool:
    """True of the to_local in what a module shows for a parameter; what a user does with a DTensor stays."""
    plain = len(user.args) == 1 and not user.kwargs
    return plain and graphs.callee(user).endswith("to_local") and graphs.leads_to(user, graphs.UNSHARD, graphs.ADD_HELD)


def _take(gm: GraphModule, node: Node, trained: bool) -> None:
    """The input becomes a leaf, trained where the DTensor is."""
    calls = list(node.users)
    rows: Tensor = calls[0].meta["example_value"]
    for call in calls:
        call.replace_all_uses_with(node)
        gm.graph.erase_node(call)
    node.meta.update({"example_value": rows.detach().requires_grad_(trained), ROWS: True})
