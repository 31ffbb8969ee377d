"""Buffers made rank 0's, outside of graphs.

[Note: Replaced buffers] What a graph writes into a buffer it makes rank 0's itself (`passes.sync_buffers`). A buffer that forward
replaces (`self.mean = 0.9 * self.mean + ...`) becomes another tensor behind the graph, which does not know it for one. So before a
call all that are not what they were at the last one are made rank 0's, as DDP does with each before every forward. Not those that
no state dict has: they are computed anew of other things (rotary frequencies for longer inputs), as each process needs them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard import torch_internals
from autoshard.ops.wire import sendable


class Buffers:
    """Of one model, as they were at the last call."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [(name, module._buffers, name.rpartition(".")[2]) for name, module in _owners(model)]
        self._known = [buffers[attribute] for _, buffers, attribute in self._places]

    def replaced(self) -> list[str]:
        """The names of those that are other tensors than they were."""
        return [name for (name, buffers, attribute), known in zip(self._places, self._known) if buffers.get(attribute) is not known]

    def take_rank_0_s(self, names: list[str]) -> dict[int, Tensor]:
        """New tensors with rank 0's values in the places of these, by the ids of those that were there: a graph may have saved one of
        them for its backward. A collective call."""
        found: dict[int, Tensor] = {}
        for i, (name, buffers, attribute) in enumerate(self._places):
            before = buffers.get(attribute)
            if name in names and before is not None:
                if id(before) not in found:  # one may be in two places
                    with torch.inference_mode(False):  # of an evaluation in that mode, which training cannot go on with
                        found[id(before)] = before.detach().clone()
                    take_rank_0_s(found[id(before)])
                buffers[attribute] = found[id(before)]
            self._known[i] = buffers.get(attribute)
        return found


def _owners(model: nn.Module) -> list[tuple[str, nn.Module]]:
    owned = [(path, module, name) for path, module in model.named_modules() for name in torch_internals.kept_buffers(module)]
    return [(f"{path}.{name}" if path else name, module) for path, module, name in owned]


def take_rank_0_s(tensor: Tensor) -> None:
    """Puts rank 0's values into it. A transport sends what lies from the first element on, whatever lies between; so what has gaps or
    another order goes as a copy, and of what lies in one place under several indices that goes once."""
    once = tensor.detach()[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
    sent = once.contiguous()
    dist.broadcast(sendable(sent.reshape(-1)), 0)
    if sent is not once:
        once.copy_(sent)
