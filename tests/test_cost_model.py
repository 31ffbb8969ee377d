"""The simulators against brute force, against what runs, and against what must be so."""

from __future__ import annotations

import functools
import itertools
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from autoshard import Config, optim
from autoshard.calibrate import _rising
from autoshard.capture import capture
from autoshard.cost_model import collectives, liveness, timeline
from autoshard.cost_model.cluster import TABLES, Cluster, measured_by, measured_here, preset, with_rate
from autoshard.cost_model.collectives import Group
from autoshard.cost_model.fusion import fuse
from autoshard.cost_model.hardware import DEVICES, device_named_like, is_known
from autoshard.cost_model.kernels import look_up, seconds
from autoshard.cost_model.liveness import CATEGORIES
from autoshard.cost_model.optimizer import NAMED, like, memory
from autoshard.cost_model.program import IN_PLACE, Operation, Program
from autoshard.cost_model.work import Work, flops_of, work_of
from autoshard.cost_model.workspace import workspace_of
from autoshard.errors import ClusterError
from autoshard.forecast import Forecaster
from autoshard.passes.choose_zero import Circumstances, make_plan
from autoshard.plan import Plan
from autoshard.report import plan_tables, rendered
from tests.small import in_full

BATCH, LENGTH = sympy.Symbol("batch"), sympy.Symbol("length")


def _operation() -> Operation:
    node = Graph().call_function(torch.ops.aten.relu.default, ())
    return Operation(node, "forward", (), ())


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Pieces of sizes in two symbols, alive at random."""
    length = draw(st.integers(1, 8))
    program = Program([_operation() for _ in range(length)])
    for _ in range(draw(st.integers(1, 10))):
        made = draw(st.integers(-1, length - 1))
        factor = st.integers(0, 50)
        size = draw(factor) * BATCH * LENGTH + draw(factor) * BATCH + draw(factor)
        program.add(size, draw(st.sampled_from(CATEGORIES)), made, draw(st.integers(made, length)))
    return program


@given(programs(), st.integers(1, 9), st.integers(1, 9))
def test_liveness_is_what_counting_gives(program: Program, batch: int, length: int) -> None:
    point = {BATCH: batch, LENGTH: length}
    curve = liveness.simulate(program)
    alive = [
        sum(int(sympy.sympify(p.bytes).subs(point)) for p in program.pieces if max(p.made, 0) <= i <= p.last)
        for i in range(len(program.operations) + 1)
    ]
    assert curve.at(point).sum(1).tolist() == alive
    assert curve.peak(point).bytes == max(alive) == sum(curve.peak(point).categories.values())


@given(programs())
def test_a_search_sees_the_same_peaks(program: Program) -> None:
    curve = liveness.simulate(program)
    grid = np.array(list(itertools.product(range(1, 5), repeat=2)), dtype=float)
    found = curve.peaks({"batch": grid[:, 0], "length": grid[:, 1]})
    assert found.tolist() == [curve.peak({BATCH: b, LENGTH: s}).bytes for b, s in grid.astype(int).tolist()]
    assert (np.diff(curve.peaks({"batch": np.arange(1.0, 9), "length": np.full(8, 3.0)})) >= 0).all()  # monotone in batch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 512), nn.GELU())
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x)), torch.zeros(len(x), dtype=torch.long))


def _forecaster(model: nn.Module, x: torch.Tensor, world: int, codegen: str = "eager") -> Forecaster:
    torch.compiler.reset()
    return Forecaster(capture(model, x), NAMED["adamw"], Cluster(1, world, DEVICES["cpu"]), codegen)


def _plan(forecaster: Forecaster, zero: Any) -> Plan:
    where = Circumstances(forecaster.cluster, None)
    config = Config(zero=zero, replicate_below=0)
    return make_plan(forecaster.captured.inventory, config, where, forecaster)


def grown(step: Any) -> int:
    """The most bytes by which a step goes above where it started."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    found = [e for e in events if e.get("name") == "[memory]"]
    return max(itertools.accumulate(int(e["args"]["Bytes"]) for e in sorted(found, key=lambda e: float(e["ts"]))))


CONVOLUTIONS = [
    (8, 64, 16, 96, 3, 1, 1, True), (8, 64, 16, 64, 1, 1, 1, True), (2, 64, 16, 64, 3, 1, 4, True), (2, 64, 16, 64, 3, 2, 1, True),
    (8, 64, 16, 96, 3, 1, 1, False), (8, 3, 16, 64, 3, 1, 1, False), (4, 3, 32, 64, 8, 8, 1, False)
]  # fmt: skip


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
        assert held + workspace_of(node, channels_last=False) == pytest.approx(grown(step), rel=0.03)


def test_what_dropout_and_the_gradient_of_batch_norm_take_for_a_while() -> None:
    x, of = torch.randn(256, 32), [torch.randn(32) for _ in range(5)]
    for call, arguments in (
        (torch.ops.aten.native_dropout.default, (x, 0.1, True)),
        (torch.ops.aten.native_batch_norm_backward.default, (x, x, *of, True, 1e-5, [True, True, True])),
    ):
        node, step = _called(call, arguments), functools.partial(call, *arguments)
        held = sum(t.nbytes for t in tree_leaves(node.meta["val"]))
        step()
        assert held + workspace_of(node, channels_last=False) == pytest.approx(grown(step), rel=0.03)


def _called(call: Any, arguments: tuple[Any, ...]) -> torch.fx.Node:
    graph = Graph()
    nodes = [graph.placeholder("x") if isinstance(a, torch.Tensor) else a for a in arguments]
    for node, value in zip(nodes, arguments):
        if isinstance(node, torch.fx.Node):
            node.meta["val"] = value
    made = graph.call_function(call, tuple(nodes))
    made.meta["val"] = call(*arguments)
    return made


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    """Blocks enough to be compiled apart from what is around them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(192, 64), nn.ModuleList(Layer() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.flatten(1))
        for layer in self.layers:
            x = layer(x)
        return x.log_softmax(-1).square().mean()


@pytest.mark.parametrize(
    "make, batch, codegen",
    [(Net, 64, "eager"), (Net, 512, "eager"), (Net, 64, "inductor"), in_full(Net, 512, "inductor"), in_full(Deep, 512, "inductor")],
)
def test_the_peak_is_the_measured_one(make: type[nn.Module], batch: int, codegen: str) -> None:
    import autoshard

    model, x = make(), torch.randn(batch, 3, 8, 8)
    predicted = _plan(_forecaster(model, x, 1, codegen), 0).predicted
    optimizer = torch.optim.AdamW(model.parameters())
    torch.compiler.reset()
    compiled = torch.compile(model, backend=autoshard.backend(Config(codegen=codegen, verbose=False)))  # type: ignore[arg-type]

    def step() -> None:
        compiled(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    held = sum(predicted.memory.get(c, 0) for c in ("parameters", "optimizer", "buffers", "inputs"))
    assert predicted.peak_bytes - held == pytest.approx(grown(step), rel=0.03)
    state = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    assert predicted.memory["optimizer"] == state
    assert predicted.memory["parameters"] == sum(p.numel() * p.element_size() for p in model.parameters())


def test_flops_are_those_of_torchs_counter() -> None:
    model, x = Net(), torch.randn(16, 3, 8, 8)
    forecaster = _forecaster(model, x, 1)
    program, *_ = forecaster.simulated(_plan(forecaster, 0))
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    assert sum(flops_of(o.node) for o in program.operations) == counter.get_total_flops()
    assert not any(work_of(o).guessed for o in program.operations)


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


def test_more_sharding_never_raises_state() -> None:
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 8)
    state = []
    for zero in range(4):
        _, curve, *_ = forecaster.simulated(_plan(forecaster, zero))
        last = dict(zip(CATEGORIES, curve.at({})[-1]))
        state.append(last["parameters"] + last["optimizer"] + last["gradients"])
    assert state == sorted(state, reverse=True) and state[0] > 7 * state[-1]


def test_what_is_packed_to_travel_is_communication_and_what_comes_of_it_gathered() -> None:
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 4)
    program, *_ = forecaster.simulated(replace(_plan(forecaster, 3), message=4096))
    by_maker = {kind: {p.category for p in program.pieces if kind in p.maker} for kind in ("pack_shards", "gather_direct", "unpack_full")}
    assert by_maker["pack_shards"] == {"communication"} and by_maker["unpack_full"] == {"gathered"}, by_maker
    assert len([o for o in program.operations if "gather_direct" in o.name]) > 2


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_what_is_summed_in_place_is_there_once(codegen: str) -> None:
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 2, codegen)
    program, _, took, _ = forecaster.simulated(replace(_plan(forecaster, 0), direct_sums=False))
    sums = [(at, o) for at, o in enumerate(program.operations) if o.name == IN_PLACE]
    assert sums and took.timeline.communication > 0
    for at, operation in sums:
        (packed,), (summed,) = operation.reads, operation.makes
        assert program.pieces[packed].last < at == program.pieces[summed].made, (at, program.pieces[packed])


def test_a_step_has_rows_of_uneven_gradients_beside_what_travels() -> None:
    """The head's alone, of 10 rows: 3 for each of 4 processes."""
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 4)
    program, *_ = forecaster.simulated(_plan(forecaster, 2))
    rows = [p for p in program.pieces if "rows_by_rank" in p.maker]
    assert sum(p.bytes for p in rows) == 4 * 3 * 4 * (512 + 1) and {p.category for p in rows} == {"communication"}
    assert all(work_of(o).kind == "pack" for o in program.operations if "rows_by_rank" in o.name)


def test_the_same_input_gives_the_same_plan_byte_by_byte() -> None:
    texts = [_plan(_forecaster(Net(), torch.randn(4, 3, 8, 8), 4), "auto").to_json() for _ in range(2)]
    assert texts[0] == texts[1] and '"place": "' in texts[0]


def test_an_optimizer_is_measured_by_stepping_it() -> None:
    rows = [((64, 64), torch.float32), ((64,), torch.float32)]
    elements = 64 * 64 + 64
    adam, sgd = (memory(NAMED[name], rows, foreach=False) for name in ("adamw", "sgd"))
    assert adam is not None and sgd is not None
    assert adam.state == 2 * 4 * elements + 2 * 4 and sgd.state == sgd.scratch == 0
    together = memory(NAMED["adamw"], rows, foreach=True)
    assert together is not None and together.scratch >= 4 * elements
    users = torch.optim.AdamW([nn.Parameter(torch.ones(2))], amsgrad=True)
    of_users = memory(like(users), rows, foreach=False)
    assert of_users is not None and of_users.state == 3 * 4 * elements + 2 * 4 and not users.state
    assert memory(lambda ps: torch.optim.Adafactor(ps), rows, foreach=False) is None  # asks for values
    ours = memory(lambda ps: optim.Adafactor(ps), rows, foreach=False)
    assert ours is not None and ours.state == 4 * (64 + 64) + 4 * 64 + 2 * 4  # rows and columns, a vector, steps
    torch.optim.lr_scheduler.StepLR(users, 1)  # puts a step of its own on the optimizer
    before = users.param_groups[0]["params"][0].detach().clone()
    users.param_groups[0]["params"][0].grad = torch.ones(2)
    assert memory(like(users), rows, foreach=False) == of_users
    assert torch.equal(users.param_groups[0]["params"][0], before) and not users.state


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_what_a_step_writes_in_place_passes_twice(options: dict[str, bool]) -> None:
    """Parameter, gradient and two moments are read, three of them written, where each operation passes once through memory."""
    found = memory(lambda ps: torch.optim.AdamW(ps, **options), [((1 << 16,), torch.float32)], foreach=False)  # type: ignore[arg-type]
    assert found is not None
    there = sum(read for read, _ in found.moved) / (4 << 16)
    assert there == pytest.approx(7, abs=0.01) if "fused" in options else there > 7


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: what is set on it is set on the optimizer inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups


def test_an_optimizer_inside_another_is_left_alone() -> None:
    inside = torch.optim.SGD([nn.Parameter(torch.ones(2))], momentum=0.9)
    groups = inside.param_groups
    found = memory(like(Wrapper(inside)), [((8,), torch.float32)], foreach=False)
    assert found is not None and found.state == 32 and inside.param_groups is groups and not inside.state


def test_halves_of_one_kind_are_as_fast_as_those_of_the_other() -> None:
    tables = {"matmul.fp32": ((1e3, 1e-5), (1e9, 1e-2)), "matmul.bf16": ((1e3, 1e-5), (1e9, 1e-3))}
    device = replace(DEVICES["h100"], tables=tables)
    took = {dtype: float(seconds(Work("matmul", 1e12, 0, 0, dtype=dtype), device)) for dtype in ("fp16", "bf16", "fp64", "fp32")}
    assert took["fp16"] == took["bf16"] < took["fp32"] == took["fp64"]


def test_convolutions_in_fp32_are_as_fast_as_tf32() -> None:
    """Which torch's matmuls are not, unless they are told to be."""
    took = {kind: float(seconds(Work(kind, 10**13, 0, 0), DEVICES["a100"])) for kind in ("convolution", "matmul")}  # type: ignore[arg-type]
    assert took["convolution"] == pytest.approx(took["matmul"] / 8, rel=0.01)
    both = {name: float(seconds(Work("convolution", 10**13, 0, 0, dtype=name), DEVICES["v100"])) for name in ("fp32", "fp16")}
    assert both["fp16"] < both["fp32"] == float(seconds(Work("matmul", 10**13, 0, 0), DEVICES["v100"]))


def test_collectives_hide_behind_compute_until_they_are_waited_for() -> None:
    graph, c10d = Graph(), torch.ops._c10d_functional
    started = graph.call_function(c10d.all_reduce.default, ())
    wait = graph.call_function(c10d.wait_tensor.default, (started,))
    kernel = graph.call_function(torch.ops.aten.relu.default, ())
    operations = [
        Operation(started, "forward", (0,), (1,)),
        Operation(kernel, "forward", (2,), (3,)),
        Operation(wait, "forward", (1,), ()),
    ]
    for compute, exposed in ((3.0, 2.0), (7.0, 0.0)):
        line = timeline.simulate(Program(operations), lambda _, c=compute: c, lambda _: 5.0)
        assert (line.seconds, line.exposed, line.communication) == (max(compute, 5.0), exposed, 5.0)
    slowed = timeline.simulate(Program(operations), lambda _: 7.0, lambda _: 5.0, timeline.Sharing(interference=0.4))
    assert slowed.seconds == 7.0 + 0.4 * 5.0
    for compute, exposed in ((2.0, 4.0), (12.0, 0.0)):  # at half its rate the collective is through after 10 seconds
        dragged = timeline.simulate(Program(operations), lambda _, c=compute: c, lambda _: 5.0, timeline.Sharing(drag=0.5))
        assert (dragged.exposed, dragged.communication) == (exposed, 5.0)
        assert next(s.end for s in dragged.spans if s.stream == "link") == (6.0 if compute == 2.0 else 10.0)


def test_a_link_at_rest_begins_later_and_a_busy_one_does_not() -> None:
    graph, reduce = Graph(), torch.ops._c10d_functional.all_reduce.default
    first, second = (Operation(graph.call_function(reduce, ()), "forward", (), (i,)) for i in range(2))
    kernel = Operation(graph.call_function(torch.ops.aten.relu.default, ()), "forward", (2,), (3,))
    for between, end in ((1.0, 11.5), (5.0, 11.5), (5.5, 12.0), (7.0, 13.5)):
        line = timeline.simulate(Program([first, kernel, second]), lambda _, c=between: c, lambda _: 5.0, timeline.Sharing(wake=1.5))
        assert max(span.end for span in line.spans if span.stream == "link") == end


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_we_put_into_a_step_has_rules(zero: int) -> None:
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 4)
    plan = _plan(forecaster, zero)
    assert plan.direct == (zero > 0) and not any("a rule for" in unknown for unknown in plan.predicted.unknown)


def test_asking_for_a_collective_takes_compute_s_time() -> None:
    """The collective may begin in it."""
    graph, c10d = Graph(), torch.ops._c10d_functional
    started = graph.call_function(c10d.all_reduce.default, ())
    wait = Operation(graph.call_function(c10d.wait_tensor.default, (started,)), "forward", (1,), ())
    kernel = Operation(graph.call_function(torch.ops.aten.relu.default, ()), "forward", (2,), (3,))
    program = Program([Operation(started, "forward", (0,), (1,)), kernel, wait])
    for compute, step in ((1.0, 5.0), (4.0, 6.0)):
        line = timeline.simulate(program, lambda _, c=compute: c, lambda _: 5.0, issue=lambda _: 2.0)
        assert (line.seconds, line.compute, line.exposed) == (step, compute + 2.0, step - compute - 2.0)


@pytest.mark.parametrize(("codegen", "calls"), [("eager", True), ("inductor", False)])
def test_a_view_takes_a_call_where_no_code_is_generated(codegen: str, calls: bool) -> None:
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 1, codegen)
    plan = _plan(forecaster, 0)
    program, _, took, _ = forecaster.simulated(plan)
    views = sum(o.views for o in program.operations)
    assert (views > 4) == calls  # its flatten and the weights' transposes, in both directions
    slow = replace(forecaster.cluster, device=replace(DEVICES["cpu"], tables={"view": ((1.0, 1.0),)}))
    _, _, slower, _ = Forecaster(forecaster.captured, NAMED["adamw"], slow, codegen).simulated(plan)
    assert slower.seconds - took.seconds == pytest.approx(views, abs=1e-6)


def test_how_far_times_were_off_is_said_only_where_tables_were_measured() -> None:
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 1)
    measured = replace(forecaster.cluster, device=replace(DEVICES["cpu"], tables={"view": ((1.0, 1e-6),)}))
    for cluster, said in ((forecaster.cluster, False), (measured, True)):
        predicted = _plan(Forecaster(forecaster.captured, NAMED["adamw"], cluster, "eager"), 0).predicted
        assert predicted.error is not None and (predicted.seconds_error is not None) == said
        assert ("Measured steps took" in rendered(plan_tables(Plan(1, (("shard", 1),), (), predicted=predicted)))) == said


def test_a_matmul_takes_no_less_than_what_it_reads() -> None:
    tables = {"matmul.fp32": ((1.0, 1e-9), (1e12, 1.0)), "pointwise": ((1.0, 1e-9), (1e9, 1.0))}
    device = replace(DEVICES["cpu"], tables=tables)
    few_rows = Work("matmul", flops=2 * 32 * 2000**2, read=4 * 2000**2, written=0)
    assert seconds(few_rows, device) == pytest.approx(4 * 2000**2 / 1e9, rel=0.01)
    assert seconds(replace(few_rows, flops=2 * 2000**3, read=12 * 2000**2), device) > 12 * 2000**2 / 1e9


def test_each_matmul_of_a_batch_is_as_fast_as_one_of_its_size() -> None:
    device = replace(DEVICES["cpu"], tables={"matmul.fp32": ((1.0, 1e-5), (1e6, 1e-4), (1e9, 1e-3))})
    one, small = Work("matmul", 10**9, 0, 0), Work("matmul", 10**6, 0, 0)
    many = seconds(replace(one, batch=1000), device)
    assert many == pytest.approx(1e-5 + 1000 * (seconds(small, device) - 1e-5)) and many > 50 * seconds(one, device)
    assert seconds(replace(small, flops=0, batch=7), device) == pytest.approx(1e-5)


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


def test_what_goes_inside_of_nodes_and_what_goes_between_them_have_links_of_their_own() -> None:
    graph, reduce = Graph(), torch.ops._c10d_functional.all_reduce.default
    first, second = (Operation(graph.call_function(reduce, ()), "forward", (), (i,)) for i in range(2))
    for link, end in (("inside", 10.0), ("between", 5.0)):
        line = timeline.simulate(
            Program([first, second]), lambda _: 0.0, lambda _: 5.0, link_of=lambda o, x=link: "inside" if o is first else x
        )
        assert max(span.end for span in line.spans) == end


def test_what_the_transport_holds_is_there_while_its_collective_is_carried_out() -> None:
    """Two gathers are issued at once; the second is carried out when the first is through."""
    graph, c10d = Graph(), torch.ops._c10d_functional
    gathers = [graph.call_function(c10d.all_gather_into_tensor.default, ()) for _ in range(2)]
    waits = [graph.call_function(c10d.wait_tensor.default, (gather,)) for gather in gathers]
    kernel = graph.call_function(torch.ops.aten.relu.default, ())
    calls = [(gathers[0], (), (0,)), (gathers[1], (), (1,)), (kernel, (), (2,)), (waits[0], (0,), ()), (kernel, (), (3,)), (waits[1], (1,), ())]
    program = Program([Operation(node, "forward", reads, makes) for node, reads, makes in calls])
    for issued, waited in ((0, 3), (1, 5)):
        program.pieces[program.add(8, "communication", issued, waited)].flight = True
    line = timeline.simulate(program, lambda operation: {2: 3.0, 3: 4.0}[operation.makes[0]], lambda _: 5.0)
    timeline.land(program, line)
    assert [(piece.made, piece.last) for piece in program.pieces] == [(2, 3), (4, 5)]


def test_fusion_stays_within_compiled_graphs_and_keeps_what_a_collective_reads() -> None:
    graph, c10d = Graph(), torch.ops._c10d_functional
    relu, other = (graph.call_function(torch.ops.aten.relu.default, ()) for _ in range(2))
    started, wait = (graph.call_function(op, ()) for op in (c10d.all_reduce.default, c10d.wait_tensor.default))
    program = Program()
    sent, got, first, second, third = (program.add(8, "temporaries", i, i + 1) for i in (0, 1, 2, 3, 4))
    program.pieces[sent].last = program.pieces[got].last = 6  # the transport reads it until the wait
    program.operations = [
        Operation(relu, "forward", (), (sent,), code=0),
        Operation(started, "forward", (sent,), (got,), code=0),
        Operation(relu, "forward", (), (first,), code=0),
        Operation(other, "forward", (first,), (second,), code=0),
        Operation(relu, "forward", (second,), (third,), code=1),
        Operation(relu, "forward", (third,), (), code=None),
        Operation(wait, "forward", (got,), (), code=None),
    ]
    fused = fuse(program)
    assert [len(o.parts) for o in fused.operations] == [1, 1, 2, 1, 0, 0]
    assert fused.pieces[first].bytes == 0 and fused.pieces[second].bytes == fused.pieces[third].bytes == 8
    assert fused.pieces[sent].last == 5


def test_cheap_values_are_computed_where_they_are_read() -> None:
    graph = Graph()
    aten = torch.ops.aten
    mm, relu, sigmoid = (graph.call_function(op, ()) for op in (aten.mm.default, aten.relu.default, aten.sigmoid.default))
    program = Program()
    product, cheap, heavy, *products = (program.add(8, "temporaries", i, i) for i in range(6))
    program.operations = [
        Operation(mm, "forward", (), (product,), code=0),
        Operation(relu, "forward", (product,), (cheap,), code=0),
        Operation(sigmoid, "forward", (product,), (heavy,), code=0),
        *(Operation(mm, "forward", (product, heavy), (p,), code=0) for p in products),
        *(Operation(graph.call_function(aten.add.Tensor, ()), "forward", (cheap, heavy, p), (), code=0) for p in products[:2]),
    ]
    for piece, last in ((product, 5), (cheap, 7), (heavy, 7), (products[0], 6), (products[1], 7), (products[2], 5)):
        program.pieces[piece].last = last
    fused = fuse(program)
    assert [o.name for o in fused.operations].count("aten.relu.default") == 0
    assert fused.pieces[cheap].bytes == 0 and fused.pieces[heavy].bytes == 8
    readers = [o for o in fused.operations if relu in o.parts]
    assert readers and all(product in o.reads and heavy in o.reads for o in readers)


def test_a_kernel_takes_in_what_it_reads_of_another_unless_something_lies_between() -> None:
    graph = Graph()
    aten = torch.ops.aten
    mm, relu, sigmoid, add = (graph.call_function(op, ()) for op in (aten.mm.default, aten.relu.default, aten.sigmoid.default, aten.add.Tensor))
    for between in (False, True):
        program = Program()
        product, heavy, first, last, second, *out = (program.add(8, "temporaries", i, i + 1) for i in range(7))
        program.operations = [
            Operation(mm, "forward", (), (product,), code=0),
            Operation(sigmoid, "forward", (product,), (heavy,), code=0),
            Operation(relu, "forward", (product, heavy), (first,), code=0),
            Operation(mm, "forward", (first,) if between else (), (last,), code=0),
            Operation(add, "forward", (product, heavy, last), (second,), code=0),
            *(Operation(mm, "forward", (p,), (made,), code=0) for p, made in zip((first, second), out)),
        ]
        fused = fuse(program)
        kernels = [[p.target for p in o.parts] for o in fused.operations if o.parts[1:]]
        together = [sigmoid.target, relu.target] if between else [sigmoid.target, relu.target, add.target]
        assert kernels == [together] and fused.pieces[heavy].bytes == (8 if between else 0)


def test_what_autograd_makes_for_an_inlined_operation_is_there_from_backward_on() -> None:
    graph = Graph()
    mm, relu = (graph.call_function(op, ()) for op in (torch.ops.aten.mm.default, torch.ops.aten.relu.default))
    program = Program()
    saved, tangent, cheap, made = (program.add(8, "temporaries", i, last) for i, last in ((0, 1), (1, 1), (1, 2), (2, 3)))
    program.operations = [
        Operation(mm, "forward", (), (saved,), code=0),
        Operation(relu, "backward", (tangent,), (cheap,), code=1),
        Operation(relu, "backward", (cheap,), (made,), code=1),
        Operation(mm, "backward", (made, saved), (), code=1),
    ]
    fused = fuse(program)
    assert len(fused.operations) == 3 and fused.pieces[tangent].made == 1


@pytest.mark.parametrize(
    ("repeats", "shared", "waits", "joined"),
    [
        ("relu mm", 16, False, True),
        ("relu", 2, False, False),
        ("", 2, False, True),
        ("relu mm", 16, True, False),
        ("relu", 16, True, True),
        ("mm", 16, True, False),
        ("", 16, True, True),
    ],
)
def test_in_backward_only_what_pays_is_joined(repeats: str, shared: int, waits: bool, joined: bool) -> None:
    graph = Graph()
    mm, relu = (graph.call_function(op, ()) for op in (torch.ops.aten.mm.default, torch.ops.aten.relu.default))
    for node, name in ((mm, "mm"), (relu, "relu")):
        node.meta["partitioner_tag"] = "is_forward" if name in repeats.split() else "is_backward"
    program = Program()
    common, own, other = (program.add(size, "activations", 0, 3) for size in (shared, 16, 16))
    first, between, later = (program.add(size, "temporaries", at, at + 1) for at, size in ((1, 8), (2, 16), (3, 8)))
    program.operations = [
        Operation(mm, "forward", (), (common, own, other), code=0),
        Operation(relu, "backward", (common, own), (first,), code=1),
        Operation(mm, "backward", (first,) if not waits else (other,), (between,), code=1),
        Operation(relu, "backward", (common, between if waits else other), (later,), code=1),
        Operation(mm, "backward", (first, later), (), code=1),
    ]
    assert any(set(o.makes) == {first, later} for o in fuse(program).operations) == joined


def test_what_writes_a_saved_tensor_is_joined_with_what_reads_it() -> None:
    graph = Graph()
    mm, relu = (graph.call_function(op, ()) for op in (torch.ops.aten.mm.default, torch.ops.aten.relu.default))
    program = Program()
    product, saved, made = (program.add(8, "activations", at, last) for at, last in ((0, 1), (1, 4), (2, 3)))
    program.operations = [
        Operation(mm, "forward", (), (product,), code=0),
        Operation(relu, "forward", (product,), (saved,), code=0),
        Operation(relu, "forward", (saved,), (made,), code=0),
        Operation(mm, "forward", (made,), (), code=0),
    ]
    fused = fuse(program)
    assert [set(o.makes) for o in fused.operations] == [{product}, {saved, made}, set()]
    assert [fused.pieces[p].bytes for p in (saved, made)] == [8, 8]


def test_what_a_kernel_sums_up_is_stored_while_it_runs_and_hands_its_place_on() -> None:
    graph = Graph()
    ops = (torch.ops.aten.mm.default, torch.ops.aten.exp.default, torch.ops.aten.sum.dim_IntList, torch.ops.aten.div.Tensor)
    mm, exp, total, div = (graph.call_function(op, ()) for op in ops)
    program = Program()
    given, heavy, summed, made = (program.add(size, "temporaries", at, at + 1) for at, size in enumerate((8, 8, 2, 8)))
    program.operations = [
        Operation(mm, "forward", (), (given,), code=0),
        Operation(exp, "forward", (given,), (heavy,), code=0),
        Operation(total, "forward", (heavy,), (summed,), code=0),
        Operation(div, "forward", (heavy, summed), (made,), code=0),
        Operation(mm, "forward", (made,), (), code=0),
    ]
    program.pieces[heavy].last = 3
    fused = fuse(program)
    assert [fused.pieces[p].bytes for p in (given, heavy, summed, made)] == [8, 0, 2, 8]
    assert [int(b) for b in liveness.simulate(fused).at().sum(1)][:3] == [8, 10, 8]  # the product's place is the quotient's


def test_numbers_of_a_dropout_are_drawn_in_the_kernel_that_reads_them() -> None:
    graph = Graph()
    targets = (torch.ops.aten.mm.default, torch.ops.prims.inductor_seeds.default, torch.ops.prims.inductor_random.default)
    mm, seeds, draw, add = (graph.call_function(op, ()) for op in (*targets, torch.ops.aten.add.Tensor))
    program = Program()
    seed = program.add(16, "temporaries", 0, 5, "inductor_seeds_default")
    numbers, product, summed = zip(*([program.add(8, "temporaries", at, at) for at in range(3)] for _ in range(2)))
    program.operations = [
        Operation(seeds, "forward", (), (seed,), code=0),
        Operation(draw, "forward", (seed,), (numbers[0],), code=0),
        Operation(draw, "forward", (seed,), (numbers[1],), code=0),
        *(Operation(mm, "forward", (), (p,), code=0) for p in product),
        *(Operation(add, "forward", (n, p), (s,), code=0) for n, p, s in zip(numbers, product, summed)),
        Operation(mm, "forward", summed, (), code=0),
    ]
    fused = fuse(program)
    assert [fused.pieces[p].bytes for p in numbers] == [0, 0]


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1)), min_size=1, max_size=6), st.floats(0, 1e12), st.floats(0, 1e12))
def test_time_never_falls_with_size(points: list[tuple[float, float]], a: float, b: float) -> None:
    table = _rising(list({size: (size, taken) for size, taken in points}.values()))
    assert look_up(table, min(a, b)) <= look_up(table, max(a, b)) * (1 + 1e-9)
    device = DEVICES["a100"]
    for group in (Group(8), Group(16, 2), Group(4, 4)):
        small, large = (collectives.seconds("all_reduce", int(size), group, device) for size in sorted((a, b)))
        assert small <= large
    kernels = [seconds(Work("matmul", int(size), 0, 0), device) for size in sorted((a, b))]
    assert kernels[0] <= kernels[1]


def test_a_cluster_survives_yaml() -> None:
    cluster = Cluster(2, 8, DEVICES["h100"])
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster
    short = "nodes: 2\nper_node: 8\ndevice: {preset: h100, name: ours, memory: 96e9, across: {bandwidth: 50e9}}"
    read = Cluster.from_yaml(short)
    assert read.device.name == "ours" and read.device.memory == 96e9 and read.device.across.latency == 10e-6
    for said, more in (("{}", {}), ("{fp64: 60e12, fp32: 50e12}", {"fp64": 60e12, "fp32": 50e12})):
        read = Cluster.from_yaml(f"device: {{preset: h100, flops: {said}}}")
        assert read.device.flops == {**DEVICES["h100"].flops, **more}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes: [", "not YAML"),
        ("- 1", "legal: a mapping"),
        ("device: h1000", "device: 'h1000' is not known; legal: h100,"),
        ("nodes: 0\ndevice: h100", "nodes: 0 is not legal"),
        ("nods: 1\ndevice: h100", "'nods' is not known; legal: nodes, per_node, device"),
        ("device: {preset: h100, bandwidth: -1}", "bandwidth: -1 is not legal; legal: 1e+06 to 1e+15"),
        ("device: {preset: h100, bandwidth: 1e30}", "bandwidth: 1e+30 is not legal"),
        ("device: {preset: h100, inside: {latency: soon}}", "latency: 'soon' is not legal"),
        ("device: {preset: h100, tables: {pointwise: [[2, 1.0], [1, 1.0]]}}", "each above the last"),
        ("device: {preset: h100, tables: {pointwise: [[2]]}}", "legal: \\[size, seconds\\]"),
        ("device: {name: x, memory: 0, flops: {}, bandwidth: 1e9, launch: 0, inside: {}, across: {}}", "flops: {} is not legal"),
        ("device: {name: x}", "memory is missing"),
        ("nodes: 1", "device is missing"),
    ],
)
def test_a_bad_cluster_file_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ClusterError, match=says.replace("+", "\\+")):
        Cluster.from_yaml(text)


def test_devices_are_known_by_what_drivers_call_them() -> None:
    gib = 2**30
    names = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H200": "h200",
        "NVIDIA B200": "b200",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "NVIDIA A100 80GB PCIe": "a100-pcie",
        "NVIDIA A100-PCIE-40GB": "a100-pcie",
        "NVIDIA L4": "l4",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "Tesla V100-SXM2-32GB": "v100",
        "Tesla V100-PCIE-16GB": "v100-pcie",
        "AMD Instinct MI300X": "mi300x",
    }
    assert {*names.values(), "cpu"} == set(DEVICES)
    for name, expected in names.items():
        assert device_named_like(name, 40 * gib) == replace(DEVICES[expected], memory=40 * gib), name
    for name in ("NVIDIA T4", "NVIDIA L40S", "NVIDIA RTX A1000", "NVIDIA GH200 480GB"):
        unknown = device_named_like(name, 16 * gib)
        assert unknown.name == name and unknown.memory == 16 * gib and not is_known(unknown)
    assert all(d.source for d in DEVICES.values())


def test_a_measured_rate_is_that_of_the_slowest_links_and_near_ones_are_the_same() -> None:
    cpu = DEVICES["cpu"]
    one, two = Cluster(1, 2, cpu), Cluster(2, 2, cpu)
    assert with_rate(one, 120e6).device.across == cpu.across and with_rate(two, 120e6).device.inside == cpu.inside
    assert with_rate(one, 120e6).device.inside.bandwidth == pytest.approx(120e6, rel=0.2)
    assert with_rate(two, 118e6) == with_rate(two, 123e6) != with_rate(two, 24e6)


def test_a_calibration_that_counts_otherwise_is_refused() -> None:
    now = Cluster(1, 1, replace(DEVICES["cpu"], source=measured_by("2.13.0")))
    assert Cluster.from_yaml(now.to_yaml()) == now
    with pytest.raises(ClusterError, match="counts kernels in another way than this version; run autoshard calibrate again"):
        Cluster.from_yaml(now.to_yaml().replace(f"tables {TABLES},", "tables 1,"))
    with pytest.raises(ClusterError, match="run autoshard calibrate again"):
        Cluster.from_yaml("device: {preset: cpu, source: 'measured by autoshard calibrate, torch 2.13.0'}")


def test_the_file_of_a_bad_cluster_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    for data, says in ((b"nodes: 0\ndevice: h100", "nodes: 0 is not legal"), (b"\xff", "")):
        file.write_bytes(data)
        with pytest.raises(ClusterError, match=f"{re.escape(str(file))}: {says}"):
            Cluster.load(file)


def test_what_was_measured_here_comes_before_the_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measured_here("cpu") == preset("cpu")
    from autoshard.cost_model.cluster import cache_file

    cache_file("cpu").parent.mkdir(parents=True)
    cache_file("cpu").write_text(Cluster.from_yaml("device: {preset: cpu, bandwidth: 5e9}").to_yaml())
    assert measured_here("cpu").bandwidth == 5e9
