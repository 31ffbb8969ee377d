"""How compute and collectives get on beside each other."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.calibration.clock import timed, timed_batch, together
from autoshard.calibration.messages import IN_A_ROW, asked_for, in_a_row
from autoshard.cost_model.timeline import MOST, Sharing
from autoshard.ops.direct import GATHER_DIRECT

TOGETHER = 0.03  # seconds of a message beside which compute is measured, at most
COVERED = 1.5  # times as long as a message takes is computed where nothing of it is to be left
BESIDE, BEHIND = 31, 40  # rounds of each measurement
# Seconds of compute before processes meet, in a block and in a step. Somebody is a millisecond or two late after however little all compute,
# from about 2 ms on: that is in `wake`. As a share of what is computed it would be 0.2 of a block, where of a step 0.03 are left.
BLOCK, STEP = 0.005, 0.1
_functional = torch.ops._c10d_functional


@dataclass(frozen=True)
class _Flight:
    """Seconds that gathers take of a process: to be asked for, what is computed beside them, and to be waited for, then or by asking for
    one while the thread that serves the one before is at work."""

    asking: float
    computing: float
    waiting: float

    @staticmethod
    def of(asked: Sequence[float], computing: float, waited: float) -> _Flight:
        """asked: seconds that each took to ask for. What one takes longer than most is waiting."""
        asking = statistics.median(asked) * len(asked)
        return _Flight(asking, computing, waited + sum(asked) - asking)

    @property
    def whole(self) -> float:
        return self.asking + self.computing + self.waiting


@dataclass(frozen=True)
class _Work:
    """A matmul and a gather, and the seconds that they take."""

    device: torch.device
    matmul: Callable[[], None]
    gather: Callable[[Tensor], Tensor]

    @staticmethod
    def on(device: torch.device, group: str) -> _Work:
        """Of the processes of a group."""
        a, size = torch.randn(256, 256, device=device), dist.get_world_size()
        gather: Callable[..., Tensor] = GATHER_DIRECT if device.type == "cpu" else _functional.all_gather_into_tensor

        def matmul() -> None:
            a @ a  # let go of at once: of a step's worth the results may be gigabytes

        return _Work(device, matmul, lambda part: gather(part, size, group))

    def compute(self, count: int) -> float:
        """So many matmuls."""
        return timed_batch(itertools.repeat(self.matmul), count, self.device) * count

    def computed(self, count: int) -> float:
        """The same, which all processes begin at once."""
        dist.barrier()
        return self.compute(count)

    def gathered(self, part: Tensor) -> float:
        """A gather from asking for it to having it."""
        return timed(lambda: _functional.wait_tensor(self.gather(part)), self.device)

    def flight(self, part: Tensor, count: int) -> _Flight:
        """Several gathers that all processes begin at once, so many matmuls behind asking for each."""
        computing: list[float] = []
        dist.barrier()
        asked, flying = asked_for(
            lambda: self.gather(part), IN_A_ROW, lambda: computing.append(self.compute(count) if count else 0.0)
        )
        return _Flight.of(asked, sum(computing), sum(self.wait(one) for one in flying))

    def wait(self, flying: Tensor) -> float:
        """The rest of one."""
        return timed(lambda: _functional.wait_tensor(flying), self.device)


def sharing(device: torch.device, group: str) -> Sharing:
    """How compute and collectives get on beside each other: matmuls, and all-gathers."""
    work = _Work.on(device, group)
    message = _message(work)
    each = together(work.compute(100) / 100)
    block, step = (max(1, round(spent / each)) for spent in (BLOCK, STEP))
    return Sharing(*_beside(work, message, each), *_behind(work, step, block))


def _message(work: _Work) -> Tensor:
    """The largest that takes at most `TOGETHER`, if one of 4 KiB does."""
    message, taken = torch.zeros(2**20, device=work.device), float("inf")
    work.compute(100)
    work.flight(message, 0)  # the first ones warm up
    while taken > TOGETHER and message.numel() > 2**10:
        message = message[: message.numel() // 2]
        taken = together(statistics.median([work.flight(message, 0).whole for _ in range(3)])) / IN_A_ROW
    return message


def _beside(work: _Work, message: Tensor, each: float) -> tuple[float, float]:
    """(interference, drag): of gathers and compute at once, and each of them alone, by turns. each: seconds of a matmul.

    Where processors move the bytes, hiding a gather is nearly as long as waiting for it, and that is measured by itself: what compute
    loses while it hides all of what a gather is waited for when nothing is computed, at most as much. Out of what compute loses a
    second it would be a ratio of two small differences. drag is seen beside so little compute that some of the gather is left."""
    alone = work.flight(message, 0)
    much = max(1, round(COVERED * together(alone.whole) / IN_A_ROW / each))
    little = max(1, round(together(alone.waiting) / 2 / IN_A_ROW / each))
    lost, done = [], []
    for _ in range(BESIDE):
        alone = work.flight(message, 0)
        computing = work.computed(much * IN_A_ROW)
        hidden, seen = work.flight(message, much), work.flight(message, little)
        lost.append((hidden.computing + hidden.waiting - computing) / alone.waiting)
        done.append((alone.whole - seen.asking - seen.waiting) / seen.computing)
    share, rate = (together(statistics.median(found)) for found in (lost, done))
    drag = min(max(1 - rate, 0.0), MOST)
    return min(max(share, 0.0), 1.0) * (1 - drag), drag


def _behind(work: _Work, step: int, block: int) -> tuple[float, float]:
    """(skew, wake): how much later than each is through a step's matmuls the slowest is, as a share of them; and how much longer
    a small gather takes from asking for it to having it, after a block's matmuls, than one of several in a row. By turns, so that both
    are of as long a time of the machine."""
    little, number = torch.zeros(2**10, device=work.device), torch.zeros(1, device=work.device)

    def meet() -> float:
        return timed(lambda: dist.all_reduce(number), work.device)

    own, until, alone, in_one = [], [], [], []
    for _ in range(BEHIND):
        meet()
        meeting = meet()
        own.append(work.compute(step))
        until.append(own[-1] + meet() - meeting)
        in_one.append(timed(lambda: in_a_row(lambda: work.gather(little)), work.device) / IN_A_ROW)
        alone += [_after(work, block, little) for _ in range(5)]
    skew = together(_several(until)) / together(_several(own)) - 1  # where the machine stood still, both did
    wake = together(_several(alone)) - together(statistics.median(in_one))
    return min(max(skew, 0.0), 1.0), min(max(wake, 0.0), 1.0)


def _after(work: _Work, count: int, part: Tensor) -> float:
    """A gather after so many matmuls."""
    work.compute(count)
    return work.gathered(part)


def _several(found: Sequence[float]) -> float:
    """What one of several in a step takes: of means, since a step waits several times and each may be late; of these the median, since
    a machine that others use stands still now and then."""
    return statistics.median(statistics.mean(found[at : at + 10]) for at in range(0, len(found), 10))
