"""What travels: gradients in fewer bits, and groups of parameters in several messages."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard.capture import Capture, capture
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.cost_model.step import GroupCost
from autoshard.dtypes import dtype_named
from autoshard.errors import ConfigError, PlanError
from autoshard.ops import wire
from autoshard.passes import graphs
from autoshard.passes.choose_bucket import choose_bucket
from autoshard.passes.choose_message import PIECES, UNMEASURED, choose_apart, choose_message
from autoshard.plan import Plan
from autoshard.planning import first_look
from autoshard.rehearsal import rehearse
from tests.cluster import Cluster
from tests.models import CASES
from tests.parity import measure, rank0_copy, whole
from tests.small import TOLERANCE, config, in_full
from tests.test_low_rank import residues

MIB = 2.0**20


class Sum(nn.Module):
    """The gradient of its weight is its input in every row: what was rounded can be told exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 15, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


class Turned(nn.Module):
    """The gradient of its parameter is complex: its input, and as much of i."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.turn * x).sum()


def turned(options: dict[str, Any]) -> Tensor:
    """The gradient of a complex parameter."""
    model = rank0_copy(Turned())
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(options.pop("zero", 0), **options)))
    compiled(torch.full((5,), dist.get_rank() + 1.0)).backward()
    return whole(model.turn.grad)


@pytest.mark.parametrize("direct", [False, True])
def test_what_is_complex_is_summed_as_it_is(two: Cluster, direct: bool) -> None:
    plan = replace(first_look(Turned(), config(0), Machines(1, 2, DEVICES["cpu"])), direct_sums=direct)
    for found in two.run(turned, {"zero": "auto", "plan": plan, "replicate_below": "auto"}):
        assert torch.equal(found, torch.full((5,), 1.5 + 1.5j))


def gradients(zero: int, options: dict[str, Any], scale: float = 1.0) -> tuple[Tensor, list[Tensor]]:
    """Of the compiled model, whole, and each process's own."""
    model = Sum()
    inputs = scale * torch.randn(dist.get_world_size(), 8, generator=torch.Generator().manual_seed(5))
    compiled: Any = torch.compile(rank0_copy(model), backend=autoshard.backend(config(zero, **options)))
    compiled(inputs[dist.get_rank()]).backward()
    return whole(compiled.layer.weight.grad), [x.expand(15, 8) for x in inputs]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize(("zero", "codegen"), [(0, "eager"), (3, "eager"), in_full(0, "inductor"), in_full(2, "inductor")])
def test_gradients_are_rounded_and_then_summed(two: Cluster, zero: int, codegen: str, name: str) -> None:
    dtype = dtype_named(name)
    for found, own in two.run(gradients, zero, {"compression": name, "codegen": codegen}):
        mean = sum(g.to(dtype).float() for g in own) / 2
        expected = mean if zero else mean.to(dtype).float()
        assert found.dtype == torch.float32 and torch.equal(found, expected)
        assert not torch.equal(found, sum(own) / 2)


def test_on_two_axes_sums_of_nodes_are_rounded_again(four: Cluster) -> None:
    options = {"compression": "bf16", "mesh": {"replicate": 2, "shard": 2}}
    for found, own in four.run(gradients, 3, options):
        first, second = (sum(g.bfloat16().float() for g in node) for node in (own[:2], own[2:]))
        mean = (first.bfloat16().float() + second.bfloat16().float()) / 4
        torch.testing.assert_close(found, mean.bfloat16().float(), rtol=1e-6, atol=0)


def test_sums_of_nodes_fit_where_every_gradient_does(four: Cluster) -> None:
    """The largest number of fp16 is 65504."""
    options = {"compression": "fp16", "mesh": {"replicate": 2, "shard": 2}}
    for found, own in four.run(gradients, 3, options, 2.3e4):
        assert max((own[0] + own[1]).abs().max(), (own[2] + own[3]).abs().max()) > 65504 > torch.stack(own).abs().max()
        torch.testing.assert_close(found, sum(own) / 4, rtol=2e-3, atol=20)


@pytest.mark.parametrize("zero", [0, in_full(1), in_full(2)])
def test_what_waited_is_added_before_it_is_rounded(two: Cluster, zero: int) -> None:
    for found, own in two.run(accumulated, zero):
        mean = sum((2 * g).bfloat16().float() for g in own) / 2
        expected = mean if zero else mean.bfloat16().float()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def accumulated(zero: int) -> tuple[Tensor, list[Tensor]]:
    """As `gradients`, of two backwards, the first of which does not communicate at stages 0 and 1."""
    model = rank0_copy(Sum())
    inputs = torch.randn(dist.get_world_size(), 8, generator=torch.Generator().manual_seed(5))
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(zero, compression="bf16")))
    with autoshard.no_sync(model):
        compiled(inputs[dist.get_rank()]).backward()
    compiled(inputs[dist.get_rank()]).backward()
    return whole(model.layer.weight.grad), [x.expand(15, 8) for x in inputs]


class Sums(Sum):
    """Of two weights, which travel together."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 15, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.other(x).sum()


def waited(zero: int, kept: list[bool], options: dict[str, Any]) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
    """The gradients of three backwards in bf16, two of which do not communicate; by parameter what each process has of them all, which
    bf16 has no numbers for; and what this process has not sent. kept: by rank, whether what waited of the second weight is."""
    model, rank, world = rank0_copy(Sums()), dist.get_rank(), dist.get_world_size()
    first = torch.randint(128, 256, (world, 8), generator=torch.Generator().manual_seed(5)).float()
    inputs = [first, torch.full_like(first, 0.5), torch.full_like(first, 0.25)]
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(zero, **options)))
    with autoshard.no_sync(model):
        for x in inputs[:2]:
            compiled(x[rank]).backward()
    if not kept[rank]:
        model.other.weight.grad = None
    compiled(inputs[2][rank]).backward()
    other = [sum(x[i] for x in (inputs if kept[i] else inputs[2:])) for i in range(world)]
    own = [[x.expand(15, 8) for x in each] for each in (sum(inputs), other)]  # type: ignore[union-attr]
    return [whole(p.grad) for p in model.parameters()], own, [r.error.detach() for r in residues(model)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("zero", "kept"), [(0, [True, True]), (1, [True, False]), in_full(1, [True, True]), in_full(0, [True, False])])
def test_what_waited_is_added_in_the_dtype_of_the_sum(two: Cluster, zero: int, kept: list[bool]) -> None:
    """Though gradients are narrower; also where of a group something waited on one process, and nothing on another."""
    for found, grads, _ in two.run(waited, zero, kept, {"precision": "bf16"}):
        for gradient, own in zip(found, grads):
            assert torch.equal(gradient, sum(own) / 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", [[True, False], in_full([True, True])])
def test_so_it_is_where_matrices_travel_in_its_place(two: Cluster, kept: list[bool]) -> None:
    """Of gradients of rank 1, so that what is missing of the mean is its rounding: to the dtype of copies, on all processes."""
    answers = two.run(waited, 0, kept, {"precision": "bf16", "compression": "powersgd", "compression_rank": 1})
    for i, own in enumerate(answers[0][1]):
        one, other = (found[i] for found, *_ in answers)
        missing = sum(errors[i] for *_, errors in answers) / 2
        assert torch.equal(one, other) and torch.equal(one, one.bfloat16().float())
        torch.testing.assert_close(one + missing, sum(own) / 2, rtol=1e-5, atol=0)


def test_where_gradients_are_summed_in_bf16_what_waited_is_rounded_once(two: Cluster) -> None:
    options = {"precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
    for found, grads, _ in two.run(waited, 0, [True, True], options):
        for gradient, own in zip(found, grads):
            assert torch.equal(gradient, sum(g.bfloat16() / 2 for g in own).float())  # type: ignore[union-attr]


def summed(options: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """As `gradients`, of a model in bf16 whose gradients are reduced in fp32."""
    model = rank0_copy(Sum().bfloat16())
    inputs = torch.randn(dist.get_world_size(), 8, generator=torch.Generator().manual_seed(5)).bfloat16()
    settings = config(2, precision=MixedPrecisionPolicy(reduce_dtype=torch.float32), **options)
    compiled: Any = torch.compile(model, backend=autoshard.backend(settings))
    compiled(inputs[dist.get_rank()]).backward()
    return whole(model.layer.weight.grad), [x.float().expand(15, 8) for x in inputs]


def test_what_is_reduced_in_fp32_is_rounded_to_a_narrower_parameter_once(three: Cluster) -> None:
    """Where each process sums by itself; of two numbers a sum is rounded once anyway."""
    for found, own in three.run(summed, {"cluster": Machines(1, 3, DEVICES["cpu"])}):
        assert torch.equal(found, (sum(own) / 3).bfloat16())


def scaled(zero: int) -> tuple[bool, float]:
    """Of a step in which one process's gradients are too large for fp16: whether parameters changed, and the scale after it."""
    model = rank0_copy(Sum())
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(zero, compression="fp16", replicate_below="auto")))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = model.layer.weight.detach().clone()
    scaler.scale(compiled(torch.full((8,), 1e3 if dist.get_rank() else 1.0))).backward()
    scaler.step(optimizer)
    scaler.update()
    return not torch.equal(whole(model.layer.weight.detach()), before), scaler.get_scale()


@pytest.mark.parametrize("zero", [2, in_full(0), in_full(3)])
def test_a_gradient_too_large_for_its_bits_skips_the_step_on_all(two: Cluster, zero: int) -> None:
    assert two.run(scaled, zero) == [(False, 512.0)] * 2


def test_what_travels_in_as_few_bits_anyway_is_left_alone(two: Cluster) -> None:
    for found, own in two.run(gradients, 2, {"compression": "bf16", "precision": "bf16"}):
        torch.testing.assert_close(found, sum(g.bfloat16().float() for g in own) / 2, rtol=1e-6, atol=0)


def test_compression_is_said_where_it_changes_something() -> None:
    plan = first_look(Sum(), config(0, compression="bf16"), Machines(2, 1, DEVICES["cpu"]))
    assert any("numbers change" in why for why in plan.why) and Plan.from_json(plan.to_json()) == plan
    plain = first_look(Sum(), config(0), Machines(2, 1, DEVICES["cpu"]))
    sent = {p.compression: sum(t.bytes for t in p.predicted.traffic) for p in (plan, plain)}
    assert 2 * sent["bf16"] == sent[""]
    alone = first_look(Sum(), config(0, compression="bf16"), Machines(1, 1, DEVICES["cpu"]))
    assert not alone.compression and any("no gradients travel in more bits" in why for why in alone.why)
    for without in ({"disable_passes": ("compress",)}, {"passes": "name_parameters,lower,compress"}):
        with pytest.raises(ConfigError, match="compression: no pass 'compress' before 'lower'"):
            config(0, compression="bf16", **without)
    with pytest.raises(ConfigError, match="compression: 'fp32' is not legal; .*'bf16'"):
        config(0, compression="fp32")
    with pytest.raises(PlanError, match="compression: 'int8' is not legal"):
        replace(plain, compression="int8")
    with pytest.raises(PlanError, match="compute: 'bfloat16' is not legal; .* bf16"):
        replace(plain, compute="bfloat16")
    with pytest.raises(PlanError, match="message: -1 is not legal"):
        replace(plain, message=-1)
    with pytest.raises(PlanError, match="bucket: -1 is not legal"):
        replace(plain, bucket=-1)


def _plan(name: str, machines: Machines, config: autoshard.Config) -> Plan:
    case = CASES[name]
    return autoshard.plan(case.build(), case.batch(torch.Generator()), config, machines)


def _cut(name: str, zero: int, world: int, message: int, codegen: str = "eager", **options: Any) -> autoshard.Config:
    """A config whose plan has such messages."""
    plan = _plan(name, Machines(1, world, DEVICES["cpu"]), config(zero, **options))
    assert not plan.message
    return config("auto", plan=replace(plan, message=message), codegen=codegen, replicate_below="auto")


@pytest.mark.parametrize(
    ("name", "zero", "codegen"),
    [in_full("attention", 2, "eager"), ("odd", 3, "eager"), in_full("llama", 3, "eager"), in_full("attention", 3, "inductor")],
)
def test_in_messages_that_cut_parameters(two: Cluster, name: str, zero: int, codegen: str) -> None:
    for distance in two.run(measure, name, _cut(name, zero, 2, 300, codegen)):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.full
def test_in_messages_over_two_axes(four: Cluster) -> None:
    for distance in four.run(measure, "odd", _cut("odd", 3, 4, 300, mesh={"replicate": 2, "shard": 2})):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.full
def test_in_messages_over_three_processes(three: Cluster) -> None:
    for distance in three.run(measure, "odd", _cut("odd", 3, 3, 200)):
        assert distance.worst <= TOLERANCE, distance


def _with_apart(name: str, plan: Plan, apart: int, machines: Machines) -> Plan:
    """The plan, of which parameters from so many bytes on are gathered by themselves, and what is predicted of it."""
    return _plan(name, machines, config("auto", plan=replace(plan, apart=apart), replicate_below="auto"))


@pytest.mark.parametrize(("nodes", "hierarchy"), [(1, "flat"), (2, "two_level")])
def test_as_many_gathers_are_predicted_as_are_made(nodes: int, hierarchy: str) -> None:
    machines = Machines(nodes, 4 // nodes, DEVICES["cpu"])
    planned, counts = _plan("attention", machines, config(3, hierarchy=hierarchy)), []
    for apart in (0, 1000):
        plan = _with_apart("attention", planned, apart, machines)
        counts.append(_gathers("attention", plan))
        gather = "gather_direct" if plan.direct else "all_gather"
        assert counts[-1] == sum(
            t.messages for t in plan.predicted.traffic if (t.collective, t.phase) == (gather, "forward")
        )
    assert counts[1] > counts[0]


@functools.cache
def _captured(name: str) -> Capture:
    case = CASES[name]
    return capture(case.build(), case.batch(torch.Generator()))


def _gathers(name: str, plan: Plan) -> int:
    """Of parameters, in forward: backward does not need all of them (an embedding's)."""
    made = rehearse(_captured(name), plan, inductor=False)
    return sum(map(graphs.gathers, made.forward.graph.nodes))


@pytest.mark.parametrize(("name", "codegen"), [("attention", "eager"), in_full("llama", "eager"), in_full("attention", "inductor")])
def test_gathered_apart(two: Cluster, name: str, codegen: str) -> None:
    machines = Machines(1, 2, DEVICES["cpu"])
    without = _plan(name, machines, config(3))
    plan = _with_apart(name, without, 1000, machines)
    assert not without.apart and _gathers(name, plan) > _gathers(name, without)
    for distance in two.run(measure, name, config("auto", plan=plan, codegen=codegen, replicate_below="auto")):
        assert distance.worst <= TOLERANCE, distance


def test_who_goes_apart_is_large_enough_for_a_collective_of_its_own() -> None:
    assert not first_look(Sum(), config(3), Machines(1, 2, DEVICES["cpu"])).apart  # alone in its group, and small
    assert 2**20 < choose_apart(_group(8), Machines(1, 8, DEVICES["h100"])) < 2**27
    few = choose_apart(_group(8), Machines(1, 8, DEVICES["h100"]))
    assert few < choose_apart(_group(64), Machines(8, 8, DEVICES["h100"]))


def _group(processes: int, elements: int = 2**21) -> GroupCost:
    held, whole = 4 * elements // processes, 4 * elements
    return GroupCost(held, held, whole, whole, whole, whole, processes, processes, 1, "all_to_all")


def test_messages_are_cut_where_smaller_ones_take_less() -> None:
    cpu = DEVICES["cpu"]

    def chosen(seconds: tuple[float, ...]) -> int:
        table = tuple(zip((MIB / 2, MIB, 2 * MIB, 8 * MIB), seconds))
        measured = replace(cpu, tables={"all_gather@2/2": table, "all_to_all@2/2": table})
        return choose_message(_group(2), Machines(2, 1, measured))

    assert chosen((0.5, 1, 2, 8)) == 0
    assert chosen((0.5, 1, 3, 14)) == MIB
    assert chosen((0.9, 1.5, 2, 8.5)) == 0
    assert choose_message(_group(2), Machines(2, 1, cpu)) == 2 * UNMEASURED
    assert choose_message(_group(2), Machines(1, 2, cpu)) == 0
    assert choose_message(_group(2, 1000), Machines(2, 1, cpu)) == 0
    assert choose_message(_group(16), Machines(2, 8, DEVICES["h100"])) == 0


def _with_bucket(name: str, zero: int, world: int, bucket: int, **options: Any) -> autoshard.Plan:
    """A plan with such buckets, and what is predicted of it."""
    machines = Machines(1, world, DEVICES["cpu"])
    plan = replace(_plan(name, machines, config(zero, **options)), bucket=bucket)
    return _plan(name, machines, config("auto", plan=plan, replicate_below="auto"))


@pytest.mark.parametrize(
    ("name", "zero", "codegen"),
    [("attention", 0, "eager"), in_full("odd", 0, "eager"), in_full("llama", 0, "eager"), in_full("llama", 0, "inductor")],
)
def test_in_buckets_of_a_few_gradients(two: Cluster, name: str, zero: int, codegen: str) -> None:
    plan = _with_bucket(name, zero, 2, 300)
    assert _reductions(name, plan) > len(plan.groups)
    for distance in two.run(measure, name, config("auto", plan=plan, codegen=codegen, replicate_below="auto")):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.full
def test_in_buckets_over_two_axes(four: Cluster) -> None:
    plan = _with_bucket("odd", 0, 4, 300, mesh={"replicate": 2, "shard": 2})
    assert _reductions("odd", plan) > len(plan.groups)
    for distance in four.run(measure, "odd", config("auto", plan=plan, replicate_below="auto")):
        assert distance.worst <= TOLERANCE, distance


def _reductions(name: str, plan: Plan) -> int:
    made = rehearse(_captured(name), plan, inductor=False)
    assert made.backward is not None
    return sum(map(graphs.reduces, made.backward.graph.nodes))


@pytest.mark.parametrize(
    ("name", "zero", "options"),
    [
        ("attention", 0, {}),
        in_full("llama", 0, {}),
        in_full("llama", 3, {}),
        in_full("gpt2", 0, {}),
        in_full("llama", 0, {"precision": "bf16"}),
        ("attention", 0, {"compression": "bf16"}),
    ],
)
def test_buckets_predicted_are_those_made(name: str, zero: int, options: dict[str, Any]) -> None:
    """Where rows are shared there is one a group."""
    counts = []
    for bucket in (0, 300):
        plan = _with_bucket(name, zero, 2, bucket, **options)
        sums = ("all_reduce", "swap_direct", "all_to_all", "exchange_direct", "reduce_scatter", *(["all_gather"] if options.get("compression") else []))
        counts.append(sum(t.messages for t in plan.predicted.traffic if t.phase == "backward" and t.collective in sums))
        assert counts[-1] == _reductions(name, plan)
    assert (counts[1] > counts[0]) == (zero == 0)


@given(st.lists(st.integers(1, 100), max_size=12), st.integers(1, 200))
@example([1, 2, 12, 1], 15)
def test_runs_hold_all_in_order_and_are_worth_it(sizes: list[int], most: int) -> None:
    """What has next to nothing, an eighth, joins a run that is full, or one that is too large by itself, on either side."""
    runs = wire.runs(sizes, most)
    assert [i for run in runs for i in run] == list(range(len(sizes)))
    totals = [sum(sizes[i] for i in run) for run in runs]
    for run, total in zip(runs, totals):
        assert total <= most * 9 / 8 or total - max(sizes[i] for i in run) <= most / 4, (run, total)
        assert total > most / 8 or len(runs) == 1


def test_a_bucket_is_as_small_as_costs_next_to_nothing() -> None:
    cpu = DEVICES["cpu"]
    whole = GroupCost(*[2**23] * 6, 1, 1, 2, "reduce_scatter")

    def chosen(seconds: tuple[float, ...], whole: GroupCost = whole) -> int:
        table = tuple(zip((MIB / 2, MIB, 2 * MIB, 8 * MIB), seconds))
        return choose_bucket([whole], Machines(2, 1, replace(cpu, tables={"all_reduce@2/2": table})))

    assert chosen((0.5, 1, 2, 8)) == MIB / 2
    assert chosen((0.9, 1.05, 2, 8)) == MIB
    assert chosen((2, 2.5, 4, 8)) == 0
    assert chosen((0.9, 1.05, 2, 8), replace(whole, gradients=2**22)) == MIB / 2  # of gradients in bf16 that are reduced in fp32
    assert chosen((0.9, 1.05, 2, 8), _group(2)) == chosen((0.9, 1.05, 2, 8), replace(whole, compressed=True)) == 0
    assert choose_bucket([whole], Machines(2, 8, DEVICES["h100"])) == 0
    assert choose_bucket([], Machines(2, 1, cpu)) == 0
    assert not first_look(Sum(), config(0), Machines(2, 1, cpu)).bucket


@given(st.integers(1, 8), st.integers(1, 64), st.integers(0, 2**34))
def test_a_group_goes_in_a_handful_of_messages(per_node: int, nodes: int, elements: int) -> None:
    group = _group(nodes * per_node, elements)
    most = choose_message(group, Machines(nodes, per_node, DEVICES["cpu"]))
    assert not most or 4 * elements <= PIECES * most
