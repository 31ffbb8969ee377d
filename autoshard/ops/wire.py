"""How shards and gradients lie in the flat tensors that travel: plain tensor functions, no communication.

The eager kernels of the logical ops call these on tensors; the lowering traces the same functions into the
graph, so there is one description of the wire format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.ops.layout import Layout

Shape = tuple[int, ...]


def split_shapes(flat: Sequence[int], ndims: Sequence[int]) -> list[Shape]:
    """Inverse of flattening a list of shapes: torch op schemas have no lists of lists."""
    shapes, at = [], 0
    for ndim in ndims:
        shapes.append(tuple(flat[at : at + ndim]))
        at += ndim
    return shapes


def split_like(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Cuts a flat tensor into views of the given shapes."""
    pieces = flat.split([math.prod(s) for s in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes)]


def _pad_rows(tensor: Tensor, shape: Shape) -> Tensor:
    """Zeros below the rows of `tensor`, to `shape`."""
    missing = shape[0] - tensor.shape[0]
    if missing == 0:
        return tensor
    if tensor.numel() == 0:
        return torch.full(shape, 0.0, dtype=tensor.dtype, device=tensor.device)
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing])


def pack_shards(shards: Sequence[Tensor], full: Sequence[Shape], layout: Layout) -> Tensor:
    """The flat tensor that this process sends to a gather: its padded shards, one after the other."""
    padded = []
    for shard, shape in zip(shards, full):
        chunk = layout.with_chunk(shape)
        rows = _pad_rows(shard.to(layout.compute or shard.dtype), chunk)
        padded.append(rows.reshape(-1))
    return torch.cat(padded) if len(padded) > 1 else padded[0]


def unpack_full(gathered: Tensor, full: Sequence[Shape], layout: Layout) -> list[Tensor]:
    """The full parameters from what a gather brought: (size × bytes of one packed bucket,)."""
    by_rank = gathered.view(layout.size, -1)
    out, at = [], 0
    for shape in full:
        chunk = layout.with_chunk(shape)
        count = math.prod(chunk)
        piece = by_rank[:, at : at + count]
        at += count
        if layout.owners:
            piece = torch.cat([piece[i : i + 1] for i in layout.owners])
        if len(shape) == 1 and not piece.is_contiguous():
            out.append(_vector(piece, shape[0]))
        else:
            rows = piece.reshape(len(layout.holders) * chunk[0], *shape[1:]).contiguous()  # one row each makes a view
            out.append(rows[: shape[0]] if shape[0] < rows.shape[0] else rows)
    return out


def _vector(by_rank: Tensor, length: int) -> Tensor:
    """The first `length` elements of (holders, elements of a chunk), whose rows lie apart.

    Not a view of a copy: Inductor of torch 2.11 cannot lower a convolution with such a bias.
    """
    whole = (length - 1) // by_rank.shape[1]
    tail = by_rank[whole, : length - whole * by_rank.shape[1]]
    return torch.cat([by_rank[:whole].reshape(-1), tail]) if whole else tail


def pack_grads(grads: Sequence[Tensor], layout: Layout) -> Tensor:
    """The flat tensor that goes into a reduction: for each process its rows of every gradient.

    The mean's division comes first, in the reduction's dtype: it keeps fp16 sums in range.
    """
    grads = [g.to(layout.reduce or g.dtype) / layout.mean_over for g in grads]
    if not layout.sharded:
        flats = [g.reshape(-1) for g in grads]
        return torch.cat(flats) if len(flats) > 1 else flats[0]
    parts = [_rows_by_rank(g, layout) for g in grads]
    return (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).reshape(-1)


def _rows_by_rank(grad: Tensor, layout: Layout) -> Tensor:
    """(size, elements of a chunk): row r holds what belongs to position r of the group."""
    chunk = layout.chunk_rows(grad.shape[0])
    holders = len(layout.holders)
    rows = _pad_rows(grad, (chunk * holders, *grad.shape[1:])).reshape(holders, -1)
    if not layout.owners:
        return rows
    nothing = torch.full((1, rows.shape[1]), 0.0, dtype=rows.dtype, device=rows.device)
    at = {owner: i for i, owner in enumerate(layout.owners)}
    return torch.cat([rows[at[r] : at[r] + 1] if r in at else nothing for r in range(layout.size)])


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
