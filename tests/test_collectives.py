"""What collectives cost: against what was measured, against what links carry, by where processes lie."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autoshard import Config
from autoshard.cost_model import collectives
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import Group
from autoshard.cost_model.hardware import DEVICES, Link
from autoshard.planning import first_look


def test_collectives_on_two_hosts_take_what_was_measured() -> None:
    """gloo, 8 MiB, two hosts at 1 Gbit/s: milliseconds by hand, and how far the model is off."""
    measured = {"all_gather": 37, "reduce_scatter": 72, "all_reduce": 70}
    for name, taken in measured.items():
        assert collectives.seconds(name, 2**23, Group(2, 2), DEVICES["cpu"]) * 1e3 == pytest.approx(taken, rel=0.1)
    assert collectives.seconds("all_to_all", 2**23, Group(2, 2), DEVICES["cpu"]) * 1e3 == pytest.approx(34, rel=0.1)


@pytest.mark.parametrize(("device", "chosen"), [("cpu", "all_to_all"), ("h100", "reduce_scatter")])
def test_rows_are_summed_where_that_is_faster(device: str, chosen: str) -> None:
    sent = {"cpu": {"gather_direct", "exchange_direct"}, "h100": {"all_gather", "reduce_scatter"}}
    summed = {"cpu": {"swap_direct"}, "h100": {"all_reduce"}}
    plan = first_look(nn.Linear(512, 512), Config(zero=2, replicate_below=0), Cluster(2, 1, DEVICES[device]))
    assert {g.reduction for g in plan.groups} == {chosen}
    assert {t.collective for t in plan.predicted.traffic} == sent[device]
    whole = first_look(nn.Linear(512, 512), Config(zero=0), Cluster(2, 1, DEVICES[device]))
    assert {t.collective for t in whole.predicted.traffic} == summed[device]


def test_an_all_reduce_goes_before_its_two_halves() -> None:
    """As long on the wire, in fewer messages."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    assert {g.degrees.stage for g in first_look(model, Config(), Cluster(2, 1, DEVICES["cpu"])).groups} == {0}


def test_a_measured_table_comes_before_the_model() -> None:
    slow = replace(DEVICES["cpu"], tables=dict.fromkeys(("all_to_all@2", "exchange_direct@2"), ((1024.0, 1.0), (2.0**30, 2.0))))
    plan = first_look(nn.Linear(512, 512), Config(zero=2, replicate_below=0), Cluster(1, 2, slow))
    assert {g.reduction for g in plan.groups} == {"reduce_scatter"} and plan.direct
    slow = replace(DEVICES["cpu"], tables={"gather_direct@2": ((1024.0, 1.0), (2.0**30, 2.0))})
    assert not first_look(nn.Linear(512, 512), Config(zero=2, replicate_below=0), Cluster(1, 2, slow)).direct


@pytest.mark.parametrize(("nodes", "slow", "direct"), [(2, "swap_direct", False), (2, "all_reduce", True), (4, "gather_direct", False)])
def test_sums_are_sends_where_these_take_no_longer(nodes: int, slow: str, direct: bool) -> None:
    device = replace(DEVICES["cpu"], tables={f"{slow}@{nodes}/{nodes}": ((1024.0, 1.0), (2.0**30, 2.0))})
    for machines, sends in ((Cluster(nodes, 1, device), direct), (Cluster(nodes, 1, DEVICES["cpu"]), True), (Cluster(nodes, 1, DEVICES["h100"]), False)):
        plan = first_look(nn.Linear(512, 512), Config(zero=0), machines)
        assert plan.direct_sums is sends and not plan.direct
    assert not first_look(nn.Linear(512, 512), Config(zero=0, compression="bf16"), Cluster(nodes, 1, DEVICES["cpu"])).direct_sums


@pytest.mark.parametrize(("longer", "direct"), [(1.0, True), (1.03, True), (1.1, False)])
def test_where_a_sum_takes_as_long_either_way_it_is_sends(longer: float, direct: bool) -> None:
    """Which of two is measured ahead of the other is chance then; beside a computation sends are."""
    tables = {f"{name}@2/2": ((1024.0, times), (2.0**30, 2 * times)) for name, times in (("all_reduce", 1.0), ("swap_direct", longer))}
    machines = Cluster(2, 1, replace(DEVICES["cpu"], tables=tables))
    assert first_look(nn.Linear(512, 512), Config(zero=0), machines).direct_sums is direct


def test_a_swap_sends_as_much_as_an_all_reduce_of_two() -> None:
    group, device = Group(2, 2), DEVICES["cpu"]
    assert collectives.bytes_sent("swap_direct", 2**20, group, device) == collectives.bytes_sent("all_reduce", 2**20, group, device) == 2**20
    saved = collectives.seconds("all_reduce", 2**20, group, device) - collectives.seconds("swap_direct", 2**20, group, device)
    assert saved == pytest.approx(device.across.latency)


def test_processes_of_nodes_do_not_each_send_to_each() -> None:
    """A ring passes what a node's processes have once between nodes; each of them would be sent its own."""
    for cluster, direct in ((Cluster(4, 1, DEVICES["cpu"]), True), (Cluster(1, 4, DEVICES["cpu"]), True), (Cluster(2, 2, DEVICES["cpu"]), False)):
        assert first_look(nn.Linear(512, 512), Config(zero=2, replicate_below=0, hierarchy="flat"), cluster).direct is direct
    in_two = first_look(nn.Linear(512, 512), Config(zero=2, replicate_below=0, hierarchy="two_level"), Cluster(2, 2, DEVICES["cpu"]))
    assert in_two.direct


@pytest.mark.parametrize("name", ["cpu", "h100"])
@pytest.mark.parametrize("group", [Group(2), Group(8), Group(2, 2), Group(8, 2)])
def test_measured_groups_say_what_others_take(name: str, group: Group) -> None:
    """A link is found again from what it made of two messages; groups of other sizes have no table, and are reckoned with it."""
    link = Link(1e-4, 3e9, DEVICES[name].inside.scatters)
    true = replace(DEVICES[name], message=2e-4, **{"inside" if group.nodes == 1 else "across": link})  # type: ignore[arg-type]
    table = tuple((float(b), collectives.ring("all_gather", b, group, true)) for b in (2**12, 2**28))
    found = collectives.measured(replace(true, tables={collectives.table_name("all_gather", group): table}), group)
    more = Group(4 * group.size, 4 * group.nodes if group.nodes > 1 else 1)
    for size, of in ((2**20, group), (2**28, more)):
        expected = collectives.ring("all_gather", size, of, true)
        assert collectives.ring("all_gather", size, of, found) == pytest.approx(expected, rel=0.15)


def test_a_table_is_of_its_nodes_alone() -> None:
    slow = replace(DEVICES["cpu"], tables={"all_gather@4/2": ((1024.0, 1.0), (2.0**30, 2.0))})
    assert collectives.seconds("all_gather", 1024, Group(4, 2), slow) == 1.0
    assert collectives.seconds("all_gather", 1024, Group(4), slow) < 0.1


@given(st.sampled_from(sorted(collectives.ALGORITHMS)), st.integers(0, 7), st.integers(1, 8), st.integers(0, 2**34))
def test_no_algorithm_beats_the_links(name: str, doublings: int, per_node: int, payload: int) -> None:
    group, device = Group(2**doublings * per_node, 2**doublings), DEVICES["h100"]
    taken = collectives.ALGORITHMS[name]("all_reduce", payload, group, device)
    into_a_node = payload * (group.nodes - 1) / group.nodes / (per_node * device.across.bandwidth)
    assert taken >= max(into_a_node, payload * (group.size - 1) / group.size / device.inside.bandwidth) * (1 - 1e-6)


def test_groups_lie_on_as_few_nodes_as_their_places_say() -> None:
    cluster = Cluster(4, 8, DEVICES["h100"])
    assert cluster.group(32) == Group(32, 4) and cluster.group(8) == Group(8, 1)
    assert cluster.group(4, 8) == Group(4, 4, beside=8)  # one on each node
    assert cluster.group(8, 4) == Group(8, 4, beside=4) and cluster.group(8, 4).per_node == 2
    assert cluster.group(6) == Group(6, 2)  # the second begins on the first node
    assert Cluster(3, 8, DEVICES["h100"]).group(12) == Group(12, 2)  # each has a node, and half of the one between


@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_a_group_is_as_its_most_spread_out_one(nodes: int, per_node: int, data: st.DataObject) -> None:
    world = nodes * per_node
    shard = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    rows = [range(at, at + shard) for at in range(0, world, shard)]
    for size, stride, groups in ((shard, 1, rows), (world // shard, shard, [range(at, world, shard) for at in range(shard)])):
        most = max(len({rank // per_node for rank in group}) for group in groups)
        assert Cluster(nodes, per_node, DEVICES["h100"]).group(size, stride).nodes == most


def test_what_a_node_shares_stays_on_its_own_links() -> None:
    def reductions(cluster: Cluster, **mesh: int) -> dict[str, float]:
        plan = first_look(nn.Linear(4096, 4096), Config(zero=3, mesh=mesh, replicate_below=0), cluster)
        return {t.collective: t.seconds for t in plan.predicted.traffic}

    one, eight = Cluster(1, 8, DEVICES["h100"]), Cluster(8, 8, DEVICES["h100"])
    alone, hybrid, flat = reductions(one, shard=8), reductions(eight, replicate=8, shard=8), reductions(eight, shard=64)
    assert hybrid["all_gather"] == alone["all_gather"] < flat["all_gather"]
    assert hybrid["all_reduce"] > 0 and "all_reduce" not in alone


def test_a_long_ring_of_small_messages_is_slower_than_a_tree() -> None:
    group, device = Group(1024, 128), DEVICES["h100"]
    taken = {name: f("all_reduce", 2**16, group, device) for name, f in collectives.ALGORITHMS.items()}
    assert collectives.seconds("all_reduce", 2**16, group, device) == taken["tree"] < taken["ring"]
    assert taken["hierarchical"] < taken["ring"]
    assert collectives.seconds("all_reduce", 2**36, group, device) == collectives.ring("all_reduce", 2**36, group, device)
