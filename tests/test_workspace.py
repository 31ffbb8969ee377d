"""What an operation takes for a while beside its results, as measured."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx import Graph
from torch.utils._pytree import tree_leaves

from autoshard.cost_model.program import bytes_held
from autoshard.cost_model.workspace import on_cpu
from tests.peaks import grown

CONVOLUTIONS = [
    (8, 64, 16, 96, 3, 1, 1, True), (8, 64, 16, 64, 1, 1, 1, True), (2, 64, 16, 64, 3, 1, 4, True), (2, 64, 16, 64, 3, 2, 1, True),
    (8, 64, 16, 96, 3, 1, 1, False), (8, 64, 16, 128, 4, 2, 1, True), (8, 128, 16, 256, 1, 2, 1, True),
    (8, 3, 16, 64, 3, 1, 1, False), (4, 3, 32, 64, 8, 8, 1, False),
    (8, 1, 32, 8, 3, 1, 1, True), (8, 4, 32, 4, 3, 1, 1, True), (8, 20, 32, 24, 3, 1, 1, True), (16, 64, 16, 20, 1, 1, 1, True),  # in blocks
    (8, 12, 32, 12, 3, 1, 1, True), (8, 36, 16, 36, 3, 1, 36, False), (1, 64, 8, 64, 1, 1, 1, True), (8, 64, 16, 64, 1, 1, 4, True),
]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a job of several processes; more of them take other ways."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("batch", "channels", "size", "out", "kernel", "stride", "groups", "inner"), CONVOLUTIONS)
def test_what_a_convolution_takes_for_a_while(
    batch: int, channels: int, size: int, out: int, kernel: int, stride: int, groups: int, inner: bool
) -> None:
    x, weight = torch.randn(batch, channels, size, size), torch.randn(out, channels // groups, kernel, kernel)
    padding = kernel // 2 if stride < kernel else 0
    options = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    y = torch.ops.aten.convolution.default(x, weight, None, *options)
    for call, arguments in (
        (torch.ops.aten.convolution.default, (x, weight, None, *options)),
        (torch.ops.aten.convolution_backward.default, (torch.randn_like(y), x, weight, None, *options, (inner, True, False))),
    ):
        node = _called(call, arguments)
        held = sum(t.nbytes for t in tree_leaves(node.meta["val"]) if isinstance(t, torch.Tensor))
        step = functools.partial(call, *arguments)
        step()
        assert held + on_cpu(node, channels_last=False) == pytest.approx(grown(step), rel=0.03)


LOSSES = ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_takes_for_a_while_and_goes_on_taking(name: str) -> None:
    call, arguments = getattr(torch.ops.aten, name).default, (torch.rand(256, 32), torch.rand(256, 32))
    node, step = _called(call, arguments), functools.partial(call, *arguments)
    step()
    held = bytes_held(node, node.meta["val"])
    assert held == step().untyped_storage().nbytes()
    assert held + on_cpu(node, channels_last=False) == pytest.approx(grown(step), rel=0.03)


def test_what_dropout_and_the_gradient_of_batch_norm_take_for_a_while() -> None:
    x, of = torch.randn(256, 32), [torch.randn(32) for _ in range(5)]
    for call, arguments in (
        (torch.ops.aten.native_dropout.default, (x, 0.1, True)),
        (torch.ops.aten.native_dropout_backward.default, (x, x > 0, 1.1)),
        (torch.ops.aten.native_batch_norm_backward.default, (x, x, *of, True, 1e-5, [True, True, True])),
    ):
        node, step = _called(call, arguments), functools.partial(call, *arguments)
        held = sum(t.nbytes for t in tree_leaves(node.meta["val"]))
        step()
        assert held + on_cpu(node, channels_last=False) == pytest.approx(grown(step), rel=0.03)


def _called(call: Any, arguments: tuple[Any, ...]) -> torch.fx.Node:
    graph = Graph()
    nodes = [graph.placeholder("x") if isinstance(a, torch.Tensor) else a for a in arguments]
    for node, value in zip(nodes, arguments):
        if isinstance(node, torch.fx.Node):
            node.meta["val"] = value
    made = graph.call_function(call, tuple(nodes))
    made.meta["val"] = call(*arguments)
    return made
