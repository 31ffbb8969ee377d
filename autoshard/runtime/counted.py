"""Steps of many parameters, counted by one addition.

[Note: Counted] Optimizers count the steps of each parameter in a tensor of its own, and a CPU adds to hundreds of these one after the
other, in calls that do nothing else. So the tensors of those that step together are put side by side in one piece of memory: one
addition counts all. Each has a storage of its own of four bytes, so that whatever writes or copies tensors (torch.save,
safetensors, deepcopy) finds single numbers, and is the object that it was: a loop, or the dict that it was loaded from, may hold it.
What moves one elsewhere, such as `share_memory_` or another optimizer that has it too, shows in its address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BYTES = torch.float32.itemsize


@dataclass(frozen=True, eq=False)
class Counted:
    """Counts that lie side by side: as one tensor, each alone, and where these are."""

    all: Tensor
    each: list[Tensor]
    addresses: list[int]

    @staticmethod
    def of(counts: Sequence[Tensor]) -> Counted | None:
        """The same tensors, moved. None where they are not on a CPU or fake, and where one is there twice, or a part of another tensor,
        with which it is counted."""
        if not counts or len(set(map(id, counts))) < len(counts) or not all(map(_is_alone, counts)):
            return None
        memory = bytearray(_BYTES * len(counts))
        for i, count in enumerate(counts):
            place = torch.frombuffer(memory, dtype=torch.float32, count=1, offset=_BYTES * i)[0]
            count.data = place.copy_(count)
        return Counted(torch.frombuffer(memory, dtype=torch.float32), list(counts), _addresses(counts))

    @property
    def stays(self) -> bool:
        """Whether all still lie where they were put."""
        return _addresses(self.each) == self.addresses


def _is_alone(count: Tensor) -> bool:
    return type(count) is Tensor and count.is_cpu and count.untyped_storage().nbytes() == _BYTES


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))
