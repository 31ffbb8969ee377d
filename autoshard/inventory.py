"""Inventory: what a plan is made from. Names, shapes and order of use of a model's parameters, no values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from autoshard.errors import UnsupportedError


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter. Shared (tied) parameters appear once, under their first name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trained: bool
    used: bool

    @property
    def elements(self) -> int:
        """Numbers in the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Inventory:
    """The parameters of a model, those that the captured graph uses first, in the order of use."""

    model: str
    parameters: tuple[ParameterInfo, ...]

    @property
    def covered(self) -> float:
        """Share of the elements that the captured graph uses."""
        total = sum(p.elements for p in self.parameters)
        return sum(p.elements for p in self.parameters if p.used) / total if total else 1.0


def names_of(model: nn.Module) -> dict[int, str]:
    """The names of a model's parameters, by id; the first name of one that is shared."""
    return {id(p): name for name, p in model.named_parameters()}


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def take_inventory(model: nn.Module, used_in_order: Iterable[nn.Parameter]) -> Inventory:
    """The inventory of `model`; `used_in_order` are the parameters that a captured graph takes as inputs. Where it takes
    none, the model's own order stands for the order of use."""
    names = names_of(model)
    parameters = {id(p): p for p in model.parameters()}
    used = [id(p) for p in used_in_order if id(p) in names] or list(parameters)
    rest = [key for key in parameters if key not in set(used)]
    return Inventory(
        type(model).__name__,
        tuple(
            _info(names[key], parameters[key], position < len(used))
            for position, key in enumerate(dict.fromkeys([*used, *rest]))
        ),
    )


def _info(name: str, parameter: nn.Parameter, used: bool) -> ParameterInfo:
    if isinstance(parameter, UninitializedParameter):
        raise UnsupportedError(f"parameter {name!r} is lazy and has no shape yet; run one batch in eager first")
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ParameterInfo(
        name, tuple(parameter.shape), dtype, parameter.element_size(), parameter.requires_grad, used
    )


def floating(dtype: str) -> bool:
    """True if a dtype of this name has gradients."""
    return bool(getattr(torch, dtype).is_floating_point)
