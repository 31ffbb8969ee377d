"""A row of a table that is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Run = Callable[[], object]
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Row:
    """One row to measure: its table and size, what makes the runs of it, and how many kernels of that size a run has. A run that gives
    seconds says itself how long it took."""

    table: str
    size: float
    make: Callable[[], Iterator[Run]]
    kernels: int = 1
