"""Parameters that are trained beside sharded models, by optimizers that have none of theirs.

[Note: Beside] Nothing here averages their gradients. That is right where somebody else does (DDP, a collective of the user's own, a hook
of the optimizer), and where all processes compute the same, or one of them trains alone; else processes train apart, without a word. So
what is looked at is what was stepped by: behind the steps 1, 2, 4, 8 and so on of such an optimizer the process that comes first leaves
checksums of its gradients in the store, and one that comes to that step with others says so. Nobody waits, and it is no error: each may
train its own on purpose. Of optimizers that are alike the first one is looked at; a loop may make one for each batch.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from autoshard.heap import alive
from autoshard.runtime.agreement import digest
from autoshard.runtime.fingerprint import arithmetic, checksums
from autoshard.runtime.optimizers import stands_still
from autoshard.runtime.presence import job_store

_LAYOUTS = (torch.strided, torch.sparse_coo)


@dataclass(eq=False)
class _Beside:
    """One such optimizer. topic: the same on all processes; "" of one that is not looked at. steps: so many it has taken."""

    topic: str
    steps: int = 0


_known: weakref.WeakKeyDictionary[Optimizer, _Beside] = weakref.WeakKeyDictionary()
_kinds: set[str] = set()


def after_step(optimizer: Optimizer) -> None:
    """To be called behind each step of an optimizer that has no parameter of a sharded model, where there is one. Warns, on one process
    of the job, the first time that gradients are not on this process what they are on another."""
    grads = _gradients(optimizer)
    if not grads or stands_still(optimizer) or not dist.is_initialized() or _is_captured():
        return
    beside = _known.get(optimizer) or _begun(optimizer, grads)
    beside.steps += 1
    if not beside.topic or beside.steps & (beside.steps - 1) != 0:
        return
    with contextlib.suppress(dist.DistNetworkError):  # who hosts the store may have ended: there is nobody to part from
        _compare(optimizer, beside, grads)


def _begun(optimizer: Optimizer, grads: dict[int, Tensor]) -> _Beside:
    shapes = [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    arithmetics = sorted({arithmetic(grad.device) for grad in grads.values()})
    kind = digest([type(optimizer).__name__, shapes, arithmetics])
    topic = "" if kind in _kinds else f"autoshard/beside/{kind}"
    _kinds.add(kind)
    return _known.setdefault(optimizer, _Beside(topic))


def _is_captured() -> bool:
    """Into a CUDA graph, which nothing can be read from."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _compare(optimizer: Optimizer, beside: _Beside, grads: dict[int, Tensor]) -> None:
    parameters = _parameters(optimizer)
    marks = dict(zip(grads, checksums(list(grads.values()))))
    ours = [f"{marks[i]:x}" if i in marks else "-" for i in range(len(parameters))]
    store = job_store(beside.topic)
    first = store.compare_set(f"step {beside.steps}", "", " ".join(ours)).decode().split(" ")
    apart = [p for p, here, there in zip(parameters, ours, first) if here != there]
    if (bare := _not_wrapped(apart)) and store.add("said", 1) == 1:
        warnings.warn(_said(optimizer, bare[0], beside.steps), stacklevel=2)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _gradients(optimizer: Optimizer) -> dict[int, Tensor]:
    """By the parameter's place, but for those that are this process's part."""
    grads = ((i, p.grad) for i, p in enumerate(_parameters(optimizer)))
    return {i: grad for i, grad in grads if grad is not None and _is_comparable(grad)}


def _is_comparable(grad: Tensor) -> bool:
    """Not of DTensors, nor of what else other libraries make of tensors, nor without values."""
    return type(grad) is Tensor and grad.layout in _LAYOUTS and not grad.is_meta


def _not_wrapped(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those that torch's own wrappers do not look after, which may let gradients differ for a while."""
    if not parameters:
        return []
    wrappers = (m for m in alive(nn.Module) if isinstance(m, (DistributedDataParallel, FullyShardedDataParallel)))
    wrapped = {id(p) for wrapper in wrappers for p in wrapper.parameters()}
    return [p for p in parameters if id(p) not in wrapped]


def _said(optimizer: Optimizer, parameter: Tensor, step: int) -> str:
    group, place = next(
        (g, i) for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"]) if p is parameter
    )
    return (
        f"autoshard: in step {step} of an optimizer {type(optimizer).__name__}, the gradient of parameter {place} of its group "
        f"{group} ({_named(parameter)}) is not the same on all processes. No model compiled with autoshard has this parameter, so nothing "
        "averages its gradients, and each process trains it by itself. Compile its module too, wrap it in DistributedDataParallel, or "
        "average its gradients before the step; filter this warning where each process is to train its own"
    )


def _named(parameter: Tensor) -> str:
    """By the module that has it, which the optimizer does not know."""
    shape = f"of shape {tuple(parameter.shape)}"
    held: Any = ((module, module.__dict__.get("_parameters", {})) for module in alive(nn.Module))
    names = (f"{name} of a {type(module).__name__}, {shape}" for module, own in held for name, p in own.items() if p is parameter)
    return next(names, shape)
