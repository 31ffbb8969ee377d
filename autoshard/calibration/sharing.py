"""How compute and collectives get on beside each other."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.calibration.clock import timed, timed_batch, together
from autoshard.calibration.messages import IN_A_ROW, in_a_row
from autoshard.cost_model.timeline import MOST, Sharing
from autoshard.ops.direct import GATHER_DIRECT

TOGETHER = 0.05  # seconds of a message beside which compute is measured, at most
# Seconds of compute between two meetings, as in a step: a process is about a millisecond late after however little it computes, which
# is measured with `wake`; after 5 ms this would be a share of 0.2, after 100 ms of 0.03.
STEP = 0.1
_functional = torch.ops._c10d_functional


def sharing(device: torch.device, group: str) -> Sharing:
    """How compute and collectives get on beside each other: matmuls, and an all-gather that takes twice as long."""
    a, message, little = torch.randn(256, 256, device=device), torch.zeros(2**21, device=device), torch.zeros(2**10, device=device)
    size = dist.get_world_size()
    collective: Callable[..., Tensor] = GATHER_DIRECT if device.type == "cpu" else _functional.all_gather_into_tensor

    def gather(part: Tensor | None = None) -> Tensor:
        return collective(message if part is None else part, size, group)

    def compute(count: int) -> float:
        return timed_batch(itertools.repeat(lambda: a @ a), count, device) * count

    def wait(flying: Tensor) -> float:
        return timed(lambda: _functional.wait_tensor(flying), device)

    def link() -> float:
        dist.barrier()
        return timed(lambda: _functional.wait_tensor(gather()), device)

    compute(100)
    link()  # the first ones warm up
    taken = float("inf")
    while taken > TOGETHER and message.numel() > little.numel():
        message = message[: message.numel() // 2]
        taken = together(statistics.median([link() for _ in range(5)]))
    count = max(1, int(together(taken / compute(100)) * 100 / 2))
    long = max(1, round(count * STEP / together(compute(count))))
    skew = _skew(lambda: compute(long), device)
    wake = _wake(lambda: compute(count), lambda: gather(little), device)
    return Sharing(*_beside(lambda: compute(count), link, gather, wait), skew, wake)


def _beside(
    compute: Callable[[], float], link: Callable[[], float], start: Callable[[], Tensor], wait: Callable[[Tensor], float]
) -> tuple[float, float]:
    """(interference, drag): of both at once, and each of them alone, by turns."""
    found = []
    for _ in range(15):
        alone = link()
        dist.barrier()
        computing = compute()
        dist.barrier()
        asked = time.perf_counter()
        flying = start()
        asking = time.perf_counter() - asked
        both = compute()
        found.append((1 - computing / both, 1 - max(alone - asking - wait(flying), 0.0) / both))
    interference, drag = (min(max(together(statistics.median(lost)), 0.0), MOST) for lost in zip(*found))
    return interference, drag


def _skew(compute: Callable[[], float], device: torch.device) -> float:
    """How much later than each usually is through the slowest is, as a share of what each computes."""
    number = torch.zeros(1, device=device)
    own, until = [], []
    for _ in range(50):
        timed(lambda: dist.all_reduce(number), device)
        meeting = timed(lambda: dist.all_reduce(number), device)
        own.append(compute())
        until.append(own[-1] + timed(lambda: dist.all_reduce(number), device) - meeting)
    return min(max(together(_several(until)) / together(statistics.median(own)) - 1, 0.0), 1.0)


def _wake(compute: Callable[[], float], gather: Callable[[], Tensor], device: torch.device) -> float:
    """How much longer a small gather takes from asking for it to having it, after some computing, than one of several in a row."""
    found = []
    for _ in range(60):
        compute()
        found.append(timed(lambda: _functional.wait_tensor(gather()), device))
    one_of_many = statistics.median(timed(lambda: in_a_row(gather), device) for _ in range(20)) / IN_A_ROW
    return min(max(together(_several(found)) - together(one_of_many), 0.0), 1.0)


def _several(found: Sequence[float]) -> float:
    """What one of several in a step takes: of means, since a step waits several times and each may be late; of these the median, since
    a machine that others use stands still now and then."""
    return statistics.median(statistics.mean(found[at : at + 10]) for at in range(0, len(found), 10))
