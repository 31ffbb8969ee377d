"""The group that forward gathers first, in two parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.passes import graphs
from autoshard.passes.choose_blocks import OWN_GRAPHS
from autoshard.plan import Plan
from autoshard.rehearsal import rehearse
from autoshard.torch_internals import KEEPS_OPERATORS
from tests.cluster import Cluster
from tests.models import Case, features
from tests.parity import Distance, measure_case
from tests.small import TOLERANCE, config, in_full

HOSTS = Machines(2, 1, DEVICES["cpu"])


class Blocks(nn.Module):
    """Of three matrices each, large enough to be worth a message of their own."""

    def __init__(self, count: int = 3, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3))) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


class Taken(Blocks):
    """With a module that is called as a part would be."""

    def __init__(self) -> None:
        super().__init__()
        self._modules["layers.0/1"] = nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self._modules["layers.0/1"](x).square().mean()  # type: ignore[misc]


class Looked(Blocks):
    """Whose first group has an embedding of which rows travel, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(30_000, 512), nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mix(self.words(x.long().sum(1))))


def planned(model: nn.Module, zero: int, cluster: Machines = HOSTS, width: int = 512) -> Plan:
    return autoshard.plan(model, torch.zeros(4, width), config(zero), cluster)


@pytest.mark.parametrize("zero", [1, 3])
def test_the_first_group_goes_in_two_parts_and_no_other(zero: int) -> None:
    plan = planned(Blocks(), zero)
    assert [g.name for g in plan.groups] == ["layers.0/1", "layers.0/2", "layers.1", "layers.2"]
    assert [len(g.parameters) for g in plan.groups] == [1, 2, 3, 3]  # half of it at most comes first
    assert any("goes in two parts" in why for why in plan.why) and Plan.from_json(plan.to_json()) == plan


def test_what_would_not_pay_stays_one() -> None:
    """Small parameters, one parameter, blocks that become graphs of their own, whole parameters, and a GPU's."""
    names = {
        "small": planned(Blocks(width=16), 3, width=16),
        "one": planned(nn.Sequential(nn.Linear(512, 512, bias=False)), 3),
        "many": planned(Blocks(OWN_GRAPHS), 3),
        "whole": planned(Blocks(), 0),
        "gpu": planned(Blocks(), 3, Machines(2, 8, DEVICES["h100"])),
    }
    for case, plan in names.items():
        assert not any("/" in g.name for g in plan.groups), case
    assert any("/" in g.name for g in planned(Blocks(OWN_GRAPHS - 1), 3).groups)


def test_parts_have_names_of_their_own() -> None:
    assert [g.name for g in planned(Taken(), 3).groups] == ["layers.0", "layers.1", "layers.2", "layers.0/1"]


@pytest.mark.skipif(not KEEPS_OPERATORS, reason="torch before 2.13 takes an embedding's gradient apart")
def test_what_is_not_gathered_is_no_part() -> None:
    plan = planned(Looked(), 3)
    assert plan.sparse == ("words.weight",) and plan.groups[0].parameters == ("words.weight", "mix.weight")
    assert [g.name for g in plan.groups[1:3]] == ["layers.0/1", "layers.0/2"]  # the first that is of several


def test_the_second_part_is_gathered_beside_the_first_ones_use_and_reduced_before_it() -> None:
    plan, captured = planned(Blocks(), 3), capture(Blocks(), torch.zeros(4, 512))
    made = rehearse(captured, plan, inductor=False)
    assert made.backward is not None
    forward = [graphs.serves(n) for n in made.forward.graph.nodes if graphs.gathers(n)]
    assert forward[:2] == [plan.groups[0].parameters, plan.groups[1].parameters]
    reduced = [set(graphs.serves(n)) for n in made.backward.graph.nodes if graphs.reduces(n)]
    assert reduced[-2:] == [set(plan.groups[1].parameters), set(plan.groups[0].parameters)]


def _distance(settings: autoshard.Config) -> Distance:
    return measure_case(Case(Blocks, features(4, 512), lambda loss: loss), settings)


@pytest.mark.parametrize(("zero", "codegen"), [(3, "eager"), in_full(1, "eager"), in_full(3, "inductor")])
def test_training_is_the_same(two: Cluster, zero: int, codegen: str) -> None:
    """Losses, gradients, their norm and parameters, by a plan that was made for other machines."""
    settings = config("auto", plan=planned(Blocks(), zero), codegen=codegen, replicate_below="auto")
    for distance in two.run(_distance, settings):
        assert distance.worst < TOLERANCE, distance
