"""Holder: where the whole gradient of one parameter goes in a backward that does not communicate.

[Note: Held gradients]
Where the plan keeps whole gradients (stages 0 and 1), a backward inside `no_sync` puts this process's own gradient
into `p.grad`, as DDP does: as it is for a plain parameter, else as a DTensor that is this process's part of the mean
(`Partial("avg")`), so that whoever reads it reads right, and `zero_grad` discards it; of a plain parameter what a user puts in its place (a clipped
one) is this process's own still. A leaf of the parameter's full
shape, which takes no memory itself, receives it from autograd and passes it on. The first forward outside takes what
`p.grad` holds into its graph, and its backward, the first one of it, adds that before the one reduction.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from autoshard.runtime.dtensors import dtensor_of, local

_SPENT = "_autoshard_spent"  # of a held gradient: whether a backward had it


@dataclass(eq=False)
class Holder:
    """Of parameter `name` of `module`. leaf: what a trace hands the parameter's gradient to. held: is told of each that came."""

    module: nn.Module
    name: str
    mesh: DeviceMesh
    held: Callable[[], None]
    leaf: Tensor = field(init=False)
    _holds: bool = False

    def __post_init__(self) -> None:
        self.leaf = self._nothing().requires_grad_()
        pass_on = weakref.WeakMethod(self._pass_on)  # such a hook is not seen by the collector: what it holds would never be freed
        self.leaf.register_post_accumulate_grad_hook(lambda leaf: (found := pass_on()) and found(leaf))

    def _nothing(self) -> Tensor:
        nothing = torch.zeros((), dtype=self.parameter.dtype, device=self.parameter.device)
        return nothing.expand(self.parameter.shape).data  # no view, or traces look for what it is one of

    def follow(self) -> None:
        """The leaf becomes as the parameter is, which may have been cast or moved since."""
        if (self.leaf.dtype, self.leaf.device) != (self.parameter.dtype, self.parameter.device):
            self.leaf.data = self._nothing()

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as the module has it now."""
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter

    @property
    def waiting(self) -> bool:
        """True if `p.grad` is what a backward left there that did not communicate, or was put in its place."""
        grad = self.parameter.grad
        self._holds = self._holds and grad is not None
        return grad is not None and (is_part(grad) or (self._holds and not isinstance(grad, DTensor)))

    def take(self) -> None:
        """A graph was called with what `p.grad` holds: it is that graph's from here on."""
        self._holds = False
        if takes_part(self.parameter):
            with torch.no_grad():
                local(self.parameter.grad).__dict__.pop(_SPENT, None)  # of one that was held before, and that the user put there again
            self.parameter.grad = None

    def _pass_on(self, leaf: Tensor) -> None:
        own, leaf.grad = leaf.grad, None
        if own is None:  # autograd had none: forward used the parameter only where nothing is differentiated
            return
        parameter = self.parameter
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = self._part_of_mean(own)
            elif self.waiting:
                local(parameter.grad).add_(own)
            else:
                own += _as_part(parameter.grad, self.mesh)
                parameter.grad = self._part_of_mean(own)
            self._holds = True
        self.held()

    def _part_of_mean(self, own: Tensor) -> Tensor:
        if not isinstance(self.parameter, DTensor):
            return own
        return dtensor_of(own, self.parameter, self.mesh, [Partial("avg")] * self.mesh.ndim)


def spend(held: Tensor) -> Tensor:
    """What was held for a call of the model, marked; or zeros where it is: a backward of that call had it before (`retain_graph`)."""
    if _SPENT in held.__dict__:
        return torch.zeros_like(held)
    held.__dict__[_SPENT] = True
    return held


def takes_part(parameter: Tensor) -> bool:
    """True if a graph that completes held gradients takes `p.grad`. Of a plain parameter it always does: one that
    was reduced already is equal everywhere, and the mean of equals is the same."""
    grad = parameter.grad
    return grad is not None and (is_part(grad) or not isinstance(grad, DTensor))


def is_part(grad: Tensor) -> bool:
    """True of a DTensor that only together with those of other processes is a gradient."""
    return isinstance(grad, DTensor) and grad.placements[0].is_partial()


def _as_part(grad: Tensor, mesh: DeviceMesh) -> Tensor:
    """A reduced gradient as one process's part of a mean: no communication, zero where the rows are others'."""
    cut = {at.dim: axis for axis, at in enumerate(grad.placements) if isinstance(at, Shard)} if isinstance(grad, DTensor) else {}
    if not cut:
        whole: Tensor = local(grad)
        return whole
    assert isinstance(grad, DTensor)
    ((dim, axis),) = cut.items()  # sharding is along one
    whole = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    pieces = whole.chunk(grad.device_mesh.size(axis), dim)
    at = grad.device_mesh.get_local_rank(axis)
    if at < len(pieces):
        pieces[at].copy_(grad.to_local() * mesh["shard"].size())
    return whole
