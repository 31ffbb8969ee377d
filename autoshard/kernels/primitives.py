"""What one operation of aten does to each number, as an expression of Triton.

Functions that are compositions of these (gelu, softmax, layer norm, their gradients) are taken apart first, by torch's own
decompositions or by the ones here. What is neither has no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoshard import torch_internals

aten, prims = torch.ops.aten, torch.ops.prims

# By the name of the operation; {0} is its first argument. In float32 division, exp, log, sin and cos are a GPU's own
# instructions (2 units in the last place).
POINTWISE: dict[str, str] = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "rsub": "{1} - {0}",
    "neg": "-{0}", "abs": "tl.abs({0})", "reciprocal": "1.0 / {0}",
    "sign": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0)).to({0}.dtype)",
    "exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "log": "tl.log({0})", "log1p": "log1p({0})",
    "sin": "tl.sin({0})", "cos": "tl.cos({0})", "erf": "tl.erf({0})",
    "sqrt": "SQRT({0})", "rsqrt": "1.0 / SQRT({0})", "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))", "tanh": "tanh({0})",
    "relu": "tl.where({0} <= 0, 0, {0})", "maximum": "maximum({0}, {1})", "minimum": "minimum({0}, {1})",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}",
    "where": "tl.where({0}, {1}, {2})", "logical_not": "{0} == 0", "isnan": "{0} != {0}",
    "logical_and": "({0} != 0) & ({1} != 0)", "logical_or": "({0} != 0) | ({1} != 0)",
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}",
}  # fmt: skip
BOOLEAN = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "logical_not", "isnan", "logical_and", "logical_or"])  # of numbers of any kind
SAME = frozenset(["convert_element_type", "_to_copy", "clone", "alias", "lift_fresh_copy", "contiguous"])  # at most another dtype
CONSTANT = frozenset(["full", "full_like", "scalar_tensor", "zeros", "ones", "zeros_like", "ones_like", "new_zeros", "new_full", "new_ones"])


class Reduction(NamedTuple):
    """The neutral element, a function of two, and what `tl.reduce` is given."""

    neutral: str
    function: str
    reducer: str


REDUCTIONS = {
    "sum": Reduction("0", "add", "plus"),
    "mean": Reduction("0", "add", "plus"),
    "amax": Reduction('float("-inf")', "maximum", "maximum"),
    "amin": Reduction('float("inf")', "minimum", "minimum"),
}
VIEWS = frozenset(["view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "slice", "select", "alias", "detach"])
ALIKE = VIEWS - {"permute", "transpose", "t", "expand", "slice", "select"}  # all of what they are of, in its order
DRAWN = "keep"  # see `random`
_BESIDE_ATEN = {("prims", "iota"), ("prims", "convert_element_type"), ("autoshard", DRAWN)}
JOINS = frozenset(["cat", "slice_backward"])  # a number of theirs is one of several's

WITH_TOTALS = frozenset(["native_layer_norm_backward", "_fused_rms_norm_backward"])  # whose items behind the first are sums over rows

# Taken apart into the above. Those of batch norms reduce over the wrong dimensions, that of `nll_loss_forward` looks up and then
# sums over rows, and `log_sigmoid_forward` gives a tensor of nothing beside its result.
COMPOSITE = frozenset(["gelu", "gelu_backward", "silu", "silu_backward", "sigmoid_backward", "tanh_backward", "threshold_backward", "leaky_relu", "leaky_relu_backward", "hardtanh", "hardtanh_backward", "clamp", "clamp_min", "clamp_max", "addcmul", "addcdiv", "masked_fill", "native_dropout_backward", "pow", "square", "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "_safe_softmax", "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm_backward", "var_mean", "var", "nll_loss_backward", "mse_loss_backward", "elu", "elu_backward", "softplus", "softplus_backward", "hardswish", "hardswish_backward", "glu", "glu_backward"])

HELPERS = '''
plus = tl.standard._sum_combine  # what tl.sum adds with, which Triton's interpreter knows and does at once


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log1p(x):
    u = 1.0 + x  # what was rounded away in it comes back by the factor
    exact = tl.log(u) * (x / (u - 1.0))
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, exact))


@triton.jit
def tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    s = x * x  # near 0, where 1 - e has few digits left
    near = x * (1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835 - s * (1382 / 155925))))))
    return tl.where(tl.abs(x) < 0.06, near, tl.where(x < 0, -t, t))
'''


def name_of(target: Any) -> str:
    """The operation's name without its overload; "" of what is not torch's own, or another operation of that name."""
    packet = getattr(target, "overloadpacket", None)
    if packet is None:
        return ""
    name = str(packet.__name__)
    return name if target.namespace == "aten" or (target.namespace, name) in _BESIDE_ATEN else ""


def literal(number: Any) -> str:
    """A number of Python in Triton's source."""
    if isinstance(number, bool | int):
        return str(number)
    return repr(float(number)) if math.isfinite(number) else f'float("{number}")'


# --- torch's decompositions, and where they are none


def _var_mean(x: Tensor, dim: Sequence[int] | None = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    dims = list(dim) if dim else list(range(x.dim()))
    count = math.prod(x.shape[d] for d in dims)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    off = wide - aten.mean.dim(wide, dims, True)
    var = aten.sum.dim_IntList(off * off, dims, keepdim) / max(count - (1 if correction is None else correction), 0)
    return var.to(x.dtype), aten.mean.dim(wide, dims, keepdim).to(x.dtype)


def _var(x: Tensor, dim: Sequence[int] | None = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = list(range(x.dim() - len(shape), x.dim()))
    mean = aten.mean.dim(wide, dims, True)
    off = wide - mean
    rstd = aten.rsqrt(aten.mean.dim(off * off, dims, True) + eps)
    out = off * rstd
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.to(x.dtype), mean, rstd


def _nll_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int, total: Tensor
) -> Tensor:
    """torch's writes zeros and then into some of them, which no kernel that goes through numbers once can."""
    if weight is not None or x.dim() != 2:
        return NotImplemented
    if reduction == 1:  # the mean
        grad = grad / total
    grad = grad.unsqueeze(1) if reduction == 0 else grad
    target = target.unsqueeze(1)
    columns = prims.iota(x.shape[1], start=0, step=1, dtype=torch.int64, device=x.device, requires_grad=False)
    hit = (columns == target) & (target != ignore)
    return torch.where(hit, -grad.to(x.dtype), torch.zeros((), dtype=x.dtype, device=x.device))


def _pow(x: Tensor, exponent: Any) -> Tensor:
    if x.is_floating_point() and isinstance(exponent, int | float) and exponent in (-2, -1, -0.5, 0.5, 1, 2, 3, 4):
        power = x.clone() if abs(exponent) == 1 else aten.sqrt(x) if abs(exponent) == 0.5 else x * x
        power = power * x if exponent == 3 else power * power if exponent == 4 else power
        return aten.reciprocal(power) if exponent < 0 else power
    return NotImplemented


OWN: dict[Any, Callable[..., Any]] = {
    aten.var_mean.correction: _var_mean,
    aten.var.correction: _var,
    aten.native_layer_norm.default: _layer_norm,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.pow.Tensor_Scalar: _pow,
    aten.square.default: lambda x: x * x,
}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Of all composite operations, by overload."""
    packets = [getattr(aten, name) for name in sorted(COMPOSITE)]
    return {**torch_internals.decompositions_of(packets), **OWN}
