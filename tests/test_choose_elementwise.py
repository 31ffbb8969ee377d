"""Which operations of a graph go together into a kernel, and which have none."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import GraphModule, Node

from autoshard.passes import graphs
from autoshard.passes.base import Context
from autoshard.passes.fuse_elementwise import FuseElementwise
from tests.kernels import CONTEXT, Function, as_list, fused, random, run, traced
from tests.small import same

pytestmark = pytest.mark.usefixtures("own_cache")
aten = torch.ops.aten


def calls(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function"]


def readers(x: Tensor, weight: Tensor) -> Tensor:
    """A matmul reads of the first chain before the second begins."""
    first = x.sin() + 1
    return (first @ weight).cos() * first + 2


def test_what_was_read_is_complete() -> None:
    x, weight = random((4, 4), torch.float32, 0), random((4, 4), torch.float32, 1)
    gm = traced(readers, [x, weight])
    assert [len(calls(r.graph)) for r in fused(gm)] == [2, 3]
    assert torch.equal(as_list(gm(x, weight))[0], readers(x, weight))


def test_what_reads_the_same_is_one_kernel() -> None:
    """As the gradients of a gate do, and a sum over rows, which nothing in the kernel may read."""

    def gate(grad: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        return [aten.silu_backward(grad * y, x), grad * F.silu(x), (x.sum(0) + 1) * 2]

    inputs = [random((4, 6), torch.float32, i) for i in range(3)]
    gm = traced(gate, inputs)
    first, second = fused(gm)
    assert len(first.outputs) == 3 and len(first.totals) == 1 and len(second.outputs) == 1
    assert same(as_list(gm(*inputs)), gate(*inputs))


def test_a_kernel_has_an_end() -> None:
    """A long chain has several, and what has many parts is torch's."""
    chain = fused(traced(lambda *xs: sum(x.square().sum() for x in xs), [random((4, 8), torch.float32, i) for i in range(300)]))
    assert len(chain) > 1
    gm = traced(lambda *xs: torch.cat(xs) * 2, [random((4, 8), torch.float32, i) for i in range(40)])
    assert graphs.calls(gm, torch.ops.aten.cat.default)


def test_nothing_moves_over_a_write() -> None:
    def writes(x: Tensor, y: Tensor) -> Tensor:
        before = x.sin() + y
        x.add_(1)
        return before * 2

    x, y = random((4, 4), torch.float32, 0), random((4, 4), torch.float32, 1)
    gm = traced(writes, [x, y])
    assert len(fused(gm)) == 1
    assert torch.equal(as_list(gm(x.clone(), y))[0], writes(x.clone(), y))


def test_views_that_others_read_stay() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return (x.sin() + 1).t() @ weight

    x, weight = random((4, 3), torch.float32, 0), random((4, 2), torch.float32, 1)
    gm = traced(function, [x, weight])
    assert len(fused(gm)) == 1 and graphs.calls(gm, aten.t.default)
    assert torch.equal(as_list(gm(x, weight))[0], function(x, weight))


def test_operations_with_options_have_no_kernel() -> None:
    """add's alpha, div's rounding, and the same bits as another dtype; what is around them has."""
    x = random((4, 6), torch.float32, 0)

    def function(x: Tensor) -> list[Tensor]:
        y = x.sin() + 1
        a = torch.add(y, x, alpha=3) * 2 - 1
        b = torch.div(y * 3, 2, rounding_mode="floor") * 2 - 1
        c = y.view(torch.int32) * 2 + 1
        return [a, b, c, torch.rsub(y, 2, alpha=2), y[-1:], y[:, -3:-1] * 2, y.select(0, -1) + y.select(1, -2)[0]]

    gm = traced(function, [x])
    assert fused(gm)
    for ours, theirs in zip(run(gm, [x]), function(x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_operations_of_others_are_not_torch_s() -> None:
    with torch.library._scoped_library("autoshard_tests", "FRAGMENT") as library:
        library.define("maximum(Tensor a, Tensor b) -> Tensor")
        library.impl("maximum", lambda a, b: torch.minimum(a, b), "CompositeExplicitAutograd")
        inputs = [random((4, 6), torch.float32, i) for i in range(2)]
        function = lambda a, b: torch.ops.autoshard_tests.maximum(a * 2 + 1, b) * 3 - 1  # noqa: E731
        gm = traced(function, inputs)
        assert fused(gm)
        torch.testing.assert_close(run(gm, inputs)[0], function(*inputs))


def test_a_view_taken_after_a_write_does_not_take_its_kernel_along() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        b = x.sin() * y
        y.mul_(0)
        return b.t()

    inputs = [random((4, 4), torch.float32, i) for i in range(2)]
    gm = traced(function, inputs)
    assert len(fused(gm)) == 1
    assert torch.equal(as_list(gm(*(x.clone() for x in inputs)))[0], function(*(x.clone() for x in inputs)))


def test_items_may_be_taken_late() -> None:
    gm = traced(lambda x, w: list(aten.native_layer_norm(x.sin() + 1, [6], None, None, 1e-5))[:2] + [w @ w], [torch.randn(4, 6), torch.randn(3, 3)])
    late = [n for n in calls(gm) if n.target is operator.getitem][-1]
    (product,) = graphs.calls(gm, aten.mm.default)
    normed = next(n for n in calls(gm) if n.target is operator.getitem)
    with gm.graph.inserting_after(product):
        reader = gm.graph.call_function(aten.mm.default, (normed, normed))
        reader.meta["val"] = normed.meta["val"]
    reader.append(late)
    assert len(fused(gm)) == 1


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x.sum(0) * 2, aten.sum.dim_IntList),  # alone
        (lambda x: (x + 1).view(2, 2, 4).sum(1) * 2, aten.sum.dim_IntList),  # over a dimension that is neither first nor last
        (lambda x: (x * 2 + 1).expand(9000, 4, 4).reshape(4, -1).sum(0), aten.sum.dim_IntList),  # rows too long to be held
        (lambda x: torch.cumsum(x, 0), aten.cumsum.default),
        (lambda x: x * 2, aten.mul.Tensor),  # alone, there is nothing to gain
        (lambda x: x[0] @ x[1], aten.dot.default),
    ],
)
def test_what_has_no_kernel_stays(function: Function, op: Any) -> None:
    x = random((4, 4), torch.float32, 0)
    gm = traced(function, [x])
    fused(gm)
    assert graphs.calls(gm, op)
    assert torch.equal(as_list(gm(x))[0], function(x))


def test_cpus_have_no_kernels() -> None:
    gm = traced(readers, [random((4, 4), torch.float32, i) for i in range(2)])
    before = gm.code
    assert FuseElementwise().run(gm, Context(CONTEXT.plan)).code == before
