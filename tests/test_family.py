"""Blocks that are compiled one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import autoshard
from autoshard.runtime.state import state_of
from tests.cluster import Cluster
from tests.parity import Distance, clipped_step, rank0_copy, see_gradients, see_state
from tests.small import TOLERANCE, Encoder, backward_beside, config, in_full, inputs_of, what_is_said


class Head(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).pow(2).mean()


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*(Encoder() for _ in range(depth)), Head()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Stages(Stack):
    """Of stages that are compiled each by itself, with blocks in them."""

    def __init__(self, depth: int) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList([*(nn.Sequential(*(Encoder() for _ in range(3))) for _ in range(depth)), Head()])


class Some(nn.Module):
    """Of several alike ones, which have not all the same parameters."""

    def __init__(self, bias: bool, gate: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=bias)
        self.gate = nn.Parameter(torch.rand(8)) if gate else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x) if self.gate is None else self.gate * self.linear(x))


class Unlike(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Some(i % 2 == 0, i > 0) for i in range(depth + 1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def block_by_block(
    zero: int, depth: int, shared: bool, forgotten: int = 0, build: Callable[[int], Any] = Stack
) -> tuple[Distance, int]:
    """As one does for a fast start: each block in place, with one backend or its own, but for the last."""
    torch.manual_seed(0)
    model = build(depth)
    plain, backend = rank0_copy(model), autoshard.backend(config(zero))
    for block in list(model.blocks)[: depth + 1 - forgotten]:
        block.compile(backend=backend if shared else autoshard.backend(config(zero)))
    optimizer, reference = (optim.AdamW(m.parameters(), lr=0.01, eps=1e-3) for m in (model, plain))
    distance = Distance()
    for inputs in inputs_of(4):
        backward_beside(model, plain, inputs)
        see_gradients(distance, model, plain)
        distance.see("norm", clipped_step(model, optimizer), clipped_step(plain, reference))
    see_state(distance, model, plain)
    with autoshard.gathered(model):
        see_state(distance, model, plain)
    return distance, sum(p.name == "name_parameters" for p in backend.report(state_of(model.blocks[0])).passes)


@pytest.mark.parametrize(
    ("zero", "depth", "shared"),
    [(3, 12, True), in_full(0, 12, True), in_full(1, 12, True), in_full(2, 2, False), in_full(3, 2, False)],
)
def test_blocks_may_be_compiled_one_by_one(two: Cluster, zero: int, depth: int, shared: bool) -> None:
    """More blocks than Dynamo compiles graphs for one function share one; the first has another, since its input has
    no gradient, and so has the head."""
    for distance, graphs in two.run(block_by_block, zero, depth, shared):
        assert distance.worst <= TOLERANCE, distance
        assert graphs == (3 if shared else 0)


@pytest.mark.parametrize("zero", [in_full(0), 3])
def test_blocks_of_one_class_need_not_have_the_same_parameters(two: Cluster, zero: int) -> None:
    for distance, _ in two.run(block_by_block, zero, 2, True, 0, Unlike):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.full
def test_stages_that_are_compiled_one_by_one(two: Cluster) -> None:
    """In the graph of one its blocks have no names of the plan's."""
    for distance, _ in two.run(block_by_block, 3, 3, True, 0, Stages):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.parametrize(
    ("depth", "shared", "forgotten", "says"),
    [
        (2, True, 1, "is in no model compiled with autoshard"),
        (12, False, 0, "12 modules of class Encoder were compiled with a backend each"),
    ],
)
def test_blocks_that_would_not_be_compiled_are_named(
    two: Cluster, depth: int, shared: bool, forgotten: int, says: str
) -> None:
    for said in two.run(what_is_said, block_by_block, 0, depth, shared, forgotten):
        assert says in said


class Nested(nn.Module):
    """A block with numbers of its own inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def _saved(policy: Any) -> list[tuple[int, ...]]:
    """Shapes of what two such blocks save for backward."""
    torch.compiler.reset()
    torch.manual_seed(0)
    blocks, found = nn.Sequential(*(Nested() for _ in range(2))), list[Any]()
    backend = autoshard.backend(config(0, recompute=policy))
    for block in blocks:
        block.compile(backend=backend)

    def note(tensor: Tensor) -> Tensor:
        found.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = blocks(torch.ones(4, 8, requires_grad=True)).sum()
    loss.backward()
    return found


def test_all_of_a_block_that_is_compiled_by_itself_has_its_policy() -> None:
    """Numbers within it are no blocks of a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert (4, 32) in _saved("none") and (4, 32) not in _saved("full")
