"""Kernels to measure, over sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.calibration.row import Row
from autoshard.calibration.turns import chain, training, turns
from autoshard.cost_model.hardware import Table
from autoshard.cost_model.kernels import look_up, numbers_of_a_cube, passing
from autoshard.dtypes import dtype_named

DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "bf16", "fp16")}  # of matmuls
SIDES = {"cpu": (16, 64, 128, 256, 512, 1024), "cuda": (16, 64, 256, 1024, 2048, 4096, 8192)}
FEW, WIDE = 16, 1024  # rows and columns of a matmul whose weight is read for little
TOKENS = {"cpu": ((1, 32), (1, 64), (4, 128), (2, 512)), "cuda": ((1, 64), (4, 128), (2, 512), (4, 2048), (2, 8192))}  # batch, sequence
IMAGES = {  # batch, channels, height and width
    "cpu": ((4, 4, 16), (4, 32, 16), (4, 128, 16)), "cuda": ((4, 4, 16), (4, 128, 16), (32, 128, 32), (128, 128, 32), (128, 256, 32))
}  # fmt: skip
NUMBERS = {"cpu": (2**8, 2**12, 2**15, 2**18, 2**20, 2**22), "cuda": (2**8, 2**12, 2**16, 2**20, 2**22, 2**24, 2**26)}


def kernels(device: torch.device) -> Iterable[Row]:
    """Of each kind that has a table, in the dtypes by which rates differ."""
    if device.type == "cpu":  # where nothing runs ahead of what it asks for
        yield Row("view", 1, turns(lambda x: torch.ops.aten.view.default(x, [256]), [(16, 16)], torch.float32, device))
    for name in DTYPES[device.type]:
        dtype = dtype_named(name)
        for n in SIDES[device.type]:
            yield Row(f"matmul.{name}", 2 * n**3, turns(_linear, [(n, n)] * 3, dtype, device), 3)
        if device.type == "cpu":
            yield Row(f"thin.{name}", 2 * FEW * WIDE**2, turns(_linear, [(FEW, WIDE), (WIDE, WIDE), (FEW, WIDE)], dtype, device), 3)
        for b, s in TOKENS[device.type]:
            yield _attention(b, s, dtype, name, device)
        for b, c, side in IMAGES[device.type]:
            shapes = [(b, c, side, side), (c, c, 3, 3)]
            yield Row(f"convolution.{name}", 2 * b * side**2 * c * c * 9, training(_convolve, shapes, dtype, device), 3)
    bytes = functools.partial(passing, on_cpu=device.type == "cpu")
    for n in NUMBERS[device.type]:
        wide = [(max(n // 256, 1), 256)]
        yield Row("pointwise", bytes(8 * n, 4 * n), chain(torch.ops.aten.add.Tensor, wide[0], device))
        yield Row("hard", n, turns(F.gelu, wide, torch.float32, device))
        yield Row("reduction", bytes(4 * n, 0), turns(lambda x: x.mean(-1), wide, torch.float32, device))
        yield Row("random", bytes(4 * n, 5 * n), turns(lambda x: torch.native_dropout(x, 0.1, True), wide, torch.float32, device))
        yield Row("masked", bytes(5 * n, 4 * n), turns(_masked(wide[0], device), wide, torch.float32, device))
        yield Row("copy", bytes(4 * n, 4 * n), turns(lambda x: x.t().contiguous(), wide, torch.float32, device))
        yield Row("lookup", bytes(4 * n, 4 * n), turns(lambda x: x.index_select(0, torch.arange(x.shape[0] - 1, -1, -1, device=x.device)), wide, torch.float32, device))


def one_by_one() -> Iterable[Row]:
    """What Inductor's code on a CPU does not vectorize: it draws random numbers and stores booleans one by one."""
    draw = torch.compile(lambda x: torch.rand_like(x) > x, dynamic=True)
    for n in (2**8, 2**12, 2**16, 2**20):
        yield Row("serial", 2 * n, turns(draw, [(n // 256, 256)], torch.float32, torch.device("cpu")))


def beyond_cubes(tables: dict[str, Table]) -> dict[str, Table]:
    """With "thin" as [Note: Tables] has it: the numbers beyond those of a cube, and seconds beyond those of as many FLOPs, which a
    cluster's file has above 0."""
    numbers = WIDE * (WIDE + 2 * FEW) - numbers_of_a_cube(2 * FEW * WIDE**2)
    found = dict(tables)
    for name in filter(lambda name: name.startswith("thin."), tables):
        ((flops, seconds),) = tables[name]
        found[name] = ((numbers, max(seconds - float(look_up(tables[f"matmul.{name[5:]}"], flops)), 1e-12)),)
    return found


def _attention(batch: int, length: int, dtype: torch.dtype, name: str, device: torch.device) -> Row:
    """Forward has 4, backward 10 operations for each of batch x heads x length x length x width: two kernels of 7."""
    shape = (batch, 4, length, 64)
    flops = 7 * batch * 4 * length * length * 64

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Row(f"attention.{name}", flops, training(attend, [shape] * 3, dtype, device), 2)


def _masked(shape: tuple[int, ...], device: torch.device) -> Callable[[Tensor], Tensor]:
    """The backward of dropout."""
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    return lambda grad: torch.ops.aten.native_dropout_backward(grad, mask, 1.1)


def _linear(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """A linear layer's forward and its two gradients, as they lie in memory."""
    return x @ weight.t(), grad @ weight, grad.t() @ x


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1)
