"""Between DTensors and this process's part of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def local(value: Any) -> Any:
    """This process's part of a DTensor; anything else as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def dtensor_of(part: Tensor, whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A DTensor of the shape and stride of `whole`, of which `part` is this process's. Nothing communicates."""
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
