"""What a sharded model is given by load_state_dict becomes rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from autoshard import torch_internals
from autoshard.errors import UnsupportedError
from autoshard.runtime.dtensors import refuse_strange_rows
from autoshard.runtime.live import state_with
from autoshard.runtime.lost_peers import naming_lost_peers
from autoshard.runtime.parameters import LOADING


def let_load(model: nn.Module) -> None:
    """Lets a model load whole state dicts from here on."""
    for module in model.modules():  # those without parameters too: the outermost one is given all that is loaded
        if not isinstance(module, torch.jit.ScriptModule):
            module.__dict__[LOADING] = module.register_load_state_dict_pre_hook(_scatter_loaded).id


_distribute = naming_lost_peers(distribute_tensor)


def _scatter_loaded(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, _strict: bool, missing: list[str], *_: Any
) -> None:
    """Plain full tensors of a loaded state dict become shards like the parameters that they go to, with rank 0's values.
    UnsupportedError where they are to take the place of parameters, since optimizers would go on with the old ones."""
    _come_to_load(module, state_dict, prefix, missing)
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if parameter is None or value is None:
            continue
        state = state_with(parameter)
        if state is not None and torch_internals.assigns(metadata):
            torch_internals.forget_assigned(metadata)
            raise UnsupportedError(
                f"load_state_dict(assign=True) would put another in the place of parameter {prefix + name!r}, and optimizers would "
                "go on with the old one; legal after the first call: load_state_dict(assign=False), of dict(...) of what "
                "another load was given with assign=True (torch leaves that in it)"
            )
        if not isinstance(parameter, DTensor):
            continue
        refuse_strange_rows(f"parameter {prefix + name!r}", value, parameter)
        if _is_whole(value, parameter):
            state_dict[prefix + name] = _distribute(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def _come_to_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, missing: list[str]) -> None:
    """With all that the outermost module is given, before any of it is sent."""
    state = next((found for p in module.parameters() if (found := state_with(p)) is not None), None)
    if state is None:
        return
    here = module.named_parameters(recurse=not state.is_loading(missing), remove_duplicate=False)
    named = [(state.ids.get(id(p)), p, state_dict.get(prefix + name)) for name, p in here]
    if names := [name for name, p, value in named if name is not None and isinstance(p, DTensor) and _is_whole(value, p)]:
        state.come_to_load(names, missing)


def _is_whole(value: Any, parameter: DTensor) -> bool:
    """Whether a value of a state dict is to become rows of this; of what has no values torch says so."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape
