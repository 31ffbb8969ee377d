"""Blocks that repeat are traced once, in a job as in a capture; what differs between them stays different."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard import torch_internals
from autoshard.capture import capture
from autoshard.passes.inline_regions import REGION
from autoshard.runtime.regions import make_regions
from tests.cluster import Cluster
from tests.models import Batch, Case
from tests.parity import Distance, measure_case
from tests.small import TOLERANCE, config, in_full

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
    def __init__(self, numbers: Sequence[int] = range(12)) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList(Block(i) for i in numbers)

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


def _batch(generator: torch.Generator) -> Batch:
    length = int(torch.randint(5, 10, (), generator=generator))
    return {"tokens": torch.randint(16, (2, length), generator=generator)}


def _train(folder: Path) -> tuple[Distance, list[int]]:
    """How far it was from unsharded training, and by how many calls of regions each graph's passes changed it."""
    case = Case(Stack, _batch, loss=lambda out: out)
    distance = measure_case(case, config("auto", dump_dir=folder), steps=4)
    records = map(json.loads, (folder / f"rank{dist.get_rank()}" / "passes.jsonl").read_text().splitlines())
    return distance, [r["ops"].get(str(REGION), 0) for r in records if r["pass"] == "inline_regions"]


def _frozen() -> nn.Module:
    stack = Stack([0] * 12)
    for module in (stack.embed, stack.blocks[0]):
        module.requires_grad_(False)
    return stack


def _without_a_norm() -> nn.Module:
    stack = Stack()
    stack.blocks[0].norm = nn.Identity()  # type: ignore[assignment]
    return stack


def _hooked() -> nn.Module:
    stack = Stack()
    stack.blocks[4].norm.register_forward_hook(lambda module, given, out: out * 3)  # type: ignore[operator, union-attr]
    return stack


class InModes(Stack):
    """Whose first blocks are called in another mode than the others."""

    def __init__(self, mode: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__([0] * 12)
        self.mode = mode

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        with self.mode():
            for block in self.blocks[:3]:
                x, y = block(x)
        for block in self.blocks[3:]:
            x, y = block(x.float())
        return x.pow(2).mean() + y.sum()


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize(("mode", "as_they_are"), [(torch.no_grad, lambda t: t.requires_grad), (_autocast, lambda t: t.dtype)])
def test_a_block_does_not_stand_for_one_in_another_mode(mode: Any, as_they_are: Callable[[Tensor], Any]) -> None:
    tokens = torch.randint(16, (2, 5))
    with pytest.MonkeyPatch.context() as patch:
        found = [capture(InModes(mode), tokens).graph]
        patch.setattr("autoshard.capture.REPEATED", 100)
        found.append(capture(InModes(mode), tokens).graph)
    ours, theirs = ([as_they_are(n.meta["example_value"]) for n in gm.graph.nodes if n.target is nn.functional.linear] for gm in found)
    assert ours == theirs and len(set(ours)) == 2


def _apart(build: Callable[[], nn.Module]) -> Distance:
    return measure_case(Case(build, _batch, loss=lambda out: out), config(3), steps=2)


@pytest.mark.parametrize("build", [_frozen, _without_a_norm, in_full(_hooked), partial(InModes, torch.no_grad), in_full(partial(InModes, _autocast))])
def test_a_block_does_not_stand_for_one_that_differs(two: Cluster, build: Callable[[], nn.Module]) -> None:
    """What torch does not look at: whether parameters are trained, what a module is that was not asked for anything, hooks."""
    for distance in two.run(_apart, build):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.full
@needs_regions
def test_a_job_s_first_trace_on_shards_has_regions(two: Cluster, tmp_path: Path) -> None:
    """Later ones, at other lengths, do not; all have the numbers of the unsharded model."""
    for distance, inlined in two.run(_train, tmp_path):
        assert distance.worst <= TOLERANCE, distance
        assert inlined[0] == -12 and inlined[1:] and not any(inlined[1:])
