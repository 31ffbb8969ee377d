"""The time simulator: operations one after the other on the compute stream, collectives beside them on the link.

[Note: Streams] Compute runs in the order of the program. A collective starts when it is issued and the one before it is
through, for each link carries out its collectives in turn. A wait holds compute up until its collective has ended. Where
the processor itself moves the bytes (gloo), compute slows down meanwhile: it loses `interference` of each second. So several
operations take beside a collective what one of their whole length would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoshard.cost_model.kernels import Amount
from autoshard.cost_model.program import WAIT, Operation, Program

Seconds = Callable[[Operation], float]


@dataclass(frozen=True)
class Span:
    """One operation on its stream, in seconds from the start of the step."""

    operation: int
    stream: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step. compute: seconds of kernels. exposed: seconds that compute waits for the link."""

    seconds: float
    compute: float
    communication: float
    exposed: float
    spans: tuple[Span, ...] = field(default=(), repr=False)


def land(program: Program, line: Timeline) -> None:
    """Lets what only the transport holds go when its collective is through, not when that is waited for."""
    ends = {span.operation: span.end for span in line.spans if span.stream == "link"}
    computing = [span for span in line.spans if span.stream == "compute"]
    for piece in program.pieces:
        if piece.flight and piece.made in ends:
            beside = [s.operation for s in computing if s.operation > piece.made and s.start < ends[piece.made]]
            piece.last = min(piece.last, max(beside, default=piece.made))


def slowed(taken: Amount, busy: Amount, interference: float) -> Amount:
    """Seconds of compute that takes `taken` alone, the link being busy for `busy` more."""
    left = max(1 - interference, 0.0)
    beside = np.minimum(np.maximum(busy, 0.0), taken / left if left else math.inf)
    return taken + interference * beside


def simulate(program: Program, kernel: Seconds, collective: Seconds, interference: float = 0.0) -> Timeline:
    """The timeline of a program without its optimizer's step."""
    now = link = compute = communication = exposed = 0.0
    ends: dict[int, float] = {}  # by the piece that a collective gives
    spans: list[Span] = []
    for i, operation in enumerate(program.operations):
        if operation.name == WAIT:
            end = max((ends.pop(p, 0.0) for p in operation.reads), default=0.0)
            exposed += max(end - now, 0.0)
            now = max(now, end)
        elif operation.name.startswith("_c10d_functional"):
            start = max(link, now)
            link = start + collective(operation)
            communication += link - start
            ends.update(dict.fromkeys(operation.makes, link))
            spans.append(Span(i, "link", start, link))
        else:
            end = now + float(slowed(kernel(operation), link - now, interference))
            compute += end - now
            spans.append(Span(i, "compute", now, end))
            now = end
    return Timeline(now, compute, communication, exposed, tuple(spans))
