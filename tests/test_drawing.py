"""Parameters that are drawn anew, or loaded from what was, after the first call."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from autoshard.runtime.dtensors import local
from tests.cluster import Cluster
from tests.parity import whole
from tests.small import compiled_pair, config, in_full, inputs_of, what_is_said


def drawn_anew(zero: int, below: int, name: str, alike: bool) -> tuple[Tensor, Tensor, str]:
    """(what a process has of a parameter that was drawn in place, what its own generator draws of that shape, what the next step
    says)"""
    model, _, compiled = compiled_pair(config(zero, replicate_below=below))
    compiled(inputs_of(1)[0, dist.get_rank()]).backward()
    parameter = model.get_parameter(name)
    drawn: list[Tensor] = []
    for tensor in (parameter, torch.empty(local(parameter).shape)):
        torch.manual_seed(7 if alike else dist.get_rank())
        drawn.append(local(nn.init.uniform_(tensor)).detach().clone())
    return drawn[0], drawn[1], what_is_said(optim.SGD(model.parameters(), lr=0.1).step)


@pytest.mark.parametrize(("zero", "below", "name"), [in_full(0, 0, "up.weight"), (3, 0, "up.weight"), (3, 10, "down.bias")])
@pytest.mark.parametrize("alike", [in_full(True), False])
def test_each_process_draws_what_it_has_by_its_own_generator(two: Cluster, zero: int, below: int, name: str, alike: bool) -> None:
    """With one seed rows repeat, and what is whole stays alike; with others what is whole parts, which the next step names."""
    (first, drawn, said), (second, drawn_too, said_too) = two.run(drawn_anew, zero, below, name, alike)
    assert torch.equal(first, drawn) and torch.equal(second, drawn_too)
    shared = min(len(first), len(second))
    assert torch.equal(first[:shared], second[:shared]) == alike
    parted = f"DivergenceError: before step 1, parameter '{name}' is not on rank 1 what it is on rank 0"
    for text in (said, said_too):
        assert text == "nothing" if alike or (zero, below) == (3, 0) else text.startswith(parted), text


def loaded_anew(zero: int) -> tuple[Tensor, Tensor]:
    """(a weight that was loaded from a layer which each process drew by itself, that layer's)"""
    model, _, compiled = compiled_pair(config(zero))
    compiled(inputs_of(1)[0, dist.get_rank()])
    torch.manual_seed(dist.get_rank())
    new = nn.Linear(8, 15)
    model.up.load_state_dict(new.state_dict())
    return whole(model.up.weight).detach(), new.weight.detach()


@pytest.mark.parametrize("zero", [in_full(1), 3])
def test_a_new_layer_that_is_loaded_is_rank_0_s(two: Cluster, zero: int) -> None:
    (first, new), (second, _) = two.run(loaded_anew, zero)
    assert torch.equal(first, new) and torch.equal(second, new)
