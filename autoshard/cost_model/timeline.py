"""The time simulator: operations one after the other on the compute stream, collectives beside them on links.

[Note: Streams] Compute runs in the order of the program. A collective starts when it is issued and the one before it is
through, for each link carries out its collectives in turn: that between nodes is one, what is inside of them another. A wait holds compute up until its collective has ended. Where
the processor itself moves the bytes (gloo), both slow down while both are at work: of each such second compute loses
`interference`, and the collective `drag`. So several operations take beside a collective what one of their whole length would.
Who carries a collective out is asleep when there is none, and begins `wake` after it is issued, or when the one before has ended.
Asking for a collective takes compute's time too, in which that may begin already.
Processes are slower by turns, and a collective begins when the slowest has asked for it, whose compute takes `skew` of itself longer. So
two go through a step: the slowest, whose time the step's is, and one as fast as most, which has computed for less and waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from autoshard.cost_model.collectives import Group
from autoshard.cost_model.hardware import Device
from autoshard.cost_model.kernels import Amount
from autoshard.cost_model.program import SPARSE, WAIT, Operation, Program, is_collective

Seconds = Callable[[Operation], float]
Link = Literal["between", "inside"]  # nodes
LinkOf = Callable[[Operation], Link]


@dataclass(frozen=True)
class Span:
    """One operation on its stream ("compute", "link", or "wait" for one), in seconds from the start of the step. Of a process as fast as
    most."""

    operation: int
    stream: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step. compute: seconds of kernels. exposed: seconds that compute waits, for the link or for slower processes."""

    seconds: float
    compute: float
    communication: float
    exposed: float
    spans: tuple[Span, ...] = field(default=(), repr=False)


def land(program: Program, line: Timeline) -> None:
    """Lets what only the transport holds exist while its collective is carried out: not yet while that stands in line, and not
    until it is waited for."""
    flights = {span.operation: span for span in line.spans if span.stream == "link"}
    process = [span for span in line.spans if span.stream != "link"]
    for piece in program.pieces:
        if piece.flight and (flight := flights.get(piece.made)):
            later = (s for s in process if s.operation > piece.made)
            beside = [s.operation for s in later if s.start < flight.end and s.end > flight.start] or [piece.made]
            piece.made, piece.last = beside[0], min(piece.last, beside[-1])


MOST = 0.9  # of a second; what was measured where nothing else was left would never end


@dataclass(frozen=True)
class Sharing:
    """What compute and the link lose of each second in which both are at work, both below 1; what compute loses to waiting for
    slower processes; and the seconds until a link at rest begins."""

    interference: float = 0.0
    drag: float = 0.0
    skew: float = 0.0
    wake: float = 0.0

    @staticmethod
    def on(device: Device, groups: Iterable[Group]) -> Sharing:
        """Of a job with these groups of processes; one process waits for nobody."""
        if all(group.size == 1 for group in groups):
            return ALONE
        return Sharing(min(device.interference, MOST), min(device.drag, MOST), device.skew, device.wake)

    def both(self, taken: Amount, busy: Amount) -> Amount:
        """Seconds in which both are: compute takes `taken` alone, and the link is busy for `busy` more if it is left alone."""
        return np.minimum(np.maximum(busy, 0.0) / (1 - self.drag), taken / (1 - self.interference))

    def slowed(self, taken: Amount, busy: Amount) -> Amount:
        """Seconds of that compute beside that link."""
        return taken + self.interference * self.both(taken, busy)

    def delayed(self, end: Amount, now: Amount, both: Amount) -> Amount:
        """When a collective that would have ended at `end` does, both being at work from now on for `both`."""
        return end + self.drag * np.minimum(np.maximum(end - now, 0.0) / (1 - self.drag), both)


ALONE = Sharing()


def _one(operation: Operation) -> Link:
    return "between"


def _at_once(operation: Operation) -> float:
    return 0.0


def simulate(
    program: Program, kernel: Seconds, collective: Seconds, sharing: Sharing = ALONE, link_of: LinkOf = _one, issue: Seconds = _at_once
) -> Timeline:
    """The timeline of a program without its optimizer's step. link_of: what carries a collective. issue: seconds that asking for it takes
    compute."""
    walk = _Walk(sharing)
    for i, operation in enumerate(program.operations):
        if operation.name == WAIT:
            walk.wait(i, operation.reads)
        elif is_collective(operation.node):
            walk.issue(i, operation.makes, collective(operation), link_of(operation), issue(operation))
        elif operation.name in SPARSE:  # it ends with its collectives
            walk.issue(i, operation.makes, collective(operation), link_of(operation))
            walk.wait(i, operation.makes)
            walk.run(i, kernel(operation))
        else:
            walk.run(i, kernel(operation))
    spans = sorted((*walk.spans, *walk.flights.values()), key=lambda span: span.operation)
    return Timeline(walk.now, walk.compute, walk.communication, walk.now - walk.compute, tuple(spans))


@dataclass
class _Walk:
    """Through a program: what the time is, and until when each link is busy. now: of the slowest process; own: of one as fast as
    most. flights: of collectives, by operation; issued: which of them gives a piece."""

    sharing: Sharing
    now: float = 0.0
    own: float = 0.0
    links: dict[Link, float] = field(default_factory=dict)
    compute: float = 0.0
    communication: float = 0.0
    flights: dict[int, Span] = field(default_factory=dict)
    issued: dict[int, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def wait(self, at: int, pieces: Iterable[int]) -> None:
        end = max((self.flights[self.issued.pop(p)].end for p in pieces if p in self.issued), default=0.0)
        if end > self.own:
            self.spans.append(Span(at, "wait", self.own, end))
            self.own, self.now = end, max(self.now, end)

    def issue(self, at: int, makes: Iterable[int], seconds: float, link: Link, asking: float = 0.0) -> None:
        start = max(self.links.get(link, 0.0), self.now + self.sharing.wake)
        self.links[link] = start + seconds
        self.communication += seconds
        self.issued.update(dict.fromkeys(makes, at))
        self.flights[at] = Span(at, "link", start, start + seconds)
        if asking:
            self._compute(at, asking, asking)

    def run(self, at: int, seconds: float) -> None:
        slower = 1 + self.sharing.skew
        taken = seconds * slower
        busy = max(self.links.values(), default=0.0) - self.now
        both = float(self.sharing.both(taken, busy))
        if self.sharing.drag:
            self._delay(both)
        slowed = float(self.sharing.slowed(taken, busy))
        self._compute(at, slowed, slowed / slower)

    def _compute(self, at: int, slowest: float, most: float) -> None:
        """So many seconds of the slowest process, and of most."""
        self.spans.append(Span(at, "compute", self.own, self.own + most))
        self.now += slowest
        self.own += most
        self.compute += most

    def _delay(self, both: float) -> None:
        def later(moment: float) -> float:
            return float(self.sharing.delayed(moment, self.now, both))

        self.links = {link: later(end) for link, end in self.links.items()}
        for at, flight in self.flights.items():
            if flight.end > self.now:
                self.flights[at] = replace(flight, start=later(flight.start), end=later(flight.end))
