"""How convolutions' tensors lie on a GPU, and what they are then copied into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, Node

from autoshard.cost_model.convolutions import are_channels_last
from autoshard.cost_model.hardware import DEVICES
from autoshard.cost_model.program import Half, Operation, Program
from autoshard.cost_model.workspace import PARTIAL, add_workspaces, on_gpu

CONVOLUTION, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
X, OUT = 8 * 32 * 16 * 16 * 4, 8 * 128 * 16 * 16 * 4  # bytes


def input_of(graph: Graph, value: torch.Tensor) -> Node:
    node = graph.placeholder("x")
    node.meta["val"] = value
    return node


def called(graph: Graph, channels: int = 32, out: int = 128, kernel: int = 3, groups: int = 1, like: Any = None) -> Node:
    x, weight = torch.empty(8, channels, 16, 16), torch.empty(out, channels // groups, kernel, kernel)
    x, weight = (t.to(**like) if like else t for t in (x, weight))
    options = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    node = graph.call_function(CONVOLUTION, (input_of(graph, x), input_of(graph, weight), None, *options))
    node.meta["val"] = torch.empty(8, out, 16, 16).to(**like) if like else torch.empty(8, out, 16, 16)
    return node


def backward_of(node: Node, weight: bool = True) -> Node:
    dy = input_of(node.graph, node.meta["val"])
    return node.graph.call_function(BACKWARD, (dy, *node.args[:2], None, *node.args[3:], [True, weight, False]))


def program_of(*nodes: Node, halves: tuple[Half, ...] = ("forward",)) -> Program:
    return Program([Operation(node, half, (), (), code=code) for code, half in enumerate(halves) for node in nodes])


@pytest.mark.parametrize(
    ("options", "last"),
    [({}, True), ({"channels": 256}, False), ({"channels": 256, "kernel": 1}, True), ({"out": 64}, False), ({"groups": 2}, False), ({"groups": 32}, True)],
)
def test_channels_are_last_where_torch_s_rule_says_it(options: dict[str, int], last: bool) -> None:
    node = called(Graph(), **options)  # type: ignore[arg-type]
    assert are_channels_last(program_of(node), on_cpu=False) == last
    assert are_channels_last(program_of(node), on_cpu=True)


def test_not_of_a_graph_of_little_else_nor_of_open_sizes_nor_of_none() -> None:
    graph = Graph()
    node = called(graph)
    for _ in range(310):
        graph.call_function(torch.ops.aten.relu.default, ())
    assert not are_channels_last(program_of(node), on_cpu=False)
    assert are_channels_last(program_of(node, halves=("forward", "backward")), on_cpu=False)  # lists of one graph, each of half of it
    assert not are_channels_last(program_of(), on_cpu=False)


def test_nor_where_a_batch_is_open() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, torch.ones(128, 32, 3, 3, device=x.device))

    made = torch.export.export(_Of(forward), (torch.ones(4, 32, 8, 8),), dynamic_shapes=({0: torch.export.Dim("batch")},)).run_decompositions()
    node = next(iter(made.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)))
    assert not are_channels_last(program_of(node), on_cpu=False)


class _Of(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function


def test_a_gpu_copies_what_does_not_lie_so() -> None:
    node = called(Graph())
    weight = 128 * 32 * 9 * 4
    assert on_gpu(node, False, tf32=True) == X + weight + OUT and on_gpu(node, True, tf32=True) == 0
    assert on_gpu(node, False, tf32=False) == 0  # not by tensor cores
    backward = backward_of(node)
    assert on_gpu(backward, False, tf32=True) == X + weight + OUT + PARTIAL and on_gpu(backward, True, tf32=True) == PARTIAL
    assert on_gpu(backward_of(node, weight=False), True, tf32=True) == 0
    assert on_gpu(called(Graph(), channels=3), False, tf32=True) == 0
    for like, tf32, size in (({"memory_format": torch.channels_last}, True, 0), ({"dtype": torch.bfloat16}, False, (X + weight + OUT) // 2), ({"dtype": torch.float64}, True, 0)):
        assert on_gpu(called(Graph(), like=like), False, tf32) == size


def test_a_device_has_the_workspaces_of_its_kind() -> None:
    for name, size in (("h100", X + 128 * 32 * 9 * 4 + OUT), ("v100", 0)):
        program = program_of(called(Graph()))
        add_workspaces(program, DEVICES[name], channels_last=False)
        assert sum(piece.bytes for piece in program.pieces) == size
