"""autoshard: one line makes an ordinary PyTorch training loop run sharded.

    model = torch.compile(model, backend=autoshard.backend())
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from autoshard import optim
from autoshard.compiler import Backend
from autoshard.config import Config
from autoshard.cost_model.cluster import Cluster
from autoshard.errors import AutoshardError, ConfigError
from autoshard.optim import fuse
from autoshard.plan import Degrees, ParameterGroup, Plan
from autoshard.planning import plan
from autoshard.report import Report
from autoshard.runtime import gathered as _gathered
from autoshard.runtime import live as _live
from autoshard.runtime import state as _state
from autoshard.runtime.whole import in_whole, state_of_module
from autoshard.sweep import Sweep, Swept, sweep
from autoshard.torch_internals import original_of
from autoshard.version import __version__

__all__ = [
    "AutoshardError",
    "Cluster",
    "Config",
    "Degrees",
    "ParameterGroup",
    "Plan",
    "Report",
    "Sweep",
    "Swept",
    "__version__",
    "backend",
    "fuse",
    "gathered",
    "no_sync",
    "optim",
    "plan",
    "plan_of",
    "report",
    "state_dict",
    "sweep",
]


def backend(config: Config | None = None, *graph: Any) -> Backend:
    """A backend for torch.compile. Without a config everything is decided from the model and the machine. ConfigError of anything
    else, such as a graph's module and inputs: what torch.compile gives it where it was not called."""
    if graph or not isinstance(config, Config | None):
        raise ConfigError(f"backend: {type(config).__name__} is not legal; legal: backend=autoshard.backend(autoshard.Config(...)), called")
    return Backend(config)


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that a model trains by, compiled or not; None before its first call."""
    state = _state.state_of(model)
    return state.plan if state else None


def report(model: nn.Module) -> Report:
    """The plan of a model and what compiling it did; print it."""
    state = _state_after_first_call(model, "report")
    assert state.reporter is not None
    made: Report = state.reporter(state)
    return made


def _state_after_first_call(model: nn.Module, what: str) -> _state.ModelState:
    state = _state.state_of(model)
    if state is None:
        part = " (this is a part of one)" if _live.has_rows_of_another(model) else ""
        raise AutoshardError(f"autoshard.{what} takes a model that was compiled, after its first call{part}")
    return state


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards of forwards inside do not reduce gradients where the plan keeps them whole (stages 0, 1)."""
    with ExitStack() as stack:
        for accumulation in _state.accumulations_in(model):
            stack.enter_context(accumulation.no_sync())
        yield


def state_dict(of: nn.Module | Optimizer, keep: bool | None = None) -> dict[str, Any]:
    """The whole of a model, under its original names, or of an optimizer, as torch.optim would give it, on the CPU, apart from
    what training goes on with: on rank 0, or on each process that says to `keep` it; empty on others. A collective, which all
    processes enter: DisagreementError if one does not come.

    For sharded checkpoints use torch.distributed.checkpoint and its `get_state_dict` on the module itself
    (`model._orig_mod` of a compiled one, whose names torch prefixes).
    """
    for state in _live.stepped_by(of) if isinstance(of, Optimizer) else _state.states_in(of):
        state.come("autoshard.state_dict")
    keeps = (not dist.is_initialized() or dist.get_rank() == 0) if keep is None else keep
    if isinstance(of, Optimizer):
        return in_whole(of.state_dict(), keeps)
    return in_whole(state_of_module(original_of(of)), keeps)


@contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """The model with whole, plain parameters on every process, for generate, export or evaluation in eager.

    A collective: all processes must enter. For reading; a write inside is an error at the end.
    """
    states = _state.states_in(model) or [_state_after_first_call(model, "gathered")]
    with ExitStack() as stack:
        for state in states:
            stack.enter_context(_gathered.gathered(state))
        yield original_of(model)
