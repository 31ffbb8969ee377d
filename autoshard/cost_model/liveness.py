"""The liveness simulator: bytes by category at every operation of a step, over sizes that are still open.

[Note: Terms] Every size is a sum of products of symbols (batch·sequence, batch·sequence², 1). So the bytes at an
operation are a vector of whole coefficients, one a term, and the curve is a matrix; what it comes to for a batch of a
given size is a product with the terms' values. Of the operations only those can be the peak whose coefficients no other
operation's exceed in every term: a few dozen of thousands, which is why a search can ask for it a hundred thousand times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import sympy
from numpy.typing import NDArray

from autoshard.cost_model.program import Category, Program
from autoshard.cost_model.sizes import Open, Size, Values, evaluator

CATEGORIES: tuple[Category, ...] = (
    "parameters", "optimizer", "compression", "buffers", "inputs", "gathered", "gradients", "activations", "temporaries", "communication",
    "workspace",
)
Point = Mapping[sympy.Symbol, float]
_AS_TRACED: Point = {}


@dataclass(frozen=True)
class Peak:
    """The most bytes that exist at once. operation: its position in the program; the program's length is the optimizer
    step. categories: bytes of each at that moment."""

    bytes: int
    operation: int
    categories: dict[Category, int]


class Terms:
    """The products of symbols that sizes are sums of, in the order in which they were met."""

    def __init__(self, open: Open) -> None:
        self.index: dict[sympy.Expr, int] = {}
        self._open = open
        self._known: dict[Size, dict[int, int]] = {}

    def coefficients(self, size: Size) -> dict[int, int]:
        """{term: factor} of a size."""
        if size not in self._known:
            named = self._open.named(size)
            parts = sympy.expand(named).as_coefficients_dict() if isinstance(named, sympy.Expr) else {sympy.S.One: named}
            self._known[size] = {self.index.setdefault(t, len(self.index)): int(c) for t, c in parts.items()}
        return self._known[size]


@dataclass(frozen=True)
class Curve:
    """Bytes over a step: `matrix` is (operations + 1) × categories × terms, the last row the optimizer step. traced: what
    the terms' symbols were in the trace."""

    terms: tuple[sympy.Expr, ...]
    matrix: NDArray[np.int64]
    traced: Point = field(default_factory=dict)

    @cached_property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """What is open, in alphabetic order."""
        found = set().union(*(t.free_symbols for t in self.terms))
        return tuple(sorted(found, key=str))

    def at(self, point: Point = _AS_TRACED) -> NDArray[np.int64]:
        """(operations + 1) × categories, bytes; what is not given is as it was in the trace."""
        if not self.symbols:
            return self.matrix @ np.array(self.terms, dtype=np.int64)
        sizes = {str(symbol): float(size) for symbol, size in {**self.traced, **point}.items()}
        return self.matrix @ self._evaluate(sizes).round().astype(np.int64)

    def peak(self, point: Point = _AS_TRACED) -> Peak:
        """The first of the highest moments."""
        bytes_at = self.at(point)
        totals = bytes_at.sum(1)
        where = int(totals.argmax())
        by_category = {c: int(b) for c, b in zip(CATEGORIES, bytes_at[where])}
        return Peak(int(totals[where]), where, by_category)

    @cached_property
    def undominated(self) -> NDArray[np.int64]:
        """Totals (rows × terms) of the operations that can be the peak for some sizes. See [Note: Terms]."""
        rows = np.unique(self.matrix.sum(1), axis=0)[::-1]
        kept: list[NDArray[np.int64]] = []
        for row in rows:
            if not any((row <= other).all() for other in kept):
                kept.append(row)
        return np.array(kept)

    @cached_property
    def _evaluate(self) -> Callable[[Values], NDArray[np.float64]]:
        return evaluator(self.terms)

    def peaks(self, values: Values) -> NDArray[np.float64]:
        """The peak in bytes for many points at once: an array for each symbol, by name, all of one shape."""
        peaks: NDArray[np.float64] = np.tensordot(self.undominated, self._evaluate(values), 1).max(0)
        return peaks


def simulate(program: Program) -> Curve:
    """The curve of a program. A piece counts from the operation that makes it to its last reader, both included."""
    terms, length = Terms(program.open), len(program.operations) + 1
    found = [terms.coefficients(piece.bytes) for piece in program.pieces]
    matrix = np.zeros((length + 1, len(CATEGORIES), len(terms.index)), dtype=np.int64)
    for piece, coefficients in zip(program.pieces, found):
        category = CATEGORIES.index(piece.category)
        for term, factor in coefficients.items():
            matrix[max(piece.made, 0), category, term] += factor
            matrix[min(piece.last, length - 1) + 1, category, term] -= factor
    return Curve(tuple(terms.index), matrix.cumsum(0)[:-1], program.open.traced)
