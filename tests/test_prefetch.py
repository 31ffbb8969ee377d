"""How far ahead gathers start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import autoshard
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.cluster import with_rate
from autoshard.cost_model.hardware import DEVICES
from autoshard.errors import PassError, PlanError
from autoshard.first_call import waits_for_gathers
from autoshard.inventory import take_inventory
from autoshard.passes.choose_prefetch import choose_prefetch
from autoshard.passes.choose_zero import Circumstances, make_plan
from autoshard.passes.overlap import Overlap
from autoshard.plan import Plan
from autoshard.planning import first_look, forecaster
from autoshard.prediction import Prediction
from tests.cluster import Cluster
from tests.models import DEEP
from tests.parity import measure
from tests.small import TOLERANCE, Net, config

TWO = Machines(2, 1, DEVICES["cpu"])


def _simulated(asked: list[int], waiting: Sequence[float], memory: int, plan: Plan) -> Plan:
    """A plan that waits so long by how far ahead gathers start, and takes so many bytes for each."""
    asked.append(plan.ahead)
    seconds = {"compute": 8.0, "waiting": waiting[plan.ahead - 1], "optimizer": 1.0}
    return replace(plan, predicted=Prediction({"gathered": memory * plan.ahead}, seconds=seconds))


def _forecast(*waiting: float, memory: int = 10) -> tuple[Plan, list[int]]:
    """What was chosen of such plans, and what was simulated for it."""
    asked: list[int] = []
    forecast = partial(_simulated, asked, waiting, memory)
    plan = forecast(first_look(Net(), config(3), TWO))
    asked.clear()
    return choose_prefetch(plan, 25 if memory > 10 else None, forecast), asked


def test_as_far_ahead_as_it_pays() -> None:
    assert (_forecast(2, 1, 0.99)[0].ahead, _forecast(2, 1, 0.99)[1]) == (2, [2, 3])
    assert (_forecast(2, 1.5, 1.0, 0.5)[0].ahead, _forecast(2, 1.5, 1.0, 0.5)[1]) == (4, [2, 3, 4])
    assert (_forecast(2, 2)[0].ahead, _forecast(2, 2)[1]) == (1, [2])
    assert (_forecast(0.01)[0].ahead, _forecast(0.01)[1]) == (1, [])
    assert _forecast(2, 1, 0.5, memory=12)[0].ahead == 2
    assert any("gathers start 2 groups before" in why for why in _forecast(2, 1, 1)[0].why)


@pytest.mark.parametrize(("budget", "ahead"), [(None, 4), (25, 2), (11, 1)])
def test_a_stage_that_was_asked_for_is_held_to_what_the_device_has(budget: int | None, ahead: int) -> None:
    """Where no budget was said; a step that takes more than that as it is may be tried all the same."""
    where = Circumstances(TWO, budget)
    assert make_plan(take_inventory(Net(), ()), config(3), where, partial(_simulated, [], (8, 4, 2, 1), 12)).ahead == ahead


@pytest.mark.parametrize(("memory", "ahead"), [({1: 100, 2: 100}, 2), ({1: 100, 2: 101}, 1), ({1: 90, 2: 96}, 2), ({1: 90, 2: 97}, 1)])
def test_room_for_what_predictions_are_off_is_asked_of_what_takes_more(memory: dict[int, int], ahead: int) -> None:
    def forecast(plan: Plan) -> Plan:
        seconds = {"compute": 8.0, "waiting": 4.0 / plan.ahead}
        held = memory.get(plan.ahead, 1000)
        return replace(plan, predicted=Prediction({"gathered": held}, error=(0.0, 0.04), seconds=seconds))

    assert choose_prefetch(forecast(first_look(Net(), config(3), TWO)), 100, forecast).ahead == ahead


@pytest.mark.parametrize("field", ["ahead", "behind"])
def test_a_forecast_is_of_what_is_on_its_way_at_once(field: str) -> None:
    """Also of a plan that differs from one that was forecast before by that alone."""
    case = DEEP["gpt2_deep"]
    forecast = forecaster(case.build(), case.batch(torch.Generator()), config(3), TWO, None)
    plan = first_look(case.build(), config(3), TWO)
    order = [[o.name for o in forecast.simulated(replace(plan, **{field: n}))[0].operations] for n in (1, 3, 1)]  # type: ignore[arg-type]
    assert order[0] == order[2] != order[1] and sorted(order[0]) == sorted(order[1])


def test_a_job_simulates_where_gathers_take_long() -> None:
    """Of a stage that was asked for; by the machines, and by how much there is to simulate."""
    inventory = take_inventory(nn.Linear(4096, 4096), ())
    slow, fast = (Circumstances(with_rate(TWO, rate), None) for rate in (1e8, 1e12))
    assert waits_for_gathers(inventory, config(3), slow) and waits_for_gathers(inventory, config(1), slow)
    assert not waits_for_gathers(inventory, config(3), fast)
    assert not waits_for_gathers(inventory, config(0), slow) and not waits_for_gathers(inventory, config("auto"), slow)


def test_not_where_nothing_was_simulated_or_nothing_is_gathered() -> None:
    for zero in (0, 3):
        plan = first_look(Net(), config(zero), TWO)
        assert choose_prefetch(plan, None, lambda p: pytest.fail("simulated")) is plan


def test_what_is_not_legal_is_refused() -> None:
    plan = first_look(Net(), config(3), TWO)
    with pytest.raises(PlanError, match="ahead: 0 is not legal"):
        replace(plan, ahead=0)
    with pytest.raises(PassError, match=r"overlap\{ahead=-1\} is not legal; legal: 0 or more"):
        Overlap(ahead=-1)


@pytest.mark.full
def test_a_plan_says_how_far(two: Cluster) -> None:
    """And trains as the plain model, whatever it says."""
    case = DEEP["gpt2_deep"]
    plan = autoshard.plan(case.build(), case.batch(torch.Generator()), config(3), TWO)
    plan = replace(plan, ahead=3, behind=1)
    assert Plan.from_json(plan.to_json()).ahead == 3
    for distance in two.run(measure, "gpt2_deep", config("auto", plan=plan, replicate_below="auto")):
        assert distance.worst <= TOLERANCE, distance
