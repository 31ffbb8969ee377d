"""The states of the models that several processes train now."""

from __future__ import annotations

import itertools
import operator
import weakref
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from autoshard import torch_internals

if TYPE_CHECKING:  # which imports this
    from autoshard.runtime.state import ModelState

# No WeakSet, which takes long to give what is in it: each step asks twice.
_live: list[weakref.ref[ModelState]] = []
_copies: weakref.WeakSet[ModelState] = weakref.WeakSet()


def remember(state: ModelState) -> None:
    """For as long as it is there."""
    _live.append(weakref.ref(state, _live.remove))


def note_copy(state: ModelState) -> None:
    """One that came to be by copying a sharded model."""
    _copies.add(state)


def copies() -> list[ModelState]:
    """The states of models that are copies of sharded ones."""
    return list(_copies)


def stepped_by(optimizer: Optimizer) -> list[ModelState]:
    """The states of the models whose parameters an optimizer has, in the same order on all processes."""
    parameters = [group["params"] for group in optimizer.param_groups]
    here = [state for ref in tuple(_live) if (state := ref()) is not None]  # one of them may go meanwhile
    found = [state for state in here if not state.ids.keys().isdisjoint(map(id, itertools.chain.from_iterable(parameters)))]
    return sorted(found, key=operator.attrgetter("topic", "number")) if len(found) > 1 else found


def any_live() -> bool:
    """Whether there is a model that several processes train, or a copy of one."""
    return bool(_live)


def state_with(parameter: nn.Parameter) -> ModelState | None:
    """The state of the model whose first call found this parameter."""
    return next((state for ref in tuple(_live) if (state := ref()) is not None and id(parameter) in state.ids), None)


def has_rows_of_another(module: nn.Module) -> bool:
    """Whether it has parameters of a model that carries a state, as a part of that has."""
    return any(state_with(p) is not None for p in torch_internals.original_of(module).parameters())
