"""Blocks that repeat are compiled once: which are found alike, and that results stay those of the unsharded model."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import autoshard
from autoshard import codegen
from autoshard.passes import outline_blocks, registry
from tests.cluster import Cluster
from tests.models import DEEP, ResNet
from tests.parity import measure
from tests.small import TOLERANCE, config, in_full

PASSES = registry.DEFAULT.replace("outline_blocks", "outline_blocks{least=2}")


def _config(zero: int, codegen: str) -> autoshard.Config:
    return config(zero, codegen=codegen, passes=PASSES)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.line = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.line(x)) + x


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def _outlined(model: nn.Module, *inputs: Tensor) -> list[int]:
    """The modules that the first graph calls once its blocks are outlined, each by the number of its first call."""
    called: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        plan = autoshard.plan(nn.Linear(2, 2), torch.ones(2, 2))
        pipeline = registry.parse("name_parameters,merge_unshards,outline_blocks{least=2}")
        parameters = {i: str(n) for i, n in enumerate(gm.graph.find_nodes(op="placeholder")) if "parameters" in str(n)}
        gm = pipeline[-1].run(gm, outline_blocks.Context(plan=plan, parameters=parameters))
        gm.graph.lint()
        gm.recompile()
        called.extend(str(n.target) for n in gm.graph.nodes if outline_blocks.is_block(n))
        return gm

    torch.compiler.reset()  # a float that changes between models would become an input
    expected = model(*inputs)
    actual = torch.compile(model, backend=backend)(*inputs)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    names = list(dict.fromkeys(called))
    return [names.index(name) for name in called]


def test_alike_blocks_are_one_graph_and_what_is_before_them_another() -> None:
    assert _outlined(Stack([Block(), Block(), Block()]), torch.randn(4, 8)) == [0, 1, 1, 1]


def test_blocks_of_a_list_that_is_made_in_forward_are_found() -> None:
    """transformers goes through `self.layers[:n]`, a new ModuleList, which tells torch that it was made."""

    class Sliced(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks[:2]:
                x = block(x)
            return x.pow(2).mean()

    assert _outlined(Sliced([Block(), Block(), Block()]), torch.randn(4, 8)) == [0, 1, 1]


def test_blocks_that_differ_in_a_constant_are_not_alike() -> None:
    class Scaled(Block):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * super().forward(x)

    assert _outlined(Stack([Scaled(1.5), Scaled(2.5)]), torch.randn(4, 8)) == []
    assert _outlined(Stack([Scaled(1.5), Scaled(1.5), Scaled(2.5)]), torch.randn(4, 8)) == [0, 1, 1, 2]


def test_blocks_with_others_between_their_own_operations_stay() -> None:
    class Interleaved(Stack):
        def forward(self, x: Tensor) -> Tensor:
            a, b = self.blocks
            return (b.line(torch.tanh(a.line(x))) + a.line(x)).sum()  # a, b, a

    assert _outlined(Interleaved([Block(), Block()]), torch.randn(4, 8)) == []


def test_blocks_that_change_buffers_stay() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = ResNet()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)[1]

    assert _outlined(Mean(), torch.randn(2, 3, 6, 6)) == []


def _scaling(factor: float) -> Callable[[Tensor], Tensor]:
    @torch.compiler.allow_in_graph
    def scaled(x: Tensor) -> Tensor:
        return x * factor

    return scaled


def test_blocks_that_call_functions_of_one_factory_are_not_alike() -> None:
    class Foreign(Block):
        def __init__(self, scaled: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.scaled = scaled

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(super().forward(x))

    twice = _scaling(2.0)
    assert _outlined(Stack([Foreign(twice), Foreign(twice), Foreign(_scaling(3.0))]), torch.randn(4, 8)) == [0, 1, 1, 2]


def test_regions_that_save_by_other_rules_are_not_alike() -> None:
    class Saving(Block):
        def __init__(self, *ops: Any) -> None:
            super().__init__()
            self.context = partial(create_selective_checkpoint_contexts, list(ops))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=self.context)  # type: ignore[no-any-return]

    mm, tanh = torch.ops.aten.mm.default, torch.ops.aten.tanh.default
    assert _outlined(Stack([Saving(mm), Saving(mm), Saving(tanh)]), torch.randn(4, 8)) == [0, 1, 1]


def _under_kernels(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return _one_after_the_other(blocks, x)


def _in_inference(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return _one_after_the_other(blocks, x)


def _mapped(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: _one_after_the_other(blocks, row))(x)


def _differentiated(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: _one_after_the_other(blocks, y).sum())(x)


def _one_after_the_other(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


@pytest.mark.parametrize(("run", "left"), [(_under_kernels, False), (_in_inference, True), (_mapped, True), (_differentiated, True)])
def test_blocks_in_another_mode_stay(run: Callable[[nn.ModuleList, Tensor], Tensor], left: bool) -> None:
    """Those behind it do not where it is known to be left; else somebody says so."""

    class Switching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.blocks = nn.ModuleList(Block() for _ in range(3)), nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return _one_after_the_other(self.blocks, run(self.inside, x).clone()).sum()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert len(_outlined(Switching(), torch.randn(4, 8))) == (3 if left else 0)
    assert any("may switch a mode that the 6 blocks behind it are in" in str(w.message) for w in said) == (not left)


class Turned(Block):
    """Sizes of the batch enter its operations, and are needed in backward."""

    def forward(self, x: Tensor) -> Tensor:
        batch, width = x.shape
        y = self.line(x).view(batch, 2, width // 2).transpose(1, 2)
        return x + torch.softmax(y, 1).reshape(batch, width) / batch


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
def test_one_graph_serves_batches_of_all_sizes(codegen: str) -> None:
    torch.compiler.reset()
    model = Stack([Turned() for _ in range(3)])
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=autoshard.backend(_config(0, codegen)))
    for batch in (4, 5, 9):
        x = torch.randn(batch, 8)
        compiled(x).backward()
        plain(x).backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad, q.grad)
    history = autoshard.report(compiled).passes
    assert sum(run.name == "outline_blocks" for run in history) == 2, "static, then dynamic"


class Next(Stack):
    """The loss of the next label; the last has none."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = _one_after_the_other(self.blocks, self.first(x))
        labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        return nn.functional.cross_entropy(self.first(x).view(-1, 8), labels.view(-1))


@pytest.mark.full
def test_generated_code_finds_lengths_that_only_others_are_made_of() -> None:
    """The backward of what is behind the blocks takes labels of `length + 1`, and nothing else as long as these."""
    torch.compiler.reset()
    model = Next([Block() for _ in range(2)])
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=autoshard.backend(_config(0, "inductor")))
    for batch, length in ((3, 10), (4, 9)):
        x, labels = torch.randn(batch, length, 8), torch.randint(8, (batch, length))
        for module in (compiled, plain):
            module(x, labels).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


def test_random_numbers_are_those_of_the_plain_model() -> None:
    torch.compiler.reset()
    model = Stack([nn.Sequential(Block(), nn.Dropout(0.5)) for _ in range(3)])
    compiled = torch.compile(model, backend=autoshard.backend(_config(0, "eager")))
    x = torch.randn(4, 8)
    losses = []
    for module in (model, compiled):
        torch.manual_seed(5)
        losses.append(module(x))
        losses[-1].backward()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("mode", [torch.autocast("cpu", torch.bfloat16), torch.no_grad()], ids=["autocast", "no_grad"])
def test_blocks_in_a_mode_that_forward_sets_stay_in_the_graph(mode: Any) -> None:
    class Within(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with mode:
                y = super().forward(x)
            return y + self.first(x).sum()

    torch.compiler.reset()
    model = Within([Block(), Block()])
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=autoshard.backend(_config(0, "eager")))
    x = torch.randn(4, 8)
    losses = [compiled(x), plain(x)]
    torch.testing.assert_close(*losses, rtol=0, atol=0)
    for loss in losses:
        loss.backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        assert (p.grad is None) == (q.grad is None)
        torch.testing.assert_close(p.grad, q.grad)


def test_a_model_outlives_another_with_blocks_like_its_own() -> None:
    torch.compiler.reset()
    x = torch.randn(4, 8)
    kept, gone = (Stack([Block(), Block()]) for _ in range(2))
    compiled, other = (torch.compile(m, backend=autoshard.backend(_config(0, "eager"))) for m in (kept, gone))
    assert [compiled(x), other(x)] == [kept(x), gone(x)]
    del gone, other
    gc.collect()
    assert compiled(x) == kept(x)


def test_a_block_that_gives_a_view_of_its_input_stays_in_the_graph() -> None:
    """An op's results must be new tensors."""

    class Flip(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.t()

    torch.compiler.reset()
    model = Stack([Flip(), Flip(), Flip()])
    compiled = torch.compile(model, backend=autoshard.backend(_config(0, "eager")))
    x = torch.randn(8, 8)
    assert compiled(x) == model(x)


def test_random_states_are_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs too, where torch would have backward wind back a generator, which nobody gives a block, and whose numbers are others."""
    wound_back: list[bool] = []

    def partition(*args: Any, **keywords: Any) -> Any:
        wound_back.append(torch._functorch.config.graphsafe_rng_functionalization)
        return cut(*args, **keywords)

    cut = codegen.min_cut_rematerialization_partition
    monkeypatch.setattr(codegen, "min_cut_rematerialization_partition", partition)
    torch.compiler.reset()
    torch.compile(Stack([Block(), Block()]), backend=autoshard.backend(_config(0, "eager")))(torch.randn(4, 8)).backward()
    assert len(wound_back) > 1 and not any(wound_back)  # blocks, and what is around them


@pytest.mark.parametrize(
    ("name", "zero"),
    [("resnet", 3)]
    + [in_full(n, 3) for n in ("llama_regions_deep", "gpt2_deep", "bert_deep", "t5_deep", "vit_deep")]
    + [in_full("llama_deep", zero) for zero in (0, 1, 2, 3)],
)
def test_parity(two: Cluster, name: str, zero: int) -> None:
    for distance in two.run(measure, name, _config(zero, "eager")):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.parametrize("name", [in_full(n) for n in DEEP])
def test_parity_on_inductor(two: Cluster, name: str) -> None:
    for distance in two.run(measure, name, _config(3, "inductor")):
        assert distance.worst <= TOLERANCE, distance
