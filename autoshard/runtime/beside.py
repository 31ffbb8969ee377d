"""Parameters that are trained beside sharded models, by optimizers that have none of theirs.

[Note: Beside] Nothing here averages their gradients. That is right where somebody else does (DDP, a collective of the user's own), and
where all processes compute the same, or one of them trains alone; else processes train apart, without a word. So what is looked at is
what comes out: before the steps 1, 2, 4, 8 and so on of such an optimizer the process that comes first leaves checksums of its gradients
in the store, and one that comes to that step with others says so. Nobody waits, and it is no error: each may train its own on purpose.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from autoshard import torch_internals
from autoshard.heap import alive
from autoshard.runtime.agreement import digest
from autoshard.runtime.fingerprint import fingerprints
from autoshard.runtime.optimizers import stands_still

_LAYOUTS = (torch.strided, torch.sparse_coo)


@dataclass(eq=False)
class _Beside:
    """One such optimizer. topic: the same on all processes, which step those that are alike for the first time in the same order.
    steps: so many it has taken."""

    topic: str
    steps: int = 0


_known: weakref.WeakKeyDictionary[Optimizer, _Beside] = weakref.WeakKeyDictionary()
_alike: Counter[str] = Counter()


def before_step(optimizer: Optimizer) -> None:
    """To be called before each step of an optimizer that has no parameter of a sharded model, where there is one. Warns, on one process
    of the job, the first time that gradients are not on this process what they are on another."""
    if stands_still(optimizer) or not dist.is_initialized() or _is_captured():
        return
    beside = _known.get(optimizer) or _begun(optimizer)
    beside.steps += 1
    if beside.steps & (beside.steps - 1) != 0:
        return
    with contextlib.suppress(dist.DistNetworkError):  # who hosts the store may have ended: there is nobody to part from
        _compare(optimizer, beside)


def _begun(optimizer: Optimizer) -> _Beside:
    shapes = [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    kind = digest([type(optimizer).__name__, shapes])
    _alike[kind] += 1
    return _known.setdefault(optimizer, _Beside(f"autoshard/beside/{kind}.{_alike[kind]}"))


def _is_captured() -> bool:
    """Into a CUDA graph, which nothing can be read from."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _compare(optimizer: Optimizer, beside: _Beside) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    store, ours = torch_internals.job_store(beside.topic), _checksums(parameters)
    first = store.compare_set(f"step {beside.steps}", "", " ".join(ours)).decode().split(" ")
    apart = [p for p, here, there in zip(parameters, ours, first) if here != there]
    if (bare := _not_wrapped(apart)) and store.add("said", 1) == 1:
        warnings.warn(_said(optimizer, bare[0], beside.steps), stacklevel=2)


def _checksums(parameters: Sequence[Tensor]) -> list[str]:
    """Of their gradients, "-" where there is none, or one that is this process's part."""
    grads = {i: p.grad for i, p in enumerate(parameters) if p.grad is not None and _is_comparable(p.grad)}
    marks = dict(zip(grads, fingerprints(list(grads.values()))))
    return [f"{zlib.crc32(repr(marks[i]).encode()):x}" if i in marks else "-" for i in range(len(parameters))]


def _is_comparable(grad: Tensor) -> bool:
    """Not of DTensors, nor of what else other libraries make of tensors."""
    return type(grad) is Tensor and grad.layout in _LAYOUTS


def _not_wrapped(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those that torch's own wrappers do not look after, which may let gradients differ for a while."""
    if not parameters:
        return []
    wrappers: list[nn.Module] = [*alive(DistributedDataParallel), *alive(FullyShardedDataParallel)]
    wrapped = {id(p) for wrapper in wrappers for p in wrapper.parameters()}
    return [p for p in parameters if id(p) not in wrapped]


def _said(optimizer: Optimizer, parameter: Tensor, step: int) -> str:
    group, place = next(
        (g, i) for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"]) if p is parameter
    )
    return (
        f"autoshard: before step {step} of an optimizer {type(optimizer).__name__}, the gradient of parameter {place} of its group "
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
