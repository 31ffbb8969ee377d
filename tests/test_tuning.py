"""Fine-tuning of Hugging Face models: adapters, activation checkpointing, resized embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoshard
from tests.cluster import Cluster
from tests.models import TUNED
from tests.parity import Distance, Trainer, batches_of, clipped_step, measure, rank0_copy, sgd
from tests.small import TOLERANCE, config


@pytest.mark.full  # CI has 15 minutes
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("name", TUNED)
def test_tuned_models(two: Cluster, name: str, zero: int) -> None:
    for distance in two.run(measure, name, config(zero)):
        assert distance.worst <= TOLERANCE, distance


def merged() -> Distance:
    """Adapters become part of the base where they lie, as rows; what was compiled goes on with them."""
    case, rank, world = TUNED["lora"], dist.get_rank(), dist.get_world_size()
    model: Any = case.build()
    reference = Trainer(rank0_copy(model), case, sgd)
    plain: Any = reference.model
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(3)))
    optimizer = sgd(p for p in model.parameters() if p.requires_grad)
    first, second = batches_of(case, world, 2)
    compiled(**first[rank]).loss.backward()
    reference.backward(first)
    clipped_step(model, optimizer)
    reference.step()
    ours, theirs = model.merge_and_unload(), plain.merge_and_unload()
    distance = Distance()
    for key, value in autoshard.state_dict(ours).items():
        distance.see("parameter", value, theirs.state_dict()[key])
    with torch.no_grad():
        distance.see("loss", compiled(**second[rank]).loss, plain(**second[rank]).loss)
    return distance


@pytest.mark.full
def test_merged_adapters_are_in_the_base(two: Cluster) -> None:
    for distance in two.run(merged):
        assert distance.worst <= TOLERANCE, distance
