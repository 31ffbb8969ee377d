"""`autoshard::gather_direct`, `exchange_direct` and `swap_direct`: an all-gather, an all-to-all, and what two processes need for an
all-reduce, in which each process sends every other one its part.

[Note: Direct] A gather of gloo's brings what arrives into a tensor of its own and copies it out at the end, a worker thread waits for
each, and what it sends stands in front of what it is to receive. Its sends and receives move bytes between the tensors that they are
given. So each process asks for all that it is to receive and offers all that it sends, and goes on; `wait_tensor` of the result waits
for all of it, as for a collective of torch's. Of one process's messages to another the first arrives first, so the order of collectives
says what belongs together. Nothing is sent out of memory that somebody may write to before it has gone: a gather sends its own copy,
into which rows are packed (`packing.GATHER_PACKED`), and what an exchange or a swap sends is read once more, to be added up, when the
other's has arrived.

[Note: Lanes] Before gloo sends anything its receiver says that it is ready. On one connection that word stands in the queue behind
all that goes the same way, and the thread that serves it cannot write while it reads; beside a computation that takes all
processors the line then carries three quarters of its rate. So what goes up the ranks has a connection and a thread of its own, and what
goes down: bytes go one way, words the other. Two hosts that swap 15 MB in 30 parts beside 126 ms of computation do so in 0.87 and
0.93 of the time in two runs, in 8 parts in as much (`python bench/lanes.py`).

An all-reduce over more than two processes is an exchange, a sum of one's own part, and a gather of these: as many bytes as in a ring.
Two of them swap all that they have, as many bytes too, and both add up. Each sum is made once, or by both in one order: so it has
the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard import torch_internals
from autoshard.errors import PlanError
from autoshard.ops.define import define

GATHERS, EXCHANGES, SWAPS, ASKS, ROWS, GRADIENT_ROWS = range(1, 7)  # each has two tags; 0 is that of a loop's own sends


def run_gather(rows: Tensor, size: int, group: str, kind: int = GATHERS) -> Tensor:
    """What all `size` processes of the group have in `rows`, flat, one after the other: to be waited for."""
    return gather_of(lambda own: own.copy_(rows), rows.new_empty(size * rows.numel()), size, group, kind)


def gather_of(put: Callable[[Tensor], Any], whole: Tensor, size: int, group: str, kind: int = GATHERS) -> Tensor:
    """`whole`, with what `put` puts into each process's part of it: to be waited for."""
    over, parts = _group(group, whole), whole.chunk(size)
    own = over.rank()
    if whole.numel():
        put(parts[own])
        _post(over, whole, parts, [parts[own]] * size, kind)
    return whole


def run_exchange(flat: Tensor, size: int, group: str) -> Tensor:
    """Of each other process the part of its `flat` that is for this one, one after the other: to be waited for."""
    over = _group(group, flat)
    own, sent = over.rank(), flat.contiguous().chunk(size)  # the gradient of a sum is one number, expanded
    brought = flat.new_empty(flat.numel() - sent[own].numel())
    _post(over, brought, _by_process(brought, sent, own), sent, EXCHANGES)
    return brought


def run_swap(flat: Tensor, group: str) -> Tensor:
    """What the other one of two processes has in its `flat`: to be waited for."""
    over, sent = _group(group, flat), flat.contiguous()
    brought = torch.empty_like(sent)
    _post(over, brought, [brought] * 2, [sent] * 2, SWAPS)
    return brought


def run_sum_swapped(brought: Sequence[Tensor], sent: Sequence[Tensor], over: int, group: str) -> Tensor:
    """The sum of what swaps of `sent` have brought and of that, one behind the other, in the order of the two processes, by `over`."""
    lengths = [flat.numel() for flat in sent]
    found = sent[0].new_empty(sum(lengths))
    first, second = (sent, brought) if _group(group, found).rank() == 0 else (brought, sent)
    for one, other, place in zip(first, second, found.split(lengths)):
        torch.add(one, other, out=place)
    return found.div_(over) if over > 1 else found


def run_sum(brought: Sequence[Tensor], sent: Sequence[Tensor], size: int, over: int, dtype: torch.dtype, group: str) -> Tensor:
    """The sum of what exchanges of `sent` have brought and of this process's own parts, in `dtype`, in the order of processes, by
    `over`."""
    own, lengths = _group(group, sent[0]).rank(), [flat.numel() // size for flat in sent]
    found = sent[0].new_empty(sum(lengths), dtype=dtype)
    for others, flat, place in zip(brought, sent, found.split(lengths)):
        _add_up(_by_process(others, flat.chunk(size), own), place)
    return found.div_(over) if over > 1 else found


def _by_process(brought: Tensor, sent: Sequence[Tensor], own: int) -> list[Tensor]:
    """What an exchange brings of each process, and what this one has for itself, in the order of processes."""
    parts = list(brought.chunk(len(sent) - 1))
    parts.insert(own, sent[own])
    return parts


def _add_up(parts: Sequence[Tensor], place: Tensor) -> None:
    if parts[0].dtype == place.dtype:
        torch.add(parts[0], parts[1], out=place)
    else:
        place.copy_(parts[0]).add_(parts[1])
    for part in parts[2:]:
        place.add_(part)


def _group(name: str, tensor: Tensor) -> dist.ProcessGroup:
    if tensor.device.type != "cpu":
        where = f"where tensors are on {tensor.device.type!r}, nor is direct_sums or sparse; legal: on 'cpu', over gloo"
        raise PlanError(f"plan: direct: True is not legal {where}")
    return torch_internals.group_named(name)


def swap_parts(takes: Sequence[Tensor], gives: Sequence[Tensor], group: str, kind: int) -> None:
    """Sends each process of the group its part of `gives` and takes what it gives, parts as long as they like, until all is here and
    gone."""
    done = gives[0].new_empty(1)
    _post(_group(group, done), done, takes, gives, kind)
    torch.ops._c10d_functional.wait_tensor(done)


def rank_in(group: str, tensor: Tensor) -> int:
    """Which of a group's processes this one is; PlanError where it would not send such a tensor."""
    return _group(group, tensor).rank()


def _post(over: dist.ProcessGroup, result: Tensor, takes: Sequence[Tensor], gives: Sequence[Tensor], kind: int) -> None:
    """Has what waits for `result` wait for all that is taken and given."""
    for work in _works(over, takes, gives, kind):
        torch_internals.register_work(result, work)


def _works(over: dist.ProcessGroup, takes: Sequence[Tensor], gives: Sequence[Tensor], kind: int) -> Iterator[dist.Work]:
    """Asks for and offers these parts, by process, but for this one's own and those with nothing in them; who comes next in turn first,
    so that not all send to one. A tag says the kind, and whether it goes down the ranks: see [Note: Lanes]."""
    own, size = over.rank(), len(gives)
    for step in range(1, size):
        source, to = (own - step) % size, (own + step) % size
        if takes[source].numel():
            yield over.recv([takes[source]], source, 2 * kind + (own < source))
        if gives[to].numel():
            yield over.send([gives[to]], to, 2 * kind + (to < own))


GATHER_DIRECT: Any = define(
    "gather_direct",
    "(Tensor rows, SymInt size, str group) -> Tensor",
    run_gather,
    lambda rows, size, group: rows.new_empty(size * rows.numel()),
)
EXCHANGE_DIRECT: Any = define(
    "exchange_direct",
    "(Tensor flat, SymInt size, str group) -> Tensor",
    run_exchange,
    lambda flat, size, group: flat.new_empty(flat.numel() - flat.numel() // size),
)
SWAP_DIRECT: Any = define(
    "swap_direct",
    "(Tensor flat, str group) -> Tensor",
    run_swap,
    lambda flat, group: flat.new_empty(flat.shape),
)
SUM_SWAPPED: Any = define(
    "sum_swapped",
    "(Tensor[] brought, Tensor[] sent, SymInt over, str group) -> Tensor",
    run_sum_swapped,
    lambda brought, sent, over, group: sent[0].new_empty(sum(flat.numel() for flat in sent)),
)
SUM_DIRECT: Any = define(
    "sum_direct",
    "(Tensor[] brought, Tensor[] sent, SymInt size, SymInt over, ScalarType dtype, str group) -> Tensor",
    run_sum,
    lambda brought, sent, size, over, dtype, group: sent[0].new_empty(sum(flat.numel() // size for flat in sent), dtype=dtype),
)

# Graphs that are run op by op call these instead, see `block.DIRECT`.
DIRECT: dict[Any, Callable[..., Any]] = {
    GATHER_DIRECT: run_gather,
    EXCHANGE_DIRECT: run_exchange,
    SWAP_DIRECT: run_swap,
    SUM_DIRECT: run_sum,
    SUM_SWAPPED: run_sum_swapped,
}
