"""Models whose elementwise operations are kernels: what a step gives, and what a plan says of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.fx import GraphModule

import autoshard
from autoshard.codegen import Compilation, call_directly
from autoshard.console import Phases
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.kernels.region import OPERATORS, Region, operator_of
from autoshard.passes import registry
from autoshard.passes.base import Context
from autoshard.passes.dump import Dump
from autoshard.passes.fuse_elementwise import FuseElementwise
from autoshard.passes.manager import PassManager
from tests.kernels import CONTEXT, apart, fused, random, run, traced
from tests.models import CASES
from tests.small import Net, in_full, same

pytestmark = pytest.mark.usefixtures("own_cache")


def model_and_batch(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    build: Any = CASES[name].build
    return build(1), CASES[name].batch(torch.Generator().manual_seed(1))


def step(model: nn.Module, inputs: dict[str, Any], inductor: bool, context: Context) -> tuple[list[Tensor], list[str]]:
    """(loss and gradients, the kernels that its graphs call)"""
    torch.compiler.reset()
    model.zero_grad()
    manager = PassManager(registry.parse(registry.DEFAULT), Dump(None))

    def backend(gm: GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        return Compilation(manager, context, inductor, Phases(False)).compile(gm, given)

    torch.manual_seed(0)
    loss = torch.compile(model, backend=backend)(**inputs)["loss"]
    loss.backward()
    changed = [name for ran in manager.history if ran.name == "fuse_elementwise" for name in ran.changed]
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *grads], [name for name in changed if name.startswith("autoshard.")]


SEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda s: s,
    "in one dimension": lambda s: s.view(-1),
    "transposed": lambda s: s.t(),
    "permuted, with one more": lambda s: s.unsqueeze(0).permute(2, 0, 1),
    "a part": lambda s: s[:, 2:],
    "one row": lambda s: s.select(0, 1),
    "several times": lambda s: s.unsqueeze(0).expand(3, 4, 6),
}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("kept", ["another dtype", "a copy"])
def test_a_sum_over_rows_is_written_as_it_lies_whatever_is_seen_of_it(seen: str, kept: str) -> None:
    x, w = random((600, 4, 6), torch.float32, 1), random((600, 4, 6), torch.float32, 2)

    def of(s: Tensor) -> Tensor:
        what = SEEN[seen](s)
        return what.to(torch.bfloat16) if kept == "another dtype" else what.clone(memory_format=torch.contiguous_format)

    def function(x: Tensor, w: Tensor) -> list[Tensor]:
        y = (x * w + 1).relu()
        return [y, of(y.sum(0))]

    gm = traced(function, [x, w])
    assert fused(gm)
    (y, found), (expected, total) = run(gm, [x, w]), function(x, w)
    assert apart(y, expected) < 1e-6 and found.dtype is total.dtype and found.stride() == total.stride()
    assert apart(found, total) < (1e-5 if kept == "a copy" else 2**-7)


@pytest.mark.parametrize("name", ["vit", in_full("gpt2"), in_full("llama"), in_full("bert"), in_full("t5")])
def test_a_model_s_regions_give_what_its_operations_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_and_batch(name)
    plain, none = step(model, inputs, False, Context(CONTEXT.plan))
    assert not none
    one_by_one, kernels = step(model, inputs, False, CONTEXT)
    assert kernels and same(one_by_one, plain)
    monkeypatch.setattr(Region, "run", lambda region, tensors: region.launched(tensors, interpret=True))
    by_kernels, _ = step(model, inputs, False, CONTEXT)
    for ours, theirs in zip(by_kernels, plain):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_inductor_takes_regions() -> None:
    model, inputs = model_and_batch("llama")
    plain, _ = step(model, inputs, True, Context(CONTEXT.plan))
    ours, kernels = step(model, inputs, True, CONTEXT)
    assert kernels
    for a, b in zip(ours, plain):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_region_is_an_operator_of_torch() -> None:
    x = random((4, 6), torch.float32, 0)
    (region,) = fused(traced(lambda x: [F.gelu(x) + 1, x.softmax(-1)], [x]))
    torch.library.opcheck(operator_of(region), ([x],), test_utils=("test_schema", "test_faketensor"))


def test_a_job_calls_regions_without_torch_s_dispatcher() -> None:
    x = random((4, 6), torch.float32, 0)
    gm = traced(lambda x: F.gelu(x) + 1, [x])
    (region,) = fused(gm)
    call_directly(gm.graph)
    gm.recompile()
    assert any(node.target == region.run for node in gm.graph.nodes) and same(gm(x), [F.gelu(x) + 1])


def test_the_source_is_in_the_dump(tmp_path: Path) -> None:
    manager = PassManager((FuseElementwise(),), Dump(tmp_path))
    gm = manager.run(("code",), traced(lambda x: F.gelu(x) + 1, [random((4, 6), torch.float32, 0)]), CONTEXT)
    (call,) = [n for n in gm.graph.nodes if "kernel" in n.meta]
    region = OPERATORS[call.target]
    assert (tmp_path / f"{region.name}.py").read_text() == region.text and "tl.erf" in region.text


def test_on_a_cpu_codegen_is_eager_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    torch.compiler.reset()
    backend = autoshard.backend(autoshard.Config(codegen="triton", verbose=False))
    model = Net()
    plain, x = copy.deepcopy(model), torch.randn(4, 8)
    loss = torch.compile(model, backend=backend)(x)
    loss.backward()
    torch.compile(Net(), backend=backend)(torch.randn(5, 8))
    plain(x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters()))
    said = " ".join("".join(capfd.readouterr()).split())
    assert said.count("'triton' is for GPUs: on cpu it is 'eager' instead") == 1
    assert backend.config.codegen == "triton"  # what processes compare, and what graphs with tensors on a GPU go by


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(512, 2048), nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(F.silu(self.gate(x)) * self.up(x))).square().mean()


def test_a_plan_for_gpus_counts_kernels() -> None:
    """What the regions of a block do alone is memory traffic, which they spare."""
    inputs = {"x": torch.randn(64, 512)}
    took = {}
    for codegen in ("eager", "triton"):
        plan = autoshard.plan(Gated(), inputs, autoshard.Config(codegen=codegen), cluster=Cluster(1, 1, DEVICES["h100"]))
        took[codegen] = plan.predicted
    assert took["triton"].step_seconds < took["eager"].step_seconds
    assert took["triton"].peak_bytes <= took["eager"].peak_bytes
