"""Training in other dtypes than parameters have."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from tests.cluster import Cluster
from tests.models import CASES
from tests.parity import Trainer, clipped_step, rank0_copy, whole
from tests.small import compiled_pair, config, in_full


def train_in(precision: str | None, autocast: bool, zero: int) -> tuple[list[float], list[float], set[torch.dtype]]:
    """(losses, those of the unsharded model in fp32, dtypes of the rows) of overfitting one batch a process"""
    case, make = CASES["llama"], functools.partial(torch.optim.AdamW, lr=1e-2)
    torch.manual_seed(0)
    model = case.build()
    reference, optimizer = Trainer(rank0_copy(model), case, make), make(model.parameters())
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(zero, precision=precision)))
    batches = [case.batch(torch.Generator().manual_seed(rank)) for rank in range(dist.get_world_size())]
    losses, exact = [], []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = case.loss(compiled(**batches[dist.get_rank()]))
        loss.backward()
        clipped_step(model, optimizer)
        losses.append(loss.item())
        exact.append(reference.backward(batches)[dist.get_rank()].item())
        reference.step()
    return losses, exact, {p.dtype for p in model.parameters()}


@pytest.mark.parametrize(("precision", "autocast"), [("bf16", False), in_full(None, True)])
@pytest.mark.parametrize("zero", [in_full(0), 3])
def test_bf16_trains_like_fp32(two: Cluster, precision: str | None, autocast: bool, zero: int) -> None:
    for losses, exact, dtypes in two.run(train_in, precision, autocast, zero):
        assert dtypes == {torch.float32} and exact[-1] < 0.7 * exact[0]
        assert losses[0] == pytest.approx(exact[0], rel=1e-2) and losses[-1] == pytest.approx(exact[-1], rel=0.1)


class Counted(nn.Linear):
    """Has parameters that are no real numbers."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.counts = nn.Parameter(torch.tensor([257, 259, 513, 1025]), requires_grad=False)
        self.turns = nn.Parameter(torch.full((4,), 1j), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.counts % 256) * self.turns.imag


class Normed(nn.Module):
    """Norms that have statistics, which stay fp32 beside what is computed in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.instance, self.head = nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.instance(torch.relu(self.batch(self.conv(x))))).mean((2, 3)))


def normed(zero: int) -> tuple[list[float], torch.dtype, torch.dtype, bool]:
    """How far gradients are from those in fp32, of themselves; the dtypes of results and statistics; whether whole parameters give the same
    compiled and in eager mode, in their own dtype. What lies in front of a norm has gradients that bf16 hardly shows."""
    model, plain, compiled = compiled_pair(config(zero, precision="bf16"), Normed)
    images = torch.randn(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    out = compiled(images[dist.get_rank()])
    out.float().pow(2).mean().backward()
    for x in images.flip(0):  # rank 0's statistics are everyone's
        (plain(x).pow(2).mean() / 2).backward()
    shown = [*model.instance.parameters(), *model.head.parameters()]
    exact = [*plain.instance.parameters(), *plain.head.parameters()]
    off = [_off(whole(p.grad), q.grad) for p, q in zip(shown, exact)]
    with autoshard.gathered(compiled) as gathered, torch.no_grad():
        gathered.eval()
        mine, eager = compiled(images[0]), gathered(images[0])
        same = mine.dtype == eager.dtype == torch.float32 and torch.allclose(mine, eager, atol=1e-6)
        gathered.train()
    return off, out.dtype, model.batch.running_mean.dtype, same


def _off(value: Tensor, exact: Tensor) -> float:
    return float((value - exact).norm() / exact.norm())


@pytest.mark.parametrize("zero", [0, 3])
def test_norms_with_statistics_and_whole_parameters_in_another_precision(two: Cluster, zero: int) -> None:
    for off, results, statistics, same in two.run(normed, zero):
        assert max(off) < 0.05 and results == torch.bfloat16 and statistics == torch.float32 and same, off


def as_precise_as_they_are(zero: int) -> tuple[Tensor, Tensor]:
    _, alone, compiled = compiled_pair(config(zero, precision="bf16"), lambda: nn.Sequential(Counted()))
    return compiled(torch.ones(2, 4)).detach().float(), alone(torch.ones(2, 4)).detach()


@pytest.mark.parametrize("zero", [0, 3])
def test_precision_is_for_real_numbers(two: Cluster, zero: int) -> None:
    for found, expected in two.run(as_precise_as_they_are, zero):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
