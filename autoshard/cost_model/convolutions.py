"""How Inductor lets the tensors of convolutions lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph

from autoshard.cost_model.program import Program
from autoshard.cost_model.sizes import size_of
from autoshard.cost_model.work import op_name

FEW, NODES = 64, 300  # channels of a convolution that gains little; nodes of a graph for each, beyond which it is not worth it


def are_channels_last(program: Program, on_cpu: bool) -> bool:
    """Whether the convolutions of a program that code is generated for work on channels-last tensors: on CPUs always; on GPUs by torch's
    own rule (`GraphLowering.decide_layout_opt`), where all graphs pass."""
    found: dict[Graph, list[Sequence[Any]]] = {}
    for operation in program.operations:
        if operation.code is not None and op_name(operation.node) == "convolution":
            found.setdefault(operation.node.graph, []).append(operation.node.args)
    return on_cpu or (bool(found) and all(_pays(graph, calls) for graph, calls in found.items()))


def _pays(graph: Graph, calls: Sequence[Sequence[Any]]) -> bool:
    weights: list[Tensor] = [arguments[1].meta["val"] for arguments in calls]
    shapes = [tuple(map(size_of, weight.shape)) for weight in weights]
    grouped = any(arguments[8] > 1 and shape[1] > 1 for arguments, shape in zip(calls, shapes))
    narrowing = any(out * 2 <= given and kernel > 1 for out, given, kernel, *_ in shapes)
    small = all(out <= FEW and given <= FEW for out, given, *_ in shapes)
    return len(graph.nodes) < NODES * len(calls) and not (grouped or narrowing or small)
