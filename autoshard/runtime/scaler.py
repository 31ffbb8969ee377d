"""torch's GradScaler over gradients of which some are rows and some whole.

[Note: Infinite gradients] GradScaler looks at all gradients of a device and dtype in one operation, and DTensor then combines what
processes found by how the first of them lies (seen on 2.11 and 2.13). Where that one is whole on every process nothing is
combined: a process whose rows have an infinite gradient skips the step, the others take it, without a word. So where a
GradScaler is there at the first call no parameter stays whole that has rows, and before steps it is seen to that rows come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from autoshard import torch_internals
from autoshard.errors import UnsupportedError
from autoshard.heap import alive

_WITH_ROWS = "a GradScaler that is made before the model's first call, or Config(replicate_below=0)"
_WITHOUT_ROWS = "parameters without dimensions behind others in the optimizer: SGD(sorted(model.parameters(), key=lambda p: -p.ndim))"


def is_there() -> bool:
    """Whether this process has a GradScaler that scales."""
    return any(scaler.is_enabled() for scaler in alive(GradScaler))


def check(stepped: Callable[[], Sequence[nn.Parameter]]) -> None:
    """Refuses a scaled step whose infinite gradients processes would not agree on. stepped: gives the parameters with a gradient."""
    if not torch_internals.is_scaled_step():
        return
    first: dict[object, DTensor] = {}
    for grad in (p.grad for p in stepped() if isinstance(p.grad, DTensor)):
        before = first.setdefault((grad.device, grad.dtype), grad)
        if _is_whole(before) and not _is_whole(grad):
            raise UnsupportedError(
                f"GradScaler would not see infinite gradients of other processes: a gradient of shape {tuple(before.shape)}, whole on "
                f"every process, comes before sharded ones; legal: {_WITH_ROWS if before.ndim else _WITHOUT_ROWS}"
            )


def _is_whole(tensor: DTensor) -> bool:
    return all(p.is_replicate() for p in tensor.placements)
