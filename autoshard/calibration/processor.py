"""What a step takes of the processor beside kernels, to measure."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from autoshard.calibration.calls import small_step
from autoshard.calibration.device import measured_device
from autoshard.calibration.row import Row
from autoshard.compiler import Backend
from autoshard.config import Config
from autoshard.kernels.launcher import lacking

MANY = (16, 96)  # parameters of models that do nothing else


def beside_kernels(device: torch.device, world: int) -> Iterable[Row]:
    """What a step takes of the processor: on a CPU for each parameter; where kernels run behind it, for each operation of one process."""
    if device.type == "cpu":
        yield from parameters(world)
    elif world == 1:
        codegens: tuple[Literal["eager", "inductor"], ...] = ("eager",) if lacking() else ("eager", "inductor")
        for codegen in codegens:
            step, count = small_step(codegen, device, measured_device(device, {}))
            yield Row("call" if codegen == "eager" else "call.generated", 1, lambda step=step: itertools.repeat(step), count)  # type: ignore[misc]


class _Many(nn.Module):
    """So little is computed of its parameters that a step takes what it does for each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(16) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat(list(self.weights)) * x).sum()


def parameters(world: int) -> Iterable[Row]:
    """What a step does for parameters beside kernels and messages: guards, their rows, what autograd adds up, the optimizer's loop."""
    tables: dict[str, Literal[0, 3]] = {"parameter": 0, "sharded": 3} if world > 1 else {"parameter": 0}
    for table, zero in tables.items():
        for count in MANY:
            yield Row(table, count, lambda count=count, zero=zero: itertools.repeat(_step_of_many(count, zero)))  # type: ignore[misc]


@functools.cache
def _step_of_many(count: int, zero: Literal[0, 3]) -> Callable[[], float]:
    """A step by the backend itself, which says how many seconds this thread did not wait."""
    model, x = _Many(count), torch.ones(16 * count)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend=Backend(Config(zero=zero, codegen="eager", replicate_below=0, verbose=False)))

    def step() -> float:
        start = time.thread_time()
        compiled(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.thread_time() - start

    return step
