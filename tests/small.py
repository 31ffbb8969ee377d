"""A small model, and how most tests compile it: eager, everything sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from autoshard.runtime.residue import Residue, residues_of
from tests.parity import Distance, rank0_copy, see_state, whole

TOLERANCE = 1e-4
ALONE = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(3))  # [step, batch, feature], for one process


def in_full(*values: Any) -> Any:
    """A set of parameters of a test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.full)


def config(zero: int | str, **more: Any) -> autoshard.Config:
    options = {"codegen": "eager", "replicate_below": 0, "timeout": 60, "verbose": False}
    return autoshard.Config(zero=zero, **(options | more))  # type: ignore[arg-type]


def interpreter_loops() -> bool:
    """Whether there is a Triton whose interpreter takes a loop whose end is an argument."""
    return find_spec("triton") is not None and tuple(map(int, version("triton").split(".")[:2])) >= (3, 7)


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


class Experts(Net):
    """With some that are one parameter: of two or three processes the first is cut along its rows, the others by experts or, of three, along
    their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.experts = nn.Parameter(torch.randn(1, 5, 8)), nn.Parameter(torch.randn(2, 5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum((x @ experts.mT).pow(2).mean() for experts in (self.expert, self.experts))


class Encoder(nn.Module):
    """Without a loss of its own, for loops that put several outputs together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 15), nn.Linear(15, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Sum(nn.Module):
    """The gradient of its weight is its input in every row: what was rounded can be told exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 15, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


def gradients_of_sum(zero: int, options: dict[str, Any], scale: float = 1.0) -> tuple[Tensor, list[Tensor]]:
    """Of the compiled model, whole, and each process's own."""
    model, _, compiled = compiled_pair(config(zero, **options), Sum)
    inputs = scale * torch.randn(dist.get_world_size(), 8, generator=torch.Generator().manual_seed(5))
    compiled(inputs[dist.get_rank()]).backward()
    return whole(model.layer.weight.grad), [x.expand(15, 8) for x in inputs]


def residues(model: nn.Module) -> list[Residue]:
    """What PowerSGD keeps of a model's parameters."""
    return [residue for module in model.modules() for residue in residues_of(module).values()]


def compiled_pair(config: autoshard.Config, build: Callable[[], nn.Module] | None = None) -> tuple[nn.Module, nn.Module, Any]:
    """(model, plain copy, compiled)"""
    torch.manual_seed(0)
    model = (build or Net)()
    return model, rank0_copy(model), torch.compile(model, backend=autoshard.backend(config))


def inputs_of(steps: int) -> Tensor:
    """[step, rank, batch, feature]"""
    return torch.randn(steps, dist.get_world_size(), 4, 8, generator=torch.Generator().manual_seed(3))


def backward_of_all(plain: nn.Module, inputs: Sequence[Tensor] | Tensor, scale: float = 1.0) -> None:
    """Of the mean over all processes, each of which has one of the inputs; so many times."""
    for x in inputs:
        (scale * plain(x) / len(inputs)).backward()


def backward_beside(compiled: Any, plain: nn.Module, inputs: Sequence[Tensor] | Tensor) -> None:
    """Of what this process is given through one, of the mean over all processes through the other. inputs: [rank, ...]"""
    compiled(inputs[dist.get_rank()]).backward()
    backward_of_all(plain, inputs)


def step_each(*optimizers: torch.optim.Optimizer) -> None:
    """The end of a step."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def trained_beside(
    model: nn.Module, plain: nn.Module, compiled: Any, optimizers: Sequence[torch.optim.Optimizer], steps: int = 4
) -> Distance:
    """How far a model is from the plain one when both have taken some steps."""
    for inputs in inputs_of(steps):
        backward_beside(compiled, plain, inputs)
        step_each(*optimizers)
    distance = Distance()
    see_state(distance, model, plain)
    return distance


def same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """Whether they are as many tensors, of the same bits."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
