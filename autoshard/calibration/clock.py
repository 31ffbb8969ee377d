"""Seconds of what runs here, on this process or on all."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from autoshard.calibration.row import Row, Run

SECONDS_EACH = 0.08  # of one row of a table in a pass, at most, or of three runs
LONG = 0.3  # seconds of a run that there is one of: a slow link's messages stand still now and then, so one of a shorter run says little


def median_of(row: Row, device: torch.device) -> float:
    """Seconds of one of a row's kernels: the median of several runs, on average over processes. A collective call."""
    runs = row.make()
    if dist.is_initialized():
        dist.barrier()
    timed(next(runs), device)  # the first one warms up
    start = time.perf_counter()
    own = timed(next(runs), device)
    once = together(time.perf_counter() - start)
    if once > LONG:
        return _mean(own) / row.kernels
    count = max(3, min(200, int(SECONDS_EACH / max(once, 1e-6))))
    batch = max(1, int(1e-3 / max(once, 1e-6)))  # short ones are timed several at once
    found = [timed_batch(runs, batch, device) for _ in range(-(-count // batch) if batch > 1 else count)]
    return _mean(statistics.median(found)) / row.kernels


def timed(run: Run, device: torch.device) -> float:
    """Seconds of a run."""
    return timed_batch(iter([run]), 1, device)


def timed_batch(runs: Iterator[Run], batch: int, device: torch.device) -> float:
    """Seconds of each of so many runs: the clock's, or what they say themselves."""
    chosen = list(itertools.islice(runs, batch))
    start = time.perf_counter()
    given = [run() for run in chosen]
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # not what a collective has of its own
    spent = [seconds for seconds in given if isinstance(seconds, float)] or [time.perf_counter() - start]
    return sum(spent) / batch


def together(seconds: float) -> float:
    """The slowest process's, so that all of them repeat equally often."""
    return _of_all(seconds, dist.ReduceOp.MAX)


def _mean(seconds: float) -> float:
    """Over processes: which of them is the slowest changes, and by how much the slowest of a step comes later is `Sharing.skew`."""
    return _of_all(seconds, dist.ReduceOp.SUM) / (dist.get_world_size() if dist.is_initialized() else 1)


def _of_all(seconds: float, operation: dist.ReduceOp.RedOpType) -> float:
    if not dist.is_initialized():
        return seconds
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, operation)
    return float(value)
