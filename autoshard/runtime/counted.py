"""Steps of many parameters, counted by one addition.

[Note: Counted] Optimizers count the steps of each parameter in a tensor of its own, and to add to hundreds of these, one after the other,
takes a CPU a third of their whole step. So the tensors of those that step together are put side by side in one piece of memory: one
addition counts all. Each has a storage of its own of four bytes, so that whatever writes or copies tensors (torch.save,
safetensors, deepcopy) finds single numbers. What moves one elsewhere, such as `share_memory_`, shows in its address.
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
        """The same numbers; None where they are not on a CPU, or fake."""
        if not counts or any(type(count) is not Tensor or not count.is_cpu for count in counts):
            return None
        memory = bytearray(_BYTES * len(counts))
        each = [
            torch.frombuffer(memory, dtype=torch.float32, count=1, offset=_BYTES * i)[0]
            for i in range(len(counts))
        ]
        for ours, count in zip(each, counts):
            ours.copy_(count)
        return Counted(torch.frombuffer(memory, dtype=torch.float32), each, _addresses(each))

    @property
    def stays(self) -> bool:
        """Whether all still lie where they were put."""
        return _addresses(self.each) == self.addresses


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))
