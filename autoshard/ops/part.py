"""Saved values that every process has alike, each process keeping a part of them until backward.

[Note: Partitioned activations] (ZeRO-R's Pa: Rajbhandari, Rasley, Ruwase, He, 2020.) What forward makes of parameters and constants alone
(a weight of two factors, a bias of positions, a mask) is the same on all processes, each of which would save all of it. With
`Config.partition_activations` each saves one part, and backward gathers the parts in front of the first use. The parts are as long on every
process, of the value as it lies in memory, padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoshard.ops.define import define
from autoshard.ops.direct import GATHER_DIRECT
from autoshard.ops.layout import Layout

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Making:
    """How a value is made. op: what gives it. digest: of all operations that lead to it. of: which of a block's tensors these take."""

    op: str
    digest: str
    of: frozenset[int] = frozenset()


def order_in_memory(value: Tensor) -> list[int] | None:
    """The dimensions of a tensor as they lie, the slowest first; None where it overlaps or leaves gaps."""
    strides: Sequence[int] = value.stride()
    order = sorted(range(value.dim()), key=lambda i: (-strides[i], -value.shape[i], i))
    return order if value.permute(order).is_contiguous() else None


def like_part(whole: Tensor, size: int) -> Tensor:
    """An empty tensor as each of so many processes keeps one of this value."""
    return whole.new_empty(-(-whole.numel() // size))


def _keep_part(whole: Tensor, order: Sequence[int], size: int, rank: int) -> Tensor:
    flat = whole.permute(list(order)).reshape(-1)
    part = -(-flat.numel() // size)
    start, end = min(rank * part, flat.numel()), min((rank + 1) * part, flat.numel())
    own = flat[start:end]
    return own.clone() if end - start == part else torch.nn.functional.pad(own, (0, part - (end - start)))


def _unshard_part(part: Tensor, shape: Sequence[int], order: Sequence[int], layout: str, name: str) -> Tensor:
    spec, lying = Layout.parse(layout), [shape[i] for i in order]
    gather = GATHER_DIRECT if spec.direct else _c10d.all_gather_into_tensor.default
    flat = _c10d.wait_tensor(gather(part, spec.size, spec.group))[: math.prod(shape)]
    return flat.view(lying).permute([list(order).index(i) for i in range(len(shape))])


def _fake_unshard_part(part: Tensor, shape: Sequence[int], order: Sequence[int], layout: str, name: str) -> Tensor:
    lying = part.new_empty([shape[i] for i in order])
    return lying.permute([list(order).index(i) for i in range(len(shape))])


KEEP_PART = define("keep_part", "(Tensor whole, int[] order, int size, int rank) -> Tensor", _keep_part, _keep_part)
UNSHARD_PART = define(
    "unshard_part", "(Tensor part, int[] shape, int[] order, str layout, str name) -> Tensor",
    lambda *args: _unshard_part(*args).clone(), _fake_unshard_part,
)

# Not the other: of operators of torch's own generated code makes a view, which holds the whole.
DEFINITIONS: dict[Any, Callable[..., Any]] = {UNSHARD_PART: _unshard_part}
NAMES: dict[Any, int] = {UNSHARD_PART: 4}
