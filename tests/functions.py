"""Functions that models are made of, each of which is to be one kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tests.kernels import Function

aten = torch.ops.aten


def rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = q.shape[-1] // 2
    return q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin


def rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
    x = x + residual
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return [x, weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)]


def layer_norm(x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
    x = x + residual
    return [x, *aten.native_layer_norm(x, [x.shape[-1]], weight, weight, 1e-5)]


def layer_norm_backward(x: Tensor, grad: Tensor, weight: Tensor) -> list[Tensor]:
    """With the gradient that goes around it."""
    _, mean, rstd = aten.native_layer_norm(x, [x.shape[-1]], weight, weight, 1e-5)
    dx, dw, db = aten.native_layer_norm_backward(grad, x, [x.shape[-1]], mean.detach(), rstd.detach(), weight, weight, [True] * 3)
    return [dx + grad, dw, db.to(torch.promote_types(db.dtype, torch.float32))]


def rms_norm_backward(x: Tensor, grad: Tensor, weight: Tensor) -> list[Tensor]:
    """As autograd writes the gradient of `rms_norm`: in parts."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    scaled = grad * weight
    inner = (scaled * wide).sum(-1, keepdim=True) * root.pow(3) / x.shape[-1]
    dw = (grad * (wide * root).to(x.dtype)).sum([0, 1], keepdim=True)
    return [dw.view(-1), (scaled * root - wide * inner).to(x.dtype)]


def fused_rms_norm_backward(x: Tensor, grad: Tensor, weight: Tensor) -> list[Tensor]:
    """Which torch keeps, and takes only the forward apart."""
    rstd = torch.rsqrt(x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1, keepdim=True) + 1e-6)
    return [*aten._fused_rms_norm_backward(grad, x, [x.shape[-1]], rstd, weight, [True] * 2)]


def softmax_and_gradient(x: Tensor, grad: Tensor) -> Tensor:
    y = F.softmax(x * 0.3, -1)
    return aten._softmax_backward_data(grad, y, -1, x.dtype)


def cross_entropy_s_gradient(scores: Tensor, target: Tensor, grad: Tensor, count: Tensor) -> Tensor:
    logs = aten._log_softmax(scores, 1, False)
    spread = aten.nll_loss_backward(grad, logs, target, None, 1, -100, count)
    return aten._log_softmax_backward_data(spread, logs, 1, logs.dtype)


def dropped(x: Tensor, seed: Tensor) -> list[Tensor]:
    kept = torch.ops.autoshard.keep(x, seed, 0.3)
    return [F.layer_norm(x + F.gelu(x) * kept * (1 / 0.7), x.shape[-1:]), kept]


FUNCTIONS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "gelu": (lambda x, y: F.gelu(x) + y, ((3, 4, 5), (5,))),
    "gelu_tanh": (lambda x, y: F.gelu(x, approximate="tanh") * y, ((3, 7), (3, 1))),
    "gelu_backward": (lambda x, y: aten.gelu_backward(y, x) * 2, ((3, 7), (3, 7))),
    "silu_gate": (lambda x, y: F.silu(x) * y, ((33, 7), (33, 7))),
    "silu_backward": (lambda x, y: aten.silu_backward(y, x) * y, ((33, 7), (33, 7))),
    "relu": (lambda x, y: F.relu(x).pow(3) + F.leaky_relu(y).clamp(-0.1, 0.5), ((9,), (9,))),
    "tanh": (lambda x, y: torch.tanh(x * 0.1) - torch.sigmoid(y) * torch.rsqrt(x.abs() + 1), ((70,), (70,))),
    "softplus": (lambda x, y: F.softplus(x * 9) - F.softplus(y, beta=2.0, threshold=1.0), ((9, 7), (9, 7))),
    "softplus_backward": (lambda x, y: aten.softplus_backward(y, x, 2.0, 1.0) * x, ((9, 7), (9, 7))),
    "elu_backward": (
        lambda x, y: aten.elu_backward(y, 1.3, 1.1, 0.9, False, x) + aten.elu_backward(y, 0.1, 1.0, 1.0, True, x), ((9, 7), (9, 7)),
    ),
    "hardswish": (lambda x, y: F.hardswish(x * 3) + aten.hardswish_backward(y, x * 3), ((33, 7), (33, 7))),
    "glu": (lambda x, y: F.glu(x * 2, -1) * y, ((6, 8), (6, 4))),
    "glu_backward": (lambda x, y: aten.glu_backward(y * 2, x, 0) + 1, ((6, 8), (3, 8))),
    "exp2": (lambda x, y: torch.exp2(x) * torch.sign(y) + torch.log1p(y.abs() * 1e-3), ((9, 7), (9, 7))),
    "rotary": (rotary, ((2, 3, 5, 8), (1, 1, 5, 8), (1, 1, 5, 8))),
    "rms_norm": (rms_norm, ((2, 3, 48), (2, 3, 48), (48,))),
    "layer_norm": (layer_norm, ((5, 33), (5, 33), (33,))),
    "layer_norm_backward": (layer_norm_backward, ((5, 33), (5, 33), (33,))),
    "rms_norm_backward": (rms_norm_backward, ((2, 3, 48), (2, 3, 48), (48,))),
    "sums_of_columns": (lambda x, y: [(z := x * y).sum(0), z.relu(), z.sum([0, 1], keepdim=True)][:2], ((37, 9), (37, 9))),
    "softmax": (softmax_and_gradient, ((2, 4, 19), (2, 4, 19))),
    "log_softmax": (lambda x, y: [F.log_softmax(z := x + y, -1), z.sum(-1)], ((6, 100), (100,))),
    "variance": (lambda x, y: (z := x * y).var(-1) + z.amax(-1), ((6, 10), (6, 10))),
    "transposed": (lambda x, y: (x * 2).view(2, 3, 4).transpose(1, 2) * y, ((6, 4), (2, 4, 3))),
    "broadcast": (lambda x, y: (x + 1) * (y - 2), ((1, 4, 1), (3, 1, 5))),
    "masked": (lambda x, y: torch.where(x > 0, x, y.masked_fill(y < -1, -torch.inf)).exp(), ((4, 9), (4, 9))),
    "no_dimensions": (lambda x, y: (x + y) * 3, ((), ())),
    "empty": (lambda x, y: (x + y) * 3, ((0, 3), (3,))),
    "empty_rows": (lambda x, y: (x + y).sum(-1) * 3, ((4, 0), (4, 0))),
}
