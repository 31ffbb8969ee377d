"""What is said to help where nothing fits, and whether it does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autoshard import Config, Plan
from autoshard.errors import BudgetError
from autoshard.inventory import Inventory
from autoshard.passes.choose_zero import make_plan
from autoshard.passes.costs import costs_of
from tests.inventories import blocks, info, where

RACKS = {"replicate": 4, "shard": 2}


@pytest.mark.parametrize(
    ("world", "said", "mib", "activations", "fix"),
    [
        (1, {"zero": 0}, 60, 0, r'more than one process \(torchrun starts them\), with zero="auto" or zero=3, or a budget of'),
        (1, {}, 60, 0, r"more than one process \(torchrun starts them\), or a budget of"),
        (1, {"zero": 1}, 30, 2**33, "a smaller batch, or a budget of 8.* GiB"),
        (8, {"zero": 1}, 30, 0, 'zero="auto" or zero=3, or a budget of'),
        (8, {"zero": 1}, 10, 0, 'more than 8 processes, with zero="auto" or zero=3, or a budget of'),
        (8, {"zero": 1}, 30, 2**33, "a smaller batch, or a budget of 8.* GiB"),
        (8, {}, 10, 0, "more than 8 processes, or a budget of"),
        (8, {}, 30, 2**33, "a smaller batch, or a budget of 8.* GiB, of which activations take 8.00 GiB"),
        (8, {"mesh": RACKS}, 30, 0, "no mesh, or one that shards over more processes, or a budget of"),
        (8, {"mesh": RACKS}, 10, 0, "more than 8 processes, with no mesh, or one that shards over more processes, or a budget of"),
        (8, {"replicate_below": 10**8}, 30, 0, 'replicate_below="auto", or a budget of'),
        (8, {"replicate_below": 10**8, "zero": 0}, 30, 0, 'zero="auto" or zero=3 and replicate_below="auto", or a budget of'),
        (8, {}, 10, 2**10, "more than 8 processes, or a budget of"),
        (8, {}, 1, 2**20, "a budget of .* MiB, of which buckets take"),
        (8, {"recompute": "none"}, 30, 2**30, 'recompute="auto", or a budget of'),
        (8, {"recompute": "none"}, 10, 2**30, "a smaller batch, or a budget of 1.* GiB, of which activations take 1.00 GiB"),
    ],
)
def test_what_a_fix_names_would_help(world: int, said: dict[str, Any], mib: int, activations: int, fix: str) -> None:
    """Of a model that takes 130 MiB in one process."""
    budget = mib * 2**20

    def forecast(plan: Plan) -> Plan:
        memory = {**plan.predicted.memory, "activations": activations}
        return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, memory=memory, place="mm", seconds={"compute": 1.0}))

    with pytest.raises(BudgetError, match=f"Cheapest fix: {fix}"):
        make_plan(blocks(64), Config(memory_budget=budget, **said), where(world, budget), forecast)


@pytest.mark.parametrize("said", [{"zero": 1}, {"mesh": RACKS}, {"replicate_below": 10**8}, {"replicate_below": 10**8, "zero": 0}])
def test_a_fix_that_is_followed_helps(said: dict[str, Any]) -> None:
    budget = 30 * 2**20
    with pytest.raises(BudgetError):
        make_plan(blocks(64), Config(memory_budget=budget, **said), where(8, budget))
    assert make_plan(blocks(64), Config(memory_budget=budget), where(8, budget)).predicted.peak_bytes <= budget


@pytest.mark.parametrize(("shape", "more_help"), [((8, 2**20), False), ((8, 2**10, 2**10), True), ((8, 8, 2**17), False)])
def test_more_processes_do_not_help_where_all_rows_are_apart(shape: tuple[int, ...], more_help: bool) -> None:
    """Of experts, say, that are matrices; those that are stacks of them are cut further."""
    experts = dataclasses.replace(blocks(1), parameters=tuple(info(f"layers.{i}.experts", *shape) for i in range(4)))
    for world, mib, helps in ((4, 200, True), (8, 150, more_help)):
        with pytest.raises(BudgetError) as found:
            make_plan(experts, Config(memory_budget=mib * 2**20), where(world, mib * 2**20))
        assert (f"more than {world} processes" in str(found.value)) is helps, found.value
        assert ("has 8 rows, which as many processes share already" in str(found.value)) is not helps


def test_rows_that_are_fewer_than_processes_are_said() -> None:
    """Eight experts that are rows of a matrix travel to sixteen processes as sixteen."""
    experts = Inventory("Net", tuple(info(f"layers.{i}.experts", 8, 1024 * 256) for i in range(4)))
    said = "layers.0.experts has 8 rows for 16 processes: 8 hold none of it, and 2.0 times as many bytes travel as parameters have; with"
    for zero, mesh, says in ((1, None, True), (0, None, False), (3, {"replicate": 2, "shard": 8}, False)):
        plan = make_plan(experts, Config(zero=zero, mesh=mesh), where(16))  # type: ignore[arg-type]
        assert any(why.startswith(f"{said} mesh={{'replicate': 2, 'shard': 8}}") for why in plan.why) is says
    with pytest.raises(BudgetError, match=f"since more processes would not help: {said}"):
        make_plan(experts, Config(), where(16, 2**20))


def test_a_mesh_that_is_recommended_cuts_evenly() -> None:
    """By the dimension along which so many processes cut it: 3 of 20 rows each are 20 rows for 64, and 3 for 4."""
    experts = Inventory("Net", tuple(info(f"layers.{i}.experts", 3, 20, 4096) for i in range(4)))
    (said,) = [why for why in make_plan(experts, Config(zero=3), where(64)).why if "for 64 processes" in why]
    assert said.startswith("layers.0.experts has 20 rows for 64 processes: 44 hold none of it") and "mesh" not in said
    router = dataclasses.replace(experts, parameters=(*experts.parameters, info("router", 3, 64)))
    assert said in make_plan(router, Config(zero=3), where(64)).why, "little has even fewer rows"
    wide = Inventory("Net", tuple(info(f"layers.{i}.experts", 3, 24, 4096) for i in range(4)))
    (said,) = [why for why in make_plan(wide, Config(zero=3), where(64)).why if "for 64 processes" in why]
    mesh = {"replicate": 8, "shard": 8}
    assert f"with mesh={mesh} it is cut evenly" in said
    costs = costs_of(make_plan(wide, Config(zero=3, mesh=mesh), where(64)), wide)
    assert sum(cost.brought for cost in costs) == sum(cost.whole for cost in costs)


@pytest.mark.parametrize("zero", [1, 3])
def test_experts_that_are_fewer_than_processes_are_each_cut(zero: int) -> None:
    """No byte of padding, on processes that are many more."""
    experts = Inventory("Net", tuple(info(f"layers.{i}.experts", 8, 1024, 256) for i in range(4)))
    plan = make_plan(experts, Config(zero=zero), where(64))
    bytes_of_all = sum(p.elements * p.itemsize for p in experts.parameters)
    costs = costs_of(plan, experts)
    assert (sum(cost.held for cost in costs), sum(cost.brought for cost in costs)) == (bytes_of_all // 64, bytes_of_all)
    assert not any("rows for 64 processes" in why for why in plan.why)
