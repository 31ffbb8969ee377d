"""Every model, every stage: losses, gradients, norm, parameters and buffers against the unsharded model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from tests.cluster import Cluster
from tests.models import CASES
from tests.parity import Distance, measure
from tests.small import TOLERANCE, compiled_pair, config, in_full, trained_beside

STAGES = (0, 1, 2, 3)


def _config(zero: int, codegen: str) -> autoshard.Config:
    return config(zero, codegen=codegen)


# Stage 2 runs on Inductor below, and odd shapes at stage 3 on three processes; the rest in full.
ALWAYS = {("conv", 0), *((name, 3) for name in CASES if name not in ("odd", "gpt2", "bert", "t5", "vit"))}


@pytest.mark.parametrize(
    ("name", "zero"),
    [case if case in ALWAYS else in_full(*case) for case in ((name, zero) for name in CASES for zero in STAGES)],
)
def test_two_processes(two: Cluster, name: str, zero: int) -> None:
    for distance in two.run(measure, name, _config(zero, "eager")):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.parametrize(
    ("name", "zero"), [*(in_full("odd", zero) for zero in (0, 1, 2)), ("odd", 3), in_full("llama", 3), in_full("conv", 1)]
)
def test_three_processes(three: Cluster, name: str, zero: int) -> None:
    """The rest is in the whole matrix."""
    for distance in three.run(measure, name, _config(zero, "eager")):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.parametrize(("zero", "name"), [(2, "attention"), *(in_full(*case) for case in ((1, "attention"), (0, "conv"), (2, "odd"), (3, "odd")))])
def test_inductor(two: Cluster, name: str, zero: int) -> None:
    """A model a stage; at stage 3 always the deep one of test_blocks."""
    for distance in two.run(measure, name, _config(zero, "inductor")):
        assert distance.worst <= TOLERANCE, distance


class Pictures(nn.Module):
    """Its convolution's weight lies in channels_last, and so does what it makes, which is then flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.reshape(1, 2, 4, 4)).square().mean()  # type: ignore[no-any-return]


def train_pictures(zero: int, codegen: str) -> Distance:
    model, plain, compiled = compiled_pair(config(zero, codegen=codegen, replicate_below="auto" if zero == 1 else 0), Pictures)
    return trained_beside(model, plain, compiled, [torch.optim.AdamW(m.parameters()) for m in (model, plain)])


@pytest.mark.parametrize(("zero", "codegen"), [(0, "eager"), (1, "eager"), (3, "eager"), in_full(0, "inductor")])
def test_weights_in_channels_last(two: Cluster, zero: int, codegen: str) -> None:
    for distance in two.run(train_pictures, zero, codegen):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.full
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_rows_by_the_transport_s_reduce_scatter(two: Cluster, codegen: str) -> None:
    """What is chosen where the transport has one of its own; on gloo all other tests take an all-to-all."""
    cpu = DEVICES["cpu"]
    scatters = replace(cpu, inside=replace(cpu.inside, scatters=True))
    for distance in two.run(measure, "odd", config(2, codegen=codegen, cluster=Machines(1, 2, scatters))):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.full
@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cluster", [2, 3, 4], indirect=True)
def test_whole_matrix(cluster: Cluster, name: str, codegen: str, zero: int) -> None:
    for distance in cluster.run(measure, name, _config(zero, codegen)):
        assert distance.worst <= TOLERANCE, distance
