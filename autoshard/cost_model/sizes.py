"""How many bytes a fake value takes, as a sympy expression of the sizes that a trace left open, and what those come to."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import sympy
from numpy.typing import NDArray
from torch import SymInt, Tensor

from autoshard.errors import SweepError

Size: TypeAlias = "int | sympy.Expr"
# what torch writes into the expressions of sizes, for sympy.lambdify; holds for numbers, arrays and sizes of a trace
OF_TORCH = {
    **dict.fromkeys(("FloorDiv", "CleanDiv"), operator.floordiv),
    **dict.fromkeys(("IntTrueDiv", "FloatTrueDiv"), operator.truediv),
    **dict.fromkeys(("Mod", "PythonMod"), operator.mod),
    "CeilToInt": lambda x: -(-x // 1),
}
# and what holds for numbers and arrays alone
OF_ARRAYS = {
    **OF_TORCH,
    "FloorToInt": lambda x: x // 1,
    "TruncToInt": np.trunc,
    "RoundToInt": np.round,
    "ToFloat": lambda x: x * 1.0,
    "BitwiseFn_bitwise_and": lambda x, y: np.asarray(x, dtype=np.int64) & np.asarray(y, dtype=np.int64),
    "BitwiseFn_bitwise_or": lambda x, y: np.asarray(x, dtype=np.int64) | np.asarray(y, dtype=np.int64),
    **{f"OpaqueUnaryFn_{function.__name__}": function for function in (np.sqrt, np.exp, np.log, np.log2)},
}
Values: TypeAlias = "Mapping[str, NDArray[np.float64] | float]"  # of sizes that are open, by name


@dataclass(frozen=True)
class Open:
    """The sizes that a trace left open. names: what its symbols stand for. traced: what these were in the trace."""

    names: Mapping[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)
    traced: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    _known: dict[Size, int] = field(default_factory=dict, compare=False, repr=False)

    def named(self, size: Size) -> Size:
        """The size in terms of what the symbols stand for."""
        return size.xreplace(dict(self.names)) if isinstance(size, sympy.Expr) else size

    def number(self, size: Size) -> int:
        """What the size was in the trace."""
        if not isinstance(size, sympy.Expr):
            return size
        if size not in self._known:
            numbers = {s: sympy.Integer(self.traced[named]) for s, named in self.names.items()}
            self._known[size] = int(size.xreplace({**numbers, **self.traced}))
        return self._known[size]

    def at(self, sizes: Mapping[str, int]) -> Open:
        """As if these sizes, by name, had been those of the trace."""
        return Open(self.names, {symbol: sizes.get(str(symbol), size) for symbol, size in self.traced.items()})

    @property
    def sizes(self) -> dict[str, int]:
        """What each was in the trace, by name."""
        return {str(symbol): size for symbol, size in self.traced.items()}

    def conditions(self, guards: Iterable[sympy.Basic]) -> tuple[sympy.Basic, ...]:
        """What a trace took for granted, in terms of what its symbols stand for; without what is always so."""
        found = (sympy.sympify(g).xreplace(dict(self.names)) for g in guards)
        return tuple(dict.fromkeys(g for g in found if g != sympy.true and g.free_symbols <= self.traced.keys()))


def truth(condition: sympy.Basic, values: Values) -> NDArray[np.bool_]:
    """Whether a condition holds, for many points."""
    symbols = sorted(condition.free_symbols, key=str)
    held = _called(sympy.lambdify(symbols, condition, [OF_ARRAYS, "numpy"]), symbols, values)
    return np.asarray(held, dtype=bool)


def _called(compute: Callable[..., Any], symbols: Sequence[sympy.Symbol], values: Values) -> Any:
    """What torch has another name for cannot be computed."""
    try:
        return compute(*(values[str(s)] for s in symbols))
    except NameError as error:
        raise SweepError(f"a size of this model is {error.name} of another, which no sweep knows; legal: a plan of each size") from error


def shape_of(values: Values) -> tuple[int, ...]:
    """The shape of the points."""
    return np.broadcast_shapes(*(np.shape(v) for v in values.values()))


def evaluator(sizes: Sequence[Size]) -> Callable[[Values], NDArray[np.float64]]:
    """All of these at once, for many points: (sizes × points) from an array of values for each name."""
    symbols = sorted(set().union(*(s.free_symbols for s in sizes if isinstance(s, sympy.Expr))), key=str)
    compute = sympy.lambdify(symbols, list(sizes), [OF_ARRAYS, "numpy"], cse=True)

    def evaluate(values: Values) -> NDArray[np.float64]:
        shape = shape_of(values)
        found = _called(compute, symbols, values)
        return np.stack([np.broadcast_to(np.asarray(f, dtype=np.float64), shape) for f in found])

    return evaluate


def size_of(number: Any) -> Size:
    """The expression of one dimension."""
    return number.node.expr if isinstance(number, SymInt) else int(number)  # type: ignore[no-any-return]


def product(numbers: Iterable[Any]) -> Size:
    """The product of dimensions."""
    out: Size = 1
    for number in numbers:
        out = out * size_of(number)
    return out


def bytes_of(tensor: Tensor) -> Size:
    """Bytes of the memory that an operation takes for a tensor of this shape."""
    return product(tensor.shape) * tensor.element_size()


def larger(a: Size, b: Size) -> Size:
    """The maximum of two."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else sympy.Max(a, b)
