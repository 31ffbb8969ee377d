"""How shards and gradients lie in the flat tensors that travel: plain tensor functions, no communication.

A flat tensor has a row for each process of the group, and in it that process's rows of every parameter, padded to a chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.ops.layout import Layout

Shape = tuple[int, ...]


def shapes_of(tensors: Sequence[Tensor]) -> tuple[Shape, ...]:
    """The tensors' shapes."""
    return tuple(tuple(t.shape) for t in tensors)


def flat_shapes(shapes: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Shapes one after the other, and how many numbers are of each: torch op schemas have no lists of lists."""
    return [length for shape in shapes for length in shape], [len(shape) for shape in shapes]


def split_shapes(flat: Sequence[int], ndims: Sequence[int]) -> tuple[Shape, ...]:
    """Inverse of `flat_shapes`."""
    shapes, at = [], 0
    for ndim in ndims:
        shapes.append(tuple(flat[at : at + ndim]))
        at += ndim
    return tuple(shapes)


def split_like(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Cuts a flat tensor into views of the given shapes."""
    pieces = flat.split([math.prod(s) for s in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes)]


@functools.cache
def counts(full: tuple[Shape, ...], layout: Layout) -> tuple[int, ...]:
    """Elements that one process has in a flat tensor of each parameter of these full shapes."""
    return tuple(math.prod(layout.with_chunk(shape) if layout.sharded else shape) for shape in full)


@functools.cache
def is_even(full: tuple[Shape, ...], layout: Layout) -> bool:
    """True if all processes of the group hold as many rows of each of these full shapes."""
    return not layout.sharded or (not layout.owners and all(shape[0] % layout.size == 0 for shape in full))


def pack_shards(shards: Sequence[Tensor], full: tuple[Shape, ...], layout: Layout) -> Tensor:
    """The flat tensor that this process sends to a gather: its padded shards, one after the other."""
    sizes, parts = counts(full, layout), []
    for shard, size in zip(shards, sizes):
        parts.append(shard.reshape(-1))
        if shard.numel() < size:
            parts.append(shard.new_zeros(size - shard.numel()))
    return torch.cat(parts, out=shards[0].new_empty(sum(sizes), dtype=layout.compute or shards[0].dtype))


def unpack_full(gathered: Tensor, full: tuple[Shape, ...], layout: Layout) -> list[Tensor]:
    """The full parameters from what a gather brought."""
    sizes = counts(full, layout)
    by_rank, found = gathered.view(layout.size, sum(sizes)), [gathered.new_empty(shape) for shape in full]
    if is_even(full, layout):
        places = [whole.view(layout.size, size) for whole, size in zip(found, sizes)]
        torch.split_with_sizes_copy(by_rank, sizes, 1, out=places)
    else:
        for whole, rows in zip(found, by_rank.split(sizes, 1)):
            for part, place in _by_holder(whole, rows, layout):
                part.copy_(place)
    return found


def _by_holder(whole: Tensor, by_rank: Tensor, layout: Layout) -> list[tuple[Tensor, Tensor]]:
    """The elements of `whole` that each process holds, beside their place in (processes, elements of a chunk)."""
    parts = whole.reshape(-1).split(by_rank.shape[1]) if whole.numel() else ()
    return [(part, by_rank[holder, : part.numel()]) for part, holder in zip(parts, layout.holders)]


def pack_grads(grads: Sequence[Tensor], layout: Layout) -> Tensor:
    """The flat tensor that goes into a reduction: for each process its rows of every gradient.

    The mean's division is in the reduction's dtype and before it: that keeps fp16 sums in range.
    """
    full = shapes_of(grads)
    sizes, even = counts(full, layout), is_even(full, layout)
    flat = grads[0].new_empty(layout.size, sum(sizes), dtype=layout.reduce or grads[0].dtype)
    rows = [g.reshape(layout.size, n) if even else _rows_by_rank(g, n, layout) for g, n in zip(grads, sizes)]
    torch.cat(rows, 1, out=flat)
    return flat.div_(layout.mean_over).view(-1)


def _rows_by_rank(grad: Tensor, size: int, layout: Layout) -> Tensor:
    """(processes, `size` elements of a chunk): row r holds what belongs to position r of the group."""
    rows = grad.new_zeros(layout.size, size)
    for part, place in _by_holder(grad, rows, layout):
        place.copy_(part)
    return rows


def sum_rows(rows: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """The sum of what an all-to-all brought from `size` processes, in `dtype` from the first addition on."""
    return rows.view(size, rows.numel() // size).sum(0, dtype=dtype)


def unpack_shards(
    flat: Tensor,
    shards: Sequence[Shape],
    full: Sequence[Shape],
    dtype: torch.dtype,
    layout: Layout,
) -> list[Tensor]:
    """This process's gradient shards from what a reduction brought."""
    if not layout.sharded:
        return [t.to(dtype) for t in split_like(flat, full)]
    chunks = [layout.with_chunk(shape) for shape in full]
    pieces = split_like(flat, chunks)
    return [
        piece[: shard[0]].to(dtype) if shard[0] < piece.shape[0] else piece.to(dtype)
        for piece, shard in zip(pieces, shards)
    ]
