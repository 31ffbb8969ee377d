"""What the processors of a job compute and move a second, told from a few matmuls and sums.

[Note: Processors at the first call] Whether gathers are waited for, and so whether copies should stay from forward to backward, depends
on how long it takes to compute beside them, and a round figure of that may be two times off. `autoshard calibrate` measures all that
there is to know; where it did not, this takes about a tenth of a second, once a process. All processes do so at once, as in a step: two
that share a core each have half of it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from autoshard.dtypes import dtype_named

SIDE, NUMBERS = 512, 1 << 22  # of matmuls, large enough for several threads; of a sum, which no cache near a processor holds
TIMES = 15
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Processor:
    """flops: operations a second that matmuls reach, by dtype. bandwidth: bytes a second that a sum reads and writes."""

    flops: Mapping[str, float]
    bandwidth: float


def processor_here() -> Processor:
    """A CPU, with as many threads as this process has; of float32 whatever the loop around this casts to, or makes tensors on."""
    return _with_threads(torch.get_num_threads())


@functools.cache
def _with_threads(count: int) -> Processor:
    with torch.autocast("cpu", enabled=False):
        flops = {name: 2 * SIDE**3 / _usual(_matmul(dtype_named(name))) for name in DTYPES}
        a, b, c = (torch.ones(NUMBERS, dtype=torch.float32, device="cpu") for _ in range(3))
        return Processor(flops, 3 * a.nbytes / _usual(lambda: torch.add(a, b, out=c)))


def _matmul(dtype: torch.dtype) -> Callable[[], object]:
    a = torch.ones(SIDE, SIDE, dtype=dtype, device="cpu")
    return lambda: a @ a


def _usual(work: Callable[[], object]) -> float:
    return statistics.median([_timed(work) for _ in range(1 + TIMES)][1:])  # the first one warms up


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
