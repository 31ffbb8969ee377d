"""Recompute regions of several blocks: results, what waits for backward and what is gathered for it, and what is chosen."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.passes import graphs
from autoshard.plan import Plan
from autoshard.rehearsal import rehearse
from tests import models
from tests.cluster import Cluster as Processes
from tests.parity import measure
from tests.recomputed import Codegen, Deep, Plain, Stack, forecaster_of, inputs, planned, trained, with_policies
from tests.small import TOLERANCE, config, in_full, same


class Few(Stack):
    """Too few blocks to be graphs of their own, but for regions."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Plain() for _ in range(4))


REGIONS = ["through", "through", "full"]


@pytest.mark.parametrize(
    ("make", "policies"),
    [
        (Few, REGIONS), (Deep, REGIONS), in_full(Deep, ["through"]), in_full(Few, ["through"]),
        in_full(Deep, ["none", "through", "save addmm#0", "through", "selective"]),
    ],
)
def test_results_are_bitwise_those_without(make: type[nn.Module], policies: list[str]) -> None:
    """Dropout in what is called again draws the same numbers."""
    plan = planned(forecaster_of(make(), inputs()))
    plain, ours = (trained(make, inputs(), p, "eager") for p in (plan, with_policies(plan, make, policies)))
    assert same(plain, ours)


@pytest.mark.parametrize("name", ["llama_deep"])
@pytest.mark.parametrize("zero", [3, *map(in_full, (0, 1, 2))])
def test_parity(two: Processes, name: str, zero: int) -> None:
    case = models.DEEP[name]
    plan = autoshard.plan(case.build(), case.batch(torch.Generator().manual_seed(0)), config(zero, recompute="full"), Cluster(1, 2, DEVICES["cpu"]))
    plan = replace(plan, recompute=tuple((block, policy) for (block, _), policy in zip(plan.recompute, REGIONS)))
    for distance in two.run(measure, name, config("auto", plan=plan, replicate_below="auto")):
        assert distance.worst <= TOLERANCE, distance
