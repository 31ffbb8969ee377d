"""Activation checkpointing that the user wrote: honoured, in the one graph, beside the same model without autoshard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.capture import capture
from autoshard.passes import graphs
from autoshard.rehearsal import rehearse
from tests.cluster import Cluster
from tests.parity import Distance, rank0_copy, see_gradients, whole
from tests.rewriting import plan_for
from tests.small import TOLERANCE, config, in_full, inputs_of


class Region:
    """How a model calls what may be a region: "none", "reentrant", or "plain"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, body: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.kind == "none":
            return body(*args, **kwargs)  # type: ignore[no-any-return]
        if self.kind == "reentrant":  # takes no keywords
            return checkpoint(partial(body, **kwargs), *args, use_reentrant=True)  # type: ignore[no-any-return]
        return checkpoint(body, *args, use_reentrant=False, **kwargs)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, region: Region, drop: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 15), nn.Linear(15, 8)
        self.drop, self.region = nn.Dropout(drop), region

    def widen(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        """A region in a region, when it is called in one."""
        return x + self.drop(self.down(self.region(self.widen, self.norm(x))))


class Net(nn.Module):
    """Regions that share a parameter with each other and with what is outside."""

    def __init__(self, kind: str, drop: float = 0.0) -> None:
        super().__init__()
        self.region = Region(kind)
        self.blocks = nn.ModuleList(Block(self.region, drop) for _ in range(3))
        self.tied = nn.Linear(8, 8)

    def _body(self, block: nn.Module, x: Tensor, scale: float = 1.0) -> Tensor:
        return block(self.tied(x)) * scale  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(x)
        for block in self.blocks:
            x = self.region(self._body, block, x, scale=0.5)
        return x.pow(2).mean()


class Deep(nn.Module):
    """Blocks enough to be graphs of their own, with a region around each or inside of it."""

    def __init__(self, around: str, inside: str) -> None:
        super().__init__()
        self.around = Region(around)
        self.blocks = nn.ModuleList(Block(Region(inside), 0.0) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.around(block, x)
        return x.pow(2).mean()


def _train(zero: int, build: Callable[[], nn.Module], codegen: str) -> Distance:
    torch.manual_seed(0)
    model = build()
    reference, rank = rank0_copy(model), dist.get_rank()
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(zero, codegen=codegen)), fullgraph=True)
    distance = Distance()
    for batches in inputs_of(3).requires_grad_():  # a reentrant region needs an input that has a gradient
        loss = compiled(batches[rank])
        loss.backward()
        losses = [reference(x) / len(batches) for x in batches]
        sum(losses[1:], losses[0]).backward()
        distance.see("loss", loss.detach(), losses[rank].detach() * len(batches))
        see_gradients(distance, model, reference)
        for p, q in zip(model.parameters(), reference.parameters()):
            p.data.sub_(p.grad, alpha=0.1)
            q.data.sub_(q.grad, alpha=0.1)
            p.grad = q.grad = None
    return distance


@pytest.mark.parametrize(
    ("zero", "kind", "codegen"),
    [in_full(0, "plain", "eager"), (2, "reentrant", "eager"), in_full(3, "plain", "eager"), in_full(1, "reentrant", "eager"),
     in_full(3, "reentrant", "inductor"), in_full(2, "plain", "inductor")],
)  # fmt: skip
def test_regions_are_honoured(two: Cluster, zero: int, kind: str, codegen: str) -> None:
    for distance in two.run(_train, zero, partial(Net, kind), codegen):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.parametrize(("around", "inside"), [("plain", "none"), in_full("none", "plain"), in_full("plain", "plain")])
def test_regions_are_honoured_where_blocks_repeat(two: Cluster, around: str, inside: str) -> None:
    for distance in two.run(_train, 3, partial(Deep, around, inside), "eager"):
        assert distance.worst <= TOLERANCE, distance


def _with_dropout(kind: str, codegen: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net(kind, drop=0.5)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(3, codegen=codegen)))
    torch.manual_seed(dist.get_rank())
    losses = [compiled(x[dist.get_rank()].requires_grad_()) for x in inputs_of(2)]
    sum(losses[1:], losses[0]).backward()
    return [*(loss.detach() for loss in losses), *(whole(p.grad) for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
def test_dropout_is_the_same_when_it_is_recomputed(two: Cluster, codegen: str) -> None:
    """Bitwise the same as without regions."""
    plain, again = two.run(_with_dropout, "plain", codegen), two.run(_with_dropout, "none", codegen)
    for ours, reference in zip(plain, again):
        assert len(ours) == len(reference) == 2 + len(list(Net("none").parameters()))
        assert all(torch.equal(a, b) for a, b in zip(ours, reference))
    assert not torch.equal(plain[0][0], plain[1][0])


@pytest.mark.parametrize(("around", "inside"), [("none", "none"), ("plain", "none"), ("none", "plain")])
def test_blocks_that_repeat_compute_again_what_their_regions_hold(around: str, inside: str) -> None:
    model = Deep(around, inside)
    rehearsed = rehearse(capture(model, torch.randn(4, 8)), plan_for(model, 3), inductor=False)
    backwards = [rehearsed.backward, *(block.backward.graph for block in rehearsed.blocks)]  # type: ignore[union-attr]
    again = [len(graphs.calls(gm, torch.ops.aten.addmm.default)) for gm in backwards if gm is not None]
    assert any(again) == ((around, inside) != ("none", "none"))
