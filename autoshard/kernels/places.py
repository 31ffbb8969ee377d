"""Where a number of a tensor lies, as an expression of where it is used: what views do to indices.

An index has an expression of whole numbers for each dimension, in running symbols and in the sizes that a trace left open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from sympy import Expr, Integer, Symbol
from sympy.printing.codeprinter import PrintMethodNotImplementedError
from sympy.printing.pycode import PythonCodePrinter
from torch import Tensor

Index = tuple[Expr, ...]
Shape = tuple[Expr, ...]
Sizes = Mapping[Symbol, Expr]  # of each running symbol, up to what it runs


def lies(tensor: Tensor, strides: Sequence[Any]) -> bool:
    """Whether its numbers are where these strides say; that of a dimension of one says nothing."""
    return all(a == b or n == 1 for a, b, n in zip(tensor.stride(), strides, tensor.shape))


class Unsupported(Exception):
    """No kernel is generated of this."""


class Div(sympy.Function):  # type: ignore[misc]  # sympy has no types
    """How often the second goes into the first."""


class Rem(sympy.Function):  # type: ignore[misc]
    """What is left of the first then."""


class _Printer(PythonCodePrinter):  # type: ignore[misc]
    def _print_Div(self, expr: Any) -> str:
        return "({} // {})".format(*(self.parenthesize(a, 60) for a in expr.args))

    _print_FloorDiv = _print_Div  # torch's, in sizes

    def _print_Pow(self, expr: Any, rational: bool = False, sqrt: str = "") -> str:
        base, exponent = expr.as_base_exp()
        if not (exponent.is_Integer and exponent > 0):
            raise Unsupported(f"{expr}, a power of sizes")
        return "({})".format(" * ".join([self.parenthesize(base, 60)] * int(exponent)))

    def _print_Rem(self, expr: Any) -> str:
        return "({} % {})".format(*(self.parenthesize(a, 60) for a in expr.args))


def as_text(place: Expr) -> str:
    """The expression in Triton."""
    try:
        return str(_Printer().doprint(place))
    except PrintMethodNotImplementedError as error:
        raise Unsupported(f"{place}, a function of sizes") from error


@dataclass(frozen=True)
class Run:
    """Symbols, outermost first, that together go through all numbers of some dimensions."""

    symbols: tuple[Symbol, ...]
    sizes: tuple[Expr, ...]

    @property
    def count(self) -> Expr:
        """How many numbers that are."""
        return sympy.Mul(*self.sizes)


def running(prefix: str, shape: Sequence[Expr]) -> tuple[Run, Index]:
    """A symbol for each dimension that has more than one number, and the index that they are."""
    symbols = [Symbol(f"{prefix}{d}", integer=True, nonnegative=True) for d in range(len(shape))]
    index = tuple(Integer(0) if n == 1 else s for s, n in zip(symbols, shape))
    kept = [(s, n) for s, n in zip(symbols, shape) if n != 1]
    return Run(tuple(s for s, _ in kept), tuple(n for _, n in kept)), index


def broadcast(index: Index, shape: Shape) -> Index:
    """Of a tensor of this shape, where one is that is used at `index` of as many dimensions or more."""
    return tuple(Integer(0) if n == 1 else i for i, n in zip(index[len(index) - len(shape) :], shape))


def reshaped(index: Index, made: Shape, given: Shape, sizes: Sizes) -> Index:
    """Of a tensor of shape `given`, where the number was that has `index` after it was reshaped to `made`."""
    if 0 in given:
        raise Unsupported("a view of nothing")
    left = [(i, n) for i, n in zip(index, made) if n != 1]
    right = [n for n in given if n != 1]
    found: list[Expr] = []
    while left or right:
        parts, into = _as_many(left, right)
        line: Expr = Integer(0)
        for i, n in parts:
            line = sympy.expand(line * n + i)
        found += _apart(line, into, sizes)
    places = iter(found)
    return tuple(Integer(0) if n == 1 else next(places) for n in given)


def _as_many(left: list[tuple[Expr, Expr]], right: list[Expr]) -> tuple[list[tuple[Expr, Expr]], list[Expr]]:
    """Takes the fewest of both from the front that go through equally many numbers."""
    parts, into = [left.pop(0)], [right.pop(0)]
    while (ratio := sympy.cancel(sympy.prod(n for _, n in parts) / sympy.prod(into))) != 1:
        more, take = (parts, left) if _is_less(ratio) else (into, right)
        if not take:
            raise Unsupported("a reshape whose sizes cannot be told apart")
        more.append(take.pop(0))  # type: ignore[arg-type]
    return parts, into


def _is_less(ratio: Expr) -> bool:
    """Than 1: as a number, or since one divides the other."""
    return bool(ratio < 1) if ratio.is_number else sympy.denom(ratio) != 1


def _apart(line: Expr, sizes_of: list[Expr], sizes: Sizes) -> list[Expr]:
    """The index in these dimensions of what is the line-th number of them."""
    found = []
    for n in reversed(sizes_of[1:]):
        line, rest = _divided(line, n, sizes)
        found.append(rest)
    return [line, *reversed(found)]


def _divided(line: Expr, by: Expr, sizes: Sizes) -> tuple[Expr, Expr]:
    """(how often `by` goes into it, the rest)"""
    terms = sympy.Add.make_args(sympy.expand(line))
    whole = [t for t in terms if sympy.denom(sympy.cancel(t / by)) == 1]
    rest = sympy.Add(*(t for t in terms if t not in whole))
    least, most = _range(rest, sizes)
    if least.is_nonnegative and sympy.expand(by - 1 - most).is_nonnegative:
        return sympy.Add(*(sympy.cancel(t / by) for t in whole)), rest
    return Div(line, by), Rem(line, by)


def _range(place: Expr, sizes: Sizes) -> tuple[Expr, Expr]:
    """The least and the most that it can be; not a number where it does not simply rise or fall with its symbols."""
    least = most = place
    for symbol in place.free_symbols & sizes.keys():
        step = place.coeff(symbol)
        simple = symbol not in sympy.expand(place - step * symbol).free_symbols and not step.free_symbols & sizes.keys()
        if not simple or not (step.is_nonnegative or step.is_nonpositive):
            return sympy.nan, sympy.nan
        low, high = (Integer(0), sizes[symbol] - 1) if step.is_nonnegative else (sizes[symbol] - 1, Integer(0))
        least, most = least.xreplace({symbol: low}), most.xreplace({symbol: high})
    return sympy.expand(least), sympy.expand(most)


def merged(run: Run, places: Sequence[Expr]) -> tuple[Run, dict[Symbol, Expr]]:
    """Dimensions that all places go through as if they were one are one; and what the outer ones become."""
    gone: dict[Symbol, Expr] = {}
    symbols, sizes = list(run.symbols), list(run.sizes)
    for d in range(len(symbols) - 1, 0, -1):
        outer, inner = symbols[d - 1], symbols[d]
        if all(_flow(sympy.expand(p.xreplace(gone)), outer, inner, sizes[d]) for p in places):
            gone[outer] = Integer(0)
            symbols[d - 1 : d + 1] = [inner]
            sizes[d - 1 : d + 1] = [sizes[d - 1] * sizes[d]]
    return Run(tuple(symbols), tuple(sizes)), gone


def _flow(place: Expr, outer: Symbol, inner: Symbol, size: Expr) -> bool:
    """Whether a step of the outer one is as far as `size` steps of the inner one."""
    steps = place.coeff(outer), place.coeff(inner)
    rest = place - steps[0] * outer - steps[1] * inner
    if {outer, inner} & (sympy.expand(rest).free_symbols | steps[0].free_symbols | steps[1].free_symbols):
        return False
    return bool(sympy.expand(steps[0] - size * steps[1]) == 0)
