"""A small model, and how most tests compile it: eager, everything sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from tests.parity import rank0_copy

TOLERANCE = 1e-4
ALONE = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(3))  # [step, batch, feature], for one process


def in_full(*values: Any) -> Any:
    """A set of parameters of a test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.full)


def config(zero: int | str, **more: Any) -> autoshard.Config:
    options = {"codegen": "eager", "replicate_below": 0, "timeout": 60, "verbose": False}
    return autoshard.Config(zero=zero, **(options | more))  # type: ignore[arg-type]


def what_is_said(function: Any, *args: Any) -> str:
    """"kind: text" of what `function` raises. For errors that all processes raise before they communicate: the
    processes can be used again, which is quicker than replacing them."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 15), nn.Linear(15, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).pow(2).mean()


class Encoder(nn.Module):
    """Without a loss of its own, for loops that put several outputs together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 15), nn.Linear(15, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def compiled_pair(config: autoshard.Config, build: Callable[[], nn.Module] | None = None) -> tuple[nn.Module, nn.Module, Any]:
    """(model, plain copy, compiled)"""
    torch.manual_seed(0)
    model = (build or Net)()
    return model, rank0_copy(model), torch.compile(model, backend=autoshard.backend(config))


def inputs_of(steps: int) -> Tensor:
    """[step, rank, batch, feature]"""
    return torch.randn(steps, dist.get_world_size(), 4, 8, generator=torch.Generator().manual_seed(3))


def backward_beside(compiled: Any, plain: nn.Module, inputs: Tensor) -> None:
    """Of what this process is given through one, of the mean over all processes through the other. inputs: [rank, ...]"""
    compiled(inputs[dist.get_rank()]).backward()
    for x in inputs:
        (plain(x) / len(inputs)).backward()


def step_each(*optimizers: torch.optim.Optimizer) -> None:
    """The end of a step."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
