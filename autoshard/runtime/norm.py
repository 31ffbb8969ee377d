"""The norm of tensors that lie in rows on many processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard import torch_internals
from autoshard.runtime.dtensors import local, over_processes


@torch.no_grad()
def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all of them together: one float32, the same on all processes. A collective for each way they lie.

    Rows are taken as plain tensors: an operation on a thousand DTensors at once takes seconds to find out how they lie.
    """
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        lies = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        alike[(tensor.device, tensor.dtype, lies)].append(tensor)
    squares = [_square(together) for together in alike.values()]
    return torch.stack(squares).sum().sqrt().float() if squares else torch.zeros(())


def _square(alike: list[Tensor]) -> Tensor:
    """The square of the norm of tensors that lie the same way."""
    norms = torch_internals.norm_of_each([local(tensor) for tensor in alike])
    return over_processes(torch.stack(norms).double().square().sum(), alike[0])
