"""Models that were compiled with autoshard and that torch.compile skipped: they would train apart, silently.

Dynamo leaves alone what is written in torch.nn (an nn.LSTM; an nn.Sequential compiled in place), so the backend
is never called. Steps look for such a model, until each parameter of an optimizer had a gradient once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from autoshard import torch_internals
from autoshard.errors import DivergenceError, UnsupportedError
from autoshard.owner import compiled_modules
from autoshard.runtime import fused_step
from autoshard.runtime.live import stepped_by
from autoshard.runtime.optimizers import stands_still
from autoshard.runtime.processes import launched_size
from autoshard.runtime.state import state_of

_WRAPPERS: dict[type, str] = {
    DistributedDataParallel: "DistributedDataParallel",
    FullyShardedDataParallel: "FullyShardedDataParallel",
    FSDPModule: "fully_shard",
}
_looked_at: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()  # the ids of parameters that need no further look


def watch(is_ours: Callable[[Any], bool], made: Collection[Any]) -> None:
    """Installs the check for models whose backend is ours, on all optimizers, by torch's public hook. made: the backends that there are."""

    def look(optimizer: Optimizer, *_: Any) -> None:
        count = sum(len(group["params"]) for group in optimizer.param_groups)  # 0 behind a step that we took, until it gets them back
        if count and len(_looked_at.get(optimizer, ())) != count and launched_size() > 1 and not stands_still(optimizer):
            _check(optimizer, is_ours, made)

    torch_internals.surround_steps(look, look)  # behind a step too: a closure computes gradients within it


def _check(optimizer: Optimizer, is_ours: Callable[[Any], bool], made: Collection[Any]) -> None:
    """A parameter of no model of ours is looked at when it has its first gradient."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    looked_at = own & _looked_at.get(optimizer, set())  # of those that are gone others may have the ids
    looked_at |= own.intersection(key for state in stepped_by(optimizer) for key in state.ids)
    new = set(map(id, fused_step.stepped_by(optimizer))) - looked_at
    if new:
        _refuse_skipped(new, is_ours, made)
    _looked_at[optimizer] = looked_at | new


def _refuse_skipped(stepped: Collection[int], is_ours: Callable[[Any], bool], made: Collection[Any]) -> None:
    """stepped: the ids of parameters, some of them of no model that autoshard has."""
    compiled = list(compiled_modules())
    for module, backend in compiled:
        if not is_ours(backend) or state_of(module) is not None:
            continue
        if any(id(p) in stepped for p in module.parameters()):
            refuse_recurrent(module)
            refuse_wrapped(module)
            name = type(module).__name__
            if torch_internals.suppressed_errors():
                raise DivergenceError(
                    f"compiling {name} failed, which suppress_errors of Dynamo's config hides, so processes would "
                    "silently differ; set it to False to see why"
                )
            raise DivergenceError(
                f"{name} was compiled with autoshard, but torch.compile never gave it a graph, so processes would silently differ. "
                "Call what torch.compile returned, not the module itself, and not inside of what torch.compile compiled with another backend. "
                f"Of models of one class Dynamo compiles at most {torch_internals.recompile_limit()} (its recompile_limit, of which it warns), "
                "also where the others are gone: call torch.compiler.reset() before each further one. What is written in torch.nn and compiled "
                "in place it skips: call it from a module of your own and compile that"
            )
    _warn_of_unserved([backend for _, backend in compiled], made)


def _warn_of_unserved(compiled: Sequence[Any], made: Collection[Any]) -> None:
    """compiled: the backends of modules."""
    if any(not backend.called and not any(backend is of for of in compiled) for backend in made):
        warnings.warn(
            "an optimizer steps parameters of no model that autoshard has, and a backend of autoshard has no model: of torch.compile(..., "
            "disable=True) it gets none, and processes train apart",
            stacklevel=3,
        )


def _called(name: str) -> str:
    """What a module of a model is called."""
    return f"module {name!r}" if name else "the model"


def _found(name: str, module: nn.Module) -> str:
    return f"{_called(name)} is an {type(module).__name__}"


def refuse_recurrent(model: nn.Module) -> None:
    """Dynamo leaves these out of every graph, and with them the module that calls one."""
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            raise UnsupportedError(
                f"{_found(name, module)}: Dynamo leaves it out of every graph, so nothing would "
                "gather its parameters or average their gradients; train it with one process, or write the recurrence out "
                "(nn.LSTMCell and nn.GRUCell are fine)"
            )


def refuse_scripted(model: nn.Module) -> None:
    """Dynamo leaves TorchScript out of every graph; without parameters or buffers it is a function."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and [*module.parameters(), *module.buffers()]:
            raise UnsupportedError(
                f"{_called(name)} is TorchScript, which Dynamo leaves out of every graph, so nothing would "
                "gather its parameters or average their gradients; legal: the module that it was made of, which torch.compile compiles as well"
            )


def refuse_sparse(model: nn.Module) -> None:
    """Gradients that are no plain tensors are nothing that rows or means could be made of."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise UnsupportedError(
                f"{_found(name, module)} with sparse=True, and gradients that are sparse "
                "tensors are not averaged over processes; legal: sparse=False, of which only the rows that were looked up travel where "
                "that is fewer bytes"
            )


def refuse_wrapped(model: nn.Module) -> None:
    """Two would shard, or reduce, the same parameters; what FSDP's first wrapper is around Dynamo skips."""
    for name, module in model.named_modules():
        wrapper = next((said for wrapper, said in _WRAPPERS.items() if isinstance(module, wrapper)), None)
        if wrapper:
            raise UnsupportedError(f"{_called(name)} is wrapped by {wrapper}; autoshard takes the plain module")
