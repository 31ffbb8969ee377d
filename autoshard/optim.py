"""Optimizers that step all their parameters at once, on this process's rows.

On a GPU each takes one or few launches of a Triton kernel; on a CPU torch's own fused function, where it has one. Those that
torch.optim has take the same options, keep the same state, and load each other's state dicts.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from autoshard import torch_internals
from autoshard.errors import ConfigError, UnsupportedError
from autoshard.runtime import factored, families, fused_step
from autoshard.runtime.families import Family
from autoshard.runtime.fused_step import Gradients
from autoshard.runtime.norm import norm_of
from autoshard.runtime.steps import watch_steps

__all__ = ["SGD", "Adafactor", "Adam", "AdamW", "Lion", "fuse"]

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


class _Fused(Optimizer):
    """Steps by its family's formulas.

    max_norm: the norm of all parameters' gradients on all processes that the step clips to, in the same pass over memory; the
    gradients themselves stay as they are. norm: what it was at the last step, before clipping. master_weights: parameters of
    bf16 or fp16 are stepped in float32, which the optimizer keeps beside them.
    """

    steps_rows = "all parameters at once"
    family: Family
    max_norm: float | None = None
    norm: Tensor | None = None
    master_weights: bool = False

    def _also(self, max_norm: float | None, master_weights: bool) -> None:
        self.max_norm, self.master_weights = _checked(max_norm), master_weights

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which torch gives nothing else."""
        return {**super().__getstate__(), "max_norm": self.max_norm, "master_weights": self.master_weights}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step. closure: computes the loss and the gradients anew; the loss is returned."""
        loss = _loss_of(closure)
        if reason := fused_step.take(self, self.family, self._gradients):
            raise UnsupportedError(f"autoshard.optim.{type(self).__name__} cannot step {reason}; torch.optim's may")
        return loss

    def _gradients(self) -> Gradients:
        found = fused_step.gradients_of(self)
        if self.max_norm is None:
            return found
        self.norm, scale = _clipped(self, self.max_norm, found.scale)
        return Gradients(scale, found.infinite)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of this class, or of torch.optim's of the same name."""
        keys = (*self.family.keys, families.MASTER)
        given = _loaded(self, super().load_state_dict, state_dict, self.family.settings, keys)
        _widen(self, given)


def _loss_of(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _checked(max_norm: float | None) -> float | None:
    if max_norm is not None and not (isinstance(max_norm, numbers.Real | Tensor) and max_norm > 0):
        raise ConfigError(f"max_norm: {max_norm!r} is not legal; legal: None, or more than 0")
    return max_norm


def _clipped(optimizer: Optimizer, max_norm: float, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """(the gradients' norm, what to divide them by)."""
    norm = norm_of(p.grad for p in fused_step.stepped_by(optimizer) if p.grad is not None)
    norm = norm if scale is None else norm / scale
    over = ((norm + 1e-6) / max_norm).clamp(min=1.0)
    return norm, over if scale is None else over * scale


def _widen(optimizer: _Fused, state_dict: dict[str, Any]) -> None:
    """torch gives what it loads the dtype of the parameter, which a master and what goes with it have not."""
    for group, loaded in zip(optimizer.param_groups, state_dict["param_groups"]):
        for parameter, index in zip(group["params"], loaded["params"]):
            if families.MASTER not in families.keys_of(optimizer, optimizer.family, group, parameter):
                optimizer.state.get(parameter, {}).pop(families.MASTER, None)  # of one that had them
                continue
            state, given = optimizer.state[parameter], state_dict["state"].get(index, {})
            for key in state.keys() & given.keys() - {"step"}:
                state[key] = given[key].to(parameter.device, torch.float32, copy=True)


def _loaded(
    optimizer: Optimizer,
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    settings: Callable[[Any], Any],
    keys: Sequence[str],
) -> dict[str, Any]:
    """Loads a state dict that has the settings and no other keys; what the user's own hooks gave in its place."""
    given = state_dict

    def last(_: Optimizer, of_hooks: dict[str, Any]) -> None:
        nonlocal given
        given = of_hooks
        _refuse_others(f"this state dict is not {type(optimizer).__name__}'s", given, settings, keys)

    handle = optimizer.register_load_state_dict_pre_hook(last)  # behind the user's own
    try:
        load(state_dict)
    finally:
        handle.remove()
    return given


def _refuse_others(kind: str, state_dict: dict[str, Any], settings: Callable[[Any], Any], keys: Sequence[str]) -> None:
    """settings: reads those of a group, or raises KeyError."""
    for group in state_dict["param_groups"]:
        try:
            settings(group)
        except KeyError as error:
            raise ConfigError(f"{kind}: a parameter group in it has no {error}") from error
        for index in group["params"]:
            if strange := set(state_dict["state"].get(index, {})) - set(keys):
                raise ConfigError(f"{kind}: it has {min(strange)!r}, legal: {', '.join(keys)}")


torch_internals.takes_scaled_gradients(_Fused)


class AdamW(_Fused, optim.AdamW):
    """torch.optim.AdamW in one pass over memory. Source: arXiv 1711.05101."""

    family = families.ADAM

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_norm: float | None = None,
        master_weights: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)
        self._also(max_norm, master_weights)


class Adam(_Fused, optim.Adam):
    """torch.optim.Adam in one pass over memory. Source: arXiv 1412.6980."""

    family = families.ADAM

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_norm: float | None = None,
        master_weights: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)
        self._also(max_norm, master_weights)


class SGD(_Fused, optim.SGD):
    """torch.optim.SGD in one pass over memory."""

    family = families.SGD

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        max_norm: float | None = None,
        master_weights: bool = False,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize)
        self._also(max_norm, master_weights)


class Lion(_Fused):
    """Steps by the sign of a mean of gradients, which takes one state a number. Source: arXiv 2302.06675.

    lr: a third to a tenth of AdamW's. betas: of the mean whose sign is taken, and of the mean that is kept.
    """

    family = families.LION

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        max_norm: float | None = None,
        master_weights: bool = False,
    ) -> None:
        if not float(lr) >= 0 or not weight_decay >= 0 or not all(0 <= beta < 1 for beta in betas):
            said = f"lr={lr!r}, betas={betas!r}, weight_decay={weight_decay!r}"
            raise ConfigError(f"{said}: legal are lr and weight_decay of 0 or more, betas in [0, 1)")
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options)
        self._also(max_norm, master_weights)


class Adafactor(optim.Adafactor):
    """torch.optim.Adafactor where parameters may be rows: of a matrix it keeps means over rows and columns, which take next to
    no memory (of a convolution's kernel, over its last two dimensions). Source: arXiv 1804.04235.

    Two collectives a step; every process must take it. max_norm, norm: as AdamW's here. On a GPU a few launches of Triton kernels,
    but for stacks of tiny matrices; on a CPU torch's operations.
    """

    steps_rows = factored.HOW

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        max_norm: float | None = None,
    ) -> None:
        super().__init__(params, lr, beta2_decay, eps, d, weight_decay, maximize=maximize)
        self.max_norm = _checked(max_norm)
        self.norm: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which torch gives nothing else."""
        return {**super().__getstate__(), "max_norm": self.max_norm, "norm": None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of this class, or of torch.optim.Adafactor."""
        settings = itemgetter("lr", "beta2_decay", "eps", "d", "weight_decay", "maximize")
        _loaded(self, super().load_state_dict, state_dict, settings, ("step", "row_var", "col_var", "variance"))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. closure: computes the loss and the gradients anew; the loss is returned."""
        loss = _loss_of(closure)
        if reason := factored.why_not(fused_step.stepped_by(self)):
            raise UnsupportedError(f"autoshard.optim.Adafactor cannot step {reason}")
        scale = None
        if self.max_norm is not None:
            self.norm, scale = _clipped(self, self.max_norm, None)
        factored.take(self, scale)
        return loss


def fuse(optimizer: Optimizer) -> Optimizer:
    """Has an optimizer of torch.optim step all its parameters at once from now on; returns it.

    Nothing of torch is replaced, and schedulers, GradScaler and state dicts go on with it. A step with a closure or with
    hooks of this optimizer is torch's own, and so is Adafactor's of plain tensors on a CPU.
    """
    if reason := fused_step.unfusable(optimizer):
        raise UnsupportedError(f"{type(optimizer).__name__} cannot be fused: {reason}")
    fused_step.asked_for.add(optimizer)
    watch_steps()
    return optimizer
