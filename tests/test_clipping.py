"""Clipping by the largest gradient, torch's norm of no finite order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.cluster import Cluster
from tests.parity import Distance, see_gradients, whole
from tests.small import (
    TOLERANCE,
    Net,
    backward_beside,
    compiled_pair,
    config,
    in_full,
    inputs_of,
    what_is_said,
)


class Narrow(Net):
    """Of its last layer one of two processes has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(15, 1)


def clipped_by_the_largest(zero: int, error_if_nonfinite: bool) -> Distance:
    """As torch's norm over all gradients, of no finite order."""
    model, plain, compiled = compiled_pair(config(zero))
    distance = Distance()
    for inputs in inputs_of(2):
        backward_beside(compiled, plain, inputs)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e-3, torch.inf, error_if_nonfinite) for m in (model, plain)]
        distance.see("norm", *map(whole, norms))
        see_gradients(distance, model, plain)
        model.zero_grad()
        plain.zero_grad()
    return distance


@pytest.mark.parametrize("zero", [in_full(0), in_full(1), 3])
@pytest.mark.parametrize("error_if_nonfinite", [False, in_full(True)])
def test_clipping_by_the_largest_gradient_is_global(two: Cluster, zero: int, error_if_nonfinite: bool) -> None:
    for distance in two.run(clipped_by_the_largest, zero, error_if_nonfinite):
        assert distance.worst <= TOLERANCE, distance


def largest_of_nothing(below: int) -> str:
    """Each process looks at its own rows, and goes no further."""
    model, _, compiled = compiled_pair(config(3, replicate_below=below), Narrow)
    compiled(inputs_of(1)[0, dist.get_rank()]).backward()
    return what_is_said(torch.linalg.vector_norm, model.down.weight.grad, torch.inf)


def test_there_is_no_largest_of_no_rows(two: Cluster) -> None:
    first, second = two.run(largest_of_nothing, 0)
    assert first == "nothing" and "on an empty tensor" in second, second
    assert two.run(largest_of_nothing, 100) == ["nothing"] * 2
