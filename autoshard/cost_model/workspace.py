"""Memory that a kernel takes while it runs, beside what it gives.

oneDNN, which torch runs convolutions with on CPUs, works on blocked layouts: what it is given is copied into them, and what
it gives out of them, padded to whole blocks of channels. An input of fewer channels than a block has is taken as it is, for the
weight's gradient one of half as many. A kernel of one element on few samples torch leaves to BLAS, where there is one thread, and on
one small sample in any case. Channels-last tensors it takes too; only the weight's gradient is copied out. Gradients of groups, and
weights of patches, are padded in ways that are not told here, other dtypes than float32 not told at all. Seen on torch 2.13 with
AVX-512; `tests/test_workspace.py` measures it.

cuDNN's kernels for tensor cores, which torch takes on GPUs for half precision and, as TF32, for fp32, take channels-last tensors alone:
others are copied, for its whole call. The weight's gradient is a sum of partial ones besides. Seen on an H100, torch 2.11.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autoshard.cost_model.hardware import Device
from autoshard.cost_model.program import Program
from autoshard.cost_model.sizes import Size, bytes_of, larger, product
from autoshard.cost_model.work import op_name

FEW_CHANNELS, FEW_SAMPLES, FEW_NUMBERS = 3, 16, 20480
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
    x, weight, _, stride, _, _, transposed, _, groups = given[backward : backward + 9]
    y, wanted = (given[0], given[-1]) if backward else (node.meta["val"], (False, False))
    call = _Convolution(x, weight, y, any(size > 1 for size in stride), transposed, groups)
    if call.is_left_to_blas:
        return call.put_together(backward)
    if channels_last:
        return 2 * bytes_of(weight) if wanted[1] else 0
    return call.backward(*wanted[:2]) if backward else call.forward()


@dataclass(frozen=True)
class _Convolution:
    """On a CPU. groups: into how many channels fall; copies in blocks are padded but for these, where each has more than one channel."""

    x: Tensor
    weight: Tensor
    y: Tensor
    strided: bool
    transposed: bool
    groups: int

    @property
    def is_left_to_blas(self) -> bool:
        """Kernels of one element, of few samples."""
        if self.strided or any(size > 1 for size in self.weight.shape[2:]):
            return False
        if not _are_few(self.x.shape[0]):
            return False
        small = self.x.shape[0] == 1 and self.groups == 1 and not self.transposed and self.x.numel() <= FEW_NUMBERS
        return bool(small) or torch.get_num_threads() == 1

    def put_together(self, backward: bool) -> Size:
        """Of groups' results, or of parts that overlap, there."""
        if self.groups > 1:
            return bytes_of(self.x if backward else self.y)
        return bytes_of(self.y) if self.transposed and not backward else 0

    def forward(self) -> Size:
        of_x = self._blocked(self.x) if self.groups > 1 or self.x.shape[1] >= _block() else 0
        of_y, y = self._blocked(self.y), bytes_of(self.y)
        copies = 2 if self.transposed and self.strided and self.groups == 1 and self.y.shape[1] >= _block() else 1
        return larger(of_x + self._blocked_weight() + of_y, of_y + copies * y) - y

    def backward(self, of_input: bool, of_weight: bool) -> Size:
        """of_input, of_weight: the gradients that are wanted. The input's comes first, and is there when the weight's is made."""
        dx, dw = bytes_of(self.x) if of_input else 0, bytes_of(self.weight) if of_weight else 0
        w, of_y = self._blocked_weight(), self._blocked(self.y)
        copies = 2 if self.strided and not self.transposed and self.groups == 1 else 1  # as measured; those of groups take less
        first = larger(of_y + w + self._blocked(self.x), self._blocked(self.x) + copies * dx) if of_input else 0
        of_x = self._blocked(self.x) if self.groups > 1 or self.x.shape[1] > _block() // 2 else 0
        then = dx + larger(of_x + of_y + w, 2 * dw) if of_weight else 0
        return larger(first, then) - dx - dw

    def _blocked(self, tensor: Tensor) -> Size:
        """Bytes of a copy in blocks."""
        if self._is_grouped or tensor.shape[1] % _block() == 0:
            return bytes_of(tensor)
        return product((tensor.shape[0], _padded(tensor.shape[1]), *tensor.shape[2:])) * tensor.element_size()

    def _blocked_weight(self) -> Size:
        outer, inner, *kernel = self.weight.shape
        if self._is_grouped:
            return bytes_of(self.weight)
        return product((_padded(outer), inner if inner < _block() else _padded(inner), *kernel)) * self.weight.element_size()

    @property
    def _is_grouped(self) -> bool:
        return self.groups > 1 and not self.groups == self.x.shape[1] == self.y.shape[1]


@functools.cache
def _block() -> int:
    """How many channels oneDNN takes at once."""
    return 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8


def _are_few(samples: Any) -> bool:
    """What is open may be many."""
    return isinstance(samples, int) and samples < FEW_SAMPLES


def _padded(channels: int) -> int:
    return -(-channels // _block()) * _block()
