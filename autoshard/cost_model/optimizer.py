"""What an optimizer keeps and what its step takes for a while, found by stepping a copy of it on tensors without values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoshard import torch_internals
from autoshard.torch_internals import FakeTensorMode

Rows = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of what a process holds of a parameter
Make = Callable[[Sequence[nn.Parameter]], Optimizer]

NAMED: dict[str, Make] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-3),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-3),
    "sgd_momentum": lambda ps: torch.optim.SGD(ps, lr=1e-3, momentum=0.9),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-3),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
}


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of one process. state: between steps. scratch: at the highest moment of a step, above that. moved: what each
    of a step's operations reads (and writes there), and what it writes elsewhere."""

    state: int
    scratch: int
    moved: tuple[tuple[int, int], ...] = ()


def like(optimizer: Optimizer) -> Make:
    """Makes optimizers as this one is, with its first group's options, on other parameters and without state.

    Of one that wraps another (accelerate's), as the other: what is set on a wrapper may be set on what it wraps.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return like(inner)

    def make(parameters: Sequence[nn.Parameter]) -> Optimizer:
        made: Optimizer = object.__new__(type(optimizer))
        made.__dict__.update(vars(optimizer))
        made.__dict__.pop("step", None)  # a learning-rate scheduler's, which steps the original
        made = torch_internals.without_step_hooks(made)
        made.state = defaultdict(dict)
        options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        made.param_groups = [{**options, "params": list(parameters)}]
        return made

    return make


def memory(make: Make, rows: Sequence[Rows], foreach: bool) -> OptimizerMemory | None:
    """What `make`'s optimizer takes where this process holds these rows; None if its step cannot go on without values.

    foreach: torch's default on this device, which takes all parameters at once (GPUs) or each alone (CPUs).
    """
    if not rows:  # which torch makes no optimizer of
        return OptimizerMemory(0, 0, ())
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in rows]
        optimizer = make(parameters)
        for group in optimizer.param_groups:
            if group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = foreach
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        try:
            optimizer.step()
            with _Watch() as watch:
                optimizer.step()
        except Exception:  # of any kind, since it is the user's code: asking for values is only the usual one
            return None
        state = sum(_held(v) for s in optimizer.state.values() for v in tree_leaves(s))
        return OptimizerMemory(state, watch.peak, tuple(watch.moved))


def _held(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _overwritten(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """What of its arguments an operator writes to; fused and foreach ones return nothing of it. A fused one's gradients are only
    written where it unscales them."""
    given = zip(func._schema.arguments, args)
    left = () if kwargs.get("grad_scale") is not None else ("grads",)
    return tree_leaves([v for a, v in given if a.alias_info is not None and a.alias_info.is_write and a.name not in left])


class _Watch(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside and still exist; `peak` is the most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.moved: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.untyped_storage()._cdata not in given]
        overwritten = _overwritten(func, args, kwargs or {})
        if made or overwritten:  # not a view, or a question about a tensor
            self.moved.append((sum(map(_held, [*tree_leaves((args, kwargs)), *overwritten])), sum(map(_held, made))))
        for tensor in made:
            storage = tensor.untyped_storage()
            self.alive[storage._cdata] = (StorageWeakRef(storage), _held(tensor))
        self.alive = {k: entry for k, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out
