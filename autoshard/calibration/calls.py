"""A step in which a GPU has next to nothing to do, by which `autoshard calibrate` finds what the processor does for an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.compiler import Backend
from autoshard.config import Config
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import Device
from autoshard.cost_model.optimizer import NAMED
from autoshard.passes.choose_zero import make_plan
from autoshard.planning import circumstances, forecaster

SHAPE = (2, 16, 32)  # batch, sequence, width


class _Block(nn.Module):
    """Of a Llama, as small as it gets: with as many operations for a parameter, which takes time of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ParameterList(torch.ones(32) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
        self.up, self.gate, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((32, 64), (32, 64), (64, 32)))

    def forward(self, x: Tensor) -> Tensor:
        y = _normed(x, self.norms[0])
        q, k, v = (p(y).unflatten(-1, (2, 16)).transpose(1, 2) for p in self.projections[:3])
        y = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        x = x + self.projections[3](y.transpose(1, 2).flatten(2))
        y = _normed(x, self.norms[1])
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _rotated(x: Tensor) -> Tensor:
    """As by an angle, which takes no operation of its own."""
    first, second = x.chunk(2, -1)
    return x * 0.6 + torch.cat((-second, first), -1) * 0.8


class _Small(nn.Module):
    """So little is computed that a step takes what the processor does for it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_Block() for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def small_step(codegen: Literal["eager", "inductor"], where: torch.device, device: Device) -> tuple[Callable[[], None], int]:
    """A step by the backend itself, and how many operations a plan for such a device sees in it."""
    config = Config(zero=0, codegen=codegen, verbose=False)
    model, x = _Small().to(where), torch.ones(SHAPE, device=where)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, backend=Backend(config))

    def step() -> None:
        compiled(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, _operations(config, Cluster(1, 1, device))


def _operations(config: Config, cluster: Cluster) -> int:
    forecast = forecaster(_Small(), torch.ones(SHAPE), config, cluster, NAMED["adamw"])
    plan = make_plan(forecast.captured.inventory, config, circumstances(config, cluster), forecast)
    return len(forecast.simulated(plan)[0].operations)
