"""Gradient accumulation, with and without no_sync: what `p.grad` is at each moment, and that nothing counts twice."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard
from tests.cluster import Cluster
from tests.models import CASES
from tests.parity import (
    Distance,
    Trainer,
    adamw,
    batches_of,
    clipped_step,
    rank0_copy,
    see_gradients,
    see_state,
    whole,
)
from tests.small import (
    TOLERANCE,
    Net,
    backward_of_all,
    compiled_pair,
    config,
    in_full,
    inputs_of,
    what_is_said,
)

# What a gradient is inside no_sync, by stage.
INSIDE = {0: "own", 1: "part", 2: "rows", 3: "rows"}


def what_it_is(grad: Tensor) -> str:
    if isinstance(grad, DTensor):
        return "part" if grad.placements[0].is_partial() else "rows"
    return "own"


def accumulate(zero: int, silent: bool) -> tuple[Distance, list[str]]:
    """Three microbatches a step; `silent`: the first two inside no_sync."""
    case = CASES["odd"]
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = case.build()
    reference = Trainer(rank0_copy(model), case, adamw)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(zero)))
    distance, inside_is = Distance(), []
    for step, micro in enumerate(zip(*[iter(batches_of(case, world, 12))] * 3)):
        for i, batches in enumerate(micro):
            inside = silent and i < 2 and step > 0
            with autoshard.no_sync(compiled) if inside else contextlib.nullcontext():
                (case.loss(compiled(**batches[rank])) / 3).backward()
            if inside:
                inside_is.append(what_it_is(model.first.weight.grad))
            reference.backward(batches, 1 / 3)
        see_gradients(distance, model, reference.model)
        distance.see("norm", clipped_step(model, optimizer), reference.step())
    see_state(distance, model, reference.model)
    return distance, inside_is


@pytest.mark.parametrize(
    ("zero", "silent"), [(3, True), (1, False), *(in_full(*case) for case in ((1, True), (0, True), (2, True), (0, False), (2, False), (3, False)))]
)
def test_accumulation(two: Cluster, zero: int, silent: bool) -> None:
    for distance, inside_is in two.run(accumulate, zero, silent):
        assert distance.worst <= TOLERANCE, distance
        assert set(inside_is) == ({INSIDE[zero]} if silent else set())


def held(order: str, zero: int, codegen: str) -> Tensor:
    """The gradient of a weight after a backward inside no_sync and others outside; each counts once."""
    model, _, compiled = compiled_pair(config(zero, codegen=codegen), lambda: nn.Sequential(nn.Linear(4, 1, bias=False), nn.Identity()))
    x = torch.ones(1, 4)
    compiled(x)
    early = compiled(x).sum()
    with autoshard.no_sync(compiled):
        compiled(x).sum().backward()
    if order == "twice":
        (compiled(x) + compiled(x)).sum().backward()
    elif order == "again":
        loss = compiled(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    elif order == "put back":
        waits = model[0].weight.grad
        compiled(x).sum().backward()
        model[0].weight.grad = None
        with autoshard.no_sync(compiled):
            compiled(x).sum().backward()
            model[0].weight.grad = waits.mul_(2)  # type: ignore[union-attr]
        compiled(x).sum().backward()
    else:
        early.backward()
        compiled(x).sum().backward()
    weight = model[0].weight
    assert weight.grad is not None
    return whole(weight.grad)


@pytest.mark.parametrize(
    ("order", "zero", "codegen"),
    [("twice", 0, "eager"), ("early", 0, "eager"), ("again", 0, "eager"), ("again", 1, "eager"), in_full("again", 0, "inductor"), ("put back", 0, "eager")],
)
def test_held_gradients_count_once(two: Cluster, order: str, zero: int, codegen: str) -> None:
    for gradient in two.run(held, order, zero, codegen):
        assert torch.equal(gradient, torch.full((1, 4), 3.0)), gradient


class Scaled(nn.Linear):
    """Uses its weight on both sides of something without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        with torch.no_grad():
            scale = x.abs().mean()
        return super().forward(x / scale).square().sum()


class Parts(nn.Module):
    """Each result reaches other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.first(hidden).pow(2).mean(), self.second(hidden.detach()).pow(2).mean()


def held_for_results(zero: int) -> Distance:
    """What was held, and then the results of one call one by one."""
    model, plain, compiled = compiled_pair(config(zero), Parts)
    rank, world = dist.get_rank(), dist.get_world_size()
    distance = Distance()
    for inputs in inputs_of(2):
        with autoshard.no_sync(compiled):
            sum(compiled(inputs[rank])).backward()
        first, second = compiled(inputs[rank])
        second.backward(retain_graph=True)
        first.backward()
        for x in inputs:
            (2 * sum(plain(x)) / world).backward()
        see_gradients(distance, model, plain)
    return distance


@pytest.mark.parametrize("zero", [in_full(0), 1, 3])
def test_held_gradients_count_once_for_results_that_are_differentiated_one_by_one(two: Cluster, zero: int) -> None:
    for distance in two.run(held_for_results, zero):
        assert distance.worst <= TOLERANCE, distance


def held_around_no_grad(zero: int) -> tuple[Tensor, Tensor]:
    """The gradient of two backwards, the first of them inside no_sync, and that of the model alone."""
    model, alone, compiled = compiled_pair(config(zero), lambda: Scaled(4, 4, bias=False))
    for inside in (False, True, False):
        with autoshard.no_sync(compiled) if inside else contextlib.nullcontext():
            compiled(torch.ones(2, 4)).backward()
        alone(torch.ones(2, 4)).backward()
    assert model.weight.grad is not None
    return whole(model.weight.grad), alone.weight.grad


@pytest.mark.parametrize("zero", [0, 1])
def test_what_is_held_counts_once_around_no_grad(two: Cluster, zero: int) -> None:
    for found, expected in two.run(held_around_no_grad, zero):
        torch.testing.assert_close(found, expected)


def replaced_inside(zero: int) -> list[tuple[Tensor, Tensor]]:
    """(gradients, wanted) after a backward outside, where what one inside left had another tensor put in its place."""
    model, plain, compiled = compiled_pair(config(zero))
    inputs, found = inputs_of(3), []
    for x in inputs:
        with autoshard.no_sync(compiled):
            compiled(x[dist.get_rank()]).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad = 0.5 * p.grad
        compiled(x[dist.get_rank()]).backward()
        backward_of_all(plain, x, 1.5)
        found += [(whole(p.grad), q.grad) for p, q in zip(model.parameters(), plain.parameters()) if p.grad is not None]
        for m in (model, plain):
            m.zero_grad()
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("zero", [0, in_full(1)])
def test_what_replaces_a_held_gradient_is_held(two: Cluster, zero: int) -> None:
    for found in two.run(replaced_inside, zero):
        assert len(found) == 3 * 4
        for gradient, expected in found:
            torch.testing.assert_close(gradient, expected)


class Frozen(Net):
    """Of which a part may be used without gradients."""

    def forward(self, x: Tensor, training: bool = True) -> Tensor:
        with torch.set_grad_enabled(training):
            x = self.up(x)
        return self.down(x.relu()).pow(2).mean()


def not_used_outside(zero: int) -> tuple[str, list[tuple[Tensor, Tensor]]]:
    """What is said of a step while a gradient waits that the graph outside did not take; and (gradients, wanted) once one has."""
    model, plain, compiled = compiled_pair(config(zero), Frozen)
    x = inputs_of(1)[0]
    compiled(x[dist.get_rank()])
    with autoshard.no_sync(compiled):
        compiled(x[dist.get_rank()]).backward()
    compiled(x[dist.get_rank()], False).backward()
    said = what_is_said(torch.optim.SGD(model.parameters(), lr=0.1).step)
    compiled(x[dist.get_rank()]).backward()
    for own in x:
        for training in (True, False, True):
            (plain(own, training) / len(x)).backward()
    return said, [(whole(p.grad), q.grad) for p, q in zip(model.parameters(), plain.parameters())]  # type: ignore[arg-type, misc]


@pytest.mark.parametrize("zero", [in_full(0), 1])
def test_what_a_graph_does_not_reduce_goes_on_waiting(two: Cluster, zero: int) -> None:
    for said, found in two.run(not_used_outside, zero):
        assert "gradients of backwards inside no_sync still wait" in said
        for gradient, expected in found:
            torch.testing.assert_close(gradient, expected)


def never_differentiated(zero: int) -> tuple[bool, list[tuple[Tensor, Tensor]]]:
    """Whether parameters of which no gradient was asked have none; and (gradients, wanted) of the others."""
    model, plain, compiled = compiled_pair(config(zero), Frozen)
    x = inputs_of(2)
    with autoshard.no_sync(compiled):
        compiled(x[0, dist.get_rank()], False).backward()
    compiled(x[1, dist.get_rank()], False).backward()
    for micro in x:
        for own in micro:
            (plain(own, False) / len(micro)).backward()
    none = all(p.grad is None or not bool(whole(p.grad).any()) for p in model.up.parameters())
    return none, [(whole(p.grad), q.grad) for p, q in zip(model.down.parameters(), plain.down.parameters())]  # type: ignore[arg-type, misc]


@pytest.mark.parametrize("zero", [0, in_full(1)])
def test_what_is_used_without_gradients_is_not_held(two: Cluster, zero: int) -> None:
    for none, found in two.run(never_differentiated, zero):
        assert none
        for gradient, expected in found:
            torch.testing.assert_close(gradient, expected)


def backward_behind_no_sync(zero: int) -> tuple[Tensor, Tensor]:
    """Gradients of forwards inside no_sync whose backwards come outside of it, and of one outside."""
    model, alone, compiled = compiled_pair(config(zero))
    inputs = inputs_of(4)
    for x in inputs[:3]:
        with autoshard.no_sync(compiled):
            loss = compiled(x[dist.get_rank()])
        loss.backward()
    compiled(inputs[3, dist.get_rank()]).backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    for x in inputs:
        backward_of_all(alone, x)
    return whole(model.up.weight.grad).detach(), alone.up.weight.grad


@pytest.mark.parametrize("zero", [in_full(0), 1])
def test_a_backward_may_come_behind_no_sync(two: Cluster, zero: int) -> None:
    for found, expected in two.run(backward_behind_no_sync, zero):
        torch.testing.assert_close(found, expected)


def step_with_closure(zero: int, inside: bool) -> tuple[str, list[Tensor]]:
    """A step whose closure has the last microbatch, outside no_sync or in it; the parameters beside those of one process."""
    model, alone, compiled = compiled_pair(config(zero))
    mine, inputs = torch.optim.SGD(model.parameters(), lr=0.1), inputs_of(2)
    compiled(inputs[0, 0])
    with autoshard.no_sync(compiled):
        compiled(inputs[0, dist.get_rank()]).backward()

    def closure() -> Tensor:
        with autoshard.no_sync(compiled) if inside else contextlib.nullcontext():
            loss: Tensor = compiled(inputs[1, dist.get_rank()])
        loss.backward()
        return loss

    said = what_is_said(mine.step, closure)
    for x in inputs:
        backward_of_all(alone, x)
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    return said, [whole(model.up.weight).detach(), alone.up.weight.detach()]


@pytest.mark.parametrize("zero", [in_full(0), 1])
def test_a_closure_may_have_the_last_microbatch(two: Cluster, zero: int) -> None:
    for said, (found, expected) in two.run(step_with_closure, zero, False):
        assert said == "nothing"
        torch.testing.assert_close(found, expected)


def test_what_a_closure_leaves_is_looked_at(two: Cluster) -> None:
    for said, _ in two.run(step_with_closure, 0, True):
        assert "gradients of backwards inside no_sync still wait" in said


def cast_before_no_sync(zero: int) -> list[tuple[Tensor, Tensor]]:
    """(gradients, wanted) of a model that was cast after its first call, of a backward inside no_sync and one outside."""
    model, plain, compiled = compiled_pair(config(zero))
    inputs = inputs_of(2)
    compiled(inputs[0, dist.get_rank()])
    for m in (model, plain):
        m.to(torch.float64)
    for inside, x in zip((True, False), inputs.double()):
        with autoshard.no_sync(compiled) if inside else contextlib.nullcontext():
            compiled(x[dist.get_rank()]).backward()
        backward_of_all(plain, x)
    return [(whole(p.grad), q.grad) for p, q in zip(model.parameters(), plain.parameters())]  # type: ignore[arg-type, misc]


@pytest.mark.parametrize("zero", [in_full(0), 1])
def test_a_model_that_was_cast_holds_gradients_as_it_is(two: Cluster, zero: int) -> None:
    for found in two.run(cast_before_no_sync, zero):
        for gradient, expected in found:
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def step_while_held() -> None:
    model, _, compiled = compiled_pair(config(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled(inputs_of(1)[0, 0]).backward()
    with autoshard.no_sync(compiled):
        compiled(inputs_of(1)[0, 0]).backward()
    optimizer.step()


def test_a_step_while_gradients_wait_is_refused(two: Cluster) -> None:
    for text in two.run(what_is_said, step_while_held):
        assert "gradients of backwards inside no_sync still wait" in text


def discard(zero: int, to_none: bool, between: bool) -> list[tuple[Tensor, Tensor]]:
    """(gradient, wanted) after zero_grad threw away what backwards inside no_sync had left.

    between: there was a reduced gradient already when the first of them came.
    """
    model, plain, compiled = compiled_pair(config(zero))
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batches in inputs_of(3):
        if between:
            compiled(batches[dist.get_rank()]).backward()
        with autoshard.no_sync(compiled):
            compiled(batches[dist.get_rank()]).backward()
            compiled(batches[dist.get_rank()]).backward()
        optimizer.zero_grad(set_to_none=to_none)
        compiled(batches[dist.get_rank()]).backward()
        plain.zero_grad()
        backward_of_all(plain, batches)
        found.append((whole(model.up.weight.grad).clone(), plain.up.weight.grad.clone()))
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("between", [in_full(False), True])
@pytest.mark.parametrize("to_none", [in_full(True), False])
@pytest.mark.parametrize("zero", [in_full(0), 1])
def test_zero_grad_discards_what_no_sync_left(two: Cluster, zero: int, to_none: bool, between: bool) -> None:
    for found in two.run(discard, zero, to_none, between):
        for gradient, wanted in found:
            torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)


def read_inside() -> list[tuple[Tensor, Tensor]]:
    """What a sharded gradient inside no_sync says of itself: (its full value, the mean of all so far)."""
    model, plain, compiled = compiled_pair(config(1))
    found = []
    batches = inputs_of(1)[0]
    compiled(batches[dist.get_rank()]).backward()
    for count in (2, 3):
        with autoshard.no_sync(compiled):
            compiled(batches[dist.get_rank()]).backward()
        plain.zero_grad()
        backward_of_all(plain, batches, count)
        found.append((whole(model.up.weight.grad), plain.up.weight.grad.clone()))
    return found


def test_a_gradient_inside_no_sync_reads_as_the_mean(two: Cluster) -> None:
    for found in two.run(read_inside):
        for gradient, wanted in found:
            torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)
