"""Reductions of how many groups are on their way at once: two, or one where memory is short."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoshard
from autoshard.config import Config
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.errors import BudgetError
from autoshard.inventory import take_inventory
from autoshard.passes.choose_behind import choose_behind
from autoshard.passes.choose_partition import Fit, Forecast
from autoshard.passes.choose_zero import Circumstances, make_plan
from autoshard.plan import Plan
from autoshard.prediction import Prediction
from autoshard.report import rendered
from autoshard.sweep import Sweep
from autoshard.sweep_report import sweep_tables
from autoshard.units import bytes_text
from tests.rewriting import Blocks, plan_for

PACKED = 512 * 512 * 4 * 2  # bytes of gradients that one reduction holds


def _forecast(takes: dict[int, tuple[int, float]], asked: list[int], plan: Plan) -> Plan:
    """A plan of which a step takes so many bytes and seconds by how many reductions are on their way."""
    asked.append(plan.behind)
    memory, seconds = takes[plan.behind]
    return replace(plan, predicted=Prediction({"communication": memory}, seconds={"compute": seconds}))


@pytest.mark.parametrize(
    ("budget", "one", "behind", "simulated"),
    [
        (None, (10, 1.0), 2, []),
        (30, (10, 1.0), 2, []),
        (29, (10, 1.0), 1, [1]),
        (29, (29, 1.01), 1, [1]),
        (5, (20, 1.0), 1, [1]),  # others make it fit
        (29, (10, 1.02), 2, [1]),
        (29, (30, 1.0), 2, [1]),
    ],
)
def test_fewer_are_on_their_way_where_memory_is_short_and_that_takes_no_time(
    budget: int | None, one: tuple[int, float], behind: int, simulated: list[int]
) -> None:
    asked: list[int] = []
    forecast = functools.partial(_forecast, {2: (30, 1.0), 1: one}, asked)
    plan = forecast(plan_for(Blocks(), 3))
    asked.clear()
    found = choose_behind(plan, budget, forecast)
    assert (found.behind, asked) == (behind, simulated)
    assert found == plan if behind == 2 else "before the next is packed" in found.why[-1]


def _planned(forecast: Forecast, budget: int, world: int = 2, fit: Fit | None = None, **more: Any) -> Plan:
    config, where = Config(replicate_below=0, memory_budget=budget, **more), Circumstances(Cluster(1, world, DEVICES["h100"]), budget)
    return make_plan(take_inventory(Blocks(), ()), config, where, forecast, fit or (lambda plan, _: forecast(plan)))


@pytest.mark.parametrize("recompute", ["auto", "none"])
def test_however_long_it_takes_where_nothing_else_makes_a_step_fit(recompute: str) -> None:
    """Before it is refused; of which it is said what it takes."""
    forecast = functools.partial(_forecast, {2: (PACKED + 10, 1.0), 1: (PACKED, 2.0)}, [])
    planned = functools.partial(_planned, forecast, zero=3, recompute=recompute)
    assert planned(PACKED + 10).behind == 2 and planned(PACKED).behind == 1
    for budget in (PACKED - 1, 10):
        with pytest.raises(BudgetError, match=f"a step takes {bytes_text(PACKED)}"):
            planned(budget)


def test_of_one_process_no_reduction_is_on_its_way() -> None:
    asked: list[int] = []
    with pytest.raises(BudgetError, match="a step takes 30 B"):
        _planned(functools.partial(_forecast, {2: (30, 1.0), 1: (10, 1.0)}, asked), 20, world=1)
    assert asked and set(asked) == {2}


@pytest.mark.parametrize("zero", ["auto", 3])
def test_what_takes_the_least_is_not_refused_if_one_reduction_on_its_way_makes_it_fit(zero: int | str) -> None:
    """Though it spares more than its gradients, as an allocator may hold less for it."""
    forecast = functools.partial(_forecast, {2: (4 * PACKED, 1.0), 1: (2 * PACKED, 2.0)}, [])
    assert _planned(forecast, 2 * PACKED, zero=zero).behind == 1
    with pytest.raises(BudgetError, match=f"at best, .* a step takes {bytes_text(2 * PACKED)}"):
        _planned(forecast, 2 * PACKED - 1, zero=zero)


def test_before_anything_is_computed_again() -> None:
    """A plan's recomputation is chosen with what then is left."""
    seen: list[int] = []

    def fit(plan: Plan, budget: int) -> Plan:
        seen.append(plan.behind)
        return replace(plan, recompute=(("layers.0", "full"),), predicted=replace(plan.predicted, memory={"activations": budget}))

    forecast = functools.partial(_forecast, {2: (30, 1.0), 1: (25, 1.0)}, [])
    plan = _planned(forecast, 20, fit=fit, zero=3)
    assert seen == [1] and plan.behind == 1


def test_what_fits_with_one_does_in_a_sweep_too() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    two = Cluster(1, 2, DEVICES["cpu"])
    config = Config(zero=1, codegen="eager", memory_budget="8MiB", mesh={"shard": 2})

    def swept(budget: int) -> Sweep:
        torch.compiler.reset()
        return autoshard.sweep(model, torch.zeros(2, 256), replace(config, memory_budget=budget), two)

    peaks = {way.plan.behind: int(way.curve.peaks({"batch": np.array([2.0])})[0]) for way in swept(8 << 20).ways}
    assert peaks[1] < peaks[2]
    sweep = swept(peaks[1])
    found = sweep.at(batch=2)
    assert found.fits and sweep.ways[int(found.way)].plan.behind == 1
    assert "behind 1" in rendered(sweep_tables(sweep, [2]), 80)
    torch.compiler.reset()
    assert autoshard.plan(model, torch.zeros(2, 256), replace(config, memory_budget=peaks[1]), two).behind == 1
    assert {way.plan.behind for way in swept(1 << 30).ways} == {2}, "of a budget it would be next to nothing"
