"""Kernels that are generated for regions of a graph, compiled for GPUs, and run there where there is one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from autoshard.codegen import call_directly
from autoshard.kernels.elementwise import LONGEST
from autoshard.kernels.region import Region, like
from autoshard.kernels.source import load
from autoshard.kernels.tuning import Tile
from tests.functions import FUNCTIONS, cross_entropy_s_gradient, dropped
from tests.kernels import (
    Function,
    apart,
    as_list,
    compiled_as,
    fused,
    random,
    spilled,
    traced,
)
from tests.small import in_full

pytestmark = pytest.mark.usefixtures("own_cache")

TRITON_S = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.int64: "i64", torch.bool: "i1"}


def tile_of(region: Region, inputs: Sequence[Tensor], wide: bool = False) -> Tile:
    """The one that it has at these sizes unless it is measured."""
    return region.sized(tuple(inputs[i].shape[d] for _, i, d in region.sizes), wide).tile


def compiled(region: Region, tile: Tile, capability: int) -> Any:
    """What Triton makes of it for a GPU that need not be there."""
    tile = dict(tile)
    warps = tile.pop("num_warps", 4)
    function = load(region.name, region.text)
    tensors = (*region.inputs, *region.outputs)
    signature = {name: f"*{TRITON_S[laid.dtype]}" for name, laid in zip(function.arg_names, tensors)}
    signature |= dict.fromkeys(map(str, [s for s, _, _ in region.sizes]), "i32")
    divisible = {(i,): [["tt.divisibility", 16]] for i in range(len(tensors) + len(region.sizes))}
    return compiled_as(function, signature, tile, capability, divisible, num_warps=warps)


LARGE = {
    "rms_norm": 4096, "softmax": LONGEST, "log_softmax": 32000, "layer_norm": LONGEST, "silu_gate": 11008, "gelu_backward": 4096,
    "layer_norm_backward": LONGEST, "rms_norm_backward": 4096,
}  # fmt: skip
GPU_CASES = [(name, capability) for name in LARGE for capability in (80, 90)]
GPU_ALWAYS = {("rms_norm", 80), ("softmax", 90), ("log_softmax", 90), ("gelu_backward", 80), ("layer_norm_backward", 90), ("rms_norm_backward", 80)}


@pytest.mark.parametrize(("name", "capability"), [case if case in GPU_ALWAYS else in_full(*case) for case in GPU_CASES])
@pytest.mark.parametrize("open", ["none", in_full("rows")])
def test_kernels_compile_for_gpus_and_stay_in_registers(name: str, capability: int, open: Literal["none", "rows"], tmp_path: Path) -> None:
    function, shapes = FUNCTIONS[name]
    longer = [(*shape[:-1], LARGE[name]) if len(shape) > 1 else (LARGE[name],) for shape in shapes]
    inputs = [random(shape, torch.bfloat16, i) for i, shape in enumerate(longer)]
    (region,) = fused(traced(function, inputs, open))
    made = compiled(region, tile_of(region, inputs), capability)
    assert spilled(made, tmp_path) == 0
    assert re.search(r"ld\.global\.[\w.:]*v[24]", made.asm["ptx"])  # 16 bytes at once


@pytest.mark.parametrize("name", [in_full(name) if name != "rotary" else name for name in FUNCTIONS if not name.startswith("empty")])
@pytest.mark.parametrize("dtype", [torch.float16, in_full(torch.bfloat16), in_full(torch.float32), in_full(torch.float64)])
@pytest.mark.parametrize("capability", [80, in_full(90)])
def test_all_functions_compile_for_gpus(name: str, dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    function, shapes = FUNCTIONS[name]
    inputs = [random(shape, dtype, i) for i, shape in enumerate(shapes)]
    (region,) = fused(traced(function, inputs))
    assert spilled(compiled(region, tile_of(region, inputs), capability), tmp_path) == 0


OTHERS: dict[str, tuple[Function, tuple[Any, ...]]] = {
    "dropout": (dropped, ((70, 4096), torch.tensor([3]))),
    "a cross-entropy's gradient": (
        cross_entropy_s_gradient, ((64, 32000), torch.zeros(64, dtype=torch.int64), torch.tensor(0.7), torch.tensor(5.0)),
    ),
    "truths": (lambda x, y: [(x > 0) & (y > 0), x * y, x.isnan()], ((70, 4096), (70, 4096))),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("dtype", [torch.float32, in_full(torch.bfloat16), in_full(torch.float16)])
@pytest.mark.parametrize("capability", [80, in_full(90)])
def test_what_reads_or_gives_others_than_numbers_compiles_for_gpus(name: str, dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    function, given = OTHERS[name]
    inputs = [x if isinstance(x, Tensor) else random(x, dtype, i) for i, x in enumerate(given)]
    (region,) = fused(traced(function, inputs))
    assert spilled(compiled(region, tile_of(region, inputs), capability), tmp_path) == 0


@pytest.mark.parametrize("name", ["silu_gate", in_full("rotary"), in_full("gelu_backward"), in_full("transposed"), in_full("glu_backward")])
@pytest.mark.parametrize("capability", [in_full(80), 90])
def test_every_tile_compiles_for_gpus(name: str, capability: int, tmp_path: Path) -> None:
    function, shapes = FUNCTIONS[name]
    inputs = [random(shape, torch.bfloat16, i) for i, shape in enumerate(shapes)]
    (region,) = fused(traced(function, inputs))
    for tile in like(tile_of(region, inputs)):
        assert spilled(compiled(region, tile, capability), tmp_path) == 0, tile


@pytest.mark.parametrize("name", ["softmax", in_full("silu_gate")])
def test_products_of_sizes_have_64_bits_where_tensors_are_large(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    inputs = [random(shape, torch.float32, i) for i, shape in enumerate(shapes)]
    (region,) = fused(traced(function, inputs, "all"))
    text = compiled(region, tile_of(region, inputs, wide=True), 80).asm["ttir"]
    assert "arith.muli" in text and not re.findall(r"arith\.muli .*i32", text)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_on_a_gpu(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    inputs = [random(shape, torch.float32, i).cuda() for i, shape in enumerate(shapes)]
    gm = traced(function, inputs)
    assert len(fused(gm)) == 1
    call_directly(gm.graph)  # as a job does
    gm.recompile()
    exact = as_list(function(*(x.double() for x in inputs)))
    for _ in range(5):  # of its tiles, each launch goes by the next
        for ours, value in zip(as_list(gm(*inputs)), exact):
            assert apart(ours, value) <= 4e-6
