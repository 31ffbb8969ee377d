"""Kernels that are generated for regions of a graph: run by Triton's interpreter and compared with torch in float64, and compiled for
GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import sympy
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoshard.kernels.elementwise import LONGEST
from autoshard.kernels.places import Unsupported, as_text
from autoshard.kernels.random import uniform
from autoshard.kernels.region import like, steps_of
from autoshard.passes import graphs
from autoshard.passes.seed_dropout import SeedDropout
from tests.functions import FUNCTIONS, cross_entropy_s_gradient, dropped, fused_rms_norm_backward
from tests.kernels import (
    CONTEXT,
    EPSILON,
    Function,
    apart,
    as_list,
    fused,
    random,
    run,
    traced,
)
from tests.small import in_full, interpreter_loops, same

pytestmark = pytest.mark.usefixtures("own_cache")
aten = torch.ops.aten


def check(function: Function, inputs: Sequence[Tensor], kernels: int = 1, roundings: float = 4) -> None:
    """One kernel, and what it gives beside the same in float64; its dtypes and strides are torch's."""
    gm = traced(function, inputs)
    assert len(fused(gm)) == kernels, gm.code
    theirs = as_list(function(*inputs))
    exact = as_list(function(*(x.double() if x.is_floating_point() else x for x in inputs)))
    for ours, plain, value in zip(run(gm, inputs), theirs, exact, strict=True):
        assert (ours.dtype, ours.stride()) == (plain.dtype, plain.stride())
        allowed = roundings * EPSILON[plain.dtype] if plain.dtype in EPSILON else 0.0
        assert apart(ours, value) <= allowed, gm.code


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


@pytest.mark.parametrize("function", [lambda x: F.log_softmax(x * 2, -1), in_full(lambda x: F.softmax(x * 30, -1))])
def test_long_rows_of_a_softmax_are_gone_through_twice(function: Function) -> None:
    """Its sum is gathered beside its maximum, whatever comes first in a row, or in a place of each block."""
    x = random((6, LONGEST + 77), torch.float32, 0)
    x[0, 3], x[1, 5:], x[2], x[3, 7], x[4, :7000] = torch.inf, -torch.inf, -torch.inf, torch.nan, -torch.inf
    check(function, [x])
    (region,) = fused(traced(function, [x]))
    assert region.text.count("for start in range") == 2


def test_a_cross_entropy_s_gradient_is_written_once() -> None:
    scores, target = random((6, 11), torch.float32, 0), torch.tensor([1, 0, -100, 10, 3, 3])
    check(cross_entropy_s_gradient, [scores, target, torch.tensor(0.7), torch.tensor(5.0)])


def test_the_gradient_that_torch_keeps_of_rms_norm_joins() -> None:
    """It runs on GPUs alone, so it is compared with autograd's."""
    x, grad, weight = (random(shape, torch.float32, i) for i, shape in enumerate([(5, 48), (5, 48), (48,)]))
    assert len(fused(gm := traced(fused_rms_norm_backward, [x, grad, weight]))) == 1
    wide = [t.double().requires_grad_() for t in (x, weight)]
    F.rms_norm(wide[0], [48], wide[1], 1e-6).backward(grad.double())
    for ours, exact in zip(run(gm, [x, grad, weight]), wide, strict=True):
        assert exact.grad is not None and apart(ours, exact.grad) <= 4e-6


def test_dropout_is_a_part_of_its_kernel() -> None:
    """Its definition in torch draws the same bits."""
    x, seed = random((70, 33), torch.float32, 0), torch.tensor([(5 << 40) + 3])
    check(dropped, [x, seed])
    assert float(uniform(torch.zeros(1, dtype=torch.int64), 1)) == (0x6627E8D5 >> 8) / 2**24  # its authors' own test
    kept = dropped(x, seed)[1]
    assert abs(float(kept.float().mean()) - 0.7) < 0.03
    assert not torch.equal(kept, dropped(x, seed + 1)[1])


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


def test_logarithms_near_one_and_signs() -> None:
    x = torch.tensor([0.0, 1e-30, -1e-12, 1e-7, -6e-8, 3e-4, -1.0, -2.0, 1e30, torch.inf, -torch.inf, torch.nan])
    gm = traced(lambda x: [torch.log1p(x * 1), torch.sign(x * 1)], [x])
    (region,) = fused(gm)
    logarithms, signs = run(gm, [x])
    torch.testing.assert_close(logarithms, x.double().log1p().float(), rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(signs, x.sign())


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
    if region.in_blocks and not interpreter_loops():
        pytest.skip("this Triton's interpreter takes no loop whose end is an argument")
    longer = [tuple(n + 2 if n % 2 == 1 and n > 1 else n for n in shape) for shape in shapes]
    inputs = [random(shape, torch.float32, i) for i, shape in enumerate(longer)]
    for ours, exact in zip(run(gm, inputs), as_list(function(*(x.double() for x in inputs)))):
        assert apart(ours, exact) <= 4e-6


OPEN: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "positions": (lambda x, p: [(x + p).relu()], ((3, 5, 8), (5, 8))),
    "one after the other": (lambda x, y: [torch.cat([x * 2, y + 1], 0)], ((3, 5, 2), (3, 5, 2))),
    "reshaped": (lambda x: [(x * 2 + 1).view(x.shape[0] * x.shape[1], 8).relu()], ((3, 5, 8),)),
    "halves that change places": (
        lambda x: [torch.cat([x[:, x.shape[1] // 2 :].cumsum(-1), x[:, : x.shape[1] // 2].cumsum(-1)], 1) * 2 + x], ((3, 6, 8),),
    ),
    "a product of sizes twice": (lambda x: [torch.minimum(x * 2, (x * 2).view(x.shape[0] * x.shape[1], 1, 1, 2)).relu()], ((3, 5, 2),)),
}


@pytest.mark.parametrize("name", OPEN)
def test_sizes_of_several_dimensions_may_stay_open(name: str) -> None:
    """What goes through several of them at once has products of sizes for its own."""
    function, shapes = OPEN[name]
    inputs = [random(shape, torch.float32, i) for i, shape in enumerate(shapes)]
    gm = traced(function, inputs, "rows")
    assert fused(gm)
    for ours, exact in zip(run(gm, inputs), as_list(function(*(x.double() for x in inputs)))):
        assert apart(ours, exact) <= 4e-6


def test_powers_of_sizes_are_products() -> None:
    rows = sympy.Symbol("s0", integer=True, positive=True)
    assert eval(as_text(2 + 3 * rows**2), {"s0": 5}) == 77 and "**" not in as_text(rows**3)
    with pytest.raises(Unsupported, match="a power of sizes"):
        as_text(1 / rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_compared_in_the_tensor_s_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 0.3, -10000.0, 1.0], dtype=dtype)

    def function(x: Tensor) -> list[Tensor]:
        return [(x == 0.1) | (x > 5.0), (x > 0.3) & (x != -10000.0)]

    gm = traced(function, [x])
    assert fused(gm)
    for ours, exact in zip(run(gm, [x]), function(x)):
        assert torch.equal(ours, exact)


def test_tensors_are_compared_in_the_half_of_the_larger_one() -> None:
    """float16 alone: Triton's interpreter does not round to bfloat16, but cuts off."""
    x, threshold = torch.tensor([0.1, 0.3, 0.7, 1.0]).half(), torch.tensor(0.3)
    gm = traced(function := lambda x, y: [(x > y) | (x == 0.1), x == torch.full_like(x, 0.7)], [x, threshold])
    assert fused(gm) and not torch.equal(x > threshold, x.float() > threshold)
    for ours, exact in zip(run(gm, [x, threshold]), function(x, threshold)):
        assert torch.equal(ours, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_constants_are_what_a_half_holds(dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 0.3, 1.0], dtype=dtype)
    gm = traced(function := lambda x: (torch.full_like(x, 0.3) == x).float() * 2, [x])
    assert fused(gm) and torch.equal(run(gm, [x])[0], function(x))


def test_inputs_that_lie_otherwise_than_in_the_trace() -> None:
    x = random((4, 6), torch.float32, 0)
    (region,) = fused(traced(lambda x: x.sin() + 1, [x]))
    (ours,) = region.launched([x.t().contiguous().t()], interpret=True)
    assert apart(ours, x.double().sin() + 1) <= 1e-6


# --- any graph

SHAPES = st.lists(st.sampled_from([1, 2, 3, 8]), min_size=0, max_size=3)
UNARY = {
    "neg": torch.neg, "abs": torch.abs, "exp": lambda x: (-x.abs()).exp(), "tanh": torch.tanh, "silu": F.silu,
    "exp2": lambda x: (-x.abs()).exp2(), "log1p": lambda x: x.abs().log1p(), "softplus": F.softplus, "hardswish": F.hardswish,
}  # fmt: skip
BINARY = {"add": torch.add, "mul": torch.mul, "max": torch.maximum, "where": lambda x, y: torch.where(x > y, x, y * 0.5)}
ROWS = {"softmax": lambda x: F.softmax(x, -1), "less_mean": lambda x: x - x.mean(-1, keepdim=True), "sum": lambda x: x / (1 + x.abs().sum(-1, keepdim=True))}  # fmt: skip
VIEWS = {
    "flat": lambda x: x.reshape(-1),
    "turned": lambda x: x.movedim(0, -1),
    "cut": lambda x: x[..., 1:],
    "longer": lambda x: torch.cat((x, -x), -1),
    "gated": lambda x: F.glu(torch.cat((x, -x), -1), -1),
    "wider": lambda x: x.unsqueeze(0).expand(2, *x.shape),
}


def strided(shape: Sequence[int], kind: str, dtype: torch.dtype, seed: int) -> Tensor:
    """plain: without gaps; turned: its last dimension is the outermost in memory; gaps: every second number is not its."""
    if kind == "turned" and shape:
        return random((shape[-1], *shape[:-1]), dtype, seed).movedim(0, -1)
    if kind == "gaps" and shape:
        return random((*shape[:-1], 2 * shape[-1]), dtype, seed)[..., ::2]
    return random(shape, dtype, seed)


@settings(max_examples=40)
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
    for ours, plain, value in zip(run(gm, inputs), function(*inputs), exact, strict=True):
        assert (ours.dtype, ours.shape) == (plain.dtype, plain.shape)
        overflowed = ~plain.isfinite() & (ours == plain)  # where torch's own numbers end, in this dtype
        assert apart(ours[~overflowed], value[~overflowed]) <= 8 * len(steps) * EPSILON[dtype]


def _fits(x: Tensor, y: Tensor) -> bool:
    return all(b in (1, a) for a, b in zip(x.shape, y.shape))


# --- edges


EDGES: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "a start before the front": (lambda x: (x * 2 + 1)[:, -512:] * 3, ((4, 6),)),
    "lines that are negative in parts": (
        lambda a, b: torch.cat([a * 1, (b.t() * 1).reshape(6)])[1:7].view(2, 3) * 2, ((3,), (3, 2))
    ),
    "parts that are shorter than their place": (
        lambda a, b: torch.cat([(a * 1).unsqueeze(1).expand(2, 3).reshape(6), b]).view(4, 3) * 2, ((2,), (6,))
    ),
    "one number of a concatenation": (lambda x, y: (torch.cat([x * 2, y]) * 1)[5] * y, ((3,), (3,))),
    "a number that no int32 is": (lambda x: ((x * 9).int() * 2654435761) & 1023, ((4, 6),)),
    "a share of a product of whole numbers": (lambda x: (y := (x * 9).int()).addcmul(y, y, value=0.5) * 2, ((4, 6),)),
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
LEFT = (  # to torch
    "a power of whole numbers", "a number that no int32 is", "a share of a product of whole numbers", "nothing is given", "a view of nothing",
    "softmax of one number",
)  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str) -> None:
    function, shapes = EDGES[name]
    inputs = [random(shape, torch.float32, i) for i, shape in enumerate(shapes)]
    gm = traced(function, inputs)
    assert bool(fused(gm)) == (name not in LEFT), gm.code
    for ours, theirs in zip(run(gm, inputs), as_list(function(*inputs)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_variance_far_from_zero() -> None:
    x = (1000 + 4 * random((4, 256), torch.float32, 0)).bfloat16()
    gm = traced(lambda x: x.mul(1.0).var(-1), [x])
    assert fused(gm)
    torch.testing.assert_close(run(gm, [x])[0], x.float().var(-1).bfloat16(), rtol=2**-7, atol=0)


# --- tiles


def test_every_tile_gives_the_same() -> None:
    x = random((37, 50), torch.float32, 0)
    (region,) = fused(traced(lambda x: [y := x.sin() + 1, y.amax(-1)], [x]))
    expected = region.launched([x], interpret=True)
    sized = region.sized((), False)
    assert len(tiles := like(sized.tile)) > 1
    for tile in tiles:
        region.at_sizes[(), False] = dataclasses.replace(sized, tile=tile)
        assert same(region.launched([x], interpret=True), expected)


@pytest.mark.parametrize("name", ["layer_norm_backward", "rms_norm_backward", "sums_of_columns"])
@pytest.mark.parametrize("steps", [1, 2, 8])
def test_programs_add_up_several_tiles_of_rows(name: str, steps: int) -> None:
    """The last ones have none; without columns of many numbers a tile has many rows."""
    function, ((*_, columns), *_) = FUNCTIONS[name]
    shapes = [(3, 4096 // 64 * 3, columns)] * 2 + [(columns,)] * (name != "sums_of_columns")
    inputs = [random(shape, torch.float32, i) for i, shape in enumerate(shapes)]
    (region,) = fused(gm := traced(function, inputs))
    sized = region.sized((), False)
    region.at_sizes[(), False] = dataclasses.replace(sized, tile={**sized.tile, "STEPS": steps})
    for ours, exact in zip(run(gm, inputs), function(*(x.double() for x in inputs)), strict=True):
        assert apart(ours, exact) <= 4e-6 * 576**0.5


@pytest.mark.parametrize("rows", [0, 5])
def test_rows_that_are_added_up_may_be_any_number(rows: int) -> None:
    function, shapes = FUNCTIONS["layer_norm_backward"]
    gm = traced(function, [random(shape, torch.float32, i) for i, shape in enumerate(shapes)], "rows")
    (region,) = fused(gm)
    assert region.sizes and region.totals
    inputs = [random(shape, torch.float32, i) for i, shape in enumerate([(rows, 33), (rows, 33), (33,)])]
    for ours, exact in zip(run(gm, inputs), function(*(x.double() for x in inputs)), strict=True):
        assert apart(ours, exact) <= 8e-6


def test_programs_are_few_however_many_rows_there_are() -> None:
    for rows, each in ((1, 1), (512, 1), (513, 1), (16384, 1), (100_000, 2), (10**7, 32)):
        programs = -(-rows // (each * steps_of(rows, each)))
        assert programs <= 512 and (2 * programs > 512 or steps_of(rows, each) == 1)


@pytest.mark.parametrize("function", [lambda x: x.sin().sum(0) * 2 + x, lambda x: (x * 2).sin().sum(-1).exp()])
def test_a_sum_over_a_dimension_of_a_number_is_the_number(function: Function) -> None:
    x = torch.tensor(0.7)
    gm = traced(function, [x])
    fused(gm)
    torch.testing.assert_close(run(gm, [x]), [function(x)])
