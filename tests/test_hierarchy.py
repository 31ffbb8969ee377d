"""Rows that travel between nodes and inside of them by themselves."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autoshard
from autoshard import Config
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES, Link
from autoshard.cost_model.step import GroupCost
from autoshard.errors import ConfigError, PlanError
from autoshard.first_call import _without_nodes, local_cluster
from autoshard.ops import packing, wire
from autoshard.ops.layout import Layout
from autoshard.passes import graphs
from autoshard.passes.choose_hierarchy import choose_hierarchy
from autoshard.plan import Plan
from autoshard.planning import first_look
from autoshard.rehearsal import Rehearsed, rehearse
from autoshard.runtime import processes
from tests.cluster import Cluster
from tests.models import CASES, DEEP
from tests.parity import Distance, measure, see_gradients
from tests.small import TOLERANCE, Net, backward_beside, compiled_pair, config, in_full, inputs_of, same

TWO_BY_TWO = Machines(2, 2, DEVICES["cpu"])

_nodes = st.tuples(st.integers(2, 3), st.integers(2, 3))  # how many, and processes of each
_shapes = st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13), st.integers(1, 3)), min_size=1, max_size=3).map(tuple)
_dims = st.integers(0, 1)
Shapes = tuple[tuple[int, ...], ...]


def _layout(nodes: int, node: int, message: int, dim: int, apart: int = 0) -> Layout:
    size = nodes * node
    return Layout("all", size, (), "", size, message=message, apart=apart, node=node, inside="in", across="out", dim=dim)


def _rows(whole: Tensor, size: int, dim: int) -> list[Tensor]:
    chunks = list(whole.chunk(size, dim))
    return chunks + [whole.narrow(dim, 0, 0)] * (size - len(chunks))


def _gather(rows: list[list[Tensor]], shapes: Shapes, layout: Layout, ranks: list[int]) -> list[Tensor]:
    """What each of these ranks has after they gathered rows: [parameter][rank]."""
    sent = [packing.pack_shards([r[rank] for r in rows], shapes, layout) for rank in ranks]
    return packing.unpack_full([torch.cat(parts) for parts in zip(*sent)], shapes, layout)


@given(_nodes, _shapes, st.integers(0, 400), st.integers(0, 100), _dims)
def test_two_gathers_make_what_one_does(nodes: tuple[int, int], shapes: Shapes, message: int, apart: int, dim: int) -> None:
    count, node = nodes
    across, inside = _layout(count, node, message, dim, apart).levels()
    whole = [torch.randn(s) for s in shapes]
    rows = [_rows(w, count * node, dim) for w in whole]
    between = tuple(inside.with_chunk(s) for s in shapes)
    by_place = [_gather(rows, between, across, [place + node * n for n in range(count)]) for place in range(node)]
    found = _gather([list(parts) for parts in zip(*by_place)], shapes, inside, list(range(node)))
    assert same(found, whole)


def _reduce(grads: list[list[Tensor]], shapes: list[tuple[int, ...]], layout: Layout, place: int) -> list[Tensor]:
    """What the process at this place has of the sum of gradients: [process][parameter]."""
    sent = [[flat.chunk(layout.size)[place] for flat in packing.pack_grads(g, layout)] for g in grads]
    flat = packing.sum_rows([torch.cat(parts) for parts in zip(*sent)], layout.size, torch.float32)
    return wire.unpack_shards(flat, shapes, wire.shapes_of(grads[0]), torch.float32, layout)


@given(_nodes, _shapes, st.integers(0, 400), _dims)
def test_two_reductions_make_what_one_does(nodes: tuple[int, int], shapes: Shapes, message: int, dim: int) -> None:
    count, node = nodes
    across, inside = _layout(count, node, message, dim).levels()
    grads = [[torch.randn(s) for s in shapes] for _ in range(count * node)]
    wanted = [_rows(torch.stack(gs).mean(0), count * node, dim) for gs in zip(*grads)]
    between = [inside.with_chunk(s) for s in shapes]
    for rank in range(count * node):
        of_nodes = [_reduce(grads[n * node : n * node + node], between, inside, rank % node) for n in range(count)]
        found = _reduce(of_nodes, [tuple(w[rank].shape) for w in wanted], across, rank // node)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs[rank])


def test_layouts_of_levels_are_text_too() -> None:
    layout = _layout(2, 4, 1 << 20, 1, 1 << 10)
    for one in (layout, *layout.levels()):
        assert Layout.parse(str(one)) == one


def _planned(name: str, zero: int, hierarchy: str, **more: Any) -> Plan:
    case = (CASES | DEEP)[name]
    plan = autoshard.plan(case.build(), case.batch(torch.Generator()), config(zero, hierarchy=hierarchy, **more), TWO_BY_TWO)
    assert plan.node == 2 and Plan.from_json(plan.to_json()) == plan
    return plan


@pytest.mark.parametrize(
    ("name", "zero", "hierarchy", "codegen"),
    [
        in_full("attention", 3, "hpz", "eager"),
        in_full("odd", 3, "two_level", "eager"),
        in_full("gpt2", 2, "two_level", "eager"),
        in_full("odd", 3, "hpz", "eager"),
        in_full("gpt2", 3, "hpz", "eager"),
        in_full("odd", 1, "two_level", "eager"),
        in_full("attention", 3, "two_level", "inductor"),
        in_full("attention", 3, "hpz", "inductor"),
        in_full("llama", 3, "hpz", "eager"),
        in_full("conv", 3, "hpz", "inductor"),
        in_full("llama_deep", 3, "hpz", "eager"),
    ],
)
def test_numbers_are_those_of_the_plain_model(four: Cluster, name: str, zero: int, hierarchy: str, codegen: str) -> None:
    plan = replace(_planned(name, zero, hierarchy), ahead=2 if hierarchy == "hpz" else 1)
    for distance in four.run(measure, name, config("auto", plan=plan, codegen=codegen, replicate_below="auto")):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [{"message": 400}, {"apart": 200}, {"compression": "bf16"}, {"compute": "bf16", "reduce": "fp32"}]
)
def test_with_what_else_a_plan_says(four: Cluster, options: dict[str, Any]) -> None:
    plan = replace(_planned("odd", 3, "hpz"), **options)
    exact = bool({"message", "apart"} & options.keys())
    for distance in four.run(measure, "odd", config("auto", plan=plan, replicate_below="auto")):
        worst = distance.worst if exact else max(distance.gradient, distance.parameter)  # a loss may be next to nothing
        assert worst <= (TOLERANCE if exact else 0.1), distance


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_with_recomputation(four: Cluster, recompute: str) -> None:
    plan = _planned("gpt2_deep", 3, "hpz", recompute=recompute)
    assert plan.recompute
    for distance in four.run(measure, "gpt2_deep", config("auto", plan=plan, replicate_below="auto")):
        assert distance.worst <= TOLERANCE, distance


class Odd(nn.Module):
    """Of whose parameters one is shared, by itself, with fewer rows on the last process."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 97, bias=False), nn.Linear(97, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).pow(2).mean()


def with_fewer_rows(zero: int, hierarchy: str) -> tuple[int, Distance]:
    before = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        model, plain, compiled = compiled_pair(config(zero, hierarchy=hierarchy, replicate_below=300), Odd)
        distance = Distance()
        for inputs in inputs_of(2):
            backward_beside(compiled, plain, inputs)
        see_gradients(distance, model, plain)
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before
    return autoshard.plan_of(model).node, distance


@pytest.mark.parametrize(("zero", "hierarchy"), [(1, "two_level"), (3, "hpz")])
def test_processes_with_fewer_rows_start_the_same(four: Cluster, zero: int, hierarchy: str) -> None:
    for node, distance in four.run(with_fewer_rows, zero, hierarchy):
        assert node == 2 and distance.worst <= TOLERANCE, distance


def in_a_job(settings: autoshard.Config, processes_of: int) -> tuple[Plan, float]:
    """A job that plans by itself, as if each node had so many processes: what it planned, and how far an accumulated step and an
    evaluation are from the plain model's."""
    before = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = str(processes_of)
    try:
        model, plain, compiled = compiled_pair(settings)
        distance, inputs = Distance(), inputs_of(2)
        with autoshard.no_sync(model):
            backward_beside(compiled, plain, inputs[0])
        backward_beside(compiled, plain, inputs[1])
        see_gradients(distance, model, plain)
        with torch.no_grad():
            distance.see("loss", compiled(inputs[0, 0]), plain(inputs[0, 0]))
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before
    return autoshard.plan_of(model), distance.worst


@pytest.mark.parametrize(("zero", "hierarchy", "node"), [(1, "two_level", 2), (3, "hpz", 2), in_full(3, "flat", 0), in_full(0, "hpz", 0)])
def test_a_job_plans_it_by_itself(four: Cluster, zero: int, hierarchy: str, node: int) -> None:
    for plan, distance in four.run(in_a_job, config(zero, hierarchy=hierarchy), 2):
        assert plan.node == node and distance <= TOLERANCE, (plan.node, distance)
        assert zero or any("no rows are shared" in why for why in plan.why)


def test_a_job_shares_rows_in_each_node_where_that_is_faster(four: Cluster) -> None:
    slow = replace(DEVICES["cpu"], across=Link(0.1, 1e6, False))
    for plan, distance in four.run(in_a_job, config("auto", cluster=Machines(2, 2, slow)), 2):
        assert plan.axes == (("replicate", 2), ("shard", 2)) and plan.stage > 0 and distance <= TOLERANCE, (plan.why, distance)


def test_ranks_that_do_not_fill_hosts_go_in_one_step() -> None:
    cyclic, filled = ["a", "b", "a", "b"], ["a", "a", "b", "b"]
    assert _without_nodes(config(3), cyclic, 2).hierarchy == "flat"
    assert _without_nodes(config(3), filled, 2).hierarchy == "auto"
    assert _without_nodes(config(3, hierarchy="hpz"), filled, 2).hierarchy == "hpz"
    with pytest.raises(ConfigError, match="hierarchy: 'hpz' is for ranks that fill one host after the other; .* a, b"):
        _without_nodes(config(3, hierarchy="hpz"), cyclic, 2)


def _graphs(zero: int, hierarchy: str) -> Rehearsed:
    model, cfg = Net(), config(zero, hierarchy=hierarchy)
    return rehearse(capture(model, (torch.randn(4, 8),)), first_look(model, cfg, TWO_BY_TWO), inductor=False)


def _over(gm: Any) -> list[str]:
    """The groups of a graph's collectives, in order."""
    return [str(n.args[-1]) for n in gm.graph.nodes if graphs.gathers(n) or graphs.reduces(n)]


def test_machines_are_as_the_launcher_or_the_ranks_hosts_say(monkeypatch: pytest.MonkeyPatch) -> None:
    filled, uneven = ["a", "a", "b", "b"], ["a", "a", "a", "a", "b", "b"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (processes.per_node(filled), processes.per_node(uneven), processes.per_node(["a", "a"])) == (4, 1, 2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert (processes.per_node(filled), processes.per_node(uneven), processes.per_node(["a", "b", "a", "b"])) == (2, 1, 1)
    cluster = local_cluster(Config(), uneven, torch.device("cpu"))
    assert (cluster.nodes, cluster.per_node) == (6, 1)


def test_where_collectives_go() -> None:
    """Two linear layers outside of blocks are one group."""
    twice = _graphs(3, "two_level")
    assert _over(twice.forward) == ["across", "inside"]
    assert _over(_graphs(3, "flat").forward) == ["shard"]
    assert _over(twice.backward)[-2:] == ["inside", "across"]


def test_hpz_gathers_inside_of_nodes_in_backward() -> None:
    """The last group's copy is kept; of the others a node has one."""
    case = CASES["attention"]
    captured = capture(case.build(), case.batch(torch.Generator()))
    gathered = {}
    for hierarchy in ("two_level", "hpz"):
        plan = _planned("attention", 3, hierarchy)
        backward = rehearse(captured, plan, inductor=False).backward
        assert backward is not None
        gathered[hierarchy] = [str(n.args[-1]) for n in backward.graph.nodes if graphs.gathers(n)]
        again = {t.phase: t.messages for t in plan.predicted.traffic if t.collective == "gather_direct"}
        assert len(gathered[hierarchy]) == again["backward"]
    assert set(gathered["hpz"]) == {"inside"} and gathered["two_level"].count("across") == len(gathered["hpz"])


def test_it_is_chosen_where_processors_of_a_node_share_its_link() -> None:
    def chosen(machines: Machines, size: int = 2**21) -> int:
        world, whole = machines.world, 4 * size
        return choose_hierarchy(GroupCost(whole // world, whole // world, *[whole] * 4, world, world, 1, "all_to_all"), machines)

    assert chosen(TWO_BY_TWO) == 2 and chosen(Machines(4, 8, DEVICES["cpu"])) == 8
    assert chosen(Machines(1, 4, DEVICES["cpu"])) == chosen(Machines(4, 1, DEVICES["cpu"])) == 0
    assert chosen(Machines(4, 8, DEVICES["h100"])) == 0


def test_what_is_not_possible_is_refused() -> None:
    with pytest.raises(ConfigError, match="hierarchy: 'hpz' is for several nodes .* here are 1 node of 4"):
        first_look(Net(), config(3, hierarchy="hpz"), Machines(1, 4, DEVICES["cpu"]))
    with pytest.raises(ConfigError, match="hierarchy: 'two_level' is for several nodes .* here are 2 nodes of 2"):
        first_look(Net(), config(3, hierarchy="two_level", mesh={"replicate": 2, "shard": 2}), TWO_BY_TWO)
    with pytest.raises(ConfigError, match="hierarchy: 'tree' is not legal; .*'two_level'"):
        config(3, hierarchy="tree")
    plan = first_look(Net(), config(3, hierarchy="hpz"), TWO_BY_TWO)
    for node, text in ((3, "3 processes a node"), (4, "4 processes a node"), (-1, "-1 is not legal")):
        with pytest.raises(PlanError, match=f"node: {text}"):
            replace(plan, node=node)
    with pytest.raises(PlanError, match="gathered again over 2 processes"):
        replace(plan, node=0)
