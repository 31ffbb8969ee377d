"""Runs of a function over buffers that a step would not have in its caches either."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from autoshard.calibration.row import Run, Shapes

POOL = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}  # bytes of buffers that are taken in turn: some times what the largest caches hold


def turns(
    function: Callable[..., object], shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> Callable[[], Iterator[Run]]:
    """Runs of `function` on buffers of these shapes, taken in turn."""

    def make() -> Iterator[Run]:
        count = _count(shapes, dtype, device)
        sets = [[_filled(s, dtype, device) for s in shapes] for _ in range(count)]
        kept: deque[object] = deque((function(*buffers) for buffers in sets), maxlen=count)
        for buffers in itertools.cycle(sets):
            yield lambda buffers=buffers: kept.append(function(*buffers))  # type: ignore[misc]

    return make


def _filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a GPU with numbers that differ: it draws less power for equal ones, and is faster than in a step."""
    return torch.full(shape, 0.5, dtype=dtype) if device.type == "cpu" else torch.randn(shape, dtype=dtype, device=device)


def _count(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> int:
    """How many sets of buffers of these shapes fill the pool."""
    return max(1, min(256, POOL[device.type] // sum(torch.Size(s).numel() * dtype.itemsize for s in shapes)))


def chain(function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], device: torch.device) -> Callable[[], Iterator[Run]]:
    """Runs of `function` on what the run before gave and a buffer, as operations of a step follow each other."""

    def make() -> Iterator[Run]:
        count = _count([shape] * 2, torch.float32, device)
        sets = [torch.full(shape, 0.5, device=device) for _ in range(count)]
        kept = deque((function(buffer, buffer) for buffer in sets), maxlen=count)
        for buffer in itertools.cycle(sets):
            yield lambda buffer=buffer: kept.append(function(kept[-1], buffer))  # type: ignore[misc]

    return make


def training(
    function: Callable[..., Tensor], shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> Callable[[], Iterator[Run]]:
    """Runs of forward and backward."""

    def both(*leaves: Tensor) -> None:
        out = function(*leaves)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    def make() -> Iterator[Run]:
        leaves = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]
        return itertools.repeat(lambda: both(*leaves))

    return make
