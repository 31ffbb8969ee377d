"""State that optimizers load whole, of which each process keeps its rows."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from autoshard import torch_internals
from autoshard.errors import UnsupportedError
from autoshard.runtime.dtensors import local, refuse_strange_rows


def load_rows(optimizer: Optimizer) -> None:
    """From here on state that the optimizer loads whole (each process reads the same file) becomes rows, as its parameter is, before torch
    takes it to its device: one tensor at a time is whole there, and none is kept."""
    torch_internals.before_loading(optimizer, _with_rows)


def _with_rows(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = zip(optimizer.param_groups, state_dict["param_groups"])
    sharded = {i: p for ours, given in groups for p, i in zip(ours["params"], given["params"]) if isinstance(p, DTensor)}
    state = dict(state_dict["state"])
    for i in sharded.keys() & state.keys():
        state[i] = _take_rows(dict(state[i]), sharded[i])
    return {**state_dict, "state": state}


def scatter_loaded(optimizer: Optimizer) -> None:
    """The same of what was loaded into an optimizer that nobody here knew of, or put into its state."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, DTensor):
            _take_rows(state, parameter)


def refuse_strange_state(optimizer: Optimizer) -> None:
    """Of an optimizer that keeps numbers of each number of a parameter. Plain ones that `scatter_loaded` left, of the shape of this process's
    rows, are of another parameter, or were saved of rows: they would be stepped with as if they were these."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if isinstance(parameter, DTensor) else ():
            if type(value) is Tensor and value.ndim and key != "step" and value.shape == local(parameter).shape:
                raise UnsupportedError(
                    f"{key} of the state of {type(optimizer).__name__} has the shape {tuple(value.shape)}, its parameter "
                    f"{tuple(parameter.shape)}; legal: whole, as autoshard.state_dict(optimizer) has it"
                )


def values_of(optimizer: Optimizer) -> list[Any]:
    """All that its state keeps, one after the other; what a user's own keeps apart of dicts is nobody's."""
    return list(itertools.chain.from_iterable(each.values() for each in optimizer.state.values() if isinstance(each, dict)))


def _take_rows(state: dict[str, Any], parameter: DTensor) -> dict[str, Any]:
    """Rows take the places of whole tensors in the state of a sharded parameter."""
    for key, value in state.items():
        if isinstance(value, DTensor) and value.device_mesh is parameter.device_mesh:
            continue  # rows of ours, as nearly all are
        refuse_strange_rows(f"{key} of an optimizer's state", value, parameter)
        if like_parameter(key, value, parameter):
            state[key] = _rows_of(value, parameter)
    return state


def _rows_of(value: Tensor, parameter: DTensor) -> Tensor:
    made = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    rows = made.to_local()
    return made.clone() if rows.untyped_storage().nbytes() > rows.nbytes else made  # a view would keep the whole


def like_parameter(key: str, value: Any, parameter: Tensor) -> bool:
    """Whether a whole tensor is kept of each number of the parameter."""
    whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return whole and key != "step" and value.shape == parameter.shape
