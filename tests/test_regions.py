"""Blocks that repeat are traced once, in a job as in a capture; what differs between them stays different."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from autoshard import torch_internals
from autoshard.passes.inline_regions import REGION
from autoshard.runtime.regions import make_regions
from tests.cluster import Cluster
from tests.parity import Distance, adamw, clipped_step, rank0_copy, see_gradients, see_state
from tests.small import TOLERANCE

needs_regions = pytest.mark.skipif(
    torch_internals.traced_once(nn.Linear.forward) is None, reason="Dynamo traces every call before torch 2.13"
)


class Block(nn.Module):
    """Every second one has another number, every third another operation."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.divisor, self.bent = 1 + number % 2, number % 3 == 2

    def forward(self, x: Tensor, scale: float = 1.0, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.line(self.norm(x))
        y = torch.tanh(y) if self.bent else torch.relu(y)
        return x + y * scale * (1 if mask is None else mask) / self.divisor, y


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList(Block(i) for i in range(12))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x, y = block(x, mask=tokens.unsqueeze(-1) > 3)
        return x.pow(2).mean() + y.sum()


def _regions_in(graphs: list[torch.fx.GraphModule]) -> list[int]:
    return [len(gm.graph.find_nodes(op="call_function", target=REGION)) for gm in graphs]


@needs_regions
def test_regions_are_let_go_of_without_a_recompilation() -> None:
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    model = Stack()
    plain, regions = copy.deepcopy(model), make_regions(model, 8)
    assert regions is not None and make_regions(plain, 13) is None
    compiled, tokens = torch.compile(model, backend=backend), torch.randint(16, (2, 5))
    assert compiled(tokens) == plain(tokens)
    regions.on = False
    assert compiled(tokens) == plain(tokens) and len(graphs) == 1
    with torch.no_grad():
        assert compiled(tokens) == plain(tokens)
    assert _regions_in(graphs) == [12, 0]


@needs_regions
def test_copies_of_a_region_are_of_the_block_s_own_class() -> None:
    model = Stack()
    make_regions(model, 8)
    assert type(model.blocks[0]) is not Block
    assert type(copy.deepcopy(model).blocks[0]) is Block and type(pickle.loads(pickle.dumps(model)).blocks[0]) is Block


def _train() -> tuple[Distance, list[int]]:
    torch.manual_seed(dist.get_rank())
    model, distance = Stack(), Distance()
    reference, optimizer = rank0_copy(model), adamw(model.parameters())
    other = adamw(reference.parameters())
    config = autoshard.Config(codegen="eager", replicate_below=0, verbose=False, timeout=60)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config))
    generator = torch.Generator().manual_seed(3)
    for length in (5, 5, 9, 7):
        batches = torch.randint(16, (dist.get_world_size(), 2, length), generator=generator)
        loss = compiled(batches[dist.get_rank()])
        loss.backward()
        losses = [reference(batch) for batch in batches]
        torch.stack(losses).mean().backward()
        distance.see("loss", loss.detach(), losses[dist.get_rank()].detach())
        see_gradients(distance, model, reference)
        distance.see("norm", clipped_step(model, optimizer), clipped_step(reference, other))
    see_state(distance, model, reference)
    inlined = [p.changed.get(str(REGION), 0) for p in autoshard.report(compiled).passes if p.name == "inline_regions"]
    return distance, inlined


@needs_regions
def test_a_job_s_first_trace_on_shards_has_regions(two: Cluster) -> None:
    """Later ones, at other lengths, do not; all have the numbers of the unsharded model."""
    for distance, inlined in two.run(_train):
        assert distance.worst <= TOLERANCE, distance
        assert inlined[0] == -12 and not any(inlined[1:])
