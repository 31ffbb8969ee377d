"""How many bytes a fake value takes, as a sympy expression of the sizes that a trace left open."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import sympy
from torch import SymInt, Tensor

Size: TypeAlias = "int | sympy.Expr"


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
