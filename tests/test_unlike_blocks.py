"""Deep models of whose blocks some differ in what is not seen in their operations: none stands for another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture import capture
from tests.cluster import Cluster
from tests.models import Batch, Case
from tests.parity import Distance, measure_case
from tests.small import TOLERANCE, config, in_full

Mode = Callable[[], AbstractContextManager[Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.line(self.norm(x)))


class Stack(nn.Module):
    """mode: that the first blocks are called in."""

    def __init__(self, mode: Mode = torch.enable_grad) -> None:
        super().__init__()
        self.embed, self.blocks, self.mode = nn.Embedding(16, 8), nn.ModuleList(Block() for _ in range(12)), mode

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        with self.mode():
            for block in self.blocks[:3]:
                x = block(x)
        for block in self.blocks[3:]:
            x = block(x.float())
        return x.pow(2).mean()


class Given(nn.Module):
    """slope: an argument more."""

    def __init__(self, slope: tuple[float, ...]) -> None:
        super().__init__()
        self.line, self.slope = nn.Linear(8, 8), slope

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        return x + nn.functional.leaky_relu(self.line(x), *self.slope) * beside


class Skips(nn.Module):
    """Whose first block is given one tensor twice, and every second one an argument more."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList(Given((0.5,) * (i % 2)) for i in range(18))

    def forward(self, tokens: Tensor) -> Tensor:
        x = beside = self.embed(tokens)
        for block in self.blocks:
            x = block(x, beside)
        return x.pow(2).mean()


def _frozen() -> nn.Module:
    stack = Stack()
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


def _tied() -> nn.Module:
    stack = Stack()
    stack.blocks[0].line.weight = stack.blocks[5].line.weight  # type: ignore[union-attr, assignment]
    return stack


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


UNLIKE = [
    _frozen, Skips, in_full(partial(Stack, torch.no_grad)), in_full(_without_a_norm), in_full(_hooked), in_full(_tied),
    in_full(partial(Stack, _autocast)),
]  # fmt: skip


def _batch(generator: torch.Generator) -> Batch:
    return {"tokens": torch.randint(16, (2, 7), generator=generator)}


def _apart(build: Callable[[], nn.Module]) -> Distance:
    return measure_case(Case(build, _batch, loss=lambda out: out), config(3), steps=2)


@pytest.mark.parametrize("build", UNLIKE)
def test_it_trains_as_unsharded(two: Cluster, build: Callable[[], nn.Module]) -> None:
    for distance in two.run(_apart, build):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.parametrize(
    ("mode", "what", "inside", "outside"),
    [(torch.no_grad, "requires_grad", False, True), (_autocast, "dtype", torch.bfloat16, torch.float32)],
)
def test_a_capture_has_each_block_in_its_own_mode(mode: Mode, what: str, inside: Any, outside: Any) -> None:
    graph = capture(Stack(mode), torch.randint(16, (2, 5))).graph.graph
    lines = graph.find_nodes(op="call_function", target=nn.functional.linear)
    assert [getattr(n.meta["example_value"], what) for n in lines] == [inside] * 3 + [outside] * 9


class Scaled(nn.Module):
    """With numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.dropout, self.scale = nn.Linear(8, 8), nn.Dropout(0.0), 0.7

    def forward(self, x: Tensor) -> Tensor:
        q = self.dropout(self.line(x))
        return x + nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout.p, scale=self.scale)


class Numbers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(12))


def _of_any_length(generator: torch.Generator) -> Batch:
    length = int(torch.randint(4, 12, (), generator=generator))
    return {"tokens": torch.randint(16, (2, length), generator=generator)}


def _with_open_numbers() -> Distance:
    return measure_case(Case(Numbers, _of_any_length, loss=lambda out: out), config(0), steps=3, dynamic=True)


@pytest.mark.full
def test_a_module_s_numbers_may_be_open_too(two: Cluster) -> None:
    """With dynamic=True they come in tensors, of which a graph of its own could not tell the numbers."""
    for distance in two.run(_with_open_numbers):
        assert distance.worst <= TOLERANCE, distance
