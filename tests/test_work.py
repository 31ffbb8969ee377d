"""What operations do, and how long that takes by tables and data sheets."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.calibrate import rising
from autoshard.calibration.kernels import FEW, WIDE, beyond_cubes
from autoshard.cost_model import collectives
from autoshard.cost_model.collectives import Group
from autoshard.cost_model.hardware import DEVICES
from autoshard.cost_model.kernels import look_up, seconds
from autoshard.cost_model.program import Operation
from autoshard.cost_model.work import Work, flops_of, work_of
from autoshard.ops.direct import SUM_DIRECT


@pytest.mark.parametrize("groups", [1, 8, 64])
def test_the_gradient_of_a_convolution_s_weight_is_of_its_groups(groups: int) -> None:
    """As many operations as forward, as is the input's."""
    x, weight = torch.randn(2, 64, 8, 8), torch.randn(64, 64 // groups, 3, 3)
    options = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)

    def both(x: torch.Tensor, weight: torch.Tensor) -> object:
        y = torch.ops.aten.convolution.default(x, weight, *options)
        return torch.ops.aten.convolution_backward.default(y, x, weight, *options, (True, True, False))

    graph = make_fx(both, tracing_mode="fake")(x, weight).graph
    forward, backward = (flops_of(node) for node in graph.nodes if "convolution" in node.name)
    assert backward == 2 * forward == 4 * 2 * 64 * 64 * (64 // groups) * 9


def test_halves_of_one_kind_are_as_fast_as_those_of_the_other() -> None:
    tables = {"matmul.fp32": ((1e3, 1e-5), (1e9, 1e-2)), "matmul.bf16": ((1e3, 1e-5), (1e9, 1e-3))}
    device = replace(DEVICES["h100"], tables=tables)
    took = {dtype: float(seconds(Work("matmul", 1e12, 0, 0, dtype=dtype), device)) for dtype in ("fp16", "bf16", "fp64", "fp32")}
    assert took["fp16"] == took["bf16"] < took["fp32"] == took["fp64"]


def test_a_matmul_takes_no_less_than_what_it_reads() -> None:
    tables = {"matmul.fp32": ((1.0, 1e-9), (1e12, 1.0)), "pointwise": ((1.0, 1e-9), (1e9, 1.0))}
    device = replace(DEVICES["cpu"], tables=tables)
    few_rows = Work("matmul", flops=2 * 32 * 2000**2, read=4 * 2000**2, written=0)
    assert seconds(few_rows, device) == pytest.approx(4 * 2000**2 / 1e9, rel=0.01)
    assert seconds(replace(few_rows, flops=2 * 2000**3, read=12 * 2000**2), device) > 12 * 2000**2 / 1e9


def test_a_matmul_of_a_few_rows_takes_what_was_measured_on_top_of_its_flops() -> None:
    """For each number that a cube of as many FLOPs does not have; other kinds and larger ones take what their FLOPs do."""
    tables = {"matmul.fp32": ((1.0, 1e-9), (1e12, 1e3)), "thin.fp32": ((1e6, 4e-4),), "pointwise": ((1.0, 1e-6), (1e9, 1e3))}
    device = replace(DEVICES["cpu"], tables=tables)
    rows, side = 32, 2000
    thin = Work("matmul", 2 * rows * side**2, read=4 * (side**2 + rows * side), written=4 * rows * side)
    beyond = side**2 + 2 * rows * side - 3 * (rows * side**2) ** (2 / 3)
    assert seconds(thin, device) - thin.flops * 1e-9 == pytest.approx(beyond * 4e-10)
    bf16 = replace(thin, read=thin.read / 2, written=thin.written / 2, dtype="bf16")
    assert seconds(bf16, device) == pytest.approx(float(seconds(thin, device)))
    many = replace(thin, flops=8 * thin.flops, read=8 * thin.read, written=8 * thin.written, batch=8)
    assert seconds(many, device) == pytest.approx(8 * float(seconds(thin, device)))
    cube = Work("matmul", 2 * side**3, read=8 * side**2, written=4 * side**2)
    assert seconds(cube, device) == pytest.approx(cube.flops * 1e-9)
    others = replace(device, tables=tables | {"convolution.fp32": tables["matmul.fp32"]})
    assert seconds(replace(thin, kind="convolution"), others) > thin.read * 1e-6


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_more_rows_never_take_less(rows: int, inner: int, columns: int) -> None:
    """By tables as a CPU's are."""
    table = ((8192.0, 2.6e-6), (524288.0, 1.15e-5), (4194304.0, 7.9e-5), (33554432.0, 4.7e-4), (268435456.0, 3.1e-3))
    device = replace(DEVICES["cpu"], tables={"matmul.fp32": table, "thin.fp32": ((1e6, 4.5e-4),)})

    def took(rows: int) -> float:
        read, written = 4 * (rows * inner + inner * columns), 4 * rows * columns
        return float(seconds(Work("matmul", 2 * rows * inner * columns, read, written), device))

    assert took(rows) <= took(rows + 1) <= 2.1 * took(rows)


def test_a_matmul_of_as_few_rows_as_were_measured_takes_what_was_measured() -> None:
    rows, side, cubes = FEW, WIDE, ((1e4, 1e-6), (1e8, 1e-3), (1e10, 1e-1))
    tables = beyond_cubes({"matmul.bf16": cubes, "thin.bf16": ((2 * rows * side**2, 1.5e-3),)})
    device = replace(DEVICES["cpu"], tables=tables)
    work = Work("matmul", 2 * rows * side**2, 2 * (rows + side) * side, 2 * rows * side, dtype="bf16")
    assert seconds(work, device) == pytest.approx(1.5e-3) and tables["matmul.bf16"] == cubes
    ((_, least),) = beyond_cubes({"matmul.bf16": cubes, "thin.bf16": ((2 * rows * side**2, 1e-6),)})["thin.bf16"]
    assert 0 < least < 1e-9  # faster than a cube, it is taken to be one


def test_each_matmul_of_a_batch_is_as_fast_as_one_of_its_size() -> None:
    device = replace(DEVICES["cpu"], tables={"matmul.fp32": ((1.0, 1e-5), (1e6, 1e-4), (1e9, 1e-3))})
    one, small = Work("matmul", 10**9, 0, 0), Work("matmul", 10**6, 0, 0)
    many = seconds(replace(one, batch=1000), device)
    assert many == pytest.approx(1e-5 + 1000 * (seconds(small, device) - 1e-5)) and many > 50 * seconds(one, device)
    assert seconds(replace(small, flops=0, batch=7), device) == pytest.approx(1e-5)
    assert seconds(replace(small, flops=0, batch=0), device) == pytest.approx(1e-5)


def test_a_cpu_reads_what_it_is_about_to_write() -> None:
    table = {"pointwise": ((1.0, 1e-9), (1e9, 1.0))}
    cpu, gpu = (replace(DEVICES[name], tables=table, launch=0.0) for name in ("cpu", "h100"))
    work = Work("pointwise", 0, 10**6, 10**6)
    assert seconds(work, cpu) == pytest.approx(3e-3) and seconds(work, gpu) == pytest.approx(2e-3)


COPIES = {
    "in rows": (lambda x: x.transpose(1, 2).clone(memory_format=torch.contiguous_format), "pointwise"),
    "turned": (lambda x: x.transpose(2, 3).clone(memory_format=torch.contiguous_format), "copy"),
    "of one number": (lambda x: x[:, :, :, :1].expand(x.shape).clone(memory_format=torch.contiguous_format), "pointwise"),
    "as it lies": (lambda x: x.transpose(2, 3).clone(), "pointwise"),
    "together": (lambda x: torch.cat([x, x]), "pointwise"),
    "zeros": (lambda x: torch.full_like(x, 0.0), "pointwise"),
}


@pytest.mark.parametrize("which", COPIES)
def test_a_copy_costs_more_where_it_turns_what_it_copies(which: str) -> None:
    copy, kind = COPIES[which]
    graph = make_fx(copy, tracing_mode="fake")(torch.ones(2, 3, 4, 5)).graph
    *_, made = (n for n in graph.nodes if n.op == "call_function")
    assert work_of(Operation(made, "forward", (), ())).kind == kind


@pytest.mark.parametrize(("wide", "kind"), [(torch.float32, "pack"), (torch.bfloat16, "pack_cast")])
def test_what_a_process_adds_up_itself_goes_part_by_part(wide: torch.dtype, kind: str) -> None:
    graph = torch.fx.Graph()
    brought, sent = graph.placeholder("brought"), graph.placeholder("sent")
    brought.meta["val"], sent.meta["val"] = torch.ones(8, dtype=wide), torch.ones(16, dtype=wide)
    made = graph.call_function(SUM_DIRECT, ([brought], [sent], 2, 2, torch.float32, "0"))
    made.meta["val"] = torch.ones(8)
    assert work_of(Operation(made, "forward", (), ())).kind == kind


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1)), min_size=1, max_size=6), st.floats(0, 1e12), st.floats(0, 1e12))
def test_time_never_falls_with_size(points: list[tuple[float, float]], a: float, b: float) -> None:
    table = rising(list({size: (size, taken) for size, taken in points}.values()))
    assert look_up(table, min(a, b)) <= look_up(table, max(a, b)) * (1 + 1e-9)
    device = DEVICES["a100"]
    for group in (Group(8), Group(16, 2), Group(4, 4)):
        small, large = (collectives.seconds("all_reduce", int(size), group, device) for size in sorted((a, b)))
        assert small <= large
    kernels = [seconds(Work("matmul", int(size), 0, 0), device) for size in sorted((a, b))]
    assert kernels[0] <= kernels[1]


def test_products_of_experts_are_counted_and_are_matmuls() -> None:
    """Forward and both gradients, of 6 rows that go to 2 experts."""
    x, weight = torch.zeros(6, 16, dtype=torch.bfloat16, requires_grad=True), torch.zeros(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([2, 6], dtype=torch.int32)

    def step(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = nn.functional.grouped_mm(x, weight, offs=ends)
        return torch.autograd.grad(out, (x, weight), torch.ones_like(out))

    found = [n for n in make_fx(step, tracing_mode="fake")(x, weight, ends).graph.nodes if "grouped_mm" in str(n.target)]
    assert len(found) == 3 and {flops_of(n) for n in found} == {2 * 6 * 16 * 32}
    assert not any(work_of(Operation(n, "forward", (), ())).guessed for n in found)


def test_products_of_experts_in_fp32_are_counted_too() -> None:
    """transformers' own operators, which torch.compile calls where torch's takes bf16 alone."""
    pytest.importorskip("transformers.integrations.moe")
    x, weight = torch.zeros(6, 16, requires_grad=True), torch.zeros(2, 16, 32, requires_grad=True)

    def step(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = torch.ops.transformers.grouped_mm_fallback(x, weight, ends)
        return torch.autograd.grad(out, (x, weight), torch.ones_like(out))

    traced = make_fx(step, tracing_mode="fake")(x, weight, torch.tensor([2, 6], dtype=torch.int32))
    found = [n for n in traced.graph.nodes if "grouped_mm" in str(n.target)]
    assert [flops_of(n) for n in found] == [2 * 6 * 16 * 32, 2 * 2 * 6 * 16 * 32]
    assert not any(work_of(Operation(n, "forward", (), ())).guessed for n in found)


def test_convolutions_in_fp32_are_as_fast_as_tf32() -> None:
    """Which torch's matmuls are not, unless they are told to be."""
    took = {kind: float(seconds(Work(kind, 10**13, 0, 0), DEVICES["a100"])) for kind in ("convolution", "matmul")}  # type: ignore[arg-type]
    assert took["convolution"] == pytest.approx(took["matmul"] / 8, rel=0.01)
    both = {name: float(seconds(Work("convolution", 10**13, 0, 0, dtype=name), DEVICES["v100"])) for name in ("fp32", "fp16")}
    assert both["fp16"] < both["fp32"] == float(seconds(Work("matmul", 10**13, 0, 0), DEVICES["v100"]))


def test_a_gpu_works_on_a_batch_of_products_at_once() -> None:
    found = {}
    for name in ("h100", "cpu"):
        device = replace(DEVICES[name], tables={"matmul.fp32": ((1e6, 1e-5), (1e7, 9e-5), (1e9, 1e-3))})
        found[name] = [float(seconds(Work("matmul", 1e8, 0, 0, batch=n), device)) for n in (1, 100)]
    assert found["h100"][0] == found["h100"][1] == found["cpu"][0] and found["cpu"][1] == pytest.approx(1e-5)


def test_a_lookup_reads_what_it_gives_and_where_that_is() -> None:
    """Not all that it looks into."""
    places = torch.zeros(6, dtype=torch.int64)
    for look, made in ((lambda w, i: nn.functional.embedding(i, w), 6 * 8 * 4), (lambda w, i: w[i], 6 * 8 * 4), (lambda w, i: w.gather(0, i[:, None]), 6 * 4)):
        graph = make_fx(look, tracing_mode="fake")(torch.ones(5000, 8), places).graph
        (found,) = (w for n in graph.nodes if n.op == "call_function" and (w := work_of(Operation(n, "forward", (), ()))).kind == "lookup")
        assert (found.read, found.written) == (6 * 8 + made, made)


@pytest.mark.parametrize(("name", "times"), [("cpu", 1), ("a100", 2)])
def test_attention_takes_a_gpu_twice_as_long_where_nothing_is_left_out(name: str, times: int) -> None:
    """It is measured with causal masks; FLOPs are counted as torch counts them, with or without."""
    device = replace(DEVICES[name], tables={"attention.fp32": ((1e3, 1e-5), (1e12, 1e-2), (2e12, 2e-2))})
    took = []
    for causal in (True, False):
        attend = functools.partial(nn.functional.scaled_dot_product_attention, is_causal=causal)
        traced = make_fx(lambda q: attend(q, q, q))(torch.randn(1, 2, 64, 32))  # noqa: B023 - called here
        (node,) = (n for n in traced.graph.nodes if "scaled_dot_product" in str(n.target))
        work = work_of(Operation(node, "forward", (), ()))
        assert (work.causal, work.flops) == (causal, 4 * 2 * 64 * 64 * 32)
        took.append(float(seconds(replace(work, flops=10**12, read=0, written=0), device)))
    assert took == pytest.approx([1e-2, times * 1e-2])
