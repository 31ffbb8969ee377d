"""The copies into and out of the flat tensors that travel, each an operator of a graph.

Without them Inductor generates code for each copy, a loop for each parameter, and compiles it as long as much of the model.
What is alone in a flat tensor, and as long on every process, is a view of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.ops import wire
from autoshard.ops.define import define
from autoshard.ops.direct import gather_of
from autoshard.ops.layout import Layout
from autoshard.ops.wire import Shape


def pack_shards(shards: Sequence[Tensor], full: tuple[Shape, ...], layout: Layout) -> list[Tensor]:
    """What goes apart, and then the others in the flat tensors of `wire.pack_shards`."""
    dtype = layout.compute or shards[0].dtype
    alone, others = _parted(full, dtype, layout)
    found = [_row(shards[i], full[i], dtype, layout) for i in alone]
    return found + _packed([shards[i] for i in others], tuple(full[i] for i in others), layout) if others else found


def _parted(full: tuple[Shape, ...], dtype: torch.dtype, layout: Layout) -> tuple[Sequence[int], list[int]]:
    """Which parameters go apart, and which do not."""
    alone = wire.apart(full, layout, dtype)
    return alone, [i for i in range(len(full)) if i not in alone]


def _row(shard: Tensor, full: Shape, dtype: torch.dtype, layout: Layout) -> Tensor:
    """A shard as it lies; the last ones may be short, and are padded."""
    if (shard.numel(),) == wire.counts((full,), layout):
        return shard.to(dtype).reshape(-1)
    return _packed([shard], (full,), layout)[0]


def _packed(shards: Sequence[Tensor], full: tuple[Shape, ...], layout: Layout) -> list[Tensor]:
    return torch.ops.autoshard.pack_shards(shards, *wire.flat_shapes(full), str(layout))  # type: ignore[no-any-return]


def unpack_full(gathered: Sequence[Tensor], full: tuple[Shape, ...], layout: Layout) -> list[Tensor]:
    """What went apart where it lies, and the others as by `wire.unpack_full`."""
    alone, others = _parted(full, gathered[0].dtype, layout)
    found = {i: _without_padding(brought, full[i]) for i, brought in zip(alone, gathered)}
    if others:
        shapes = wire.flat_shapes(tuple(full[i] for i in others))
        found |= zip(others, torch.ops.autoshard.unpack_full(gathered[len(alone) :], *shapes, str(layout)))
    return [found[i] for i in range(len(full))]


def _without_padding(brought: Tensor, full: Shape) -> Tensor:
    """The whole of what was gathered by itself."""
    size = math.prod(full)
    return (brought if brought.numel() == size else brought[:size]).view(full)


def runs_of(grads: Sequence[Tensor], layout: Layout) -> list[list[int]]:
    """Which gradients are reduced together, by position: the large ones apart, if they can be sent from where they lie."""
    if not layout.divides_sums(grads[0].dtype):
        return [list(range(len(grads)))]
    shapes = wire.shapes_of(grads)
    alone = [i for i in wire.apart(shapes, layout, layout.travels(grads[0].dtype)) if wire.lies_by_rank(shapes[i], layout)]
    others = [i for i in range(len(grads)) if i not in alone]
    return [*([i] for i in alone), *([others] if others else [])]


def pack_grads(grads: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    """See `wire.pack_rows`."""
    dtype = layout.travels(grads[0].dtype)
    if len(grads) == 1 and wire.apart(wire.shapes_of(grads), layout, dtype):
        flat = wire.padded_to(layout.size * wire.counts(wire.shapes_of(grads), layout)[0], grads[0].to(dtype).reshape(-1))
        return [flat / layout.mean_over if layout.divides(grads[0].dtype) else flat]
    return torch.ops.autoshard.pack_grads(grads, str(layout))  # type: ignore[no-any-return]


def sum_rows(rows: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
    """See `wire.sum_rows`."""
    return torch.ops.autoshard.sum_rows(rows, size, dtype)  # type: ignore[no-any-return]


def run_pack_shards(shards: Sequence[Tensor], shapes: Sequence[int], ndims: Sequence[int], layout: str) -> list[Tensor]:
    """`wire.pack_shards` of full shapes one after the other, `ndims` of each."""
    return wire.pack_shards(shards, wire.split_shapes(shapes, ndims), Layout.parse(layout))


def run_gather_packed(shards: Sequence[Tensor], shapes: Sequence[int], ndims: Sequence[int], layout: str, size: int, group: str) -> Tensor:
    """`run_gather` of what these shards make in one flat tensor."""
    full, spec = wire.split_shapes(shapes, ndims), Layout.parse(layout)
    (piece,) = wire.cut(wire.counts(full, spec), 0)
    whole, rows = _gathered_like(shards, shapes, ndims, layout, size, group), wire.flat_rows(shards, full, spec)
    return gather_of(lambda own: wire.pack_piece(rows, piece, own), whole, size, group)


def _gathered_like(shards: Sequence[Tensor], shapes: Sequence[int], ndims: Sequence[int], layout: str, size: int, group: str) -> Tensor:
    """What that gives, with nothing in it."""
    spec = Layout.parse(layout)
    sizes = wire.counts(wire.split_shapes(shapes, ndims), spec)
    return shards[0].new_empty(size * sum(sizes), dtype=spec.compute or shards[0].dtype)


def run_unpack_full(gathered: Sequence[Tensor], shapes: Sequence[int], ndims: Sequence[int], layout: str) -> list[Tensor]:
    """`wire.unpack_full` of full shapes one after the other, `ndims` of each."""
    return wire.unpack_full(gathered, wire.split_shapes(shapes, ndims), Layout.parse(layout))


def run_pack_grads(grads: Sequence[Tensor], layout: str) -> list[Tensor]:
    """`wire.pack_rows`."""
    return wire.pack_rows(grads, Layout.parse(layout))


def _lengths(sizes: tuple[int, ...], dtype: torch.dtype, layout: Layout) -> list[int]:
    """Elements of a process in each flat tensor, which has so many of each parameter."""
    return [sum(wire.lengths(piece)) for piece in wire.cut(sizes, layout.most(dtype))]


def _fake_pack_shards(shards: Sequence[Tensor], shapes: Sequence[int], ndims: Sequence[int], layout: str) -> list[Tensor]:
    spec = Layout.parse(layout)
    dtype = spec.compute or shards[0].dtype
    sizes = wire.counts(wire.split_shapes(shapes, ndims), spec)
    return [shards[0].new_empty(n, dtype=dtype) for n in _lengths(sizes, dtype, spec)]


def _fake_unpack_full(gathered: Sequence[Tensor], shapes: Sequence[int], ndims: Sequence[int], layout: str) -> list[Tensor]:
    return [gathered[0].new_empty(shape) for shape in wire.split_shapes(shapes, ndims)]


def _fake_pack_grads(grads: Sequence[Tensor], layout: str) -> list[Tensor]:
    spec = Layout.parse(layout)
    dtype = spec.travels(grads[0].dtype)
    sizes = wire.counts(wire.shapes_of(grads), spec)
    return [grads[0].new_empty(spec.size * n, dtype=dtype) for n in _lengths(sizes, dtype, spec)]


def _fake_sum_rows(rows: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
    return rows[0].new_empty(sum(brought.numel() // size for brought in rows), dtype=dtype)


_ANY = [torch.Tag.flexible_layout]
_SHAPES = "SymInt[] shapes, SymInt[] ndims, str layout"
PACK_SHARDS: Any = define("pack_shards", f"(Tensor[] shards, {_SHAPES}) -> Tensor[]", run_pack_shards, _fake_pack_shards, _ANY)
GATHER_PACKED: Any = define(
    "gather_direct.packed", f"(Tensor[] shards, {_SHAPES}, SymInt size, str group) -> Tensor", run_gather_packed, _gathered_like
)
define("unpack_full", f"(Tensor[] gathered, {_SHAPES}) -> Tensor[]", run_unpack_full, _fake_unpack_full, _ANY)
define("pack_grads", "(Tensor[] grads, str layout) -> Tensor[]", run_pack_grads, _fake_pack_grads, _ANY)
define("sum_rows", "(Tensor[] rows, SymInt size, ScalarType dtype) -> Tensor", wire.sum_rows, _fake_sum_rows, _ANY)

# Graphs that are run op by op call these instead, see `block.DIRECT`.
DIRECT: dict[Any, Callable[..., Any]] = {
    PACK_SHARDS: run_pack_shards,
    GATHER_PACKED: run_gather_packed,
    torch.ops.autoshard.unpack_full.default: run_unpack_full,
    torch.ops.autoshard.pack_grads.default: run_pack_grads,
    torch.ops.autoshard.sum_rows.default: wire.sum_rows,
}
