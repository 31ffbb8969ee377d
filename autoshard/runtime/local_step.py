"""Optimizer steps on this process's rows, for the optimizers of torch.optim that do to each number what they would
do to it in the whole.

[Note: Local steps] A step on DTensors pays their dispatch for every op on every parameter, and some optimizers fail
on them. So for the length of one `step()` the optimizer holds plain tensors: leaves over the rows, their gradients,
and its state, all in the storage of the DTensors; and after it, whether it failed or not, DTensors again, those of new state too. Where
a user's own hook would see the rows, or a closure computes gradients within the step, the optimizer steps on DTensors as it did.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autoshard import torch_internals
from autoshard.runtime.dtensors import dtensor_of, local
from autoshard.runtime.loaded import refuse_strange_state

ELEMENTWISE = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)


def can_step_locally(optimizer: Optimizer) -> bool:
    """True of exactly torch's own classes: a subclass may do anything in its step. In a step that is compiled Dynamo has set
    "capturable", with which torch's eager steps refuse a CPU."""
    return (
        type(optimizer) in ELEMENTWISE
        and not torch_internals.has_step_hooks(optimizer)
        and not any(group.get("differentiable") or _captured_on_cpu(group) for group in optimizer.param_groups)
    )


def _captured_on_cpu(group: dict[str, Any]) -> bool:
    return bool(group.get("capturable")) and any(p.device.type == "cpu" for p in group["params"])


@dataclass
class _Swapped:
    """One parameter that is out of its optimizer: its stand-in, and its state as DTensors and as rows."""

    parameter: nn.Parameter
    leaf: nn.Parameter
    state: dict[str, Any]
    rows: dict[str, Any]


@dataclass
class LocalStep:
    """What one optimizer holds during one step, and how it gets its own back."""

    optimizer: Optimizer
    groups: list[list[nn.Parameter]] = field(default_factory=list)
    swapped: list[_Swapped] = field(default_factory=list)

    def enter(self) -> None:
        """Rows take the places of DTensors."""
        for group in self.optimizer.param_groups:
            self.groups.append(group["params"])
            group["params"] = [self._stand_in(p) for p in group["params"]]

    def leave(self) -> None:
        """DTensors are back in their places."""
        for group, parameters in zip(self.optimizer.param_groups, self.groups):
            group["params"] = parameters
        for entry in self.swapped:
            _update_state(entry, self.optimizer.state.pop(entry.leaf, entry.rows))
            if entry.state:
                self.optimizer.state[entry.parameter] = entry.state

    def _stand_in(self, parameter: nn.Parameter) -> nn.Parameter:
        if not isinstance(parameter, DTensor):
            return parameter
        leaf = nn.Parameter(parameter.to_local(), requires_grad=parameter.requires_grad)
        leaf.grad = None if parameter.grad is None else local(parameter.grad)
        state = self.optimizer.state.pop(parameter, {})
        rows = {key: local(value) for key, value in state.items()}
        if state:
            self.optimizer.state[leaf] = dict(rows)
        self.swapped.append(_Swapped(parameter, leaf, state, rows))
        return leaf


def _update_state(entry: _Swapped, after: dict[str, Any]) -> None:
    """State that the step made or replaced goes into the parameter's own state; what it changed is there already."""
    for key, value in after.items():
        if value is not entry.rows.get(key, entry):
            entry.state[key] = _like(entry.parameter, key, value)


def _like(parameter: nn.Parameter, key: str, value: Any) -> Any:
    """State of the parameter's size as a DTensor that lies as the parameter does."""
    assert isinstance(parameter, DTensor)
    if not isinstance(value, Tensor) or key == "step" or value.shape != parameter.to_local().shape:
        return value
    return dtensor_of(value, parameter, parameter.device_mesh, parameter.placements)


def take_over(optimizer: Optimizer, closure: bool) -> bool:
    """Takes a step of an optimizer that has sharded parameters, on rows; False if it cannot."""
    if closure or not can_step_locally(optimizer) or not _gradients_lie_as_parameters(optimizer):
        return False
    refuse_strange_state(optimizer)
    step = LocalStep(optimizer)
    try:
        step.enter()
        torch_internals.step_without_hooks(optimizer)
    finally:
        step.leave()
    return True


def _gradients_lie_as_parameters(optimizer: Optimizer) -> bool:
    parameters: Iterable[Any] = (p for group in optimizer.param_groups for p in group["params"])
    return all(
        isinstance(p.grad, DTensor) and p.grad.placements == p.placements
        for p in parameters
        if isinstance(p, DTensor) and p.grad is not None
    )
