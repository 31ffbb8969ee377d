"""Between DTensors and this process's part of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from autoshard import torch_internals
from autoshard.errors import UnsupportedError
from autoshard.runtime.lost_peers import naming_lost_peers


def local(value: Any) -> Any:
    """This process's part of a DTensor; anything else as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def dtensor_of(part: Tensor, whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A DTensor of the shape and stride of `whole`, of which `part` is this process's. Nothing communicates."""
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


@naming_lost_peers
def over_processes(part: Tensor, tensor: Tensor) -> Tensor:
    """The sum of what processes have found of their rows of `tensor`; where it is whole everywhere all have found the same."""
    if not isinstance(tensor, DTensor):
        return part
    lying = [Replicate() if placement.is_replicate() else Partial() for placement in tensor.placements]
    return DTensor.from_local(part, tensor.device_mesh, lying, run_check=False).full_tensor()


@dataclass(eq=False)
class Written:
    """Tells rows of what was written to their DTensors. Torch counts that by the DTensor, while a graph that gathers again saves rows, and
    would gather what they are by then."""

    _times: dict[int, int] = field(default_factory=dict)

    def tell(self, wholes: Sequence[Any]) -> None:
        """To be called before a graph saves rows of the DTensors among these, and before its backward takes them."""
        times = {id(whole): torch_internals.times_written(whole) for whole in wholes if isinstance(whole, DTensor)}
        changed = {key for key, now in times.items() if self._times.get(key, now) != now}
        self._times |= times
        with torch.no_grad():  # in which the rows themselves are given
            written = [whole.to_local() for whole in wholes if id(whole) in changed]
        if written:
            torch.autograd.graph.increment_version(written)


def taking_rows(run: Callable[..., Any], positions: tuple[int, ...]) -> Callable[..., Any]:
    """`run`, which takes this process's rows at these positions, for DTensors there; their gradients are DTensors like
    them."""
    if not positions:
        return run

    @functools.wraps(run)
    def taking(*args: Any) -> Any:
        given = list(args)
        for i, rows in zip(positions, _Rows.apply(*(args[i] for i in positions))):  # type: ignore[no-untyped-call]
            given[i] = rows
        del args
        return run(*given)

    return taking


class _Rows(torch.autograd.Function):
    """to_local of many DTensors at once."""

    @staticmethod
    def forward(ctx: Any, *wholes: DTensor) -> tuple[Tensor, ...]:
        parts = tuple(whole.to_local().detach() for whole in wholes)
        ctx.wholes = [torch_internals.like_rows(whole) for whole in wholes]
        ctx.mark_non_differentiable(*(part for part, whole in zip(parts, wholes) if not whole.requires_grad))
        ctx.set_materialize_grads(False)
        return parts

    @staticmethod
    @once_differentiable  # gradients of gradients would end here, without a word
    def backward(ctx: Any, *parts: Tensor | None) -> tuple[DTensor | None, ...]:
        return tuple(None if part is None else whole(part) for part, whole in zip(parts, ctx.wholes))


@register_sharding(torch.ops.aten._is_any_true.default)  # type: ignore[untyped-decorator]
def _any_of_rows(tensor: Any) -> list[tuple[list[Placement], list[Placement]]]:
    """torch's anomaly mode asks it of each gradient, for which torch has no rule: each process looks at its own rows. What has fewer rows
    than there are processes torch gathers first."""
    found: list[tuple[list[Placement], list[Placement]]] = [([Replicate()], [Replicate()])]
    return found + [([Partial("max")], [Shard(dim)]) for dim in range(tensor.ndim)]


def refuse_strange_rows(what: str, loaded: Any, ours: DTensor) -> None:
    """torch.save of a DTensor keeps one process's rows and that process's place in the mesh. Another process that
    loads the file takes them for its own rows."""
    if not isinstance(loaded, DTensor):
        return
    place, here = _place(loaded), _place(ours)
    if place != here:
        raise UnsupportedError(
            f"{what} was loaded with rows that another process saved (its place in the mesh is {place}, ours is "
            f"{here}): torch.save of a sharded state_dict() keeps the rows of one process. Save "
            "autoshard.state_dict(model or optimizer), or use torch.distributed.checkpoint"
        )


def _place(tensor: DTensor) -> str:
    coordinate = tensor.device_mesh.get_coordinate()
    return f"{list(coordinate) if coordinate else None} of {list(tensor.device_mesh.shape)}"
