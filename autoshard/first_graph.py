"""What a first call takes from a model's first graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from autoshard import torch_internals
from autoshard.capture import Capture
from autoshard.errors import UnsupportedError
from autoshard.family import used_in
from autoshard.inventory import Inventory, in_order_of_last_use, names_of, rows_looked_up, take_inventory
from autoshard.passes import graphs
from autoshard.passes.name_parameters import refuse_direct_uses, refuse_nested


@dataclass(frozen=True)
class FirstGraph:
    """written: parameters that forward writes to. capture: the graph itself, where it was captured. transformed:
    parameters that it takes in a transform of functions, as far as that is known."""

    inventory: Inventory
    written: tuple[str, ...]
    capture: Capture | None = None
    transformed: tuple[str, ...] = ()

    @staticmethod
    def given(model: nn.Module, gm: GraphModule, inputs: Sequence[Any]) -> FirstGraph:
        """As Dynamo gives it to a backend, of whole parameters."""
        used = used_in(model, [x for x in inputs if isinstance(x, nn.Parameter)])
        broken = bool(torch_internals.graph_break(gm) or torch_internals.behind_a_break() or torch_internals.runs_in_python(model))
        inventory = take_inventory(model, used, used_in(model, in_order_of_last_use(gm, inputs)), rows_looked_up(gm, inputs), broken)
        names = names_of(model)
        whole = {
            n: names[id(x)] for n, x in zip(gm.graph.find_nodes(op="placeholder"), inputs) if id(x) in names
        }
        return FirstGraph(inventory, _written(gm, whole))

    @staticmethod
    def captured(capture: Capture) -> FirstGraph:
        """Of a copy of the model, whose modules show their parameters as sharded ones do."""
        whole = {u: name for n, name in capture.named_inputs.items() for u in n.users if graphs.is_call(u, graphs.UNSHARD)}
        inside = graphs.in_transforms(capture.graph)
        transformed = tuple(name for node, name in whole.items() if node in inside)
        return FirstGraph(capture.inventory, _written(capture.graph, whole), capture, transformed)

    def refuse_writes(self) -> None:
        """On a shard they would be lost."""
        if self.written:
            raise UnsupportedError(
                f"forward writes to parameter {self.written[0]!r} in place (an embedding's max_norm, say); "
                "on a shard that write would be lost"
            )

    def refuse_direct_uses(self) -> None:
        """Dynamo gets through no trace of rows that are mixed with tensors, and would not name the parameter."""
        if self.capture is not None:
            refuse_nested(self.capture.graph)
            refuse_direct_uses(self.capture.named_inputs)

    def refuse_transformed(self) -> None:
        """Torch takes no DTensor apart there."""
        if self.transformed:
            raise UnsupportedError(
                f"forward uses parameter {self.transformed[0]!r} in a transform of functions (torch.vmap, torch.func.grad), "
                "which no sharded one can be; legal: zero=0, or to take the parameter outside of the function that is transformed"
            )


def _written(gm: GraphModule, whole: dict[Node, str]) -> tuple[str, ...]:
    """Of these whole parameters, with their names, those that the graph writes to."""
    written = graphs.written(gm)
    return tuple(name for node, name in whole.items() if written(node))
