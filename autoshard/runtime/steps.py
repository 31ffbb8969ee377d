"""What surrounds every optimizer's step, by torch's public hooks: checks, then the step itself where we take it.

A compiled step has them between its graphs: Dynamo must not trace what looks at gradients and swaps parameters.

[Note: Closures] A closure computes the gradients within the step. What looks at gradients then waits until it has run.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from autoshard import torch_internals
from autoshard.errors import DivergenceError
from autoshard.runtime import beside, factored, fused_step, local_step, scaler
from autoshard.runtime.live import any_live, stepped_by
from autoshard.runtime.loaded import load_rows, scatter_loaded
from autoshard.runtime.lost_peers import naming_lost_peers
from autoshard.runtime.optimizers import check_steps_on_shards, stands_still
from autoshard.runtime.state import ModelState

Call = tuple[tuple[Any, ...], dict[str, Any]]


_out: weakref.WeakKeyDictionary[Optimizer, list[list[nn.Parameter]]] = weakref.WeakKeyDictionary()


@functools.cache
def watch_steps() -> None:
    """Installs, once, what surrounds steps."""
    torch_internals.surround_steps(_before_step, _stepped)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The arguments of the step, where they are others."""
    if torch_internals.within_step(optimizer):
        return None
    _give_back(optimizer)  # where the last step was interrupted, the hooks after it did not run
    states = stepped_by(optimizer)
    sharded = any(state.plan.sharded for state in states)
    closure = kwargs.get("closure", next(iter(args[1:]), None))  # args[0] is the optimizer
    if sharded:
        check_steps_on_shards(optimizer, closure is not None)
        load_rows(optimizer)
    if not callable(closure):
        _check_gradients(optimizer, states)
    how, taken = _step(optimizer, closure is not None, sharded, any(state.fuses for state in states))
    for state in states:
        state.steps[type(optimizer).__name__] = how
    if taken:
        _leave_nothing_to_do(optimizer)
    if not callable(closure) or not states:
        return None
    checked = _checked(closure, optimizer)
    return (args, {**kwargs, "closure": checked}) if "closure" in kwargs else ((args[0], checked, *args[2:]), kwargs)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    if torch_internals.within_step(optimizer):
        return
    _give_back(optimizer)
    states = stepped_by(optimizer)
    if not states and any_live():
        beside.after_step(optimizer)
    for early in sorted((s.early for s in states if s.early), key=lambda early: early.number):
        naming_lost_peers(early.start)()


def _leave_nothing_to_do(optimizer: Optimizer) -> None:
    """Of torch's own step, which still comes."""
    _out[optimizer] = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []


def _give_back(optimizer: Optimizer) -> None:
    for group, parameters in zip(optimizer.param_groups, _out.pop(optimizer, [])):
        group["params"] = parameters


def _checked(closure: Callable[..., Any], optimizer: Optimizer) -> Callable[[], Any]:
    """The closure, and then what is said of its gradients."""

    @functools.wraps(closure)
    def checked(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        _check_gradients(optimizer, stepped_by(optimizer))
        return loss

    return checked


def _check_gradients(optimizer: Optimizer, states: Sequence[ModelState]) -> None:
    stepped, still = functools.partial(fused_step.stepped_by, optimizer), stands_still(optimizer)
    if any(state.plan.sharded for state in states):
        scaler.check(stepped)  # first: another process may skip this step already, and not come to what follows
    for state in states:
        state.check_step(optimizer, stepped, still)
    if states and not still:
        _refuse_strangers(optimizer, states)


def _refuse_strangers(optimizer: Optimizer, states: Sequence[ModelState]) -> None:
    known = functools.reduce(operator.or_, (state.ids for state in states))
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for parameter in (p for p in parameters if id(p) not in known and p.grad is not None):
        raise DivergenceError(
            f"the optimizer steps a parameter of shape {tuple(parameter.shape)} that is in no model compiled with "
            "autoshard, beside some that are: nothing averages its gradient, so processes would silently differ"
        )


def _step(optimizer: Optimizer, closure: bool, sharded: bool, fuses: bool) -> tuple[str, bool]:
    """How a step is taken, in words, and whether it was."""
    itself = fused_step.steps_itself(optimizer)
    if not itself and (fuses or optimizer in fused_step.asked_for) and fused_step.take_over(optimizer, closure):
        return "all parameters at once", True
    if sharded and not (itself and fused_step.is_laid_out(optimizer)):
        scatter_loaded(optimizer)
    if itself:
        return itself, False
    if (sharded or fuses or optimizer in fused_step.asked_for) and factored.take_over(optimizer, closure, sharded):
        return factored.HOW, True
    if sharded and local_step.take_over(optimizer, closure):
        return "on rows, by torch", True
    return "by torch", False
