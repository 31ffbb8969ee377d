"""Models of blocks that can be computed again, how they are planned, and what some steps of them give."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard import Config
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster, measured_here
from autoshard.cost_model.optimizer import NAMED
from autoshard.forecast import Forecaster
from autoshard.passes.choose_zero import Circumstances, make_plan
from autoshard.plan import Plan
from tests import models
from tests.peaks import grown_in_a_step

HERE = Cluster(1, 1, measured_here("cpu"))
Codegen = Literal["eager", "inductor"]
TEXT = models.tokens(67, 32, 24)


class Layer(nn.Module):
    """Attention, dropout, a norm that keeps statistics, and a view that leaves the block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.BatchNorm1d(32), nn.Linear(32, 96)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x.flatten(0, 1)).view_as(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        x = x + nn.functional.dropout(y.transpose(1, 2).flatten(-2), 0.1)
        return (x + self.down(nn.functional.gelu(self.up(x)))).unsqueeze(0)[0]


class Stack(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(layers)), nn.Linear(32, 50)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).log_softmax(-1).square().mean()


class Checkpointed(Stack):
    """Whose user repeats its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x).log_softmax(-1).square().mean()


class Plain(nn.Module):
    """Of a block that can be a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.1)


class Deep(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Plain() for _ in range(9))


class Few(Stack):
    """Blocks that are no graphs of their own, and a head where the peak is."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers, self.head = nn.ModuleList(Plain() for _ in range(3)), nn.Linear(32, 200)


class Looped(Stack):
    """Calls one block over and over, with nothing between two calls or something."""

    between: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList([Plain()])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.between(self.layers[0](x))
        return self.head(x).log_softmax(-1).square().mean()


class LoopedApart(Looped):
    between = staticmethod(torch.tanh)


@torch.library.custom_op("autoshard_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """Draws numbers, and does not say so."""
    return torch.rand_like(x)


@noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Noisy(nn.Linear):
    """Has an operator of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(super().forward(x)) * noise(x.detach())


def inputs(batch: int = 4) -> Tensor:
    return torch.randn(batch, 16, 32, generator=torch.Generator().manual_seed(0))


def forecaster_of(model: nn.Module, x: Any, codegen: Codegen = "eager") -> Forecaster:
    return Forecaster(capture(model, x), NAMED["adamw"], HERE, codegen)


def planned(forecaster: Forecaster, **options: Any) -> Plan:
    return make_plan(forecaster.captured.inventory, Config(zero=0, **options), Circumstances(HERE, None), forecaster)


def trained(make: type[nn.Module], x: Tensor, plan: Plan, codegen: str) -> list[Tensor]:
    """Losses and gradients of two steps, and buffers after them."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = make().to(x.device)
    run = torch.compile(model, backend=autoshard.backend(Config(plan=plan, codegen=codegen, verbose=False)))  # type: ignore[arg-type]
    torch.manual_seed(1)
    return two_steps(run, model, x)


def grown_by(case: models.Case, batch: models.Batch, plan: Plan, codegen: Codegen) -> int:
    """By how many bytes a step with this plan goes above what is there between steps."""
    torch.compiler.reset()
    model = case.build().train()
    optimizer = torch.optim.AdamW(model.parameters())
    run = torch.compile(model, backend=autoshard.backend(Config(plan=plan, codegen=codegen, verbose=False)))
    return grown_in_a_step(lambda: case.loss(run(**batch)), optimizer)


def two_steps(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    losses = []
    for _ in range(2):
        losses.append(run(x))
        losses[-1].backward()
    return [*losses, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def with_policies(plan: Plan, make: type[nn.Module], policies: Sequence[str]) -> Plan:
    """The plan with these policies for the layers, in turn."""
    names = [f"layers.{i}" for i in range(len(make().layers))]  # type: ignore[arg-type]
    return replace(plan, recompute=tuple(zip(names, itertools.cycle(policies))))
