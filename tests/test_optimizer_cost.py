"""What an optimizer's step takes, found by stepping it without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import optim
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.cost_model.optimizer import NAMED, Existing, like, memory


def test_an_optimizer_is_measured_by_stepping_it() -> None:
    rows = [((64, 64), torch.float32), ((64,), torch.float32)]
    elements = 64 * 64 + 64
    adam, sgd = (memory(NAMED[name], rows, foreach=False) for name in ("adamw", "sgd"))
    assert adam is not None and sgd is not None
    assert adam.state == 2 * 4 * elements + 2 * 4 and sgd.state == sum(sgd.scratch) == 0
    together = memory(NAMED["adamw"], rows, foreach=True)
    assert together is not None and sum(together.scratch) >= 4 * elements and {4 * 64 * 64, 4 * 64} <= set(together.scratch)
    users = torch.optim.AdamW([nn.Parameter(torch.ones(2))], amsgrad=True)
    of_users = memory(like(users, [0, 0]), rows, foreach=False)
    assert of_users is not None and of_users.state == 3 * 4 * elements + 2 * 4 and not users.state
    assert memory(lambda ps: torch.optim.Adafactor(ps), rows, foreach=False) is None  # asks for values
    ours = memory(lambda ps: optim.Adafactor(ps), rows, foreach=False)
    assert ours is not None and ours.state == 4 * (64 + 64) + 4 * 64 + 2 * 4  # rows and columns, a vector, steps
    torch.optim.lr_scheduler.StepLR(users, 1)  # puts a step of its own on the optimizer
    before = users.param_groups[0]["params"][0].detach().clone()
    users.param_groups[0]["params"][0].grad = torch.ones(2)
    assert memory(like(users, [0, 0]), rows, foreach=False) == of_users
    assert torch.equal(users.param_groups[0]["params"][0], before) and not users.state


@pytest.mark.parametrize("world", [1, 2])
def test_of_torch_s_adafactor_no_moments_are_counted(world: int) -> None:
    """It asks for values, and Adam's would be assumed."""
    plan = autoshard.plan(
        nn.Linear(256, 256), torch.zeros(2, 256), autoshard.Config(zero=0), Cluster(1, world, DEVICES["h100"]), torch.optim.Adafactor
    )
    assert plan.predicted.memory["optimizer"] < 16 * 256 and not any("assumed" in unknown for unknown in plan.predicted.unknown)


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
    found = memory(like(Wrapper(inside), [0]), [((8,), torch.float32)], foreach=False)
    assert found is not None and found.state == 32 and inside.param_groups is groups and not inside.state


def test_each_parameter_steps_by_its_own_group_and_optimizer() -> None:
    """A model's momentum, or that of a part of it, is not foreseen from the first group."""
    a, b, c = (nn.Parameter(torch.ones(n)) for n in (2, 8, 32))
    names, rows = {id(a): "a", id(b): "b", id(c): "c"}, [((n,), torch.float32) for n in (32, 2, 8)]
    grouped = torch.optim.SGD([{"params": a}, {"params": [b], "momentum": 0.9}], lr=0.1)
    others = torch.optim.AdamW([c])
    found = memory(Existing([grouped, Wrapper(others), others], names).on(["c", "a", "b"]), rows, foreach=False)
    assert found is not None and found.state == 4 * 8 + (2 * 4 * 32 + 4)  # b's momentum, c's two moments and step
    assert not grouped.state and not others.state
    frozen = memory(Existing([grouped], names).on(["c", "a", "b"]), rows, foreach=False)  # c is not stepped
    assert frozen is not None and frozen.state == 4 * 8
