"""What an optimizer keeps and what its step takes for a while, found by stepping a copy of it on tensors without values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autoshard import torch_internals
from autoshard.torch_internals import FakeTensorMode, TorchDispatchMode

Rows = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of what a process holds of a parameter
Make = Callable[[Sequence[nn.Parameter]], "Optimizer | Sequence[Optimizer]"]

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
    """Bytes of one process. state: between steps. scratch: of each tensor that there is above that at the highest moment of a step.
    moved: what each of a step's operations reads (and writes there), and what it writes elsewhere."""

    state: int
    scratch: tuple[int, ...] = ()
    moved: tuple[tuple[int, int], ...] = ()


def made_by(make: Make, parameters: Sequence[nn.Parameter]) -> list[Optimizer]:
    """The optimizer that it makes, or all of them."""
    made = make(parameters)
    return [made] if isinstance(made, Optimizer) else list(made)


@dataclass(frozen=True)
class Existing:
    """Optimizers that hold a model's parameters. names: of these, by id."""

    optimizers: Sequence[Optimizer]
    names: Mapping[int, str]

    def on(self, order: Sequence[str]) -> Make:
        """Makes optimizers as these are, on as many parameters as `order` has names, each in the groups that it is in here."""
        makes = []
        for optimizer in {id(inside): inside for inside in map(_inside, self.optimizers)}.values():
            groups = {self.names.get(id(p)): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
            makes.append(like(optimizer, [groups.get(name) for name in order]))
        return lambda parameters: [made for make in makes if (made := make(parameters)).param_groups]


def _inside(optimizer: Optimizer) -> Optimizer:
    """Of one that wraps another (accelerate's), the other: what is set on a wrapper may be set on what it wraps."""
    inner = getattr(optimizer, "optimizer", None)
    return _inside(inner) if isinstance(inner, Optimizer) else optimizer


def like(optimizer: Optimizer, groups: Sequence[int | None]) -> Callable[[Sequence[nn.Parameter]], Optimizer]:
    """Makes optimizers as this one is on other parameters, without state. groups: the number of each one's group; None of one that it
    does not hold."""
    optimizer = _inside(optimizer)

    def make(parameters: Sequence[nn.Parameter]) -> Optimizer:
        made: Optimizer = object.__new__(type(optimizer))
        made.__dict__.update(vars(optimizer))
        made.__dict__.pop("step", None)  # a learning-rate scheduler's, which steps the original
        made = torch_internals.without_hooks(made)
        made.state = defaultdict(dict)
        made.param_groups = [
            {**group, "params": members}
            for i, group in enumerate(optimizer.param_groups)
            if (members := [p for p, at in zip(parameters, groups, strict=True) if at == i])
        ]
        return made

    return make


def memory(make: Make, rows: Sequence[Rows], foreach: bool) -> OptimizerMemory | None:
    """What `make`'s optimizers take, one after the other, where this process holds these rows; None if a step cannot go on
    without values.

    foreach: torch's default on this device, which takes all parameters at once (GPUs) or each alone (CPUs).
    """
    if not rows:  # which torch makes no optimizer of
        return OptimizerMemory(0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in rows]
        optimizers = made_by(make, parameters)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            if group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = foreach
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        try:
            for optimizer in optimizers:
                optimizer.step()
            with _Watch() as watch:
                for optimizer in optimizers:
                    optimizer.step()
        except Exception:  # of any kind, since it is the user's code: asking for values is only the usual one
            return None
        state = sum(_held(v) for optimizer in optimizers for s in optimizer.state.values() for v in tree_leaves(s))
        return OptimizerMemory(state, watch.peak, tuple(watch.moved))


def _held(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _overwritten(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """What of its arguments an operator writes to; fused and foreach ones return nothing of it. A fused one's gradients are only
    written where it unscales them."""
    given = zip(torch_internals.schema_of(func).arguments, args)
    left = () if kwargs.get("grad_scale") is not None else ("grads",)
    return tree_leaves([v for a, v in given if a.alias_info is not None and a.alias_info.is_write and a.name not in left])


class _Watch(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside and still exist; `peak` has those of each when they are most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak: tuple[int, ...] = ()
        self.moved: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {torch_internals.storage_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and torch_internals.storage_of(t) not in given]
        overwritten = _overwritten(func, args, kwargs or {})
        if made or overwritten:  # not a view, or a question about a tensor
            self.moved.append((sum(map(_held, [*tree_leaves((args, kwargs)), *overwritten])), sum(map(_held, made))))
        for tensor in made:
            self.alive[torch_internals.storage_of(tensor)] = (StorageWeakRef(tensor.untyped_storage()), _held(tensor))
        self.alive = {k: entry for k, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, tuple(size for _, size in self.alive.values()), key=sum)
        return out
