"""Backward's first gradient, computed and sent in parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.passes import graphs
from autoshard.plan import Plan
from autoshard.planning import first_look
from autoshard.rehearsal import rehearse
from tests.cluster import Cluster
from tests.parity import Distance
from tests.small import TOLERANCE, backward_of_all, compiled_pair, config, inputs_of, trained_beside


class Headed(nn.Module):
    """A body, and a head whose weight has 37 rows of 12 numbers, 1776 bytes."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, 37, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x))).logsumexp(-1).mean()


def _plan(bucket: int, model: nn.Module, zero: int = 0, world: int = 2, **options: Any) -> Plan:
    """One that sums by sends, in buckets of so many bytes."""
    plan = first_look(model, config(zero, **options), Machines(1, world, DEVICES["cpu"]))
    return replace(plan, direct_sums=True, bucket=bucket)


def _order(plan: Plan, model: nn.Module, inductor: bool = False) -> list[tuple[str, tuple[int, ...]]]:
    """Matmuls, sends, waits and sums of backward, with the shapes of what they give."""
    backward = rehearse(capture(model, {"x": torch.randn(4, 8)}), plan, inductor).backward
    assert backward is not None
    seen = ("mm", "swap_direct", "wait_tensor", "sum_swapped")
    named = ((str(getattr(n.target, "overloadpacket", "")).rpartition(".")[-1], n) for n in backward.graph.nodes)
    return [(name, tuple(graphs.example(n).shape)) for name, n in named if name in seen]


@pytest.mark.parametrize("inductor", [False, True])
def test_each_part_is_sent_before_the_next_is_computed(inductor: bool) -> None:
    """Four, the last of which has fewer rows."""
    found = [step for step in _order(_plan(1776, Headed()), Headed(), inductor) if step != ("mm", (4, 12))]  # of what enters the head
    assert found[:8] == [step for rows in (10, 10, 10, 7) for step in (("mm", (rows, 12)), ("swap_direct", (rows * 12,)))]
    assert [kind for kind, _ in found[8:13]] == ["mm", "swap_direct", *["wait_tensor"] * 3], found
    assert ("sum_swapped", (37 * 12,)) in found


@pytest.mark.parametrize(
    ("bucket", "zero", "world", "options"),
    [
        (0, 0, 2, {}),  # all of a group in one
        (1777, 0, 2, {}),  # it is less than a bucket
        (1776, 1, 2, {}),  # rows of it
        (1776, 0, 3, {}),  # more processes than two
        (1776, 0, 2, {"compression": "bf16"}),
    ],
)
def test_what_stays_in_one(bucket: int, zero: int, world: int, options: dict[str, Any]) -> None:
    matmuls = [shape for kind, shape in _order(_plan(bucket, Headed(), zero, world, **options), Headed()) if kind == "mm"]
    assert matmuls[0] == (37, 12)


def test_what_travels_with_others_stays_in_one() -> None:
    """A bias of less than a bucket goes with its matrix."""
    model = Headed(bias=True)
    assert ("mm", (37, 12)) in _order(_plan(1776, model), model)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sum()


def test_what_has_no_rows_stays_in_one() -> None:
    assert [shape for kind, shape in _order(_plan(4, Scaled()), Scaled()) if kind == "swap_direct"] == [(1,)]


def trained(plan: Plan, codegen: str) -> Distance:
    model, plain, compiled = compiled_pair(config("auto", plan=plan, replicate_below="auto", codegen=codegen), Headed)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, eps=1e-3) for each in (model, plain)]
    return trained_beside(model, plain, compiled, optimizers)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_steps_are_those_of_the_unsharded_model(two: Cluster, codegen: str) -> None:
    for distance in two.run(trained, _plan(1776, Headed()), codegen):
        assert distance.worst <= TOLERANCE, distance


def held(plan: Plan) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of all parameters behind a backward that communicates, where one process has some of the head waiting and the other has not;
    and of the mean of what each had."""
    model, plain, compiled = compiled_pair(config("auto", plan=plan, replicate_below="auto"), Headed)
    silent, loud = inputs_of(2)
    with autoshard.no_sync(model):
        compiled(silent[dist.get_rank()]).backward()
    if dist.get_rank():
        model.head.weight.grad = None  # type: ignore[union-attr]
    compiled(loud[dist.get_rank()]).backward()
    backward_of_all(plain, [*silent, *loud], 2.0)
    (silent_head,) = torch.autograd.grad(plain(silent[1]) / 2, [plain.head.weight])  # type: ignore[union-attr]
    plain.head.weight.grad -= silent_head  # type: ignore[union-attr,operator]
    return [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]  # type: ignore[misc]


def test_all_send_as_many_parts_where_something_waited_on_one(two: Cluster) -> None:
    for ours, theirs in two.run(held, _plan(1776, Headed())):
        torch.testing.assert_close(ours, theirs)


class Twice(Headed):
    """A head that a longer sequence uses more often."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(Twice, self).forward(part) for part in x.split(4)]).mean()


def of_two_lengths(plan: Plan) -> tuple[list[Tensor], list[Tensor]]:
    model, plain, compiled = compiled_pair(config("auto", plan=plan, replicate_below="auto"), Twice)
    inputs = [x[: 4 * (i + 1)] for i, x in enumerate(inputs_of(2).flatten(1, 2))]
    compiled(inputs[dist.get_rank()]).backward()
    backward_of_all(plain, inputs)
    return [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]  # type: ignore[misc]


def test_all_send_as_many_parts_where_one_uses_the_head_more_often(two: Cluster) -> None:
    for ours, theirs in two.run(of_two_lengths, _plan(1776, Twice())):
        torch.testing.assert_close(ours, theirs)
