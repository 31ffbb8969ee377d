"""Parameters and buffers that share memory without being the same tensor, which shards cannot.

[Note: Shared memory] What a step writes to a parameter is seen in a buffer that was registered as `weight.data`, and in
another parameter that was made of it. Rows have memory of their own. So such a model is refused where it would be sharded; parameters
that are one object (tied), or lie beside each other in one piece of memory, are not meant.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import torch
from torch import Tensor, nn

from autoshard import torch_internals
from autoshard.errors import UnsupportedError


def refuse_shared_memory(model: nn.Module) -> None:
    """UnsupportedError if a parameter shares elements with another, or with a buffer."""
    named: list[tuple[str, Tensor]] = [(f"parameter {name!r}", p) for name, p in model.named_parameters()]
    named += [(f"buffer {name!r}", b) for name, b in model.named_buffers()]
    together: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in named:
        if tensor.layout == torch.strided and tensor.numel():
            together[torch_internals.storage_of(tensor)].append((name, tensor))
    for group in together.values():
        for (one, a), (other, b) in pairwise(sorted(group, key=lambda each: _span(each[1]))):
            if (isinstance(a, nn.Parameter) or isinstance(b, nn.Parameter)) and _overlap(a, b):
                raise UnsupportedError(
                    f"{one} and {other} share memory without being one object: sharded, what is written to the one would not be "
                    "in the other. Clone it (`weight.detach().clone()`), or tie them (one nn.Parameter in both places)"
                )


def _span(tensor: Tensor) -> tuple[int, int]:
    """Between which bytes of its storage it lies."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + int(last) + 1) * tensor.itemsize


def _overlap(a: Tensor, b: Tensor) -> bool:
    if _span(b)[0] >= _span(a)[1]:
        return False
    if a.itemsize != b.itemsize:
        return True
    within = torch.zeros(a.untyped_storage().nbytes() // a.itemsize, dtype=torch.bool)
    within.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(within.as_strided(b.shape, b.stride(), b.storage_offset()).any())
