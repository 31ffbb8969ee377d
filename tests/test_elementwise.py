"""Kernels that are generated for regions of a graph: run by Triton's interpreter and compared with torch in float64, and
compiled for GPUs; and which operations of a graph become regions."""

from __future__ import annotations

import copy
import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import autoshard
from autoshard.codegen import Compilation
from autoshard.console import Phases
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.kernels.elementwise import LONGEST
from autoshard.kernels.random import uniform
from autoshard.kernels.region import OPERATORS, Region, like, operator_of
from autoshard.kernels.source import load
from autoshard.passes import graphs, registry
from autoshard.passes.base import Context
from autoshard.passes.dump import Dump
from autoshard.passes.fuse_elementwise import FuseElementwise
from autoshard.passes.manager import PassManager
from autoshard.passes.seed_dropout import SeedDropout
from autoshard.plan import Plan
from autoshard.torch_internals import FakeTensorMode
from tests.models import CASES
from tests.small import Net, in_full
from tests.test_kernels import EPSILON, spilled

triton = pytest.importorskip("triton")
aten = torch.ops.aten
CONTEXT = Context(Plan(1, (("shard", 1),), ()), fuses=DEVICES["h100"])
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    return


def as_list(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def traced(function: Function, inputs: Sequence[Tensor], open: Literal["none", "rows", "all"] = "none") -> GraphModule:
    """The graph of a function that gives a list. open: which sizes are symbols; of rows: all but a last dimension."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for x in inputs:
        closed = {"none": x.dim(), "rows": 1, "all": 0}[open]
        dims = [DimDynamic.STATIC if d >= x.dim() - closed else DimDynamic.DYNAMIC for d in range(x.dim())]
        fakes.append(mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dims)))
    with mode:
        gm = make_fx(lambda *tensors: as_list(function(*tensors)))(*fakes)
    gm.graph.eliminate_dead_code()
    return gm


def fused(gm: GraphModule) -> list[Region]:
    """The regions that become kernels, in graph order."""
    gm = FuseElementwise().run(gm, CONTEXT)
    gm.graph.lint()
    gm.recompile()
    return [OPERATORS[n.target] for n in gm.graph.nodes if "kernel" in n.meta]


def run(gm: GraphModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The graph, its kernels by Triton's interpreter."""
    for node in gm.graph.nodes:
        if "kernel" in node.meta:
            region = OPERATORS[node.target]
            node.target = lambda tensors, region=region: region.launched(tensors, interpret=True)
    gm.recompile()
    return as_list(gm(*inputs))


def apart(ours: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to one or what it should be."""
    assert ours.shape == exact.shape
    exact = exact.double()
    same = (ours.double() == exact) | (ours.isnan() & exact.isnan())
    off = ((ours.double() - exact).abs() / (1 + exact.abs())).masked_fill(same, 0.0)
    return float(off.max()) if off.numel() else 0.0


def check(function: Function, inputs: Sequence[Tensor], kernels: int = 1, roundings: float = 4) -> None:
    """One kernel, and what it gives beside the same in float64; its dtypes and strides are torch's."""
    gm = traced(function, inputs)
    assert len(fused(gm)) == kernels, gm.code
    theirs = as_list(function(*inputs))
    exact = as_list(function(*(x.double() if x.is_floating_point() else x for x in inputs)))
    for ours, plain, value in zip(run(gm, inputs), theirs, exact):
        assert (ours.dtype, ours.stride()) == (plain.dtype, plain.stride())
        allowed = roundings * EPSILON[plain.dtype] if plain.dtype in EPSILON else 0.0
        assert apart(ours, value) <= allowed, gm.code


# --- functions that models are made of


def rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = q.shape[-1] // 2
    return q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin


def rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
    x = x + residual
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return [x, weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)]


def layer_norm(x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
    x = x + residual
    return [x, *aten.native_layer_norm(x, [x.shape[-1]], weight, weight, 1e-5)]


def softmax_and_gradient(x: Tensor, grad: Tensor) -> Tensor:
    y = F.softmax(x * 0.3, -1)
    return aten._softmax_backward_data(grad, y, -1, x.dtype)


FUNCTIONS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "gelu": (lambda x, y: F.gelu(x) + y, ((3, 4, 5), (5,))),
    "gelu_tanh": (lambda x, y: F.gelu(x, approximate="tanh") * y, ((3, 7), (3, 1))),
    "gelu_backward": (lambda x, y: aten.gelu_backward(y, x) * 2, ((3, 7), (3, 7))),
    "silu_gate": (lambda x, y: F.silu(x) * y, ((33, 7), (33, 7))),
    "silu_backward": (lambda x, y: aten.silu_backward(y, x) * y, ((33, 7), (33, 7))),
    "relu": (lambda x, y: F.relu(x).pow(3) + F.leaky_relu(y).clamp(-0.1, 0.5), ((9,), (9,))),
    "tanh": (lambda x, y: torch.tanh(x * 0.1) - torch.sigmoid(y) * torch.rsqrt(x.abs() + 1), ((70,), (70,))),
    "rotary": (rotary, ((2, 3, 5, 8), (1, 1, 5, 8), (1, 1, 5, 8))),
    "rms_norm": (rms_norm, ((2, 3, 48), (2, 3, 48), (48,))),
    "layer_norm": (layer_norm, ((5, 33), (5, 33), (33,))),
    "softmax": (softmax_and_gradient, ((2, 4, 19), (2, 4, 19))),
    "log_softmax": (lambda x, y: [F.log_softmax(z := x + y, -1), z.sum(-1)], ((6, 100), (100,))),
    "variance": (lambda x, y: (z := x * y).var(-1) + z.amax(-1), ((6, 10), (6, 10))),
    "transposed": (lambda x, y: (x * 2).view(2, 3, 4).transpose(1, 2) * y, ((6, 4), (2, 4, 3))),
    "broadcast": (lambda x, y: (x + 1) * (y - 2), ((1, 4, 1), (3, 1, 5))),
    "masked": (lambda x, y: torch.where(x > 0, x, y.masked_fill(y < -1, -torch.inf)).exp(), ((4, 9), (4, 9))),
    "no_dimensions": (lambda x, y: (x + y) * 3, ((), ())),
    "empty": (lambda x, y: (x + y) * 3, ((0, 3), (3,))),
    "empty_rows": (lambda x, y: (x + y).sum(-1) * 3, ((4, 0), (4, 0))),
}


def random(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, in_full(torch.float16), in_full(torch.float64)])
def test_functions_are_one_kernel_each(name: str, dtype: torch.dtype) -> None:
    function, shapes = FUNCTIONS[name]
    check(function, [random(shape, dtype, i) for i, shape in enumerate(shapes)])


@pytest.mark.parametrize("rows", [1, 5])
def test_long_rows_are_gone_through_in_blocks(rows: int) -> None:
    x = random((rows, LONGEST + 77), torch.float32, 0)
    x[0, 3] = torch.inf
    check(lambda x: F.log_softmax(x * 2, -1), [x])
    check(lambda x: [F.layer_norm(x + 1, x.shape[-1:]), (x + 1).mean(-1)][:1], [x[:, 4:]])


def test_a_cross_entropy_s_gradient_is_written_once() -> None:
    scores, target = random((6, 11), torch.float32, 0), torch.tensor([1, 0, -100, 10, 3, 3])

    def gradient(scores: Tensor, target: Tensor, grad: Tensor, count: Tensor) -> Tensor:
        logs = aten._log_softmax(scores, 1, False)
        spread = aten.nll_loss_backward(grad, logs, target, None, 1, -100, count)
        return aten._log_softmax_backward_data(spread, logs, 1, torch.float32)

    check(gradient, [scores, target, torch.tensor(0.7), torch.tensor(5.0)])


def test_dropout_is_a_part_of_its_kernel() -> None:
    """Its definition in torch draws the same bits."""
    x, seed = random((70, 33), torch.float32, 0), torch.tensor([(5 << 40) + 3])

    def function(x: Tensor, seed: Tensor) -> list[Tensor]:
        kept = torch.ops.autoshard.keep(x, seed, 0.3)
        return [F.layer_norm(x + F.gelu(x) * kept * (1 / 0.7), (33,)), kept]

    check(function, [x, seed])
    assert float(uniform(torch.zeros(1, dtype=torch.int64), 1)) == (0x6627E8D5 >> 8) / 2**24  # its authors' own test
    kept = function(x, seed)[1]
    assert abs(float(kept.float().mean()) - 0.7) < 0.03
    assert not torch.equal(kept, function(x, seed + 1)[1])


def test_dropout_repeats_by_torch_s_seed() -> None:
    x = random((64, 33), torch.float32, 0)
    gm = traced(lambda x: [*aten.native_dropout(x.sin(), 0.25, True)], [x])
    gm = SeedDropout().run(gm, CONTEXT)
    assert len(fused(gm)) == 1 and graphs.calls(gm, aten.randint.low)
    drawn = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        dropped, kept = as_list(gm(x))
        torch.testing.assert_close(dropped, torch.where(kept, x.sin() / 0.75, 0))
        drawn.append(kept)
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])


def test_values_that_are_no_numbers_stay_so() -> None:
    x = torch.tensor([[1.0, torch.nan, torch.inf], [-torch.inf, -torch.inf, -torch.inf], [0.0, -0.0, torch.inf]])

    def function(x: Tensor) -> list[Tensor]:
        x = -x
        return [F.relu(x) - x, x * 0, x.amax(-1), F.softmax(x, -1), x.clamp(0, 1), torch.maximum(x, -x)]

    check(function, [x])


def test_numbers_that_are_whole_or_true() -> None:
    x, n = random((4, 6), torch.float32, 0), torch.arange(24).view(4, 6)

    def function(x: Tensor, n: Tensor) -> list[Tensor]:
        n = n + 1
        return [n * 2, (n > 7) & (x < 0), x + n, (n == 3).to(torch.float32) * x, n.to(torch.bfloat16)]

    check(function, [x, n])


@pytest.mark.parametrize("name", ["rms_norm", "rotary", "broadcast", "log_softmax"])
def test_sizes_may_stay_open(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    gm = traced(function, [random(shape, torch.float32, i) for i, shape in enumerate(shapes)], "all")
    (region,) = fused(gm)
    assert region.sizes
    if region.in_blocks and triton.__version__ < "3.7":
        pytest.skip("this Triton's interpreter takes no loop whose end is an argument")
    longer = [tuple(n + 2 if n % 2 == 1 and n > 1 else n for n in shape) for shape in shapes]
    inputs = [random(shape, torch.float32, i) for i, shape in enumerate(longer)]
    for ours, exact in zip(run(gm, inputs), as_list(function(*(x.double() for x in inputs)))):
        assert apart(ours, exact) <= 4e-6


def test_inputs_that_lie_otherwise_than_in_the_trace() -> None:
    x = random((4, 6), torch.float32, 0)
    (region,) = fused(traced(lambda x: x.sin() + 1, [x]))
    (ours,) = region.launched([x.t().contiguous().t()], interpret=True)
    assert apart(ours, x.double().sin() + 1) <= 1e-6


# --- any graph

SHAPES = st.lists(st.sampled_from([1, 2, 3, 8]), min_size=0, max_size=3)
UNARY = {"neg": torch.neg, "abs": torch.abs, "exp": lambda x: (-x.abs()).exp(), "tanh": torch.tanh, "silu": F.silu}
BINARY = {"add": torch.add, "mul": torch.mul, "max": torch.maximum, "where": lambda x, y: torch.where(x > y, x, y * 0.5)}
ROWS = {"softmax": lambda x: F.softmax(x, -1), "less_mean": lambda x: x - x.mean(-1, keepdim=True), "sum": lambda x: x / (1 + x.abs().sum(-1, keepdim=True))}  # fmt: skip
VIEWS = {
    "flat": lambda x: x.reshape(-1),
    "turned": lambda x: x.movedim(0, -1),
    "cut": lambda x: x[..., 1:],
    "longer": lambda x: torch.cat((x, -x), -1),
    "wider": lambda x: x.unsqueeze(0).expand(2, *x.shape),
}


def strided(shape: Sequence[int], kind: str, dtype: torch.dtype, seed: int) -> Tensor:
    """plain: without gaps; turned: its last dimension is the outermost in memory; gaps: every second number is not its."""
    if kind == "turned" and shape:
        return random((shape[-1], *shape[:-1]), dtype, seed).movedim(0, -1)
    if kind == "gaps" and shape:
        return random((*shape[:-1], 2 * shape[-1]), dtype, seed)[..., ::2]
    return random(shape, dtype, seed)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
def test_any_graph_gives_what_torch_gives(data: st.DataObject, shape: list[int], dtype: torch.dtype) -> None:
    steps = data.draw(st.lists(st.sampled_from([*UNARY, *BINARY, *ROWS, *VIEWS]), min_size=2, max_size=8), "steps")
    kinds = data.draw(st.tuples(*[st.sampled_from(["plain", "turned", "gaps"])] * 2), "strides")
    other = [1 if data.draw(st.booleans(), "broadcast") else n for n in shape]

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        results = []
        for step in steps:
            if step in BINARY:
                x = BINARY[step](x, y if x.dim() == len(shape) and x.shape[-1:] == torch.Size(shape[-1:]) and _fits(x, y) else x)
            elif step in UNARY or x.dim():
                x = {**UNARY, **ROWS, **VIEWS}[step](x)
            if len(results) < 2 and step in UNARY:
                results.append(x)
        return [*results, x * 2]

    inputs = [strided(s, kind, dtype, i) for i, (s, kind) in enumerate(zip((shape, other), kinds))]
    gm = traced(function, inputs)
    fused(gm)
    exact = function(*(x.double() for x in inputs))
    for ours, plain, value in zip(run(gm, inputs), function(*inputs), exact):
        assert (ours.dtype, ours.shape) == (plain.dtype, plain.shape)
        overflowed = ~plain.isfinite() & (ours == plain)  # where torch's own numbers end, in this dtype
        assert apart(ours[~overflowed], value[~overflowed]) <= 8 * len(steps) * EPSILON[dtype]


def _fits(x: Tensor, y: Tensor) -> bool:
    return all(b in (1, a) for a, b in zip(x.shape, y.shape))


# --- which operations go together


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
    """As the gradients of a gate do."""

    def gate(grad: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        return [aten.silu_backward(grad * y, x), grad * F.silu(x), (x.sum(0) + 1) * 2]

    inputs = [random((4, 6), torch.float32, i) for i in range(3)]
    gm = traced(gate, inputs)
    first, second = fused(gm)
    assert len(first.outputs) == 2 and len(second.outputs) == 1
    assert all(map(torch.equal, as_list(gm(*inputs)), gate(*inputs)))


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
    for ours, theirs in zip(run(gm, [x]), function(x)):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


EDGES: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "a start before the front": (lambda x: (x * 2 + 1)[:, -512:] * 3, ((4, 6),)),
    "lines that are negative in parts": (
        lambda a, b: torch.cat([a * 1, (b.t() * 1).reshape(6)])[1:7].view(2, 3) * 2, ((3,), (3, 2))
    ),
    "parts that are shorter than their place": (
        lambda a, b: torch.cat([(a * 1).unsqueeze(1).expand(2, 3).reshape(6), b]).view(4, 3) * 2, ((2,), (6,))
    ),
    "one number of a concatenation": (lambda x, y: (torch.cat([x * 2, y]) * 1)[5] * y, ((3,), (3,))),
    "both are true": (lambda x, y: ((x > 0) + (y > 0)).float() * 2, ((9,), (9,))),
    "a concatenation of truths": (lambda x, y: torch.cat([(x > 0) & (y > 0), x < 0]), ((9,), (9,))),
    "a power of whole numbers": (lambda x: (x * 0 + 5e9).to(torch.int64).pow(2.0) * 0.5, ((4,),)),
    "a constant of more precision": (lambda x: ((x * 0 + 0.1) == torch.tensor(0.1, dtype=torch.float64)).float() * 2, ((4,),)),
    "whole numbers that are full of a fraction": (lambda x: torch.full((4,), 2.7, dtype=torch.int64) * 2 + x, ((4,),)),
    "an empty part": (lambda x: torch.cat([torch.zeros(0), x * 2], -2) * 3, ((4, 6),)),
    "nothing is given": (lambda x: [(torch.full((4, 6), 2.0) * 2).sin() + 1, x], ((4,),)),
    "a view of nothing": (lambda x: (x * 2).view(-1).sin(), ((0, 3),)),
    "softmax of one number": (lambda x: F.softmax(x * 2, 0) + x.sum(0), ((),)),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str) -> None:
    function, shapes = EDGES[name]
    inputs = [random(shape, torch.float32, i) for i, shape in enumerate(shapes)]
    gm = traced(function, inputs)
    fused(gm)
    for ours, theirs in zip(run(gm, inputs), as_list(function(*inputs))):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_variance_far_from_zero() -> None:
    x = (1000 + 4 * random((4, 256), torch.float32, 0)).bfloat16()
    gm = traced(lambda x: x.mul(1.0).var(-1), [x])
    assert fused(gm)
    torch.testing.assert_close(run(gm, [x])[0], x.float().var(-1).bfloat16(), rtol=2**-7, atol=0)


def test_operations_of_others_are_not_torch_s() -> None:
    with torch.library._scoped_library("autoshard_tests", "FRAGMENT") as library:
        library.define("maximum(Tensor a, Tensor b) -> Tensor")
        library.impl("maximum", lambda a, b: torch.minimum(a, b), "CompositeExplicitAutograd")
        inputs = [random((4, 6), torch.float32, i) for i in range(2)]
        function = lambda a, b: torch.ops.autoshard_tests.maximum(a * 2 + 1, b) * 3 - 1  # noqa: E731
        gm = traced(function, inputs)
        fused(gm)
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
    "function",
    [
        lambda x: x.sum(0) + x.sum(0).sin().mul(2).div(3)[:0].sum(),  # over the first dimension
        lambda x: torch.cumsum(x, 0),
        lambda x: x * 2,  # alone, there is nothing to gain
        lambda x: x[0] @ x[1],
    ],
)
def test_what_has_no_kernel_stays(function: Function) -> None:
    x = random((4, 4), torch.float32, 0)
    gm = traced(function, [x])
    fused(gm)
    assert any(not str(n.target).startswith("autoshard") for n in calls(gm))
    assert torch.equal(as_list(gm(x))[0], function(x))


def test_cpus_have_no_kernels() -> None:
    gm = traced(readers, [random((4, 4), torch.float32, i) for i in range(2)])
    before = gm.code
    assert FuseElementwise().run(gm, Context(CONTEXT.plan)).code == before


# --- whole models


def model_and_batch(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    build: Any = CASES[name].build
    return build(1), CASES[name].batch(torch.Generator().manual_seed(1))


def step(model: nn.Module, inputs: dict[str, Any], inductor: bool, context: Context) -> tuple[list[Tensor], list[str]]:
    """(loss and gradients, the kernels that its graphs call)"""
    torch.compiler.reset()
    model.zero_grad()
    manager = PassManager(registry.parse(registry.DEFAULT), Dump(None))

    def backend(gm: GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        return Compilation(manager, context, inductor, Phases(False)).compile(gm, given)

    torch.manual_seed(0)
    loss = torch.compile(model, backend=backend)(**inputs)["loss"]
    loss.backward()
    changed = [name for ran in manager.history if ran.name == "fuse_elementwise" for name in ran.changed]
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *grads], [name for name in changed if name.startswith("autoshard.")]


@pytest.mark.parametrize("name", ["vit", in_full("gpt2"), in_full("llama"), in_full("bert"), in_full("t5")])
def test_a_model_s_regions_give_what_its_operations_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_and_batch(name)
    plain, none = step(model, inputs, False, Context(CONTEXT.plan))
    assert not none
    one_by_one, kernels = step(model, inputs, False, CONTEXT)
    assert kernels and all(map(torch.equal, one_by_one, plain))
    monkeypatch.setattr(Region, "run", lambda region, tensors: region.launched(tensors, interpret=True))
    by_kernels, _ = step(model, inputs, False, CONTEXT)
    for ours, theirs in zip(by_kernels, plain):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_inductor_takes_regions() -> None:
    model, inputs = model_and_batch("llama")
    plain, _ = step(model, inputs, True, Context(CONTEXT.plan))
    ours, kernels = step(model, inputs, True, CONTEXT)
    assert kernels
    for a, b in zip(ours, plain):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_region_is_an_operator_of_torch() -> None:
    x = random((4, 6), torch.float32, 0)
    (region,) = fused(traced(lambda x: [F.gelu(x) + 1, x.softmax(-1)], [x]))
    torch.library.opcheck(operator_of(region), ([x],), test_utils=("test_schema", "test_faketensor"))


def test_the_source_is_in_the_dump(tmp_path: Path) -> None:
    manager = PassManager((FuseElementwise(),), Dump(tmp_path))
    gm = manager.run(("code",), traced(lambda x: F.gelu(x) + 1, [random((4, 6), torch.float32, 0)]), CONTEXT)
    (call,) = [n for n in gm.graph.nodes if "kernel" in n.meta]
    region = OPERATORS[call.target]
    assert (tmp_path / f"{region.name}.py").read_text() == region.text and "tl.erf" in region.text


def test_on_a_cpu_codegen_is_eager_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    torch.compiler.reset()
    backend = autoshard.backend(autoshard.Config(codegen="triton", verbose=False))
    model = Net()
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    loss = torch.compile(model, backend=backend)(x)
    loss.backward()
    plain(x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters()))
    assert "'triton' is for GPUs: on cpu it is 'eager' instead" in " ".join("".join(capfd.readouterr()).split())


def test_a_plan_for_gpus_counts_kernels() -> None:
    """What the regions of a block do alone is memory traffic, which they spare."""
    inputs = {"x": torch.randn(64, 512)}
    took = {}
    for codegen in ("eager", "triton"):
        plan = autoshard.plan(Gated(), inputs, autoshard.Config(codegen=codegen), cluster=Cluster(1, 1, DEVICES["h100"]))
        took[codegen] = plan.predicted
    assert took["triton"].step_seconds < took["eager"].step_seconds
    assert took["triton"].peak_bytes <= took["eager"].peak_bytes


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(512, 2048), nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(F.silu(self.gate(x)) * self.up(x))).square().mean()


# --- tiles


def test_every_tile_gives_the_same() -> None:
    x = random((37, 50), torch.float32, 0)
    (region,) = fused(traced(lambda x: [y := x.sin() + 1, y.amax(-1)], [x]))
    expected = region.launched([x], interpret=True)
    sized = region.sized((), False)
    for tile in like(sized.tile):
        region.at_sizes[(), False] = dataclasses.replace(sized, tile=tile)
        assert all(map(torch.equal, region.launched([x], interpret=True), expected))


# --- on GPUs


def compiled(region: Region, inputs: Sequence[Tensor], capability: int, wide: bool = False) -> Any:
    """What Triton makes of it for a GPU that need not be there, at the sizes that it would have."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64", torch.bool: "i1"}
    tile = dict(region.sized(tuple(inputs[i].shape[d] for _, i, d in region.sizes), wide).tile)
    warps = tile.pop("num_warps", 4)
    function = load(region.name, region.text)
    tensors = (*region.inputs, *region.outputs)
    signature = {name: f"*{names[laid.dtype]}" for name, laid in zip(function.arg_names, tensors)}
    signature |= dict.fromkeys(map(str, [s for s, _, _ in region.sizes]), "i32") | dict.fromkeys(tile, "constexpr")
    divisible = {(i,): [["tt.divisibility", 16]] for i in range(len(tensors) + len(region.sizes))}
    source = ASTSource(function, signature, constexprs=tile, attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


LARGE = {"rms_norm": 4096, "softmax": LONGEST, "log_softmax": 32000, "layer_norm": LONGEST, "silu_gate": 11008, "gelu_backward": 4096}
GPU_CASES = [(name, capability) for name in LARGE for capability in (80, 90)]
GPU_ALWAYS = {("rms_norm", 80), ("softmax", 90), ("log_softmax", 90), ("gelu_backward", 80)}


@pytest.mark.parametrize(("name", "capability"), [case if case in GPU_ALWAYS else in_full(*case) for case in GPU_CASES])
@pytest.mark.parametrize("open", ["none", in_full("rows")])
def test_kernels_compile_for_gpus_and_stay_in_registers(name: str, capability: int, open: Literal["none", "rows"], tmp_path: Path) -> None:
    function, shapes = FUNCTIONS[name]
    longer = [(*shape[:-1], LARGE[name]) if len(shape) > 1 else (LARGE[name],) for shape in shapes]
    inputs = [random(shape, torch.bfloat16, i) for i, shape in enumerate(longer)]
    (region,) = fused(traced(function, inputs, open))
    made = compiled(region, inputs, capability)
    assert spilled(made, tmp_path) == 0
    assert re.search(r"ld\.global\.[\w.:]*v[24]", made.asm["ptx"])  # 16 bytes at once


@pytest.mark.parametrize("name", ["softmax", in_full("silu_gate")])
def test_products_of_sizes_have_64_bits_where_tensors_are_large(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    inputs = [random(shape, torch.float32, i) for i, shape in enumerate(shapes)]
    (region,) = fused(traced(function, inputs, "all"))
    text = compiled(region, inputs, 80, wide=True).asm["ttir"]
    assert "arith.muli" in text and not re.findall(r"arith\.muli .*i32", text)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_on_a_gpu(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    inputs = [random(shape, torch.float32, i).cuda() for i, shape in enumerate(shapes)]
    gm = traced(function, inputs)
    assert len(fused(gm)) == 1
    for ours, exact in zip(as_list(gm(*inputs)), as_list(function(*(x.double() for x in inputs)))):
        assert apart(ours, exact) <= 4e-6
