"""Groups of parameters that travel in several messages, and parameters that travel by themselves."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import autoshard
from autoshard.capture import Capture, capture
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.cost_model.step import GroupCost
from autoshard.ops import wire
from autoshard.passes import graphs
from autoshard.passes.choose_bucket import choose_bucket
from autoshard.passes.choose_message import PIECES, UNMEASURED, choose_apart, choose_message
from autoshard.plan import Plan
from autoshard.planning import first_look
from autoshard.rehearsal import rehearse
from tests.cluster import Cluster
from tests.models import CASES
from tests.parity import measure
from tests.small import TOLERANCE, Sum, config, in_full

MIB = 2.0**20


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
        in_full("attention", 0, {}),
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
