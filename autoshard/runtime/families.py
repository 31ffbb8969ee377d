"""Kinds of optimizers whose steps are taken all at once: their formulas, what they keep, and torch's own fused function."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from autoshard import torch_internals
from autoshard.kernels import multi_tensor, rule
from autoshard.kernels.rule import Rule

Options = Mapping[str, Any]  # of a parameter group
MASTER = "master"  # the key of one in an optimizer's state, see [Note: Masters]


@dataclass
class Rows:
    """What one launch works on, in lists that run in parallel. states: by torch.optim's keys. copies: parameters of less
    precision than what is stepped in their place, see [Note: Masters]; mostly none.
    """

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    states: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    copies: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Family:
    """A kind of optimizer, by the options of a parameter group.

    keys: of all that may be kept of a parameter. settings: the numbers in its formulas. on_cpu: torch's fused function; None
    where torch has none. first: options that hold in a parameter's first step. halves: whether `on_cpu` is right for bf16 and fp16.
    """

    keys: tuple[str, ...]
    rule: Callable[[Options], Rule]
    settings: Callable[[Options], dict[str, float]]
    on_cpu: Callable[[Rows, Options, Tensor | None], None] | None
    first: Options = field(default_factory=dict)
    halves: bool = True

    def function_for(self, dtype: torch.dtype) -> Callable[[Rows, Options, Tensor | None], None] | None:
        """torch's, for parameters of this dtype on a CPU; None where that has to go by the formulas."""
        return self.on_cpu if self.halves or dtype not in multi_tensor.HALVES else None


def _adam_rule(options: Options) -> Rule:
    return rule.adam(
        decoupled=options["decoupled_weight_decay"],
        weight_decay=bool(options["weight_decay"] != 0),
        amsgrad=options["amsgrad"],
        maximize=options["maximize"],
        quick=_is_quick(options["betas"][0]),
    )


def _is_quick(beta: Any) -> bool:
    """Whether a mean is half or more what is new in it."""
    return float(beta) <= 0.5


def _adam_settings(options: Options) -> dict[str, float]:
    beta1, beta2 = map(float, options["betas"])
    return {**_numbers(options, "lr", "weight_decay", "eps"), "beta1": beta1, "beta2": beta2}


def _adam_on_cpu(rows: Rows, options: Options, infinite: Tensor | None) -> None:
    beta1, beta2 = options["betas"]
    states = [rows.states.get(key, []) for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
    torch_internals.fused_adam(
        (rows.params, rows.grads, *states, rows.steps),
        decoupled=options["decoupled_weight_decay"],
        beta1=beta1,
        beta2=beta2,
        found_inf=infinite,
        **{name: options[name] for name in ("lr", "eps", "weight_decay", "amsgrad", "maximize")},
    )


def _sgd_rule(options: Options) -> Rule:
    return rule.sgd(
        weight_decay=bool(options["weight_decay"] != 0),
        momentum=bool(options["momentum"] != 0),
        nesterov=options["nesterov"],
        maximize=options["maximize"],
    )


def _sgd_settings(options: Options) -> dict[str, float]:
    return _numbers(options, "lr", "weight_decay", "momentum", "dampening")


def _sgd_on_cpu(rows: Rows, options: Options, infinite: Tensor | None) -> None:
    torch_internals.fused_sgd(
        (rows.params, rows.grads, rows.states.get("momentum_buffer", [])),
        found_inf=infinite,
        **{name: options[name] for name in ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")},
    )


def _lion_rule(options: Options) -> Rule:
    beta1, beta2 = map(_is_quick, options["betas"])
    return rule.lion(weight_decay=bool(options["weight_decay"] != 0), maximize=options["maximize"], quick=(beta1, beta2))


def _lion_settings(options: Options) -> dict[str, float]:
    beta1, beta2 = map(float, options["betas"])
    return {**_numbers(options, "lr", "weight_decay"), "beta1": beta1, "beta2": beta2}


def _numbers(options: Options, *names: str) -> dict[str, float]:
    return {name: float(options[name]) for name in names}


ADAM = Family(("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"), _adam_rule, _adam_settings, _adam_on_cpu)
SGD = Family(("momentum_buffer",), _sgd_rule, _sgd_settings, _sgd_on_cpu, {"dampening": 0.0}, halves=False)
LION = Family(("exp_avg",), _lion_rule, _lion_settings, None)
FAMILIES: dict[type[Optimizer], Family] = {optim.Adam: ADAM, optim.AdamW: ADAM, optim.SGD: SGD}


def keys_of(optimizer: Optimizer, family: Family, options: Options, parameter: Tensor) -> tuple[str, ...]:
    """All that is kept of a parameter."""
    mastered = getattr(optimizer, "master_weights", False) and parameter.dtype in multi_tensor.HALVES
    return (*family.rule(options).keys, *((MASTER,) if mastered else ()))
