"""The mean gradient of an embedding by the rows that were looked up, where those are fewer than it has.

[Note: Sparse gradients] A process has as many rows of gradient as its batch has tokens, and none knows how many another has. So
counts go first, a number each, and say to all alike what follows: the rows with their indices, padded to the most that a process
has; or the whole gradient, where rows would be as much, or where a process has only that (its graph uses the embedding in another
way, or adds what waited since `no_sync`). These collectives run within the operator, which ends with the last of them: an embedding
comes first in forward, so its gradient is the last of backward, with nothing behind it to hide in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_c10d = torch.ops._c10d_functional
_backward = torch.ops.aten.embedding_dense_backward.default
WHOLE = -1  # what a process counts that has no rows


def pays(counts: Sequence[int], table: int) -> bool:
    """Whether rows travel, of which each process has so many, for an embedding of `table` rows: then half as much travels, or less."""
    return min(counts) >= 0 and 0 < max(counts) * len(counts) <= table


@torch.library.custom_op("autoshard::reduce_sparse", mutates_args=())
def reduce_sparse(
    grad: Tensor,
    indices: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    name: str,
    padding: int,
    carried: torch.dtype,
    size: int,
    group: str,
) -> Tensor:
    """The mean over `size` processes of an embedding's gradient, of `shape`, in `dtype`; travels and is summed in `carried`. grad: of
    the rows at `indices`, or whole where these are None. padding: the row that has no gradient; -1: none. See [Note: Sparse
    gradients]."""
    counts = _counts(WHOLE if indices is None else indices.numel(), grad, size, group)
    if indices is not None:
        indices, grad = indices.reshape(-1).long(), grad.reshape(indices.numel(), shape[1])
        if pays(counts, shape[0]):
            rows, places = _exchanged(grad.to(carried) / size, indices, counts, group)
            return _backward(rows, places, shape[0], padding, False).to(dtype)
        grad = _backward(grad, indices, shape[0], padding, False)
    mean = grad.to(carried) / size
    return _c10d.wait_tensor(_c10d.all_reduce(mean, "sum", group)).to(dtype)  # type: ignore[no-any-return]


def _counts(own: int, like: Tensor, size: int, group: str) -> list[int]:
    """Of each process."""
    return _gathered(torch.tensor([own], device=like.device), size, group).tolist()  # type: ignore[no-any-return]


def _exchanged(rows: Tensor, indices: Tensor, counts: Sequence[int], group: str) -> tuple[Tensor, Tensor]:
    """All processes' rows and their indices, process after process. One message has both: an index is bits in more columns."""
    bits = indices.contiguous().view(rows.dtype).view(len(rows), indices.itemsize // rows.itemsize)
    own = rows.new_zeros(max(counts), rows.shape[1] + bits.shape[1])
    own[: len(rows)] = torch.cat([rows, bits], 1)
    brought = _gathered(own, len(counts), group).split(max(counts))
    found = torch.cat([part[:count] for part, count in zip(brought, counts)])
    return found[:, : rows.shape[1]].contiguous(), found[:, rows.shape[1] :].contiguous().view(torch.long).view(-1)


def _gathered(own: Tensor, size: int, group: str) -> Tensor:
    return _c10d.wait_tensor(_c10d.all_gather_into_tensor(own, size, group))  # type: ignore[no-any-return]


reduce_sparse.register_fake(lambda grad, indices, shape, dtype, *_: grad.new_empty(shape, dtype=dtype))
