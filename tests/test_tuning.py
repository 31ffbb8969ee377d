"""Fine-tuning of Hugging Face models: adapters, activation checkpointing, resized embeddings."""

from __future__ import annotations

import pytest

from tests.cluster import Cluster
from tests.models import TUNED
from tests.parity import measure
from tests.small import TOLERANCE, config, in_full


@pytest.mark.parametrize(
    ("name", "zero"),
    [("lora", 3), ("llama_regions", 2), ("resized", 3)]
    + [in_full(name, zero) for name in TUNED for zero in range(4)],
)
def test_tuned_models(two: Cluster, name: str, zero: int) -> None:
    for distance in two.run(measure, name, config(zero)):
        assert distance.worst <= TOLERANCE, distance
