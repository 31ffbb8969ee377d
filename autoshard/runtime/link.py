"""What the links between a job's processes carry, told from a few all-reduces of nothing.

[Note: Links at the first call] How much goes in one message, and by which collective, depends on the links' rate, and a round figure
of it may be ten times off. `autoshard calibrate` measures all that there is to know; where it did not, this tells a fast link
from a slow one. Of each size the shortest counts, since whatever else the processors do can only make one longer. What a message
costs beside its bytes is not told by it: beside a step's own work that is several times what it is on idle processors.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from autoshard.errors import PeerLostError

SMALL, LARGE = 1 << 10, 1 << 20  # bytes
TIMES = 10


def link_rate(timeout: float) -> float:
    """Bytes a second that each process sends in an all-reduce over all of them, on CPUs; a collective call. timeout: seconds
    for each. PeerLostError where one fails."""
    size = dist.get_world_size()
    least, most = (_shortest(n, timeout) for n in (SMALL, LARGE))
    return 2 * LARGE * (size - 1) / size / (most - least if most > least else most)


def _shortest(size: int, timeout: float) -> float:
    numbers = torch.zeros(size, dtype=torch.uint8)
    return min([_timed(numbers, timeout) for _ in range(1 + TIMES)][1:])  # the first one warms up


def _timed(numbers: torch.Tensor, timeout: float) -> float:
    start = time.perf_counter()
    try:
        work = dist.all_reduce(numbers, async_op=True)
        assert work is not None, "this process is in the group of all"
        work.wait(timedelta(seconds=timeout))
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {dist.get_rank()} measured its links and lost another process ({error}); look at the others' own logs"
        ) from error
    return time.perf_counter() - start
