"""The yardstick: train a model sharded and, in the same process, unsharded, and measure how far apart they are.

Each process has its own batches. The reference runs every process's batch in turn on one plain model and
averages the gradients; a buffer that the step changes takes rank 0's value, as DDP's would.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard
from tests.models import CASES, DEEP, TUNED, Batch, Case

STEPS = 10


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """eps is large so that gradients which are zero but for rounding (a bias in front of a BatchNorm)
    don't become steps of full size in a random direction."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


@dataclass
class Distance:
    """Largest difference relative to the largest value of the tensor; 0.0 is bitwise equality."""

    loss: float = 0.0
    gradient: float = 0.0
    norm: float = 0.0
    parameter: float = 0.0
    buffer: float = 0.0

    @property
    def worst(self) -> float:
        return max(vars(self).values())

    def see(self, what: str, ours: Tensor, reference: Tensor) -> None:
        assert ours.shape == reference.shape, (what, ours.shape, reference.shape)
        if not reference.numel():
            return
        # A value that is zero but for rounding (the gradient of a bias in front of a BatchNorm) has no scale.
        scale = max(reference.double().abs().max().item(), 1e-3)
        error = (ours.double() - reference.double()).abs().max().item() / scale
        assert error == error, f"{what} is not a number"
        setattr(self, what, max(getattr(self, what), error))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """The end of every loop; the gradients' norm."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return whole(norm)


class Trainer:
    """A plain model's loop over the batches of all processes."""

    def __init__(self, model: nn.Module, case: Case, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.model, self.case = model, case
        self.optimizer = make(p for p in model.parameters() if p.requires_grad)

    def backward(self, batches: list[Batch], scale: float = 1.0) -> list[Tensor]:
        before = [b.clone() for b in self.model.buffers()]
        after: list[Tensor] = []
        losses = []
        for i, batch in enumerate(batches):
            for buffer, value in zip(self.model.buffers(), before):
                buffer.copy_(value)
            loss = self.case.loss(self.model(**batch))
            (loss * scale / len(batches)).backward()
            losses.append(loss.detach())
            if i == 0:
                after = [b.clone() for b in self.model.buffers()]
        for buffer, value in zip(self.model.buffers(), after):
            buffer.copy_(value)
        return losses

    def step(self) -> Tensor:
        return clipped_step(self.model, self.optimizer)


def batches_of(case: Case, world: int, steps: int) -> list[list[Batch]]:
    """[step][rank], the same on every process."""
    g = torch.Generator().manual_seed(7)
    return [[case.batch(g) for _ in range(world)] for _ in range(steps)]


def see_gradients(distance: Distance, ours: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"gradient of {name}: {p.grad} against {q.grad}"
        if p.grad is not None and q.grad is not None:
            distance.see("gradient", whole(p.grad), q.grad)


def see_state(distance: Distance, ours: nn.Module, reference: nn.Module) -> None:
    for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
        distance.see("parameter", whole(p.detach()), q.detach())
    for b, c in zip(ours.buffers(), reference.buffers(), strict=True):
        distance.see("buffer", b, c)


def measure(
    name: str,
    config: autoshard.Config,
    make: Callable[..., torch.optim.Optimizer] = adamw,
    steps: int = STEPS,
) -> Distance:
    """How far the sharded training of a case is from the unsharded one after `steps` steps."""
    return measure_case((CASES | TUNED | DEEP)[name], config, make, steps)


def measure_case(
    case: Case,
    config: autoshard.Config,
    make: Callable[..., torch.optim.Optimizer] = adamw,
    steps: int = STEPS,
    dynamic: bool | None = None,
) -> Distance:
    """The same of a case that has no name. dynamic: torch.compile's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # other parameters on each process: rank 0's must win
    model = case.build()
    reference = Trainer(rank0_copy(model), case, make)
    optimizer = make(p for p in model.parameters() if p.requires_grad)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config), dynamic=dynamic)
    distance = Distance()
    for batches in batches_of(case, world, steps):
        loss = case.loss(compiled(**batches[rank]))
        loss.backward()
        losses = reference.backward(batches)
        distance.see("loss", loss.detach(), losses[rank])
        see_gradients(distance, model, reference.model)
        distance.see("norm", clipped_step(model, optimizer), reference.step())
    see_state(distance, model, reference.model)
    return distance


def rank0_copy(model: nn.Module) -> nn.Module:
    """A plain copy with rank 0's values."""
    reference = copy.deepcopy(model)
    for tensor in [*reference.parameters(), *reference.buffers()]:
        dist.broadcast(tensor.detach(), 0)
    return reference
