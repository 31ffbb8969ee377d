"""How long one operation takes on a device: from the device's measured tables, or by roofline where it has none.

[Note: Tables] `autoshard calibrate` measures tables of (size, seconds). For kernels the size is FLOPs (matmul, convolution,
attention) or bytes that pass between processor and memory (the rest), and the first row is what the smallest kernel takes, launch
and dispatch included. Between rows time is a power of size; beyond the last it grows in proportion. "hard" and "serial" have
elements as their size. A table's name ends with the dtype where rates differ by it. A "view" is what a call takes that computes
nothing; it has one row, and costs nothing where it was not measured. A CPU's matmuls are measured as cubes; "thin", of one row, is
what those of a few rows take on top, in seconds of so many numbers read and written that a cube of as many FLOPs does not have: a
weight comes from memory for a few rows as for many. Where that was not measured, a matmul takes no less than what it reads and
writes would. Attention is measured with causal masks, of which a GPU's kernels leave out half; any other counts twice there. A
CPU's take as long for either, up to 512 tokens at least. "parameter" and "sharded" have a model's parameters as their size, and are
what a step then takes beside kernels: guards, rows, what autograd adds up, the optimizer's loop. A GPU runs behind the processor
that asks for kernels, so that is not added there: "call", and with generated code "call.generated", are what a step takes of that
processor for each operation of its graphs, with all that it does besides, and a step takes the longer of both.
"""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_model.hardware import Device, Table
from autoshard.cost_model.work import Kind, Work
from autoshard.dtypes import dtype_named

# Of the peak in a data sheet, what large matmuls reach on GPUs (cuBLAS on H100 and A100: 0.6 to 0.8), and what streaming
# kernels reach of the memory's bandwidth.
REACHED_FLOPS, REACHED_BANDWIDTH = 0.7, 0.85
BY_FLOPS: frozenset[Kind] = frozenset({"matmul", "convolution", "attention"})
BY_DTYPE = BY_FLOPS | {"thin"}
DTYPES = ("fp32", "bf16", "fp16", "fp64")  # that tables are of, where rates differ by it
# Those of none, see [Note: Tables].
KERNELS = frozenset([
    "pointwise", "reduction", "lookup", "copy", "random", "masked", "pack", "pack_cast", "other", "hard", "serial", "view", "parameter",
    "sharded", "call", "call.generated",
])  # fmt: skip
_LIKE: dict[Kind, Kind] = {"other": "pointwise", "pack": "copy", "pack_cast": "copy", "masked": "pointwise"}
Amount: TypeAlias = "float | NDArray[np.float64]"


def passing(read: Any, written: Any, on_cpu: bool) -> Any:
    """Bytes that pass between processor and memory: a CPU reads what it is about to write, unless it has read it anyway."""
    return read + written * (2 if on_cpu else 1)


def seconds(work: Work, device: Device, fused: bool = False) -> Amount:
    """Seconds of one kernel whose sizes are numbers, or of as many as their arrays have. fused: generated code, which no
    dispatcher comes before."""
    if work.kind == "view":
        return device.tables.get("view", ((1.0, 0.0),))[0][1]
    bytes: Any = passing(work.read, work.written, device.is_cpu)
    table = _table(work, device)
    if table is None:
        return device.launch + _roofline(work, device)
    hard = device.tables.get("hard")
    spent = look_up(table, bytes) if work.kind not in BY_FLOPS else _by_flops(table, work, device)
    if hard is not None and np.any(work.hard):
        spent = np.maximum(spent, look_up(hard, work.hard / 3))
    memory = device.tables.get("pointwise")
    if work.kind == "matmul" and (thin := _of_dtype("thin", work.dtype, device)):
        spent = spent + _beyond_a_cube(work, table[0][0]) * thin[-1][1] / thin[-1][0]
    elif work.kind in BY_FLOPS and memory is not None:  # of a few rows, a matmul reads little but the weights
        spent = np.maximum(spent, look_up(memory, bytes))
    saved = max(table[0][1] - device.launch, 0.0) if fused else 0.0
    return np.maximum(spent - saved, device.launch) + (_one_by_one(work, device) if fused else 0.0)


def is_table(name: str) -> bool:
    """Whether a device's table of this name is ever looked into."""
    kind, _, dtype = name.partition(".")
    return name in KERNELS or (kind in BY_DTYPE and dtype in DTYPES)


def calling(device: Device, fused: bool) -> float:
    """Seconds that the processor takes for an operation, where kernels run behind it. fused: it calls generated code."""
    return device.tables.get("call.generated" if fused else "call", ((1.0, 0.0),))[0][1]


def _by_flops(table: Table, work: Work, device: Device) -> Amount:
    """Of a batch of matmuls each is as fast as one of its size, without what a call takes; a GPU works on all of them at once."""
    if not device.is_cpu:
        return look_up(table, _computed(work, device))
    call, count = table[0][1], work.batch
    return call + count * (look_up(table, work.flops / np.maximum(count, 1)) - call)


def _computed(work: Work, device: Device) -> Any:
    """FLOPs; of attention those of a causal one that takes as long."""
    whole = work.kind == "attention" and not work.causal and not device.is_cpu
    return cast(Any, work.flops) * (2 if whole else 1)


def _one_by_one(work: Work, device: Device) -> Amount:
    """What generated code does not vectorize on CPUs; the first row is little but the call."""
    table = device.tables.get("serial")
    if table is None or not np.any(work.serial):
        return 0.0
    return np.maximum(look_up(table, work.serial) - table[0][1], 0.0)


def _table(work: Work, device: Device) -> Table | None:
    if work.kind not in BY_FLOPS:
        return device.tables.get(work.kind) or device.tables.get(_LIKE.get(work.kind, work.kind))
    return _of_dtype(work.kind, work.dtype, device)


def _of_dtype(name: str, dtype: str, device: Device) -> Table | None:
    """The table of this dtype, or of the one most like it that was measured."""
    measured = (device.tables.get(f"{name}.{like}") for like in (dtype, *(("bf16",) if dtype == "fp16" else ()), "fp32"))
    return next(filter(None, measured), None)


def _beyond_a_cube(work: Work, least: float) -> Any:
    """Numbers that matmuls read and write, less those of cubes of as many FLOPs, of which smaller ones than of `least` take as long."""
    numbers = cast(Any, work.read + work.written) / dtype_named(work.dtype).itemsize
    return np.maximum(numbers - work.batch * numbers_of_a_cube(np.maximum(work.flops / np.maximum(work.batch, 1), least)), 0)


def numbers_of_a_cube(flops: Any) -> Any:
    """Read and written by the matmul of as many rows as columns that has these FLOPs."""
    return 3 * (flops / 2) ** (2 / 3)


def _rate(work: Work, device: Device) -> float:
    """Operations a second at the peak."""
    rounded = ("tf32",) if (work.kind, work.dtype) == ("convolution", "fp32") else ()
    known = filter(None, map(device.flops.get, (*rounded, work.dtype, "fp32")))
    return next(known, max(device.flops.values()))


def _roofline(work: Work, device: Device) -> Amount:
    rate, flops = _rate(work, device), _computed(work, device)
    moved: Any = work.read + work.written
    return np.maximum(flops / (rate * REACHED_FLOPS), moved / (device.bandwidth * REACHED_BANDWIDTH))


def look_up(table: Table, size: Any) -> Amount:
    """The seconds of this size, or of each of an array. See [Note: Tables]."""
    sizes, spent = np.array(table).T
    within = np.exp(np.interp(np.log(np.maximum(size, sizes[0])), np.log(sizes), np.log(spent)))
    return np.where(size > sizes[-1], spent[-1] * size / sizes[-1], within)

