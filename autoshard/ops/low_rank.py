"""PowerSGD: in the place of a gradient travel two thin matrices whose product is near to it. An option that changes numbers.

[Note: PowerSGD] (Vogels, Karimireddy, Jaggi, 2019.) To its gradient G of n x m a process adds what it has not sent of earlier ones:
M = G + E. Of the M of all, P = M Q is summed, with a Q of m x r that all have alike, and made orthonormal; then R = Mᵀ P is averaged.
P Rᵀ is everyone's mean gradient, and what a process's own G has more than that is added to its E: nothing is lost, it comes later.
The columns of R, brought to one length, are the next Q, so that steps together find the r directions in which gradients are largest; of what
is zero the direction stays.

E and Q are leaves whose gradients are the *changes* of them. So a backward is a function as any other, a forward without a backward
changes nothing, and blocks of which one graph is compiled have an E and a Q each. What is not finite
does not enter them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.ops import wire
from autoshard.ops.layout import Layout

_c10d = torch.ops._c10d_functional


def _define_mean_low_rank(
    grads: Sequence[Tensor], errors: Sequence[Tensor], factors: Sequence[Tensor], layout: str, names: str
) -> list[Tensor]:
    spec = Layout.parse(layout)
    matrices = [(grad.to(error.dtype) + error).flatten(1) for grad, error in zip(grads, errors)]
    lefts = _sums([m @ factor for m, factor in zip(matrices, factors)], spec)
    lefts = [torch.linalg.qr(left).Q for left in lefts]
    rights = [right / spec.mean_over for right in _sums([m.T @ left for m, left in zip(matrices, lefts)], spec)]
    means = [(left @ right.T).view(g.shape).to(spec.compute or g.dtype) for g, left, right in zip(grads, lefts, rights)]
    unsent = [_finite(grad.to(error.dtype) - mean) for grad, error, mean in zip(grads, errors, means)]
    turned = [_direction(right, factor) - factor for right, factor in zip(rights, factors)]
    return [*means, *unsent, *turned]


def _sums(parts: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    """Each of these matrices, summed over all processes, in one message."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    flat = _c10d.wait_tensor(_c10d.all_reduce(flat, "sum", layout.replicas))
    return wire.split_like(flat, wire.shapes_of(parts))


def _direction(right: Tensor, factor: Tensor) -> Tensor:
    """The columns, whose magnitudes then add up to 1 (squares of small gradients would be zero); as they were, where all are zero or
    one is not finite."""
    length = right.abs().sum(0)
    return torch.where((length > 0) & (length < math.inf), right / length, factor)


def _finite(change: Tensor) -> Tensor:
    return torch.where(change.abs() < math.inf, change, 0.0)


@torch.library.custom_op("autoshard::low_rank", mutates_args=())
def low_rank(full: Tensor, error: Tensor, factor: Tensor, layout: str, name: str) -> Tensor:
    """`full`; its gradient comes as the mean over all processes, of low rank. See [Note: PowerSGD]."""
    return full.clone()


@torch.library.custom_op("autoshard::mean_low_rank", mutates_args=())
def mean_low_rank(
    grads: Sequence[Tensor], errors: Sequence[Tensor], factors: Sequence[Tensor], layout: str, names: str
) -> list[Tensor]:
    """The mean gradients, then the changes of all errors, then those of all factors. Means are in the layout's compute dtype, the same
    on all processes, though one's gradient may be wider (`widen_held`)."""
    return _define_mean_low_rank(grads, errors, factors, layout, names)


@low_rank.register_fake
def _(full: Tensor, error: Tensor, factor: Tensor, layout: str, name: str) -> Tensor:
    return torch.empty_like(full)


@mean_low_rank.register_fake
def _(
    grads: Sequence[Tensor], errors: Sequence[Tensor], factors: Sequence[Tensor], layout: str, names: str
) -> list[Tensor]:
    compute = Layout.parse(layout).compute
    means = [grad.new_empty(grad.shape, dtype=compute or grad.dtype) for grad in grads]
    return [*means, *(like.new_empty(like.shape) for like in (*errors, *factors))]


def _context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, error, factor, ctx.layout, ctx.param = inputs
    ctx.save_for_backward(error, factor)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    error, factor = ctx.saved_tensors
    found = torch.ops.autoshard.mean_low_rank([grad], [error], [factor], ctx.layout, ctx.param)
    return *found, None, None


low_rank.register_autograd(_backward, setup_context=_context)

DEFINITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.autoshard.low_rank.default: lambda full, error, factor, layout, name: full,
    torch.ops.autoshard.mean_low_rank.default: _define_mean_low_rank,
}
NAMES: dict[Any, int] = {torch.ops.autoshard.low_rank.default: 4, torch.ops.autoshard.mean_low_rank.default: 4}


def residue_shapes(shape: Sequence[int], rank: int) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The shapes of E and Q of a parameter of this shape."""
    return tuple(shape), (math.prod(shape[1:]), rank)
