"""Gathers of the next step that start when the optimizer has stepped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import autoshard
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.errors import ConfigError
from autoshard.ops.direct import GATHER_DIRECT
from autoshard.ops.early import Flight, Recipe
from autoshard.plan import Plan
from autoshard.planning import first_look
from autoshard.runtime.state import state_of
from tests.cluster import Cluster
from tests.models import CASES
from tests.parity import measure, sgd, whole
from tests.small import TOLERANCE, Net, backward_beside, compiled_pair, config, in_full, inputs_of, step_each

TWO = Machines(2, 1, DEVICES["cpu"])
EARLY = {"early_gathers": True}
Between = Callable[[Any, Any], None]


@pytest.mark.parametrize(
    ("name", "zero", "options"),
    [
        in_full("gpt2_deep", 3, {}),
        in_full("odd", 1, {}),
        ("odd", 2, {}),
        in_full("gpt2_deep", 3, {"codegen": "inductor"}),
        in_full("gpt2_deep", 3, {"passes": "inline_regions,hoist_unshards,name_parameters,merge_unshards,bucket{mb=0.01},lower,overlap{ahead=3},early_gathers"}),
    ],
)
def test_numbers_are_those_of_the_plain_model(two: Cluster, name: str, zero: int, options: dict[str, Any]) -> None:
    for distance in two.run(measure, name, config(zero, **EARLY, **options)):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.full
def test_what_was_cast_is_as_without(two: Cluster) -> None:
    with_and_without = (two.run(measure, "odd", config(3, precision="bf16", early_gathers=early)) for early in (True, False))
    assert next(with_and_without) == next(with_and_without)


@pytest.mark.full
@pytest.mark.parametrize("options", [{"hierarchy": "two_level"}, {"mesh": {"replicate": 2, "shard": 2}}])
def test_over_more_groups_of_processes(four: Cluster, options: dict[str, Any]) -> None:
    plan = first_look(CASES["odd"].build(), config(3, **EARLY, **options), Machines(2, 2, DEVICES["cpu"]))
    for distance in four.run(measure, "odd", config("auto", plan=plan, replicate_below="auto")):
        assert distance.worst <= TOLERANCE, distance


def _gathers(run: Callable[[], Any]) -> int:
    """How many it starts."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    return sum(event.name == "autoshard::gather_direct" for event in seen.events())


def nothing(model: Any, compiled: Any) -> None:
    """What most loops do between a step and the next forward."""


def write_data(model: Any, compiled: Any) -> None:
    """On one process alone, and without a trace."""
    if dist.get_rank() == 1:
        model.up.weight.to_local().data.mul_(-1.0)


def load(model: Any, compiled: Any) -> None:
    model.load_state_dict({name: torch.full(p.shape, 0.01) for name, p in model.named_parameters()})


def swap(model: Any, compiled: Any) -> None:
    """As an average's values take the place of the parameters'."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().copy_(parameter.to_local().clone() * 0.5)


def step_again(model: Any, compiled: Any) -> None:
    """Another optimizer, of other parameters."""
    parameters = list(model.parameters())[-1:]
    parameters[0].grad = torch.ones_like(parameters[0])
    step_each(torch.optim.SGD(parameters, lr=0.1))


def evaluate(model: Any, compiled: Any) -> None:
    with torch.no_grad():
        compiled(torch.ones(4, 8))  # another graph, which gathers by itself


class Alone(nn.Module):
    """Rows of which each is as long, by themselves: they travel as they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).pow(2).mean()


def in_a_loop(between: Between, build: Callable[[], nn.Module]) -> tuple[list[int], float]:
    """Gathers that each step's forward starts where this is done between the steps, and how far losses are from the plain model's."""
    model, plain, compiled = compiled_pair(config(3, **EARLY), build)
    optimizer, counts, losses, expected = sgd(model.parameters()), list[int](), list[Tensor](), list[Tensor]()
    for x in inputs_of(4)[:, dist.get_rank()]:
        counts.append(_gathers(lambda x=x: losses.append(compiled(x))))  # type: ignore[misc]
        expected.append(plain(x))
        losses[-1].backward()
        step_each(optimizer)
        assert state_of(model).early.flight is not None  # type: ignore[union-attr]
        between(model, compiled)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            q.data = whole(p.detach()).clone()  # whatever was written
    return counts, max(abs(a.item() / b.item() - 1) for a, b in zip(losses, expected, strict=True))


@pytest.mark.parametrize(
    ("between", "again", "build"),
    [
        (nothing, False, Net),
        in_full(write_data, True, Net),
        (write_data, True, Alone),
        in_full(step_again, False, Net),
        in_full(nothing, False, Alone),
        in_full(load, True, Net),
        in_full(load, True, Alone),
        in_full(swap, True, Net),
        in_full(swap, True, Alone),
        in_full(step_again, False, Alone),
        in_full(evaluate, False, Net),
        in_full(evaluate, False, Alone),
    ],
)
def test_what_was_written_since_is_gathered_anew(
    two: Cluster, between: Between, again: bool, build: Callable[[], nn.Module]
) -> None:
    """And what was not is not."""
    for counts, worst in two.run(in_a_loop, between, build):
        assert worst <= TOLERANCE
        assert [count > 0 for count in counts[1:]] == [again] * 3, counts


def beside_a_copy() -> list[float]:
    """Both are trained, turn by turn."""
    model, plain, compiled = compiled_pair(config(3, **EARLY))
    inputs = inputs_of(4)
    backward_beside(compiled, plain, inputs[0])
    other, also = copy.deepcopy(model), copy.deepcopy(plain)
    assert state_of(other).early is not state_of(model).early  # type: ignore[union-attr]
    both = [(compiled, plain, sgd(model.parameters()), sgd(plain.parameters()))]
    theirs = torch.compile(other, backend=autoshard.backend(config(3, **EARLY)))
    both.append((theirs, also, sgd(other.parameters()), sgd(also.parameters())))
    both[0][0].zero_grad()
    plain.zero_grad()
    for x in inputs[1:]:
        for ours, reference, *optimizers in both:
            backward_beside(ours, reference, x)
            step_each(*optimizers)
    assert all(state_of(m).early.flight is not None for m in (model, other))  # type: ignore[union-attr]
    pairs = zip([*model.parameters(), *other.parameters()], [*plain.parameters(), *also.parameters()], strict=True)
    return [(whole(p.detach()) - q).abs().max().item() for p, q in pairs]


@pytest.mark.full
def test_a_copy_of_the_model_has_its_own(two: Cluster) -> None:
    for distances in two.run(beside_a_copy):
        assert max(distances) <= TOLERANCE


RECIPE = Recipe(nn.Module(), GATHER_DIRECT, 2, "some")  # type: ignore[arg-type]


def _flight(*flats: Tensor) -> Flight:
    return Flight(RECIPE, list(flats), [])


def test_bits_are_compared() -> None:
    zero, nan = torch.zeros(2), torch.full((2,), torch.nan)
    assert _flight(zero, nan).is_of([zero.clone(), nan.clone()], RECIPE)
    assert not _flight(zero).is_of([-zero], RECIPE)
    assert not _flight(zero).is_of([zero, zero], RECIPE)
    assert not _flight(zero).is_of([torch.zeros(3)], RECIPE)
    assert not _flight(zero).is_of([zero.int()], RECIPE)
    assert not _flight(zero).is_of([zero], replace(RECIPE, group="other"))


def test_a_plan_says_so() -> None:
    plan = first_look(Net(), config(3, **EARLY), TWO)
    assert plan.early and Plan.from_json(plan.to_json()).early
    assert not first_look(Net(), config(3), TWO).early
    whole_everywhere = first_look(Net(), config(0, **EARLY), TWO)
    assert not whole_everywhere.early
    assert any("nothing is gathered" in why for why in whole_everywhere.why)


def test_what_is_not_legal_is_refused() -> None:
    with pytest.raises(ConfigError, match="early_gathers: 1 is not legal; legal: False, True"):
        config(3, early_gathers=1)
    with pytest.raises(ConfigError, match="early_gathers: a pinned plan decides this"):
        config("auto", plan=first_look(Net(), config(3), TWO), **EARLY)
    with pytest.raises(ConfigError, match="early_gathers: no pass 'early_gathers'"):
        config(3, disable_passes=("early_gathers",), **EARLY)
