"""Formulas of sympy as expressions of Triton."""

from __future__ import annotations

from typing import Any

from sympy import Expr, Integer, Rational
from sympy.printing.pycode import PythonCodePrinter


class _Printer(PythonCodePrinter):  # type: ignore[misc]  # sympy has no types
    """sqrt: Triton's function for the type that is computed in; `tl.sqrt` is approximate for float32."""

    def __init__(self, sqrt: str) -> None:
        super().__init__({"fully_qualified_modules": False})
        self._sqrt = sqrt

    def _print_Pow(self, expr: Any, rational: bool = False, sqrt: str = "") -> str:
        base, exponent = expr.as_base_exp()
        if exponent == Rational(1, 2):
            return f"{self._sqrt}({self._print(base)})"
        if exponent == Integer(2):
            return f"{self.parenthesize(base, 100)} * {self.parenthesize(base, 100)}"
        if exponent == -1:
            return f"1.0 / {self.parenthesize(base, 100)}"
        return f"tl.exp({self._print(exponent)} * tl.log({self._print(base)}))"

    def _print_Max(self, expr: Any) -> str:
        first, *rest = (self._print(a) for a in expr.args)
        for other in rest:  # NaN stays NaN, as in torch
            first = f"tl.maximum({first}, {other}, propagate_nan=tl.PropagateNan.ALL)"
        return first

    def _print_sign(self, expr: Any) -> str:
        x = self._print(expr.args[0])
        return f"tl.where({x} > 0, 1.0, tl.where({x} < 0, -1.0, {x}))"


def as_triton(formula: Expr, precise: bool) -> str:
    """`formula`, whose symbols are names there. precise: it is computed in float64."""
    return str(_Printer("tl.sqrt" if precise else "tl.sqrt_rn").doprint(formula))
