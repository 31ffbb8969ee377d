"""Groups that every process has whole beside others whose rows are shared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Plan
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.cluster import with_rate
from autoshard.cost_model.hardware import DEVICES
from autoshard.passes.choose_blocks import OWN_GRAPHS
from autoshard.passes.choose_whole import LOOKS, choose_whole, with_whole
from autoshard.planning import first_look
from autoshard.prediction import Prediction, Traffic
from tests.cluster import Cluster
from tests.models import Case, features
from tests.parity import Distance, measure_case
from tests.small import TOLERANCE, config, in_full
from tests.test_halves import Blocks

TWO = Machines(2, 1, DEVICES["cpu"])
BYTES = 100  # of each whole group


def whole_in(plan: Plan) -> list[str]:
    return [g.name for g in plan.groups if g.degrees.optimizer == 1]


def no_states(plan: Plan) -> int:
    return 0


class Forecast:
    """A step is a tenth shorter for each of some groups that are whole, and a tenth longer for each other one. waiting: where none is.
    backward: of reductions."""

    def __init__(self, gains: Collection[str], waiting: float = 1.0, backward: float = 0.5) -> None:
        self.gains, self.waiting, self.asked = gains, waiting, list[list[str]]()
        self.traffic = Traffic("all_gather", "forward", 1, 1, 0.5), Traffic("all_to_all", "backward", 1, 1, backward)

    def __call__(self, plan: Plan) -> Plan:
        whole = whole_in(plan)
        self.asked.append(whole)
        seconds = {"compute": 1.0, "waiting": self.waiting + 0.1 * sum(-1 if name in self.gains else 1 for name in whole)}
        return replace(plan, predicted=Prediction({"parameters": BYTES * len(whole)}, self.traffic, seconds=seconds))


def _layers(count: int) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(count))})


def _look(zero: int, count: int = 4) -> Plan:
    plan = first_look(_layers(count), config(zero), TWO)
    return replace(plan, groups=tuple(replace(g, last_use=i) for i, g in enumerate(plan.groups)))


def _chosen(forecast: Forecast, stages: Iterable[int] = (1,), budget: int | None = None, **changes: object) -> tuple[Plan, Plan]:
    """What is chosen of the plans of these stages, and which of them is the fastest."""
    plans = [forecast(replace(_look(stage), **changes)) for stage in stages]  # type: ignore[arg-type]
    forecast.asked.clear()
    best = min(plans, key=lambda plan: plan.predicted.step_seconds or 0.0)
    return choose_whole(best, plans, budget, forecast, no_states), best


def test_what_makes_a_step_shorter_is_whole_and_what_is_gathered_first_is_looked_at_first() -> None:
    forecast = Forecast(["layers.1", "layers.3"])
    plan, _ = _chosen(forecast)
    assert whole_in(plan) == ["layers.1", "layers.3"] and plan.stage == 1
    assert forecast.asked == [["layers.0"], ["layers.1"], ["layers.1", "layers.2"], ["layers.1", "layers.3"]]
    assert any("with 2 groups whole" in why and "10.0% less" in why for why in plan.why), plan.why
    assert Plan.from_json(plan.to_json()) == plan


def test_where_stage_0_is_the_fastest_what_makes_a_step_shorter_is_shared() -> None:
    """What is used last is looked at first."""
    forecast = Forecast(["layers.1", "layers.2", "layers.3"])
    plan, best = _chosen(forecast, (0, 3))
    assert best.stage == 0 and whole_in(plan) == ["layers.1", "layers.2", "layers.3"]
    assert [str(g.degrees) for g in plan.groups if g.name == "layers.0"] == ["2/2/2"]
    everything = {f"layers.{i}" for i in range(4)}
    assert [everything.difference(asked) for asked in forecast.asked] == [{f"layers.{i}"} for i in (3, 2, 1, 0)]
    assert any("with 3 groups whole" in why and "sums less" in why for why in plan.why), plan.why


@pytest.mark.parametrize(("gains", "budget", "found"), [((), None, 0), ((1, 2), 2 * BYTES, 2), ((1, 2), BYTES, 1)])
def test_not_where_nothing_is_gained_or_there_is_no_room(gains: Collection[int], budget: int | None, found: int) -> None:
    plan, best = _chosen(Forecast([f"layers.{i}" for i in gains]), budget=budget)
    assert len(whole_in(plan)) == found and (found or plan is best)


@pytest.mark.parametrize(("travelling", "budget", "looks"), [(0, 3, 2), (1, 3, 3), (0, 5, 4)])
def test_what_cannot_fit_by_its_states_is_not_simulated(travelling: int, budget: int, looks: int) -> None:
    """Beside the activations, which are as much as a group; what travels may be spared."""
    forecast = Forecast([f"layers.{i}" for i in range(4)])
    plan = forecast(_look(1))
    plan = replace(plan, predicted=replace(plan.predicted, memory={"activations": BYTES, "gathered": travelling * BYTES}))
    forecast.asked.clear()
    found = choose_whole(plan, [plan], (budget + travelling) * BYTES, forecast, lambda p: BYTES * len(whole_in(p)))
    assert len(forecast.asked) == len(whole_in(found)) == looks


@pytest.mark.parametrize(("grows", "error", "found"), [(True, 0.0, 3), (True, 0.04, 2), (False, 0.04, 4)])
def test_room_for_what_predictions_are_off_is_asked_of_what_takes_more(grows: bool, error: float, found: int) -> None:
    simple = Forecast([f"layers.{i}" for i in range(4)])

    def forecast(plan: Plan) -> Plan:
        predicted = simple(plan).predicted
        memory = predicted.memory if grows else {"parameters": 3 * BYTES}
        return replace(plan, predicted=replace(predicted, memory=memory, error=(0.0, error)))

    plan = forecast(_look(1))
    assert len(whole_in(choose_whole(plan, [plan], 3 * BYTES, forecast, no_states))) == found


@pytest.mark.parametrize(("gains", "found"), [((1,), 0), ((1, 2), 2)])
def test_what_spares_less_than_predictions_are_off_by_is_left(gains: Collection[int], found: int) -> None:
    """Each spares 2 % here."""
    plan, best = _chosen(Forecast([f"layers.{i}" for i in gains], waiting=4.0))
    assert len(whole_in(plan)) == found and (found or plan is best)


def test_not_where_sums_are_others_or_nothing_was_simulated() -> None:
    for changes in ({"compression": "bf16"}, {"early": True}):
        forecast = Forecast(["layers.1"])
        plan, best = _chosen(forecast, **changes)
        assert plan is best and not forecast.asked
    unknown = _look(1)
    assert choose_whole(unknown, [unknown], None, Forecast(["layers.1"]), no_states) is unknown


@pytest.mark.parametrize(("waiting", "backward"), [(0.05, 0.5), (1.0, 0.7)])
def test_nothing_is_simulated_where_little_is_waited_for_or_backward_has_no_time_left(waiting: float, backward: float) -> None:
    """Of what is computed two thirds are backward's."""
    forecast = Forecast(["layers.1"], waiting, backward)
    plan, best = _chosen(forecast)
    assert plan is best and not forecast.asked


def test_backward_without_time_left_may_sum_less() -> None:
    forecast = Forecast(["layers.1", "layers.2", "layers.3"], backward=0.9)
    assert len(whole_in(_chosen(forecast, (0, 3))[0])) == 3


def test_many_groups_are_looked_at_in_few_looks() -> None:
    count = 3 * LOOKS + 1
    forecast = Forecast([f"layers.{i}" for i in range(count)])
    plan = forecast(_look(3, count))
    forecast.asked.clear()
    assert len(whole_in(choose_whole(plan, [plan], None, forecast, no_states))) == count and len(forecast.asked) == LOOKS
    assert [len(names) for names in forecast.asked] == [*range(3, 3 * LOOKS, 3), count]
    assert all(abs(int(a[7:]) - int(b[7:])) >= LOOKS for a in forecast.asked[0] for b in forecast.asked[0] if a != b)


def _planned(zero: int | str) -> Plan:
    return autoshard.plan(Blocks(6, 384), torch.zeros(256, 384), config(zero), with_rate(TWO, 87.5e6))


def test_a_plan_has_groups_of_both_kinds_where_that_is_the_fastest() -> None:
    plan, none, one = map(_planned, ("auto", 0, 1))
    assert 0 < len(whole_in(plan)) < len(plan.groups) and plan.predicted.step_seconds
    assert plan.bucket and plan.direct_sums and any("whole in every process" in why for why in plan.why)
    assert all(plan.predicted.step_seconds < (of_one.predicted.step_seconds or 0.0) for of_one in (none, one))
    assert len(whole_in(one)) == 0  # a stage that was asked for is that of all groups


def _many() -> Blocks:
    """Of blocks that become graphs of their own."""
    return Blocks(OWN_GRAPHS, 256)


def _distance(make: Callable[[], nn.Module], width: int, settings: autoshard.Config) -> Distance:
    return measure_case(Case(make, features(4, width), lambda loss: loss), settings)


@pytest.mark.parametrize(
    ("make", "width", "zero", "codegen"),
    [
        (Blocks, 512, 1, "eager"),
        (_many, 256, 3, "eager"),
        in_full(Blocks, 512, 3, "eager"),
        in_full(_many, 256, 1, "eager"),
        in_full(Blocks, 512, 2, "eager"),
        in_full(_many, 256, 2, "eager"),
        in_full(Blocks, 512, 3, "inductor"),
        in_full(_many, 256, 3, "inductor"),
    ],
)
def test_training_is_the_same(two: Cluster, zero: int, codegen: str, make: Callable[[], nn.Module], width: int) -> None:
    """Losses, gradients, their norm and parameters, by a plan that was made for other machines."""
    plan = autoshard.plan(make(), torch.zeros(4, width), config(zero), with_rate(TWO, 125e6))
    plan = replace(with_whole(plan, [g.name for g in plan.groups[1::2]]), bucket=2**17)
    assert plan.sharded and len(whole_in(plan)) == len(plan.groups) // 2
    settings = config("auto", plan=plan, codegen=codegen, replicate_below="auto")
    for distance in two.run(_distance, make, width, settings):
        assert distance.worst < TOLERANCE, distance
