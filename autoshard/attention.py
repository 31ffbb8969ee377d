"""Attention as it is on a GPU, in a graph that was traced without one.

[Note: Attention by device] `scaled_dot_product_attention` is a choice of kernels, which torch makes by the device of its inputs when a
model is traced. A plan for a GPU is traced on the CPU, whose fast kernel drops nothing out: with dropout torch takes the formulas
there, that keep sequence² numbers of each head for backward. A GPU's kernels keep none. So in a graph that is planned for a GPU the call
is one of these, by torch's own order: flash attention for half precision without a mask, on all but GPUs older than it; else the
memory-efficient one; else the formulas: for fewer heads of keys than of queries, for float64, and where numbers of a head or of a mask
do not lie one after the other, as of one that was expanded over keys. On Hopper torch prefers cuDNN's kernel in half precision, which is
not told apart here: it keeps as much as flash attention, and where there is a mask and fewer heads of keys, less than the formulas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from autoshard.cost_model.hardware import Device
from autoshard.passes import graphs

_HALF = (torch.float16, torch.bfloat16)
_WIDEST = 256  # numbers of a head that flash attention takes


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Arguments as of `scaled_dot_product_attention`."""
    found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    return found[0]  # type: ignore[no-any-return]


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The same."""
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    return op(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def formulas(*given: Any, **named: Any) -> Tensor:
    """The same, on a CPU too, whose own kernel takes more."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*given, **named)


def as_on(device: Device, gm: GraphModule) -> None:
    """Makes the attention of a graph of Dynamo's what it is on this device, if that is a GPU and the graph's tensors are on none. See
    [Note: Attention by device]."""
    if device.is_cpu:
        return
    for graph in (*graphs.nested(gm), gm):
        for node in graph.graph.find_nodes(op="call_function", target=scaled_dot_product_attention):
            node.target = _kernel(device, node) or node.target
        graph.recompile()


def _kernel(device: Device, node: Node) -> Any:
    query, key, value, mask = (_example(node, i, name) for i, name in enumerate(("query", "key", "value", "attn_mask")))
    if query.device.type != "cpu" or query.dim() != 4:
        return None
    grouped, heads = query.shape[1] != key.shape[1], {query.shape[-1], key.shape[-1], value.shape[-1]}
    given = (query, key, value, *(() if mask is None else (mask,)))
    if any(x.stride(-1) != 1 for x in given):
        return formulas
    if query.dtype in _HALF and mask is None and len(heads) == 1 and max(heads) <= _WIDEST and _has_flash(device):
        return flash
    return efficient if query.dtype in (*_HALF, torch.float32) and not grouped else formulas


def _has_flash(device: Device) -> bool:
    """GPUs that are too old for it do not compute in bf16 either."""
    return "bf16" in device.flops


def _example(node: Node, position: int, name: str) -> Any:
    given = node.args[position] if position < len(node.args) else node.kwargs.get(name)
    return given.meta["example_value"] if isinstance(given, Node) else given
