"""Buffers made rank 0's, outside of graphs.

[Note: Changed buffers] What a graph writes into a buffer it makes rank 0's itself (`passes.sync_buffers`), if it has parameters, by
which it is told whose it is. Not so of a buffer that forward replaces (`self.mean = 0.9 * self.mean + ...`), which becomes another
tensor behind the graph, of one that is written between the pieces of a graph or in a piece without parameters, and of what is loaded.
So before a call all that are not what they were behind the last one are made rank 0's, as DDP does with each before every forward.
Torch counts how often a tensor is written to, but for the statistics of torch.nn's norms: where their count of batches alone is seen to
be written, it is their values that are looked at from then on. Buffers that no state dict has stay as they are: they are computed anew
of other things (rotary frequencies for longer inputs), as each process needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard import torch_internals
from autoshard.ops.wire import sendable
from autoshard.runtime.fingerprint import fingerprints
from autoshard.runtime.lost_peers import naming_lost_peers

COUNT = "num_batches_tracked"  # of batches, in torch.nn
Place = tuple[str, nn.Module, str]  # a buffer's name, the module that has it, and as what
State = tuple["Tensor | None", int, list[tuple[int, ...]]]  # what is there, how often it was written to, and a mark of its value or none


class Buffers:
    """Of one model, as they were behind the last call."""

    def __init__(self, model: nn.Module) -> None:
        self._all = [(name, module, name.rpartition(".")[2]) for name, module in _owners(model)]
        self._places = [place for place in self._all if place[2] in torch_internals.kept_buffers(place[1])]
        self._by_value: set[nn.Module] = set()
        self.note()

    def note(self) -> None:
        """As they are now."""
        self._known = list(map(self._state_of, self._places))

    def changed(self) -> list[str]:
        """The names of those that are other tensors than they were, or were written to."""
        found = {place for place, known in zip(self._places, self._known) if _differs(self._state_of(place), known)}
        written = Counter(module for _, module, _ in found)
        counted = {module for _, module, attribute in found if attribute == COUNT and written[module] == 1}
        self._by_value |= counted
        return [place[0] for place in self._places if place in found or place[1] in counted]

    def _state_of(self, place: Place) -> State:
        """Torch does not count how often those are written to that were made in inference mode."""
        _, module, attribute = place
        buffer = module._buffers.get(attribute)
        if buffer is None:
            return None, 0, []
        written = 0 if buffer.is_inference() else torch_internals.times_written(buffer)
        return buffer, written, fingerprints([buffer]) if module in self._by_value else []

    def names_of(self, buffers: Iterable[Tensor]) -> tuple[str, ...]:
        """What these are called now."""
        names = {id(module._buffers.get(attribute)): name for name, module, attribute in reversed(self._all)}
        return tuple(names.get(id(buffer), "?") for buffer in buffers)

    def take_rank_0_s(self, names: list[str]) -> dict[int, Tensor]:
        """Puts rank 0's values in the places of these: into the tensors that were there at the last call, and of others into new ones,
        which it gives by the ids of those that are there: a graph may have saved one of them for its backward. A collective call."""
        found: dict[int, Tensor] = {}
        for (name, module, attribute), (known, *_) in zip(self._places, self._known):
            before = module._buffers.get(attribute)
            if name in names and before is not None:
                if id(before) not in found:  # one may be in two places
                    found[id(before)] = before if before is known else _copy(before)
                    take_rank_0_s(found[id(before)])
                module._buffers[attribute] = found[id(before)]
        return found


def _differs(now: State, known: State) -> bool:
    return now[0] is not known[0] or now[1:] != known[1:]


def _copy(buffer: Tensor) -> Tensor:
    with torch.inference_mode(False):  # of an evaluation in that mode, which training cannot go on with
        return buffer.detach().clone()


def _owners(model: nn.Module) -> list[tuple[str, nn.Module]]:
    owned = [(path, module, name) for path, module in model.named_modules() for name, _ in module._buffers.items()]
    return [(f"{path}.{name}" if path else name, module) for path, module, name in owned]


@naming_lost_peers
def take_rank_0_s(tensor: Tensor) -> None:
    """Puts rank 0's values into it. A transport sends what lies from the first element on, whatever lies between; so what has gaps or
    another order goes as a copy, and of what lies in one place under several indices that goes once."""
    once = tensor.detach()[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
    sent = once.contiguous()
    dist.broadcast(sendable(sent.reshape(-1)), 0)
    if sent is not once:
        once.copy_(sent)
