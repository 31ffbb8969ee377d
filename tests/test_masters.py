"""Masters: float32 copies of parameters in bf16, by which optimizers step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import distribute_tensor

import autoshard
from autoshard.errors import UnsupportedError
from autoshard.runtime import fused_step
from tests.cluster import Cluster
from tests.parity import Distance, see_state, whole
from tests.small import Net, config, inputs_of


def half_net() -> Net:
    torch.manual_seed(0)
    return Net().bfloat16()


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int, interpret: bool = False) -> nn.Module:
    """On gradients that do not depend on the model, so that only steps differ."""
    drawn = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=drawn).bfloat16().to(p.dtype)
        if interpret:
            assert not fused_step.take(optimizer, optimizer.family, interpret=True)  # type: ignore[attr-defined]
        else:
            optimizer.step()
    return model


def off(model: nn.Module, exact: nn.Module) -> float:
    pairs = zip(model.parameters(), exact.parameters())
    return float(sum((p.float() - q).abs().sum() for p, q in pairs))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_masters_bring_bf16_nearer_to_fp32(name: str) -> None:
    make = getattr(autoshard.optim, name)
    exact, plain, ours = half_net().float(), half_net(), half_net()
    train(exact, make(exact.parameters(), lr=1e-3), 100)
    train(plain, getattr(optim, name, make)(plain.parameters(), lr=1e-3), 100)
    optimizer = make(ours.parameters(), lr=1e-3, master_weights=True)
    train(ours, optimizer, 100)
    assert off(ours, exact) < off(plain, exact) / 2
    for p, q in zip(ours.parameters(), exact.parameters()):
        master = optimizer.state[p]["master"]
        assert master.dtype is torch.float32 and torch.equal(p, master.bfloat16())
        torch.testing.assert_close(master, q, rtol=1e-5, atol=1e-6)


def test_masters_by_the_kernel() -> None:
    """The interpreter cuts numbers to bf16 off where torch and GPUs round them."""
    exact, ours = half_net().float(), half_net()
    train(exact, autoshard.optim.AdamW(exact.parameters(), lr=1e-3), 5)
    optimizer = autoshard.optim.AdamW(ours.parameters(), lr=1e-3, master_weights=True)
    train(ours, optimizer, 5, interpret=True)
    for p, q in zip(ours.parameters(), exact.parameters()):
        torch.testing.assert_close(optimizer.state[p]["master"], q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interpret", [True, False])
def test_a_parameter_that_somebody_wrote_counts(interpret: bool) -> None:
    model = half_net()
    optimizer = autoshard.optim.SGD(model.parameters(), lr=0.5, master_weights=True)
    train(model, optimizer, 2, interpret)
    with torch.no_grad():
        for p in model.parameters():
            p.data.fill_(3.0)
    train(model, optimizer, 1, interpret)
    drawn = torch.Generator().manual_seed(5)
    for p in model.parameters():
        expected = 3.0 - 0.5 * torch.randn(p.shape, generator=drawn).bfloat16().float()
        torch.testing.assert_close(optimizer.state[p]["master"], expected)


def test_masters_of_a_state_that_was_kept_without() -> None:
    """Momentum goes on, and does not begin anew."""
    p, q = (nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    options: Any = {"lr": 0.1, "momentum": 0.9, "dampening": 0.9}
    plain, ours = optim.SGD([p], **options), autoshard.optim.SGD([q], **options, master_weights=True)
    p.grad = torch.ones_like(p)
    plain.step()
    ours.load_state_dict(copy.deepcopy(plain.state_dict()))
    q.data.copy_(p.data)
    q.grad = torch.ones_like(q)
    ours.step()
    torch.testing.assert_close(ours.state[q]["momentum_buffer"].float(), torch.ones(4), rtol=1e-2, atol=0)
    assert ours.state[q]["master"].dtype is torch.float32
    without = autoshard.optim.SGD([q], **options)
    without.load_state_dict(ours.state_dict())
    assert "master" not in without.state[q]


def test_a_mastered_parameter_that_lies_otherwise_is_stepped_so() -> None:
    start = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    parameters = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [autoshard.optim.SGD([p], lr=0.1, momentum=0.9, master_weights=True) for p in parameters]
    for step in range(4):
        for i, (p, optimizer) in enumerate(zip(parameters, optimizers)):
            if step == 2 and i:
                p.data = p.data.t().contiguous().t()
            p.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
            optimizer.step()
    assert torch.equal(*parameters) and not parameters[1].is_contiguous()
    assert torch.equal(*(o.state[p]["master"] for p, o in zip(parameters, optimizers)))


def test_a_mastered_parameter_with_gaps_in_memory_is_refused() -> None:
    p = nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
    p.data = torch.ones(4, 12, dtype=torch.bfloat16)[:, ::2]
    p.grad = torch.ones_like(p)
    with pytest.raises(UnsupportedError, match="has gaps in memory"):
        autoshard.optim.SGD([p], lr=0.1, master_weights=True).step()


def test_masters_are_in_the_state_dict() -> None:
    one, other = half_net(), half_net()
    make = lambda m: autoshard.optim.AdamW(m.parameters(), lr=1e-2, master_weights=True)  # noqa: E731
    first, second = make(one), make(other)
    train(one, first, 3)
    other.load_state_dict(one.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(2):
        train(one, first, 1)
        train(other, second, 1)
    for p, q in zip(one.parameters(), other.parameters()):
        assert all(torch.equal(first.state[p][key], second.state[q][key]) for key in ("master", "exp_avg", "exp_avg_sq"))
    optim.AdamW(one.parameters()).load_state_dict(first.state_dict())  # which does not mind what it does not know


def sharded_masters() -> Distance:
    torch.manual_seed(0)
    model = Net().bfloat16()
    plain = copy.deepcopy(model)
    optimizers = [autoshard.optim.AdamW(m.parameters(), lr=1e-3, master_weights=True) for m in (model, plain)]
    compiled = torch.compile(model, backend=autoshard.backend(config(3)))
    distance = Distance()
    for step in range(3):
        compiled(inputs_of(1)[0][0].bfloat16()).backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            drawn = torch.Generator().manual_seed(step)
            q.grad = torch.randn(q.shape, generator=drawn).bfloat16()
            rows = distribute_tensor(q.grad, p.device_mesh, p.placements, src_data_rank=None)  # type: ignore[attr-defined]
            p.grad = rows
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters()):
        distance.see("parameter", whole(optimizers[0].state[p]["master"]), optimizers[1].state[q]["master"])
    see_state(distance, model, plain)
    return distance


def test_masters_of_rows(two: Cluster) -> None:
    for distance in two.run(sharded_masters):
        assert distance.worst == 0, distance
