"""What one step of an optimizer does to each number, as formulas.

Order and form follow torch.optim's, so that rounding differs little. Sources: Adam, arXiv 1412.6980; its decoupled weight
decay, arXiv 1711.05101; amsgrad, openreview ryQu7f-RZ; SGD with momentum, Sutskever et al. 2013; Lion, arXiv 2302.06675.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sympy import Expr, Max, Symbol, lambdify, sign, sqrt, symbols

Formulas = tuple[tuple[str, Expr], ...]


@dataclass(frozen=True)
class Rule:
    """One step of one number.

    states: what is kept of a parameter between steps, each of its shape, by torch.optim's keys.
    settings: numbers of a parameter group.
    scalars: once a tensor, in order, in float64: of settings, and of `step`, the steps taken with this one.
    formulas: once a number, in order: of `param`, `grad`, states, settings and scalars; each gives one of them its next value.
    """

    name: str
    states: tuple[str, ...]
    settings: tuple[str, ...]
    scalars: Formulas
    formulas: Formulas

    @property
    def keys(self) -> tuple[str, ...]:
        """Of all that is kept of a parameter: `step` too, where numbers change with the steps that were taken."""
        counts = any(_STEP in formula.free_symbols for _, formula in self.scalars)
        return (*(("step",) if counts else ()), *self.states)

    @property
    def written(self) -> tuple[str, ...]:
        """What outlives the step."""
        given = {name for name, _ in self.formulas}
        return tuple(name for name in ("param", *self.states) if name in given)


_PARAM, _GRAD, _STEP = symbols("param grad step")
_LR, _DECAY = symbols("lr weight_decay")


@functools.cache
def adam(*, decoupled: bool, weight_decay: bool, amsgrad: bool, maximize: bool, quick: bool = False) -> Rule:
    """Adam, and with `decoupled` AdamW. weight_decay: whether there is any. quick: whether half or more of the mean is the gradient."""
    beta1, beta2, eps = symbols("beta1 beta2 eps")
    mean, square, largest = symbols("exp_avg exp_avg_sq max_exp_avg_sq")
    rate1, rate2, size, root = symbols("rate1 rate2 size root")
    begin, decay_scalars = _begin(maximize, weight_decay, decoupled)
    scalars: Formulas = (
        ("rate1", 1 - beta1),
        ("rate2", 1 - beta2),
        ("size", _LR / (1 - beta1**_STEP)),
        ("root", sqrt(1 - beta2**_STEP)),
    )
    formulas: Formulas = (
        ("exp_avg", _towards(mean, rate1, beta1, quick)),
        ("exp_avg_sq", beta2 * square + rate2 * _GRAD**2),
    )
    if amsgrad:
        formulas += (("max_exp_avg_sq", Max(largest, square)),)
    bound = largest if amsgrad else square
    formulas += (("param", _PARAM - size * mean / (sqrt(bound) / root + eps)),)
    states = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if amsgrad else ())
    settings = ("lr", "beta1", "beta2", "eps", "weight_decay")
    return Rule("adamw" if decoupled else "adam", states, settings, decay_scalars + scalars, begin + formulas)


@functools.cache
def sgd(*, weight_decay: bool, momentum: bool, nesterov: bool, maximize: bool) -> Rule:
    """SGD, whose momentum starts as the first gradient: as zeros, without dampening."""
    factor, dampening, buffer, rate = symbols("momentum dampening momentum_buffer rate")
    begin, _ = _begin(maximize, weight_decay, decoupled=False)
    direction: Expr = _GRAD
    formulas: Formulas = ()
    if momentum:
        formulas = (("momentum_buffer", factor * buffer + rate * _GRAD),)
        direction = _GRAD + factor * buffer if nesterov else buffer
    formulas += (("param", _PARAM - _LR * direction),)
    states = ("momentum_buffer",) if momentum else ()
    scalars: Formulas = (("rate", 1 - dampening),) if momentum else ()
    return Rule("sgd", states, ("lr", "weight_decay", "momentum", "dampening"), scalars, begin + formulas)


@functools.cache
def lion(*, weight_decay: bool, maximize: bool, quick: tuple[bool, bool] = (False, False)) -> Rule:
    """Lion: the sign of a mean, and another mean to keep. quick: whether half or more of either is the gradient."""
    beta1, beta2, mean, rate1, rate2, towards = symbols("beta1 beta2 exp_avg rate1 rate2 towards")
    begin, decay_scalars = _begin(maximize, weight_decay, decoupled=True)
    scalars = decay_scalars + (("rate1", 1 - beta1), ("rate2", 1 - beta2))
    formulas: Formulas = (
        ("towards", _towards(mean, rate1, beta1, quick[0])),
        ("param", _PARAM - _LR * sign(towards)),
        ("exp_avg", _towards(mean, rate2, beta2, quick[1])),
    )
    return Rule("lion", ("exp_avg",), ("lr", "beta1", "beta2", "weight_decay"), scalars, begin + formulas)


def _towards(mean: Expr, rate: Expr, beta: Expr, quick: bool) -> Expr:
    """The mean with a share `rate` of the gradient, from the nearer end, as torch's lerp: a small gradient that has most of the weight is
    not lost beside a large mean."""
    return _GRAD - beta * (_GRAD - mean) if quick else mean + rate * (_GRAD - mean)


def _begin(maximize: bool, weight_decay: bool, decoupled: bool) -> tuple[Formulas, Formulas]:
    """(formulas, scalars) of what comes first: the direction, and what weight decay takes."""
    formulas: Formulas = (("grad", -_GRAD),) if maximize else ()
    if not weight_decay:
        return formulas, ()
    if not decoupled:
        return (*formulas, ("grad", _GRAD + _DECAY * _PARAM)), ()
    return (*formulas, ("param", _PARAM * Symbol("keep"))), (("keep", 1 - _LR * _DECAY),)


def evaluate(rule: Rule, values: dict[str, Any]) -> dict[str, Any]:
    """The formulas in torch: all values after a step, by name. Nothing is written.

    values: settings and `step` as numbers, the others as tensors.
    """
    values = dict(values)
    for of, formulas in (("math", rule.scalars), ("torch", rule.formulas)):
        for name, formula in formulas:
            names = tuple(sorted(str(s) for s in formula.free_symbols))
            values[name] = _callable(formula, names, of)(*(values[n] for n in names))
    return values


@functools.cache
def _callable(formula: Expr, names: tuple[str, ...], of: str) -> Callable[..., Any]:
    made: Callable[..., Any] = lambdify(names, formula, modules=[{"sign": _sign}, of] if formula.has(sign) else of)
    return made


def _sign(x: Any) -> Any:
    """NaN of NaN, which torch takes for 0."""
    return x.sign().where(x == x, x)
