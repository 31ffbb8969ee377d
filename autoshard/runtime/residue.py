"""Residue: what PowerSGD keeps of one parameter from step to step. See [Note: PowerSGD] in ops/low_rank.py.

It is not part of a state dict, as torch's hook keeps it out of the model's: what had not been sent when a checkpoint was written is
not in it.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.errors import UnsupportedError
from autoshard.ops.low_rank import residue_shapes

RESIDUES = "_autoshard_residues"  # of a module: those of its parameters, by attribute
MARK = "_autoshard_residue"  # of a tensor: whose it is


@dataclass(eq=False)
class Residue:
    """Of the parameter `name`. error: what this process has not sent of its gradients; factor: the directions that the next step
    begins with, the same on all processes. Both fp32, whatever gradients are in. changed: whether a backward ever did."""

    name: str
    shape: tuple[int, ...]
    rank: int
    device: torch.device
    changed: bool = False
    error: Tensor = field(init=False)
    factor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        error, factor = residue_shapes(self.shape, self.rank)
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        start = torch.randn(factor, generator=generator, dtype=torch.float32, device="cpu")  # whatever a loop's defaults are
        self.error = self._marked(torch.zeros(error, dtype=torch.float32, device=self.device))
        self.factor = self._marked((start / start.abs().sum(0)).to(self.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> Residue:
        return Residue(self.name, self.shape, self.rank, self.device)  # of a copied model: it has sent nothing yet

    def _marked(self, value: Tensor) -> Tensor:
        setattr(value, MARK, self)
        return value.requires_grad_()

    def leaf_of(self, value: Tensor) -> Tensor:
        """One more leaf on the memory of the error or the factor."""
        leaf = value.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(self._change)
        return leaf

    def _change(self, leaf: Tensor) -> None:
        change, leaf.grad = leaf.grad, None
        assert change is not None
        leaf.data.add_(change)  # not in place for autograd: a forward that still waits for its backward is to find this
        self.changed = True


def residues_of(module: nn.Module) -> dict[str, Residue]:
    """Those of a module's own parameters, by attribute."""
    found: dict[str, Residue] = module.__dict__.get(RESIDUES, {})
    return found


def forget(module: nn.Module, _: Any = None) -> None:
    """What was not sent of gradients belongs to other values, once some were loaded."""
    for residue in residues_of(module).values():
        residue.error.data.zero_()


def refuse_lost(residues: dict[int, Residue], stepped: Iterable[nn.Parameter]) -> None:
    """A step on gradients of low rank of which nothing was kept, not once. residues: by the id of the parameter."""
    for parameter in stepped:
        residue = residues.get(id(parameter))
        if residue is not None and not residue.changed:
            raise UnsupportedError(
                f"parameter {residue.name!r} got its gradient by torch.autograd.grad or backward(inputs=...), which leave out what "
                "PowerSGD keeps for the next step; legal: loss.backward(), or another compression"
            )


def giving_leaves(run: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    """`run`, a graph compiled for these inputs, given a leaf of its own in each call for each of them that is a residue's. Of one
    leaf for two calls autograd would add up both changes before it makes them, and the second backward would not find the first's:
    what had not been sent would be sent twice."""
    positions = [i for i, x in enumerate(inputs) if hasattr(x, MARK)]

    @functools.wraps(run)
    def given(*args: Any) -> Any:
        filled = list(args)
        for i in positions if torch.is_grad_enabled() else ():
            filled[i] = getattr(args[i], MARK).leaf_of(args[i])  # of whichever block this graph is called for
        return run(*filled)

    return given if positions else run
