"""The logical ops: what passes see of sharding before it becomes collectives.

`unshard` turns a shard into the whole parameter; its gradient is `reduce_grad`, which turns a whole local
gradient into this process's rows of the mean. `unshard_bucket` and `reduce_bucket` are the same for several
parameters in one message. `hold` and `add_held` are identities in forward that divert or complete a gradient
(accumulation without communication); the gradient of `add_held` is `complete_grad`. `replicate_buffers` makes rank 0's values everyone's. `low_rank` (ops/low_rank.py) is an
identity too, behind which the gradient is the mean already; `keep_part` and `unshard_part` (ops/part.py) are of saved values.

[Note: Kernels and lowering] The functions of `DEFINITIONS` say what each op is in terms of functional
collectives. The eager kernels run them, so a graph from which the lowering was left out computes the same;
the lowering pass traces the same functions into the graph. There is no second description.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.ops import low_rank, packing, part, wire
from autoshard.ops.direct import EXCHANGE_DIRECT, GATHER_DIRECT, SUM_DIRECT, SUM_SWAPPED, SWAP_DIRECT
from autoshard.ops.layout import Layout

_c10d = torch.ops._c10d_functional


def _define_unshard_bucket(
    shards: Sequence[Tensor], names: str, shapes: Sequence[int], ndims: Sequence[int], layout: str
) -> list[Tensor]:
    spec, full = Layout.parse(layout), wire.split_shapes(shapes, ndims)
    if not spec.sharded:
        return [s.to(spec.compute or s.dtype) for s in shards]
    flats = packing.pack_shards(shards, full, spec)
    gather = GATHER_DIRECT if spec.direct else _c10d.all_gather_into_tensor.default
    gathered = [gather(flat, spec.size, spec.group) for flat in flats]
    return packing.unpack_full(_all(gathered), full, spec)


def _define_reduce_bucket(
    grads: Sequence[Tensor],
    names: str,
    shapes: Sequence[int],
    ndims: Sequence[int],
    dtype: torch.dtype,
    layout: str,
) -> list[Tensor]:
    spec = Layout.parse(layout)
    if spec.low_rank:  # it is the mean already
        return [grad.to(dtype) for grad in grads]
    shards, found = wire.split_shapes(shapes, ndims), dict[int, Tensor]()
    for run in packing.runs_of(grads, spec):
        together = [grads[i] for i in run]
        flat = _mean(together, dtype, spec)
        found |= zip(run, wire.unpack_shards(flat, [shards[i] for i in run], wire.shapes_of(together), dtype, spec))
    return [found[i] for i in range(len(grads))]


def _mean(grads: Sequence[Tensor], dtype: torch.dtype, layout: Layout) -> Tensor:
    """This process's rows of the mean of these, one after the other."""
    flats = packing.pack_grads(grads, layout)
    if layout.compress:
        return _mean_of_compressed(flats, layout.reduce or dtype, layout)
    carried = flats[0].dtype
    summed = carried if layout.replicas else torch.promote_types(carried, dtype)
    flat = _scatter_sum(flats, summed, layout) if layout.sharded else flats[0]
    if not layout.replicas:
        return flat
    if layout.direct_sums:
        return _sum_of_copies(flat, layout.mean_over if layout.divides_sums(grads[0].dtype) else 1, layout)
    packed = not layout.sharded and layout.divides(grads[0].dtype)  # for this sum alone; a gradient itself somebody else may read
    reduce = _c10d.all_reduce_ if packed and not carried.is_complex else _c10d.all_reduce  # in place no transport takes complex numbers
    return _c10d.wait_tensor(reduce(flat, "sum", layout.replicas))  # type: ignore[no-any-return]


def _all(flying: Sequence[Tensor]) -> list[Tensor]:
    """What these collectives bring."""
    return [_c10d.wait_tensor(one) for one in flying]


def _scatter_sum(flats: Sequence[Tensor], dtype: torch.dtype, layout: Layout) -> Tensor:
    """This process's row of the sum over the group."""
    if layout.reduction == "all_to_all":
        return _sum_here(flats, dtype, layout)
    summed = _all([_c10d.reduce_scatter_tensor(flat, "sum", layout.size, layout.group) for flat in flats])
    return torch.cat(summed) if len(summed) > 1 else summed[0]


def _sum_here(flats: Sequence[Tensor], dtype: torch.dtype, layout: Layout) -> Tensor:
    """This process's part of the sum over the group that holds the rows, which it adds up itself in `dtype`."""
    if not layout.direct:
        return _sum_over(flats, dtype, layout.size, layout.group)
    brought = _all([EXCHANGE_DIRECT(flat, layout.size, layout.group) for flat in flats])
    over = layout.mean_over if layout.divides_sums(flats[0].dtype) else 1
    return SUM_DIRECT(brought, flats, layout.size, over, dtype, layout.group)  # type: ignore[no-any-return]


def _sum_over(flats: Sequence[Tensor], dtype: torch.dtype, size: int, group: str) -> Tensor:
    """The same over a group of so many, by torch's collective."""
    each = [[flat.numel() // size] * size for flat in flats]
    flying = [_c10d.all_to_all_single(flat, n, n, group) for flat, n in zip(flats, each)]
    return packing.sum_rows(_all(flying), size, dtype)


def _sum_of_copies(flat: Tensor, over: int, layout: Layout) -> Tensor:
    """The sum over the processes that hold the same rows, by `over`, by sends of each to each."""
    copies, group = layout.copies, layout.replicas
    if copies == 2:
        return SUM_SWAPPED([_c10d.wait_tensor(SWAP_DIRECT(flat, group))], [flat], over, group)  # type: ignore[no-any-return]
    sent = _in_parts(flat, copies)
    brought = _c10d.wait_tensor(EXCHANGE_DIRECT(sent, copies, group))
    part = SUM_DIRECT([brought], [sent], copies, over, flat.dtype, group)
    return _c10d.wait_tensor(GATHER_DIRECT(part, copies, group))[: flat.numel()]  # type: ignore[no-any-return]


def _in_parts(flat: Tensor, count: int) -> Tensor:
    """With zeros behind it, to be parted into so many equal ones."""
    return wire.padded_to(-(-flat.numel() // count) * count, flat)


def _mean_of_compressed(flats: Sequence[Tensor], dtype: torch.dtype, layout: Layout) -> Tensor:
    """This process's rows of the mean, of what travels in fewer bits than `dtype`, in which every process sums. Copies of the same
    rows are made equal again by what one of them has of the mean, so in those bits."""
    flat = _sum_here(flats, dtype, layout) / layout.size if layout.sharded else flats[0]
    if not layout.replicas:
        return flat
    elements, copies = flat.numel(), layout.copies
    flat = _in_parts(flat.to(layout.compress), copies)
    part = (_sum_over([flat], dtype, copies, layout.replicas) / copies).to(layout.compress)
    whole = _c10d.wait_tensor(_c10d.all_gather_into_tensor(part, copies, layout.replicas))
    return whole[:elements]


def _define_unshard(shard: Tensor, shape: Sequence[int], layout: str, name: str) -> Tensor:
    return _define_unshard_bucket([shard], name, shape, [len(shape)], layout)[0]


def _define_reduce_grad(
    grad: Tensor, shape: Sequence[int], dtype: torch.dtype, layout: str, name: str
) -> Tensor:
    return _define_reduce_bucket([grad], name, shape, [len(shape)], dtype, layout)[0]


def _define_complete_grad(grad: Tensor, held: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(torch.promote_types(grad.dtype, held.dtype), dtype)
    return (grad.to(wide) + held.to(wide)).to(dtype)


def _define_replicate_buffers(values: Sequence[Tensor], group: str) -> list[Tensor]:
    flat = torch.cat([v.reshape(-1) for v in values])
    sent = _c10d.wait_tensor(_c10d.broadcast(wire.sendable(flat), 0, group))
    flat = sent if sent.dtype == flat.dtype else sent.view(flat.dtype)
    return wire.split_like(flat, [tuple(v.shape) for v in values])


@torch.library.custom_op("autoshard::unshard", mutates_args=())
def unshard(shard: Tensor, shape: Sequence[int], layout: str, name: str) -> Tensor:
    """The full parameter of `shape`, in the layout's compute dtype, from this process's rows."""
    return _define_unshard(shard, shape, layout, name).clone()


@torch.library.custom_op("autoshard::reduce_grad", mutates_args=())
def reduce_grad(
    grad: Tensor, shape: Sequence[int], dtype: torch.dtype, layout: str, name: str
) -> Tensor:
    """This process's rows, of `shape`, of the mean gradient, in the parameter's dtype."""
    return _define_reduce_grad(grad, shape, dtype, layout, name).clone()


@torch.library.custom_op("autoshard::unshard_bucket", mutates_args=())
def unshard_bucket(
    shards: Sequence[Tensor], names: str, shapes: Sequence[int], ndims: Sequence[int], layout: str
) -> list[Tensor]:
    """`unshard` of several parameters of one layout; full shapes one after the other, `ndims` of each."""
    return [t.clone() for t in _define_unshard_bucket(shards, names, shapes, ndims, layout)]


@torch.library.custom_op("autoshard::reduce_bucket", mutates_args=())
def reduce_bucket(
    grads: Sequence[Tensor],
    names: str,
    shapes: Sequence[int],
    ndims: Sequence[int],
    dtype: torch.dtype,
    layout: str,
) -> list[Tensor]:
    """`reduce_grad` of several gradients of one layout; shard shapes one after the other."""
    return [t.clone() for t in _define_reduce_bucket(grads, names, shapes, ndims, dtype, layout)]


@torch.library.custom_op("autoshard::replicate_buffers", mutates_args=())
def replicate_buffers(values: Sequence[Tensor], group: str) -> list[Tensor]:
    """Rank 0's values (all of one dtype) on every process of `group`."""
    return [t.clone() for t in _define_replicate_buffers(values, group)]


@torch.library.custom_op("autoshard::hold", mutates_args=())
def hold(full: Tensor, holder: Tensor) -> Tensor:
    """`full`; its gradient goes to `holder` (of the full shape), and nothing goes to `full`."""
    return full.clone()


@torch.library.custom_op("autoshard::add_held", mutates_args=())
def add_held(full: Tensor, held: Tensor) -> Tensor:
    """`full`; its gradient has `held` added, what earlier backwards left there."""
    return full.clone()


@torch.library.custom_op("autoshard::complete_grad", mutates_args=())
def complete_grad(grad: Tensor, held: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of a gradient and of what waited, added in the widest of all three dtypes, in `dtype`: the gradient's as autograd
    has it, that which it travels in behind `widen_held`."""
    return _define_complete_grad(grad, held, dtype)


@unshard.register_fake
def _(shard: Tensor, shape: Sequence[int], layout: str, name: str) -> Tensor:
    return _whole_like(shard, shape, Layout.parse(layout))


def _whole_like(shard: Tensor, shape: Sequence[int], layout: Layout) -> Tensor:
    """What is whole already lies as it did, such as a convolution's weight in channels_last; what is gathered is contiguous."""
    dtype = layout.compute or shard.dtype
    return shard.new_empty(shape, dtype=dtype) if layout.sharded else torch.empty_like(shard, dtype=dtype)


@reduce_grad.register_fake
def _(grad: Tensor, shape: Sequence[int], dtype: torch.dtype, layout: str, name: str) -> Tensor:
    return grad.new_empty(shape, dtype=dtype)


@unshard_bucket.register_fake
def _(
    shards: Sequence[Tensor], names: str, shapes: Sequence[int], ndims: Sequence[int], layout: str
) -> list[Tensor]:
    parsed = Layout.parse(layout)
    return [_whole_like(s, shape, parsed) for s, shape in zip(shards, wire.split_shapes(shapes, ndims))]


@reduce_bucket.register_fake
def _(
    grads: Sequence[Tensor],
    names: str,
    shapes: Sequence[int],
    ndims: Sequence[int],
    dtype: torch.dtype,
    layout: str,
) -> list[Tensor]:
    shards = wire.split_shapes(shapes, ndims)
    return [g.new_empty(shape, dtype=dtype) for g, shape in zip(grads, shards)]


@replicate_buffers.register_fake
def _(values: Sequence[Tensor], group: str) -> list[Tensor]:
    return [v.new_empty(v.shape) for v in values]


@hold.register_fake
@add_held.register_fake
def _(full: Tensor, other: Tensor) -> Tensor:
    return torch.empty_like(full)


@complete_grad.register_fake
def _(grad: Tensor, held: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(grad, dtype=dtype)


def _unshard_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, _, ctx.layout, ctx.param = inputs
    ctx.shard_shape, ctx.dtype = list(shard.shape), shard.dtype


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    reduced = torch.ops.autoshard.reduce_grad(
        grad, ctx.shard_shape, ctx.dtype, ctx.layout, ctx.param
    )
    return reduced, None, None, None


unshard.register_autograd(_unshard_backward, setup_context=_unshard_context)
hold.register_autograd(
    lambda ctx, grad: (None, grad.to(ctx.dtype)),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "dtype", inputs[1].dtype),
)
add_held.register_autograd(
    lambda ctx, grad: (torch.ops.autoshard.complete_grad(grad, ctx.saved_tensors[0], grad.dtype), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)

_ops = torch.ops.autoshard
DEFINITIONS: dict[Any, Callable[..., Any]] = {
    _ops.unshard.default: _define_unshard,
    _ops.reduce_grad.default: _define_reduce_grad,
    _ops.unshard_bucket.default: _define_unshard_bucket,
    _ops.reduce_bucket.default: _define_reduce_bucket,
    _ops.replicate_buffers.default: _define_replicate_buffers,
    _ops.complete_grad.default: _define_complete_grad,
    _ops.hold.default: lambda full, holder: full,
    _ops.add_held.default: lambda full, held: full,
    **low_rank.DEFINITIONS,
    **part.DEFINITIONS,
}
# Where each op has the names of its parameters.
NAMES: dict[Any, int] = {
    _ops.unshard.default: 3,
    _ops.reduce_grad.default: 4,
    _ops.unshard_bucket.default: 1,
    _ops.reduce_bucket.default: 1,
    **low_rank.NAMES,
    **part.NAMES,
}
