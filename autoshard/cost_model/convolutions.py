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
    own rule for training (`GraphLowering.decide_layout_opt`), where all graphs pass."""
    if on_cpu:
        return True
    calls: dict[int, list[Sequence[Any]]] = {}
    graphs: dict[int, Graph] = {}
    for operation in program.operations:
        if operation.code is not None and op_name(operation.node) == "convolution":
            calls.setdefault(operation.code, []).append(operation.node.args)
            graphs[operation.code] = operation.node.graph
    nodes = {code: len(graph.nodes) / _halves(program, graph) for code, graph in graphs.items()}
    return bool(calls) and all(_pays(nodes[code], of_code) for code, of_code in calls.items())


def _halves(program: Program, graph: Graph) -> int:
    """Two where forward and backward are lists of one graph, each of about half of it."""
    return len({operation.half for operation in program.operations if operation.node.graph is graph})


def _pays(nodes: float, calls: Sequence[Sequence[Any]]) -> bool:
    given: list[Tensor] = [arguments[i].meta["val"] for arguments in calls for i in (0, 1)]
    if not all(isinstance(size_of(n), int) for tensor in given for n in tensor.shape):
        return False
    shapes = [tuple(weight.shape) for weight in given[1::2]]
    grouped = any(arguments[8] > 1 and shape[1] > 1 for arguments, shape in zip(calls, shapes))
    narrowing = any(out * 2 <= channels and kernel > 1 for out, channels, kernel, *_ in shapes)
    small = all(out <= FEW and channels <= FEW for out, channels, *_ in shapes)
    return nodes < NODES * len(calls) and not (grouped or narrowing or small)
