"""Reading a model without running it: what `plan` and the command line do instead of a first call."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from autoshard.errors import AutoshardError, UnsupportedError
from autoshard.inventory import Inventory, take_inventory
from autoshard.torch_internals import FakeTensorMode, ThroughDynamo


class _Captured(ThroughDynamo):
    """Ends the trace: the graph has been read."""


def capture(model: nn.Module, example_inputs: Any) -> Inventory:
    """The inventory of `model` called on `example_inputs`: a tensor, a tuple of arguments, or a dict of keywords.

    The model may be on any device, meta too; neither it nor the inputs are changed or run, and nothing is
    allocated: a copy without values is traced. UnsupportedError if torch.compile finds no graph in it.
    """
    if next(model.parameters(), None) is None:
        raise UnsupportedError(f"{type(model).__name__} has no parameters; there is nothing to plan")
    found: list[Inventory] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        shadow = _without_values(model)
        args, kwargs = as_call(example_inputs)
        args, kwargs = tree_map_only(Tensor, _empty_like, (args, kwargs))

        def read(gm: GraphModule, inputs: Sequence[Any]) -> Any:
            used = [x for x in inputs if isinstance(x, nn.Parameter)]
            found.append(take_inventory(shadow, used))
            raise _Captured("read")

        try:
            torch.compile(shadow, backend=read)(*args, **kwargs)
        except _Captured:
            return found[0]
        except AutoshardError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be called with these example inputs: "
                f"{str(error).splitlines()[0]}; legal: a tensor, a tuple of arguments, or a dict of keywords"
            ) from error
    raise UnsupportedError(
        f"torch.compile found no graph in {type(model).__name__}; is its forward skipped by Dynamo (nn.LSTM)?"
    )


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from the forms that example inputs may have."""
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def _empty_like(tensor: Tensor) -> Tensor:
    device = "cpu" if tensor.is_meta else tensor.device
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _without_values(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are fake: shapes, dtypes and ties, no memory."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = nn.Parameter(_empty_like(parameter), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = fake
    for buffer in model.buffers():
        memo[id(buffer)] = _empty_like(buffer)
    return copy.deepcopy(model, memo)
