"""The time of a step for many sizes at once: a program whose kernels between two events on the link are one stretch.

[Note: Stretches] What a timeline does with each kernel (`timeline.Sharing`) it does with their sum, so a step of thousands
of kernels is a few hundred events. Kernels that are alike are counted: a stretch is a row of counts, a step's time a
product of counts and the kernels' times, then a walk over the events; all for an array of points. It is the sum that
`timeline.simulate` gives, for sizes that were not traced too; which operations there are, and in which order, stays as it
was in the trace.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_model.hardware import Device
from autoshard.cost_model.kernels import seconds
from autoshard.cost_model.program import SPARSE, WAIT, Operation, Program, is_collective
from autoshard.cost_model.sizes import Values, evaluator, shape_of
from autoshard.cost_model.timeline import Link, LinkOf, Sharing
from autoshard.cost_model.work import VIEW, Work, work_of

_SIZES = ("flops", "read", "written", "hard", "serial", "batch")
_AT_ONCE = 1 << 17  # points: some hundred megabytes of what is computed for them
Kernel = tuple[Work, bool]  # its sizes as expressions; whether code is generated for it


@dataclass(frozen=True)
class Stretch:
    """Kernels one after the other: how often each."""

    counts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Message:
    """A collective that is issued, for which `issue` seconds pass on compute. gives: the pieces that its wait will name. link: what
    carries it."""

    seconds: float
    issue: float
    gives: tuple[int, ...]
    link: Link


@dataclass(frozen=True)
class Wait:
    """For the collective that gave these pieces."""

    pieces: tuple[int, ...]


Event = Stretch | Message | Wait


@dataclass(frozen=True)
class Schedule:
    """A step: events in order, over kernels of a device that shares itself so; then the optimizer, `after` seconds. least: seconds of
    the processor that the device runs behind."""

    kernels: tuple[Kernel, ...]
    events: tuple[Event, ...]
    device: Device
    sharing: Sharing
    after: float
    least: float = 0.0

    def seconds(self, values: Values) -> NDArray[np.float64]:
        """The step's seconds for many points at once: an array for each open size, by name, all of one shape."""
        shape = shape_of(values)
        flat = {name: np.broadcast_to(v, shape).reshape(-1) for name, v in values.items()}
        count = math.prod(shape)
        parts = [self._seconds({n: v[at : at + _AT_ONCE] for n, v in flat.items()}) for at in range(0, count, _AT_ONCE)]
        return np.concatenate(parts).reshape(shape) if parts else np.zeros(shape)

    def _seconds(self, values: Values) -> NDArray[np.float64]:
        spent = self._stretches(values)
        now: Any = np.zeros(spent.shape[1:])
        links: dict[Link, Any] = {}
        ends: dict[int, Any] = {}
        sharing = self.sharing
        for event in self.events:
            if isinstance(event, Stretch):
                taken = spent[self._row[event]] * (1 + sharing.skew)
                busy = functools.reduce(np.maximum, links.values(), now) - now
                if sharing.drag:
                    both = sharing.both(taken, busy)
                    ends = {piece: sharing.delayed(end, now, both) for piece, end in ends.items()}
                    links = {link: sharing.delayed(end, now, both) for link, end in links.items()}
                now = now + sharing.slowed(taken, busy)
            elif isinstance(event, Message):
                links[event.link] = np.maximum(links.get(event.link, now), now + sharing.wake) + event.seconds
                ends.update(dict.fromkeys(event.gives, links[event.link]))
                now = now + event.issue
            else:
                for piece in event.pieces:
                    now = np.maximum(now, ends.pop(piece, now))
        return np.atleast_1d(np.maximum(now + self.after, self.least))

    @cached_property
    def _row(self) -> dict[Stretch, int]:
        """Stretches that are equal are computed once."""
        distinct = dict.fromkeys(e for e in self.events if isinstance(e, Stretch))
        return {stretch: row for row, stretch in enumerate(distinct)}

    @cached_property
    def _counts(self) -> NDArray[np.float64]:
        counts = np.zeros((len(self._row), len(self.kernels)))
        for stretch, row in self._row.items():
            for kernel, count in stretch.counts:
                counts[row, kernel] = count
        return counts

    @cached_property
    def _sizes(self) -> Callable[[Values], NDArray[np.float64]]:
        return evaluator([size for work, _ in self.kernels for size in _sizes_of(work)])

    def _stretches(self, values: Values) -> NDArray[np.float64]:
        """(distinct stretches × points), seconds of each."""
        found = self._sizes(values).reshape(len(self.kernels), len(_SIZES), *shape_of(values))
        times = np.stack([self._kernel(kernel, sizes) for kernel, sizes in zip(self.kernels, found)])
        return np.tensordot(self._counts, times, 1)

    def _kernel(self, kernel: Kernel, sizes: NDArray[np.float64]) -> Any:
        work, generated = kernel
        at: Any = dict(zip(_SIZES, sizes))
        return np.broadcast_to(seconds(replace(work, **at), self.device, generated), sizes.shape[1:])


def _sizes_of(work: Work) -> tuple[Any, ...]:
    return tuple(getattr(work, name) for name in _SIZES)


class _Book:
    """Kernels by number, and the events so far."""

    def __init__(self) -> None:
        self.kernels: dict[Kernel, int] = {}
        self.events: list[Event] = []
        self._open: Counter[int] = Counter()

    def run(self, operation: Operation, kernel: Kernel) -> None:
        """One more in this stretch, and the views before it."""
        self._open[self._number(kernel)] += 1
        if operation.views:
            self._open[self._number((VIEW, False))] += operation.views

    def _number(self, kernel: Kernel) -> int:
        return self.kernels.setdefault(kernel, len(self.kernels))

    def note(self, event: Message | Wait) -> None:
        """Ends the stretch."""
        self.close()
        self.events.append(event)

    def close(self) -> None:
        """What was run since the last event is one stretch."""
        if self._open:
            self.events.append(Stretch(tuple(sorted(self._open.items()))))
            self._open = Counter()


def schedule_of(
    program: Program,
    collective: Callable[[Operation], float],
    generated: Callable[[Operation], bool],
    device: Device,
    sharing: Sharing,
    after: float,
    link_of: LinkOf,
    issue: Callable[[Operation], float],
    least: float,
) -> Schedule:
    """The schedule of a program. collective: the seconds of one. link_of: what carries it. issue: seconds that asking for it takes.
    generated: whether code is generated for an operation. after: the optimizer's seconds. least: the processor's."""
    book = _Book()
    for operation in program.operations:
        if operation.name == WAIT:
            book.note(Wait(operation.reads))
        elif is_collective(operation.node):
            book.note(Message(collective(operation), issue(operation), operation.makes, link_of(operation)))
        elif operation.name in SPARSE:
            book.note(Message(collective(operation), 0.0, operation.makes, link_of(operation)))
            book.note(Wait(operation.makes))
            book.run(operation, (work_of(operation).at(program.open.named), generated(operation)))
        else:
            book.run(operation, (work_of(operation).at(program.open.named), generated(operation)))
    book.close()
    return Schedule(tuple(book.kernels), tuple(book.events), device, sharing, after, least)
