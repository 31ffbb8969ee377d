"""How long one operation takes on a device: from the device's measured tables, or by roofline where it has none.

[Note: Tables] `autoshard calibrate` measures tables of (size, seconds). For kernels the size is FLOPs (matmul, convolution,
attention) or bytes moved (the rest), and the first row is what the smallest kernel takes, launch and dispatch included.
Between rows time is a power of size; beyond the last it grows in proportion. "hard" has elements as its size. A table's
name ends with the dtype where rates differ by it.
"""

from __future__ import annotations

import bisect
import math

from autoshard.cost_model.hardware import Device, Table
from autoshard.cost_model.work import Kind, Work

# Of the peak in a data sheet, what large matmuls reach on GPUs (cuBLAS on H100 and A100: 0.6 to 0.8), and what streaming
# kernels reach of the memory's bandwidth.
REACHED_FLOPS, REACHED_BANDWIDTH = 0.7, 0.85
_BY_FLOPS: frozenset[Kind] = frozenset({"matmul", "convolution", "attention"})
_LIKE: dict[Kind, Kind] = {"other": "pointwise"}


def seconds(work: Work, device: Device, fused: bool = False) -> float:
    """Seconds of one kernel whose sizes are numbers. fused: generated code, which no dispatcher comes before."""
    size = float(work.flops if work.kind in _BY_FLOPS else work.read + work.written)
    table = _table(work, device)
    if table is None:
        return device.launch + _roofline(work, device)
    hard = device.tables.get("hard")
    spent = look_up(table, size)
    if hard is not None and work.hard:
        spent = max(spent, look_up(hard, float(work.hard)))
    saved = look_up(table, 0) - device.launch if fused else 0.0
    return max(spent - max(saved, 0.0), device.launch)


def _table(work: Work, device: Device) -> Table | None:
    kind = _LIKE.get(work.kind, work.kind)
    return device.tables.get(f"{kind}.{work.dtype}") or device.tables.get(f"{kind}.fp32" if kind in _BY_FLOPS else kind)


def _roofline(work: Work, device: Device) -> float:
    rate = device.flops.get(work.dtype) or device.flops.get("fp32") or max(device.flops.values())
    computing = float(work.flops) / (rate * REACHED_FLOPS)
    moving = float(work.read + work.written) / (device.bandwidth * REACHED_BANDWIDTH)
    return max(computing, moving)


def look_up(table: Table, size: float) -> float:
    """The seconds of this size. See [Note: Tables]."""
    sizes = [s for s, _ in table]
    at = bisect.bisect_left(sizes, size)
    if at == 0:
        return table[0][1]
    if at == len(table):
        return table[-1][1] * size / table[-1][0]
    (low, fast), (high, slow) = table[at - 1], table[at]
    share = (math.log(size) - math.log(low)) / (math.log(high) - math.log(low))
    return math.exp(math.log(fast) + share * (math.log(slow) - math.log(fast)))

