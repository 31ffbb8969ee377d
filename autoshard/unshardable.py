"""What cannot be sharded, or not any more: named errors before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autoshard import torch_internals
from autoshard.errors import UnsupportedError
from autoshard.exact_types import refuse_exact_types
from autoshard.family import members_of
from autoshard.heap import alive
from autoshard.runtime.state import ModelState, refuse_unusable
from autoshard.skipped import refuse_recurrent, refuse_scripted, refuse_sparse, refuse_wrapped


def refuse_what_cannot_be_sharded(model: nn.Module) -> None:
    """A model that would train something else, silently."""
    refuse_unusable(model)
    _refuse_ddp_around(model)
    refuse_kinds(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"parameter {name!r} is a DTensor already; autoshard takes plain parameters. Of models that share it compile one that "
                "holds them all"
            )
        if parameter.is_meta:
            raise UnsupportedError(
                f"parameter {name!r} is on the meta device and has no values; legal: model.to_empty(device=...) and load_state_dict, "
                "before the first call"
            )
        if torch_internals.has_hooks(parameter) or parameter.grad is not None:
            raise UnsupportedError(
                f"parameter {name!r} has hooks or a gradient from before its first call, which would be lost; "
                "register hooks after it, and zero_grad before it"
            )


def refuse_kinds(model: nn.Module) -> None:
    """By what its modules are alone, which plans look at too."""
    refuse_recurrent(model)
    refuse_scripted(model)
    refuse_sparse(model)
    refuse_wrapped(model)
    refuse_exact_types(model)


def refuse_unsent(model: nn.Module) -> None:
    """Buffers that are to become rank 0's, and cannot be sent as they lie."""
    for name, buffer in model.named_buffers():
        if buffer.layout != torch.strided:
            raise UnsupportedError(
                f'buffer {name!r} is {buffer.layout}, which rank 0 cannot send; legal: Config(buffers="local"), where each process makes it '
                "alike, or a dense one"
            )


def _refuse_ddp_around(model: nn.Module) -> None:
    """DDP would go on reducing the gradients of parameters that are gone."""
    compiled = members_of(model)
    for outer in alive(DistributedDataParallel):
        if outer is not model and any(module is m for module in outer.modules() for m in compiled):
            raise UnsupportedError(
                f"{type(compiled[0]).__name__} was compiled with autoshard and then wrapped by DistributedDataParallel; "
                "autoshard takes its place. Where Accelerate or transformers.Trainer wrap it, use autoshard.huggingface; where Lightning does, "
                "a strategy that does not (docs/loops.md)"
            )


def refuse_unplanned(state: ModelState, names: Mapping[int, str], inputs: Sequence[Any]) -> None:
    """A graph may only train parameters that were there at the first call: others would not be reduced. One that took the place of
    rows would be taken for them, trained or not. names: of the parameters that the model has now, by id."""
    for x in inputs:
        if not isinstance(x, nn.Parameter) or id(x) in state.ids:
            continue
        if x.requires_grad or (state.plan.sharded and id(x) in names):
            if id(x) not in names:
                raise UnsupportedError(
                    f"a parameter of shape {tuple(x.shape)} is in no module of the model, or of another model; legal: modules that hold it as "
                    "an attribute, in an nn.ModuleList or in an nn.ModuleDict (a plain list does not). Models that one function computes with "
                    "have their first call together: call that function before any of them alone, or compile one nn.ModuleList of them"
                )
            raise UnsupportedError(
                f"parameter {names[id(x)]!r} of shape {tuple(x.shape)} came after the first call; "
                "add parameters before the first call, and give one that is there other values by load_state_dict"
            )
