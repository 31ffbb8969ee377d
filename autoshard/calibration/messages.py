"""Collectives to measure, over sizes, and what copies parameters into them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from autoshard.calibration.row import Row
from autoshard.calibration.turns import turns
from autoshard.cost_model.collectives import Group, table_name
from autoshard.cost_model.kernels import passing
from autoshard.ops import wire
from autoshard.ops.direct import EXCHANGE_DIRECT, GATHER_DIRECT, SWAP_DIRECT
from autoshard.ops.layout import Layout

IN_A_ROW = 3  # collectives
ASKED, SMALL = 8, 2**18  # collectives that are asked for as in a step, of up to so many numbers of a process; IN_A_ROW of larger ones
BEGIN_WHERE_ASKED = ("gather_direct", "exchange_direct", "swap_direct")  # whose sends begin in the thread that asks for them
BETWEEN = 3e-3  # seconds that are computed behind asking for each of those, at least: as in a backward of a hundred milliseconds
PACKED = 8  # parameters
_functional = torch.ops._c10d_functional


def packs(device: torch.device) -> Iterable[Row]:
    """Rows of several parameters copied into what is sent, as they are and as bf16."""
    for table, dtype in (("pack", torch.float32), ("pack_cast", torch.bfloat16)):
        layout = Layout("", 2, (), "", 2, dtype)
        for n in (2**8, 2**12, 2**15, 2**18):

            def pack(*rows: Tensor, n: int = n, layout: Layout = layout) -> object:
                return wire.pack_shards(rows, ((2 * n,),) * PACKED, layout)

            size = passing(PACKED * n * 4, PACKED * n * dtype.itemsize, device.type == "cpu")
            yield Row(table, size, turns(pack, [(n,)] * PACKED, torch.float32, device))


def collectives(device: torch.device, where: Group, group: str) -> Iterable[Row]:
    """Each collective over sizes of the whole tensor, in bytes; several in a row, as in a step, where the next is there when one is
    through."""
    size = where.size
    for n in (2**10, 2**14, 2**16, 2**17, 2**18, 2**20, 2**21):
        whole, rows, each = torch.zeros(n * size, device=device), torch.zeros(n, device=device), [n] * size
        calls: dict[str, Callable[[], Tensor]] = {
            "all_gather": lambda rows=rows: _functional.all_gather_into_tensor(rows, size, group),  # type: ignore[misc]
            "reduce_scatter": lambda whole=whole: _functional.reduce_scatter_tensor(whole, "sum", size, group),  # type: ignore[misc]
            "all_to_all": lambda whole=whole, each=each: _functional.all_to_all_single(whole, each, each, group),  # type: ignore[misc]
            "all_reduce": lambda whole=whole: _functional.all_reduce(whole, "sum", group),  # type: ignore[misc]
        }
        if device.type == "cpu":
            calls["gather_direct"] = lambda rows=rows: GATHER_DIRECT(rows, size, group)  # type: ignore[misc]
            calls["exchange_direct"] = lambda whole=whole: EXCHANGE_DIRECT(whole, size, group)  # type: ignore[misc]
        if device.type == "cpu" and size == 2:
            calls["swap_direct"] = lambda whole=whole: SWAP_DIRECT(whole, group)  # type: ignore[misc]
        for name, call in calls.items():
            if name in BEGIN_WHERE_ASKED:
                count = ASKED if n <= SMALL else IN_A_ROW
                yield Row(table_name(f"{name}.issue", where), 4 * n * size, lambda call=call, count=count: itertools.repeat(lambda: _asking(call, count)))  # type: ignore[misc]
            yield Row(table_name(name, where), 4 * n * size, lambda call=call: itertools.repeat(lambda: in_a_row(call)), IN_A_ROW)  # type: ignore[misc]


def in_a_row(call: Callable[[], Tensor]) -> None:
    """Several, to the end of the last one, by the clock."""
    _wait([call() for _ in range(IN_A_ROW)])


def _asking(call: Callable[[], Tensor], count: int) -> float:
    """Seconds that asking takes: the median of so many, each behind something that is computed, as in a step. One that comes while the
    thread that serves those before is at work waits for it, up to some milliseconds; that is in `Sharing.interference`."""
    a = torch.ones(128, 128)
    asked, flying = asked_for(call, count, lambda: _compute(a, BETWEEN))
    _wait(flying)
    return statistics.median(asked)


def asked_for(call: Callable[[], Tensor], count: int, between: Callable[[], None]) -> tuple[list[float], list[Tensor]]:
    """Collectives, with something done behind asking for each: the seconds that each takes to ask for, and what is to be waited for."""
    asked, flying = [], []
    for _ in range(count):
        start = time.perf_counter()
        flying.append(call())
        asked.append(time.perf_counter() - start)
        between()
    return asked, flying


def _compute(a: Tensor, seconds: float) -> None:
    """Matmuls, for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        a @ a


def _wait(flying: Iterable[Tensor]) -> None:
    for one in flying:
        _functional.wait_tensor(one)
