"""Memory that a kernel takes while it runs, beside what it gives.

oneDNN, which torch runs convolutions with on CPUs, works on blocked layouts: what it is given is copied into them, and what
it gives out of them, padded to whole blocks of channels. An input of fewer channels than a block has is taken as it is. A kernel of one
element on few samples torch leaves to BLAS, where there is one thread. Channels-last tensors it takes too; only the weight's gradient is copied out. Gradients
of groups, and weights of patches, are padded in ways that are not told here. Seen on torch 2.13; `tests/test_workspace.py` measures it.

cuDNN's kernels for tensor cores, which torch takes on GPUs for half precision and, as TF32, for fp32, take channels-last tensors alone:
others are copied, for its whole call. The weight's gradient is a sum of partial ones besides. Seen on an H100, torch 2.11.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autoshard.cost_model.hardware import Device
from autoshard.cost_model.program import Program
from autoshard.cost_model.sizes import Size, bytes_of, larger, product
from autoshard.cost_model.work import op_name

FEW_CHANNELS, FEW_SAMPLES = 3, 16
PARTIAL = 8 << 20  # bytes of the parts that a weight's gradient is made in on a GPU, at most; fewer where it is large
_LOSSES = {"mse_loss": 1, "smooth_l1_loss": 1, "huber_loss": 1, "binary_cross_entropy_with_logits": 2}  # of their input
_HALF = (torch.float16, torch.bfloat16)
STATE = torch.get_rng_state().nbytes


def add_workspaces(program: Program, device: Device, channels_last: bool) -> None:
    """Puts what a device's kernels take for a while into the program. channels_last: of all convolutions' tensors."""
    of_device = on_cpu if device.is_cpu else functools.partial(on_gpu, tf32="tf32" in device.flops)
    for at, operation in enumerate(program.operations):
        if size := of_device(operation.node, channels_last):
            program.add(size, "workspace", at, at, operation.name)


def on_gpu(node: Node, channels_last: bool, tf32: bool) -> Size:
    """Bytes that a call takes above what it gives. channels_last: of all convolutions' tensors; tf32: what fp32 is multiplied as."""
    name = op_name(node)
    if name not in ("convolution", "convolution_backward"):
        return 0
    given: list[Any] = [a.meta["val"] if isinstance(a, Node) else a for a in node.args]
    backward = name == "convolution_backward"
    x, weight = given[backward : backward + 2]
    if x.shape[1] <= FEW_CHANNELS or not (x.dtype in _HALF or (tf32 and x.dtype is torch.float32)):
        return 0
    tensors = (x, weight, given[0] if backward else node.meta["val"])
    copied = 0 if channels_last else sum(bytes_of(t) for t in tensors if not _is_channels_last(t))
    return copied + (PARTIAL if backward and given[-1][1] else 0)


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def on_cpu(node: Node, channels_last: bool) -> Size:
    """Bytes that a call takes above what it gives, at its highest moment. channels_last: of a convolution's tensors."""
    given: list[Any] = [a.meta.get("val") if isinstance(a, Node) else a for a in node.args]
    repeated = [i for i, a in enumerate(given) if hasattr(a, "overloadpacket")]
    if not repeated:
        return _of_call(op_name(node), given, node, channels_last)
    at = repeated[0]  # a random op that gives what it gave before; the generator's own state is put aside meanwhile
    return STATE + _of_call(given[at].overloadpacket.__name__, given[at + 1 :], node, channels_last)


def _of_call(name: str, given: list[Any], node: Node, channels_last: bool) -> Size:
    if name in ("convolution", "convolution_backward"):
        return _convolution(node, given, name == "convolution_backward", channels_last)
    if name == "native_dropout":
        return product(given[0].shape) * 4  # its mask is drawn as integers
    if name == "native_dropout_backward":
        return bytes_of(node.meta["val"])  # the product with its mask, which is scaled then
    if name in _LOSSES and not node.meta["val"].dim():
        return _LOSSES[name] * bytes_of(given[0])
    if name == "look_up_rows":
        return _told(given[1], given[3][0]) + 2 * bytes_of(node.meta["val"])
    if name == "reduce_rows":
        return _told(given[5], given[6]) + _sums_of_rows(given)
    if name == "native_batch_norm_backward":
        return bytes_of(given[1])
    return 0


def _told(messages: Tensor, table: int) -> Size:
    """Of an embedding: who looks up which row, and where among its own rows a process has each."""
    return 8 * messages.numel() + 4 * table


def _sums_of_rows(given: list[Any]) -> Size:
    """Of an embedding's gradient: what a process sends, and what comes from all others."""
    rows, shape, messages, table = given[0], given[2], given[5], given[6]
    others = messages.numel() // -(-(table + 2) // 8) - 1  # a bit a row, and two
    return bytes_of(rows) * (1 + (others if shape[0] == table else 1))


def _convolution(node: Node, given: list[Any], backward: bool, channels_last: bool) -> Size:
    x, weight, _, stride = given[backward : backward + 4]
    y, wanted = (given[0], given[-1]) if backward else (node.meta["val"], (False, False))
    if all(size == 1 for size in (*weight.shape[2:], *stride)) and torch.get_num_threads() == 1 and _are_few(x.shape[0]):
        return 0
    if channels_last:
        return 2 * bytes_of(weight) if wanted[1] else 0
    grouped = weight.shape[1] != x.shape[1]
    blocked = _blocked(x, grouped) if x.shape[1] >= _block() or grouped else 0
    w, of_y = bytes_of(weight) if grouped else _blocked_weight(weight), _blocked(y, grouped)
    if not backward:
        return larger(blocked + w + of_y, of_y + bytes_of(y)) - bytes_of(y)
    dx, dw, of_dx = (bytes_of(x), bytes_of(weight), _blocked(x, grouped)) if wanted[0] else (0, bytes_of(weight), 0)
    dw = dw if wanted[1] else 0
    strided = any(size > 1 for size in stride) and not grouped  # as measured; those of groups take less
    of_input = larger(of_y + w + of_dx, of_dx + (2 if strided else 1) * dx) if wanted[0] else 0  # it comes first, and is there when the weight's is made
    of_weight = dx + larger(blocked + of_y + (w if wanted[1] else 0), 2 * dw) if wanted[1] else 0
    return larger(of_input, of_weight) - dx - dw


@functools.cache
def _block() -> int:
    """How many channels oneDNN takes at once."""
    return 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8


def _are_few(samples: Any) -> bool:
    """What is open may be many."""
    return isinstance(samples, int) and samples < FEW_SAMPLES


def _padded(channels: int) -> int:
    return -(-channels // _block()) * _block()


def _blocked(tensor: Tensor, grouped: bool) -> Size:
    """Bytes of a copy in blocks."""
    if grouped or tensor.shape[1] % _block() == 0:
        return bytes_of(tensor)
    return product((tensor.shape[0], _padded(tensor.shape[1]), *tensor.shape[2:])) * tensor.element_size()


def _blocked_weight(weight: Tensor) -> Size:
    inner = weight.shape[1] if weight.shape[1] < _block() else _padded(weight.shape[1])
    return product((_padded(weight.shape[0]), inner, *weight.shape[2:])) * weight.element_size()
