"""State dicts with whole tensors, apart from what training goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from autoshard.runtime.dtensors import local
from autoshard.runtime.shard import full_value
from autoshard.torch_internals import storage_of


def in_whole(state: Mapping[str, Any], keeps: bool) -> dict[str, Any]:
    """The same with whole tensors on the CPU, copies of those that lie here; of what is tied and whole, one. Empty where this process
    does not keep it. One tensor at a time is whole on every device. A collective, which all enter, whoever keeps it."""
    here = {storage_of(local(t)) for t in tree_leaves(dict(state)) if isinstance(t, Tensor) and t.layout == torch.strided}
    copies: dict[Any, Tensor] = {}

    def whole(value: Any) -> Any:
        full = full_value(value) if isinstance(value, Tensor) else value
        if not keeps or not isinstance(full, Tensor):
            return full if keeps else None
        if full.layout != torch.strided or storage_of(full) not in here:
            return full.to("cpu", copy=not isinstance(value, DTensor))
        place = storage_of(full), full.storage_offset(), full.shape, full.stride()
        if place not in copies:
            copies[place] = full.to("cpu", copy=True)
        return copies[place]

    found = tree_map(whole, dict(state))
    return found if keeps else {}
