"""The peak that a plan says, beside what two processes take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from tests.cluster import Cluster
from tests.parity import rank0_copy
from tests.small import config, in_full
from tests.peaks import grown
from tests.test_low_rank import residues

STATE = ("parameters", "optimizer", "buffers", "inputs")


class Wide(nn.Module):
    """Each weight is a group of its own, and as large as all activations together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(256, 256), nn.GELU())), nn.Linear(256, 16))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), torch.zeros(len(x), dtype=torch.long))


def measured(plan: autoshard.Plan, codegen: str) -> int:
    """By how many bytes a step goes above what is predicted to be there between steps."""
    model, x = rank0_copy(Wide()), torch.randn(64, 256)
    backend = autoshard.backend(config("auto", plan=plan, codegen=codegen, replicate_below="auto"))
    compiled: Any = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        compiled(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    dist.barrier()
    return grown(step) + sum(r.error.nbytes + r.factor.nbytes for r in residues(model))


@pytest.mark.parametrize(("compression", "codegen"), [(None, "inductor"), in_full(None, "eager"), in_full("powersgd", "inductor"), in_full("powersgd", "eager")])
def test_the_peak_is_the_measured_one(two: Cluster, compression: str | None, codegen: str) -> None:
    """Of stage 0: how much of gathers overlaps in a step this small is a question of time."""
    settings = config(0, codegen=codegen, optimizer="sgd", compression=compression)
    plan = autoshard.plan(Wide(), torch.randn(64, 256), settings, Machines(1, 2, DEVICES["cpu"]), torch.optim.SGD)
    held = sum(plan.predicted.memory.get(c, 0) for c in STATE)
    for found in two.run(measured, plan, codegen):
        assert plan.predicted.peak_bytes - held == pytest.approx(found, rel=0.03), plan.predicted
