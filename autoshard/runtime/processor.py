"""What the processors of a job compute and move a second, told from a few matmuls and sums.

[Note: Processors at the first call] Whether gathers are waited for, and so whether copies should stay from forward to backward, depends
on how long it takes to compute beside them, and a round figure of that may be two times off. `autoshard calibrate` measures all that
there is to know; where it did not, this takes about a tenth of a second, once a process. All processes do so at once, as in a step: two
that share a core each have half of it.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from autoshard.dtypes import dtype_named

SIDE, NUMBERS = 512, 1 << 22  # of matmuls, large enough for several threads; of a sum, which no cache near a processor holds
TIMES = 15  # of each; matmuls of as many tensors, since a step's weights and activations do not lie in the caches either
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
        flops = {name: 2 * SIDE**3 / _usual(_matmuls(dtype_named(name))) for name in DTYPES}
        a, b, c = (torch.ones(NUMBERS, dtype=torch.float32, device="cpu") for _ in range(3))
        return Processor(flops, 3 * a.nbytes / _usual(itertools.repeat(lambda: torch.add(a, b, out=c))))


def _matmuls(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    sets = [[torch.ones(SIDE, SIDE, dtype=dtype, device="cpu") for _ in range(3)] for _ in range(TIMES)]
    for a, b, c in itertools.cycle(sets):
        yield functools.partial(torch.matmul, a, b, out=c)


def _usual(work: Iterator[Callable[[], object]]) -> float:
    return statistics.median([_timed(next(work)) for _ in range(1 + TIMES)][1:])  # the first one warms up


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
