"""State dicts with whole tensors, apart from what training goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from autoshard.runtime.dtensors import local
from autoshard.runtime.shard import full_value
from autoshard.torch_internals import original_names, storage_of, versions_of, with_versions


def state_of_module(module: nn.Module) -> dict[str, Any]:
    """Its state dict, under the names that it has without torch.compile; what is tied is one object."""
    given = module.state_dict()
    state, first = dict(given), dict[int, str]()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        before = first.setdefault(id(parameter), name)
        if name in state and before in state and _lie_together(state[name], state[before]):
            state[name] = state[before]
    return with_versions(original_names(state), original_names(versions_of(given)))


def _lie_together(one: Any, other: Any) -> bool:
    """A hook may have put something else in the place of either."""
    return isinstance(one, DTensor) and isinstance(other, DTensor) and storage_of(one.to_local()) == storage_of(other.to_local())


def in_whole(state: Mapping[str, Any], keeps: bool) -> dict[str, Any]:
    """The same with whole tensors on the CPU, copies of those that lie here; of what is tied, one. Empty where this process
    does not keep it. One tensor at a time is whole on every device. A collective, which all enter, whoever keeps it."""
    here = {storage_of(local(t)) for t in tree_leaves(dict(state)) if isinstance(t, Tensor) and t.layout == torch.strided}
    copies: dict[Any, Tensor] = {}
    gathered: dict[int, Any] = {}

    def whole(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return copied(value)
        if id(value) not in gathered:
            gathered[id(value)] = copied(value)
        return gathered[id(value)]

    def copied(value: Any) -> Any:
        full = full_value(value) if isinstance(value, Tensor) else value
        if not keeps or not isinstance(full, Tensor):
            return full if keeps else None
        if full.layout != torch.strided or storage_of(full) not in here:
            return full.to("cpu", copy=not isinstance(value, DTensor))
        seen_as = full.dtype, full.shape, full.stride(), full.is_conj(), full.is_neg()
        place = storage_of(full), full.storage_offset(), seen_as
        if place not in copies:
            copies[place] = full.to("cpu", copy=True)
        return copies[place]

    found = tree_map(whole, dict(state))
    if not keeps:
        return {}
    return with_versions(found, versions) if (versions := versions_of(state)) else found
