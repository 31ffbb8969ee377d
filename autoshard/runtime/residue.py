"""Residue: what PowerSGD keeps of one parameter from step to step. See [Note: PowerSGD] in ops/low_rank.py.

It is not part of a state dict, as torch's hook keeps it out of the model's: what had not been sent when a checkpoint was written is
not in it.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoshard.ops.low_rank import residue_shapes


@dataclass(eq=False)
class Residue:
    """Of the parameter `name`. error: what this process has not sent of its gradients; factor: the directions that the next step
    begins with, the same on all processes. Both fp32, whatever gradients are in."""

    name: str
    shape: tuple[int, ...]
    rank: int
    device: torch.device
    error: Tensor = field(init=False)
    factor: Tensor = field(init=False)

    def __post_init__(self) -> None:
        error, factor = residue_shapes(self.shape, self.rank)
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        self.error = _marked(torch.zeros(error, device=self.device))
        self.factor = _marked(torch.randn(factor, generator=generator).to(self.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> Residue:
        return Residue(self.name, self.shape, self.rank, self.device)  # of a copied model: it has sent nothing yet


def _marked(value: Tensor) -> Tensor:
    value._autoshard_residue = True  # type: ignore[attr-defined]
    return value.requires_grad_()


def giving_leaves(run: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    """`run`, a graph compiled for these inputs, given a leaf of its own in each call for each of them that is a residue's. Of one
    leaf for two calls autograd would add up both changes before it makes them, and the second backward would not find the first's:
    what had not been sent would be sent twice."""
    positions = [i for i, x in enumerate(inputs) if getattr(x, "_autoshard_residue", False)]

    @functools.wraps(run)
    def given(*args: Any) -> Any:
        filled = list(args)
        for i in positions if torch.is_grad_enabled() else ():
            filled[i] = _leaf_of(args[i])
        return run(*filled)

    return given if positions else run


def _leaf_of(value: Tensor) -> Tensor:
    """On the same memory."""
    leaf = value.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(_change)
    return leaf


def _change(leaf: Tensor) -> None:
    change, leaf.grad = leaf.grad, None
    assert change is not None
    leaf.data.add_(change)  # not in place for autograd: a forward that still waits for its backward is to find this
