"""Kernels on any machine: run by Triton's interpreter, and compiled for GPUs that need not be there.

A module whose tests do so says `pytestmark = pytest.mark.usefixtures("own_cache")`: sources of kernels are files.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from autoshard.cost_model.hardware import DEVICES
from autoshard.kernels.region import OPERATORS, Region
from autoshard.passes.base import Context
from autoshard.passes.fuse_elementwise import FuseElementwise
from autoshard.plan import Plan
from autoshard.torch_internals import FakeTensorMode

triton = pytest.importorskip("triton")
CONTEXT = Context(Plan(1, (("shard", 1),), ()), fuses=DEVICES["h100"])
Function = Callable[..., Any]
# Half the distance between two numbers; all of it in bfloat16, which the interpreter cuts off where a GPU rounds.
EPSILON = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}


def apart(ours: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to one or what it should be."""
    assert ours.shape == exact.shape
    exact = exact.double()
    same = (ours.double() == exact) | (ours.isnan() & exact.isnan())
    off = ((ours.double() - exact).abs() / (1 + exact.abs())).masked_fill(same, 0.0)
    return float(off.max()) if off.numel() else 0.0


def compiled_as(function: Any, signature: dict[str, str], constants: dict[str, Any], capability: int, attrs: Any = None, **options: int) -> Any:
    """What Triton makes of it for a GPU that need not be there. signature: of what is no constant."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(function, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spilled(made: Any, folder: Path) -> int:
    """Bytes of a thread's that are not in registers."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"(?:STACK|LOCAL):(\d+)", said)
    assert found, said
    return sum(map(int, found))


def as_list(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def traced(function: Function, inputs: Sequence[Tensor], open: Literal["none", "rows", "all"] = "none") -> GraphModule:
    """The graph of a function that gives a list. open: which sizes are symbols; of rows: all but a last dimension."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for x in inputs:
        closed = {"none": x.dim(), "rows": 1, "all": 0}[open]
        dims = [DimDynamic.STATIC if d >= x.dim() - closed else DimDynamic.DYNAMIC for d in range(x.dim())]
        fakes.append(mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dims)))
    with mode:
        gm = make_fx(lambda *tensors: as_list(function(*tensors)))(*fakes)
    gm.graph.eliminate_dead_code()
    return gm


def fused(gm: GraphModule) -> list[Region]:
    """The regions that become kernels, in graph order."""
    gm = FuseElementwise().run(gm, CONTEXT)
    gm.graph.lint()
    gm.recompile()
    return [OPERATORS[n.target] for n in gm.graph.nodes if "kernel" in n.meta]


def run(gm: GraphModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The graph, its kernels by Triton's interpreter."""
    for node in gm.graph.nodes:
        if "kernel" in node.meta:
            region = OPERATORS[node.target]
            node.target = lambda tensors, region=region: region.launched(tensors, interpret=True)
    gm.recompile()
    return as_list(gm(*inputs))


def random(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype)
