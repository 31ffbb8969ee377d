"""How shards and gradients lie in the flat tensors that travel: plain tensor functions, no communication.

A flat tensor has a row for each process of the group, and in it that process's rows of every parameter, padded to a chunk. Where
the plan cuts messages there are several, each with a part of every process's elements. What is cut along another dimension than the
first (`Layout.dim`) is a stack of tensors of which each process has a chunk, one after the other.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.ops.layout import Layout

# Whose numbers every transport takes (gloo and NCCL, torch 2.11 and 2.13).
TAKEN = frozenset([
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int8,
    torch.uint8, torch.bool,
])
Shape = tuple[int, ...]
Piece = tuple[tuple[int, int, int], ...]  # which parameter, and from where to where of one process's elements of it


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


def sendable(flat: Tensor) -> Tensor:
    """A flat tensor as it can be sent without changing it: itself, or a view of its bytes."""
    return flat if flat.dtype in TAKEN else flat.view(torch.uint8)


def split_like(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Cuts a flat tensor into views of the given shapes."""
    pieces = flat.split([math.prod(s) for s in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes)]


def padded_to(size: int, flat: Tensor) -> Tensor:
    """A flat tensor with zeros behind it, of this size."""
    missing = size - flat.numel()
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


@functools.cache
def counts(full: tuple[Shape, ...], layout: Layout) -> tuple[int, ...]:
    """Elements that one process has in a flat tensor of each parameter of these full shapes."""
    return tuple(math.prod(layout.with_chunk(shape) if layout.sharded else shape) for shape in full)


def is_even(full: Shape, layout: Layout) -> bool:
    """True if all processes of the group hold as many rows of this full shape."""
    return not layout.sharded or (not layout.owners and full[layout.dim] % (layout.size * layout.turns) == 0)


def lies_by_rank(full: Shape, layout: Layout) -> bool:
    """Whether what is whole, of this shape, has one process's rows after the other's, as many of each: as they travel."""
    return lies_in_order(layout) and is_even(full, layout)


def lies_in_order(layout: Layout) -> bool:
    """Whether one process's rows are behind the other's, and all that is padded behind these: the last ones have less, or none."""
    return layout.turns == 1 and not (layout.sharded and (layout.dim or layout.owners))


@functools.cache
def apart(full: tuple[Shape, ...], layout: Layout, dtype: torch.dtype) -> tuple[int, ...]:
    """Which parameters of these full shapes are gathered by themselves, as they lie: the large ones, or the only one, if that is one
    message."""
    sizes, most, least = counts(full, layout), layout.most(dtype), layout.apart
    return tuple(
        i
        for i, size in enumerate(sizes)
        if lies_in_order(layout)
        and (not most or size <= most)
        and (len(full) == 1 or 0 < least <= size * layout.size * dtype.itemsize)
    )


@functools.cache
def cut(sizes: tuple[int, ...], most: int) -> tuple[Piece, ...]:
    """What lies in each of the flat tensors in which parameters with so many elements of a process travel: as long as each other
    but for the last, and of at most `most` of those elements; 0: in one."""
    total, ends = sum(sizes), tuple(itertools.accumulate(sizes))
    each = -(-total // -(-total // most)) if most and total else max(total, 1)
    members = [(i, end - size, end) for i, (size, end) in enumerate(zip(sizes, ends)) if size or not total]
    return tuple(
        tuple(
            (i, max(at, begin) - begin, min(at + each, end) - begin)
            for i, begin, end in members
            if begin < at + each and (at < end or not total)
        )
        for at in range(0, max(total, 1), each)
    )


def runs(sizes: Sequence[int], most: float) -> list[list[int]]:
    """Runs of neighbours whose sizes add up to at most `most`, by position; 0: all in one. What is larger has a run of its own; what
    is less than an eighth of `most` is not worth one, and joins what is beside it."""
    found, total = [[0]] if sizes else [[]], sum(sizes[:1])
    for i, size in enumerate(sizes[1:], 1):
        total += size
        if most and total > most and min(total - size, sum(sizes[i:])) > most / 8:
            found.append([])
            total = size
        found[-1].append(i)
    return found


def lengths(piece: Piece) -> list[int]:
    """How many elements of a process of each parameter are in it."""
    return [end - begin for _, begin, end in piece]


def pack_shards(shards: Sequence[Tensor], full: tuple[Shape, ...], layout: Layout) -> list[Tensor]:
    """The flat tensors that this process sends to gathers: its padded shards, one after the other."""
    dtype = layout.compute or shards[0].dtype
    pieces, rows = cut(counts(full, layout), layout.most(dtype)), flat_rows(shards, full, layout)
    return [pack_piece(rows, piece, shards[0].new_empty(sum(lengths(piece)), dtype=dtype)) for piece in pieces]


def flat_rows(shards: Sequence[Tensor], full: tuple[Shape, ...], layout: Layout) -> list[Tensor]:
    """Shards as they are packed: what is missing at their end `pack_piece` pads, but not what is missing in each tensor of a stack."""
    if not layout.dim:
        return [shard.reshape(-1) for shard in shards]
    missing = [layout.with_chunk(shape)[layout.dim] - shard.shape[layout.dim] for shape, shard in zip(full, shards)]
    behind = [(0, 0) * (shard.dim() - layout.dim - 1) for shard in shards]
    return [torch.constant_pad_nd(s, [*at, 0, n]).reshape(-1) if n else s.reshape(-1) for s, n, at in zip(shards, missing, behind)]


def pack_piece(rows: Sequence[Tensor], piece: Piece, flat: Tensor) -> Tensor:
    """One of them, of flat shards, put into `flat`."""
    parts = [part for i, begin, end in piece for part in _padded(rows[i], begin, end)]
    return torch.cat(parts, out=flat)


def _padded(row: Tensor, begin: int, end: int) -> list[Tensor]:
    """What a row has there, and zeros behind its end."""
    there = row[begin:end]
    return [there] if there.numel() == end - begin else [there, row.new_zeros(end - begin - there.numel())]


def unpack_full(gathered: Sequence[Tensor], full: tuple[Shape, ...], layout: Layout) -> list[Tensor]:
    """The full parameters from what gathers brought."""
    sizes, found = counts(full, layout), [gathered[0].new_empty(shape) for shape in full]
    for brought, piece in zip(gathered, cut(sizes, layout.most(gathered[0].dtype))):
        by_rank = brought.view(layout.size, sum(lengths(piece)))
        if all(lies_by_rank(full[i], layout) for i, _, _ in piece):
            places = [found[i].view(layout.size, sizes[i])[:, begin:end] for i, begin, end in piece]
            torch.split_with_sizes_copy(by_rank, lengths(piece), 1, out=places)
            continue
        for (i, begin, _), rows in zip(piece, by_rank.split(lengths(piece), 1)):
            for part, place in _by_holder(found[i], rows, sizes[i], layout, begin):
                part.copy_(place)
    return found


def _by_holder(whole: Tensor, by_rank: Tensor, size: int, layout: Layout, begin: int = 0) -> list[tuple[Tensor, Tensor]]:
    """The elements of `whole` that processes hold, `size` of them each at most, from `begin` on, beside their place in (processes,
    elements of a piece): in few pairs, as each is a copy."""
    if not whole.numel():
        return []
    stack, step = math.prod(whole.shape[: layout.dim]), len(layout.holders)
    flat, chunk = whole.reshape(stack, -1), size // (stack * layout.turns)
    each = by_rank.shape[1] // (stack * layout.turns)
    places = by_rank.unflatten(1, (stack, layout.turns, each))
    if layout.owners:
        parts = enumerate(part[:, begin : begin + each] for part in flat.split(chunk, 1))
        return [(part, places[layout.owners[i % step], :, i // step, : part.shape[1]]) for i, part in parts]
    turns, rest = divmod(flat.shape[1], step * chunk)
    holders, last = divmod(rest, chunk)
    in_turns, in_chunks, behind = flat.split([turns * step * chunk, holders * chunk, last], 1)
    found = [(in_turns.unflatten(1, (turns, step, chunk))[..., begin : begin + each], places[:, :, :turns].permute(1, 2, 0, 3))] if turns else []
    if holders:
        found.append((in_chunks.unflatten(1, (holders, chunk))[..., begin : begin + each], places[:holders, :, turns].transpose(0, 1)))
    if last:
        behind = behind[:, begin : begin + each]
        found.append((behind, places[holders, :, turns, : behind.shape[1]]))
    return found


def pack_rows(grads: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    """The flat tensors that go into reductions: for each process its rows of every gradient, and zeros behind their end.

    The mean's division is in the reduction's dtype and before it: that keeps fp16 sums in range. What is divided after it see in
    `Layout.divides`.
    """
    dtype, sizes, found = layout.travels(grads[0].dtype), counts(shapes_of(grads), layout), []
    over = layout.mean_over if layout.divides(grads[0].dtype) else 1
    for piece in cut(sizes, layout.most(dtype)):
        flat = grads[0].new_empty(layout.size, sum(lengths(piece)), dtype=dtype)
        of_piece = [grads[i] for i, _, _ in piece]
        # On CPUs, where a pass through memory costs more than a call, copied and divided in one.
        at_once = over if flat.device.type == "cpu" and all(grad.dtype == dtype for grad in of_piece) else 1
        if at_once == 1 and all(lies_by_rank(shape, layout) for shape in shapes_of(of_piece)):
            torch.cat([grads[i].reshape(layout.size, sizes[i])[:, begin:end] for i, begin, end in piece], 1, out=flat)
        else:
            for (i, begin, _), rows in zip(piece, flat.split(lengths(piece), 1)):
                _put(grads[i], rows, sizes[i], layout, begin, at_once)
        found.append((flat.div_(over) if at_once < over else flat).view(-1))
    return found


def _put(grad: Tensor, rows: Tensor, size: int, layout: Layout, begin: int, over: int) -> None:
    """Puts a gradient's elements from `begin` on into rows of processes, divided by `over`."""
    if not is_even(tuple(grad.shape), layout):
        rows.zero_()
    for part, place in _by_holder(grad, rows, size, layout, begin):
        if over > 1:
            torch.div(part, over, out=place)
        else:
            place.copy_(part)


def sum_rows(rows: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
    """The sum of what all-to-alls brought from `size` processes, in `dtype` from the first addition on."""
    by_rank = [brought.view(size, brought.numel() // size) for brought in rows]
    each = [brought.shape[1] for brought in by_rank]
    found = rows[0].new_empty(sum(each), dtype=dtype)
    for brought, place in zip(by_rank, found.split(each)):
        torch.sum(brought, 0, dtype=dtype, out=place)
    return found


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
    pieces = split_like(flat, [layout.with_chunk(shape) for shape in full])
    return [_without_padding(piece, shard, layout.dim).to(dtype).contiguous() for piece, shard in zip(pieces, shards)]


def _without_padding(piece: Tensor, shard: Shape, dim: int) -> Tensor:
    """What a process has of a padded piece."""
    return piece.narrow(dim, 0, shard[dim]) if piece.shape != shard else piece
