"""Embeddings of which only the rows travel that are looked up, where those are fewer than there are: of the parameter itself, where
each process holds some of its rows, and of its mean gradient.

[Note: Sparse rows] A process looks up what its batch names, and none knows what another one does. So each tells all others at the
beginning of forward, a bit a row, which it looks up (`ask_rows`). That is as long for every batch, so it can be on its way beside
anything else; and when it has arrived all know alike what follows and how long that is. Where it pays, who holds a row sends it to those
that look it up (`look_up_rows`); in backward each process adds up what its places give a row, and sends that to who holds it, or where
all have all rows to everyone (`reduce_rows`). Where it does not, and where a process uses the parameter otherwise, or has a gradient
that is no embedding's (or is one with something added, as what waited since `no_sync`), which two more bits say, all of it travels, as of
any other parameter. An embedding comes first in forward and its gradient last in backward, with nothing to hide behind: so those two
end with what they bring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.ops.define import define
from autoshard.ops.direct import ASKS, GRADIENT_ROWS, ROWS, rank_in, run_gather, swap_parts
from autoshard.ops.layout import Layout
from autoshard.ops.logical import DEFINITIONS

_backward = torch.ops.aten.embedding_dense_backward.default
_unshard, _reduce_grad = (DEFINITIONS[op.default] for op in (torch.ops.autoshard.unshard, torch.ops.autoshard.reduce_grad))
_BITS = 8


def pays(looked_up: float, table: int) -> bool:
    """Whether rows travel, if a process looks up so many at most of an embedding's `table`: then half as much travels, or less."""
    return 2 * looked_up <= table


def message_bytes(table: int) -> int:
    """In which a process tells which rows of so many it looks up, and the two things that are said of all of them."""
    return -(-(table + 2) // _BITS)


def _count(which: Tensor) -> int:
    return int(torch.count_nonzero(which))  # a sum would be of a copy in wider numbers


@dataclass(frozen=True)
class Asked:
    """What all processes told. rows: which look up which, (processes, rows). whole: whether a process needs all of the parameter; dense:
    whether one's gradient is no embedding's. parts: from where to where the rows lie that each process holds. own: this process."""

    rows: Tensor
    whole: bool
    dense: bool
    parts: Sequence[tuple[int, int]]
    own: int

    @staticmethod
    def told(messages: Tensor, table: int, layout: Layout, own: int) -> Asked:
        """By messages of `ask_rows`, one process's after the other's. layout: of the parameter."""
        bits = messages.view(-1, message_bytes(table), 1).bitwise_right_shift(torch.arange(_BITS, dtype=torch.uint8)).bitwise_and_(1)
        rows, whole, dense = bits.flatten(1).view(torch.bool)[:, : table + 2].split([table, 1, 1], 1)
        count, chunk = len(rows), layout.chunk_rows(table) if layout.sharded else 0
        ends = [min(i * chunk, table) for i in range(count + 1)]
        parts = list(zip(ends, ends[1:])) if layout.sharded else [(0, table)] * count
        return Asked(rows, bool(whole.any()), bool(dense.any()), parts, own)

    @property
    def travel(self) -> bool:
        """Whether rows do, and not all of the parameter."""
        return not self.whole and pays(max(map(_count, self.rows)), self.rows.shape[1])

    @property
    def brought(self) -> list[int]:
        """How many rows this process looks up of those that each holds."""
        return [_count(self.held(self.own, holder)) for holder in range(len(self.parts))]

    def held(self, by: int, holder: int) -> Tensor:
        """Which of its rows `holder` was asked for, as (rows,) of these alone."""
        begin, end = self.parts[holder]
        return self.rows[by, begin:end]

    def places(self) -> Tensor:
        """Where each row that this process looks up lies among these."""
        return self.rows[self.own].cumsum(0, dtype=torch.int32).sub_(1)


def run_ask_rows(indices: Tensor | None, like: Tensor, table: int, dense: bool, name: str, size: int, group: str) -> Tensor:
    """What each process of the group tells: the rows at these indices, or all of them; whether its gradient is `dense`. To be waited
    for. like: a tensor where the parameter is."""
    told = like.new_zeros(_BITS * message_bytes(table), dtype=torch.uint8)
    if indices is None:
        told[table] = 1
    else:
        told[:table].scatter_(0, indices.reshape(-1).long(), 1)  # who has none of these numbers hears of it, of negative ones too
    told[table + 1] = dense
    shifts = torch.arange(_BITS, dtype=torch.uint8)
    return run_gather(told.view(-1, _BITS).bitwise_left_shift_(shifts).sum(1, dtype=torch.uint8), size, group, ASKS)


def run_look_up_rows(
    rows: Tensor, messages: Tensor, indices: Tensor | None, shape: Sequence[int], layout: str, name: str, group: str
) -> Tensor:
    """The parameter of `shape` at these indices, or all of it where there are none, from the rows that each process holds."""
    spec, own = Layout.parse(layout), rank_in(group, rows)
    asked = Asked.told(messages, shape[0], spec, own)
    if not asked.travel:
        whole = _unshard(rows, shape, layout, name)
        return whole if indices is None else F.embedding(indices, whole)
    assert indices is not None
    here = rows.to(spec.compute or rows.dtype)
    brought = asked.brought
    table = here.new_empty(sum(brought), *shape[1:])
    takes = table.split(brought)
    gives = [here[asked.held(by, own)] for by in range(spec.size)]
    takes[own].copy_(gives[own])
    swap_parts(takes, gives, group, ROWS)
    return F.embedding(asked.places()[indices.long()], table)


def run_reduce_rows(
    grad: Tensor,
    indices: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    name: str,
    messages: Tensor,
    table: int,
    padding: int,
    layout: str,
    group: str,
) -> Tensor:
    """This process's rows, of `shape`, of the mean gradient, in `dtype`. grad: of what was looked up at these indices, or whole where
    there are none. padding: the row that has no gradient; -1: none."""
    spec, own = Layout.parse(layout), rank_in(group, grad)
    asked = Asked.told(messages, table, spec, own)
    if asked.dense or not asked.travel:
        whole = grad if indices is None else _backward(grad, indices, table, padding, False)
        return _reduce_grad(whole, shape, dtype, layout, name)  # type: ignore[no-any-return]
    assert indices is not None
    places, carried = asked.places(), spec.travels(grad.dtype)
    without = int(places[padding]) if padding >= 0 and asked.rows[own, padding] else -1
    sums = _backward(grad, places[indices.long()], _count(asked.rows[own]), without, False).to(carried).div_(spec.mean_over)
    found = grad.new_zeros(shape, dtype=torch.promote_types(carried, dtype))
    asks = [asked.held(by, own) for by in range(len(asked.parts))]
    gives = list(sums.split(asked.brought)) if spec.sharded else [sums] * len(asks)
    takes = [gives[own] if by == own else sums.new_empty(_count(rows), *shape[1:]) for by, rows in enumerate(asks)]
    swap_parts(takes, gives, group, GRADIENT_ROWS)
    for rows, part in zip(asks, takes):
        found.index_add_(0, rows.nonzero().view(-1), part.to(found.dtype))
    return found.to(dtype)


def _fake_ask_rows(indices: Tensor | None, like: Tensor, table: int, dense: bool, name: str, size: int, group: str) -> Tensor:
    return like.new_empty(size * message_bytes(table), dtype=torch.uint8)


def _fake_look_up_rows(
    rows: Tensor, messages: Tensor, indices: Tensor | None, shape: Sequence[int], layout: str, name: str, group: str
) -> Tensor:
    found = shape if indices is None else (*indices.shape, *shape[1:])
    return rows.new_empty(found, dtype=Layout.parse(layout).compute or rows.dtype)


def _fake_reduce_rows(grad: Tensor, indices: Tensor | None, shape: Sequence[int], dtype: torch.dtype, *_: Any) -> Tensor:
    return grad.new_empty(shape, dtype=dtype)


ASK_ROWS: Any = define(
    "ask_rows",
    "(Tensor? indices, Tensor like, SymInt table, bool dense, str name, SymInt size, str group) -> Tensor",
    run_ask_rows,
    _fake_ask_rows,
)
LOOK_UP_ROWS: Any = define(
    "look_up_rows",
    "(Tensor rows, Tensor messages, Tensor? indices, SymInt[] shape, str layout, str name, str group) -> Tensor",
    run_look_up_rows,
    _fake_look_up_rows,
)
REDUCE_ROWS: Any = define(
    "reduce_rows",
    "(Tensor grad, Tensor? indices, SymInt[] shape, ScalarType dtype, str name, Tensor messages, SymInt table, int padding, str layout, "
    "str group) -> Tensor",
    run_reduce_rows,
    _fake_reduce_rows,
)
# Where each has the name of its parameter.
NAMES: dict[Any, int] = {ASK_ROWS: 4, LOOK_UP_ROWS: 5, REDUCE_ROWS: 4}

# Graphs that are run op by op call these instead, see `block.DIRECT`.
DIRECT: dict[Any, Callable[..., Any]] = {
    ASK_ROWS: run_ask_rows,
    LOOK_UP_ROWS: run_look_up_rows,
    REDUCE_ROWS: run_reduce_rows,
}
