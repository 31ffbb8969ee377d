"""Matmuls that do not wait for a sum that comes late."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.passes.base import Context
from autoshard.passes.early_matmuls import EarlyMatmuls
from tests.rewriting import plan_for
from tests.small import same


def test_a_matmul_does_not_wait_for_a_late_sum() -> None:
    """As the gradient of the head does for that of a tied embedding."""

    a, b = torch.randn(4, 4), torch.randn(4, 4)
    gm = make_fx(lambda a, b: (a @ b + torch.sin(a), torch.cos(a) + b @ a), tracing_mode="fake")(a, b)
    expected = gm(a, b)
    EarlyMatmuls().run(gm, Context(plan_for(nn.Linear(2, 2), 0)))
    gm.recompile()
    first, second = gm.graph.output_node().args[0]  # type: ignore[union-attr, misc]
    assert first.target is torch.ops.aten.squeeze.dim and second.target is torch.ops.aten.add.Tensor
    assert same(expected, gm(a, b))


def test_a_sum_of_early_matmuls_and_more_is_rewritten_step_by_step() -> None:
    """As the gradients of a table that every block takes a part of: a sum of sums."""
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    gm = make_fx(lambda a, b: a @ b + torch.sin(a) + b @ a + torch.cos(b), tracing_mode="fake")(a, b)
    first, last = [n for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default]
    first.append(last)  # both matmuls before what they are added to
    expected = gm(a, b)
    EarlyMatmuls().run(gm, Context(plan_for(nn.Linear(2, 2), 0)))
    gm.graph.lint()
    gm.recompile()
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.squeeze.dim)) == 2
    assert torch.equal(expected, gm(a, b))
