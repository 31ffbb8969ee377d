"""What backward gathers again, and computes again of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoshard.passes import graphs as passgraphs
from tests.rewriting import Blocks, collectives, plan_for, rewritten
from tests.small import in_full

pytestmark = pytest.mark.usefixtures("many_processes")


class Looking(nn.Module):
    """Takes rows of a plain parameter by what comes in, and adds another to what it computes; backward needs what became of both."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.shift, self.line = nn.Parameter(torch.randn(512, 8)), nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + torch.tanh(torch.sigmoid(self.table[ids]).sin() * 2) + torch.sigmoid(self.line(x).sin() + self.shift).sin()


class Tables(nn.Module):
    def __init__(self, blocks: int = 3, checkpointed: bool = False) -> None:
        super().__init__()
        self.table, self.checkpointed = nn.Parameter(torch.randn(512, 8)), checkpointed
        self.layers, self.head = nn.ModuleList(Looking() for _ in range(blocks)), nn.Linear(8, 512)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.table[ids])
        for layer in self.layers:
            x = checkpoint(layer, x, ids, use_reentrant=False) if self.checkpointed else layer(x, ids)
        return self.head(x).square().mean()


ALWAYS = [(3, False, "none"), (3, True, "full"), (8, False, "selective")]
CASES = [(*how, policy) for how in ((3, False), (3, True), (8, False)) for policy in ("none", "selective", "full")]


@pytest.mark.parametrize(("blocks", "checkpointed", "policy"), [case if case in ALWAYS else in_full(*case) for case in CASES])
def test_what_is_gathered_again_is_the_same_for_batches_of_all_sizes(blocks: int, checkpointed: bool, policy: str) -> None:
    found = []
    for tokens in (1, 10, 1000):
        model = Tables(blocks, checkpointed)
        plan = replace(plan_for(model, 3), recompute=tuple((f"layers.{i}", policy) for i in range(blocks)) * (policy != "none"))
        graphs = rewritten(model, torch.zeros(tokens, dtype=torch.long), plan)
        found.append([collectives(graphs[phase]) for phase in ("forward", "backward")])
    assert found[0] == found[1] == found[2] and any("gather" in name for name in found[0][1])


class Pruned(nn.Module):
    """Weights times a mask, of which backward reads the mask alone, in float64; or weights as they are."""

    def __init__(self, blocks: int, masked: bool) -> None:
        super().__init__()
        self.layers, self.masked = nn.ModuleList(nn.Linear(64, 64) for _ in range(blocks)), masked
        for layer in self.layers:
            layer.register_buffer("mask", torch.ones(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weight = (layer.weight * layer.mask).to(torch.float64) if self.masked else layer.weight
            x = torch.nn.functional.linear(x.to(weight.dtype), weight, layer.bias.to(weight.dtype))
        return x.square().mean()


@pytest.mark.parametrize("blocks", [3, 8])
def test_of_masked_and_cast_weights_as_much_is_gathered_again_as_of_others(blocks: int) -> None:
    found = []
    for masked in (False, True):
        model = Pruned(blocks, masked)
        graphs = rewritten(model, torch.randn(4, 64), plan_for(model, 3))
        saved = [n.meta["val"] for n in graphs["forward"].graph.output_node().all_input_nodes if n.op != "placeholder"]
        found.append((collectives(graphs["backward"]), sum(isinstance(v, Tensor) and v.shape == (64, 64) for v in saved)))
    assert found[0] == found[1] and any("gather" in name for name in found[0][0])


class Smooth(nn.Module):
    """Blocks whose activations are more than their parameters."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("budget", [{"activation_memory_budget": 0.1}, in_full({"aggressive_recomputation": True})], ids=str)
@pytest.mark.parametrize(("blocks", "zero"), [(3, 2), in_full(8, 2), (8, 3)])
def test_to_spare_memory_torch_gathers_nothing_again_and_repeats_no_block(blocks: int, zero: int, budget: dict[str, Any]) -> None:
    """What it would repeat depends on the sizes of a batch; a block would draw other random numbers."""
    found = []
    for options in ({}, budget):
        model = Smooth(blocks)
        with torch._functorch.config.patch(options):
            graphs = rewritten(model, torch.randn(4096, 64), plan_for(model, zero))
        found.append(collectives(graphs["backward"]))
        assert not passgraphs.calls(graphs["backward"], passgraphs.BLOCK)
    assert found[0] == found[1]


class Regions(Blocks):
    """Blocks, each in an activation-checkpoint region that also uses one shared layer."""

    def _region(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.layers[0](layer(x)))  # backward needs what gelu was given

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers[1:]:
            x = checkpoint(self._region, layer, x, use_reentrant=False)
        return x.sum()


@pytest.mark.parametrize(("zero", "forward", "backward"), [(0, 0, 4), (2, 4, 4), (3, 4, 6)])
def test_a_region_recomputes_what_it_holds_and_the_plan_says_what_is_gathered(
    zero: int, forward: int, backward: int
) -> None:
    model = Regions()
    graphs = rewritten(model, torch.randn(4, 8), plan_for(model, zero))
    assert len(collectives(graphs["forward"])) == forward
    assert len(collectives(graphs["backward"])) == backward
    products = [sum(n.target is torch.ops.aten.addmm.default for n in gm.graph.nodes) for gm in graphs.values()]
    assert products == [5, 4]
