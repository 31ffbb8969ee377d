"""Loops that people write, on two processes, each beside the same loop on the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import autoshard
from tests.cluster import Cluster
from tests.models import CASES
from tests.parity import Distance, rank0_copy, see_gradients, see_state, whole
from tests.small import (
    ALONE,
    TOLERANCE,
    Encoder,
    Net,
    backward_beside,
    backward_of_all,
    compiled_pair,
    config,
    in_full,
    inputs_of,
    step_each,
    what_is_said,
)

Models = list[Any]
Optimizers = list[optim.Optimizer]


@dataclass(frozen=True)
class Place:
    """Where one process's batch stands among those that make one step: the reference runs all of them."""

    first: bool
    last: bool


def clip_values(models: Models, optimizers: Optimizers, x: Tensor, scale: float, at: Place) -> None:
    (models[0](x).pow(2).mean() * scale).backward()
    if at.last:
        nn.utils.clip_grad_value_(models[0].parameters(), 1e-3)
        step_each(optimizers[0])


def zero_between(models: Models, optimizers: Optimizers, x: Tensor, scale: float, at: Place) -> None:
    loss = models[0](x).pow(2).mean() * scale
    if at.first:
        optimizers[0].zero_grad()
    loss.backward()
    if at.last:
        optimizers[0].step()


def siamese(models: Models, optimizers: Optimizers, x: Tensor, scale: float, at: Place) -> None:
    """Two forwards for one backward."""
    a, b = models[0](x), models[0](x.flip(0))
    ((a - b).pow(2).mean() * scale).backward()
    if at.last:
        step_each(optimizers[0])


def summed(models: Models, optimizers: Optimizers, x: Tensor, scale: float, at: Place) -> None:
    """One loss over several calls of other sizes."""
    losses = [models[0](part).pow(2).mean() for part in (x[:1], x[1:], x)]
    (sum(losses[1:], losses[0]) * scale).backward()
    if at.last:
        step_each(optimizers[0])


def teacher(models: Models, optimizers: Optimizers, x: Tensor, scale: float, at: Place) -> None:
    """A frozen teacher, sharded too, and a student."""
    with torch.no_grad():
        wanted = models[1](x)
    ((models[0](x) - wanted).pow(2).mean() * scale).backward()
    if at.last:
        step_each(optimizers[0])


def adversarial(models: Models, optimizers: Optimizers, x: Tensor, scale: float, at: Place) -> None:
    """A GAN's two losses, with the generator's output detached for the first."""
    fake = models[0](x)
    ((models[1](fake.detach()) - models[1](x)).pow(2).mean() * scale).backward()
    (models[1](fake).abs().mean() * scale).backward(inputs=list(models[0].parameters()))
    if at.last:
        step_each(*optimizers)


def _training_some(
    models: Models, optimizers: Optimizers, x: Tensor, scale: float, at: Place, trained: Callable[[str, int], bool]
) -> None:
    """trained: by a parameter's name and the steps before this one."""
    steps = getattr(optimizers[0], "seen", 0)
    for name, parameter in models[0].named_parameters():
        parameter.requires_grad_(trained(name, steps))
    (models[0](x).pow(2).mean() * scale).backward()
    if at.last:
        optimizers[0].seen = steps + 1  # type: ignore[attr-defined]
        step_each(optimizers[0])


def frozen_for_a_while(models: Models, optimizers: Optimizers, x: Tensor, scale: float, at: Place) -> None:
    _training_some(models, optimizers, x, scale, at, lambda name, steps: "up.weight" not in name or steps not in (1, 2))


def thawed_later(models: Models, optimizers: Optimizers, x: Tensor, scale: float, at: Place) -> None:
    _training_some(models, optimizers, x, scale, at, lambda name, steps: "down" in name or steps > 1)


LOOPS: dict[str, Callable[..., None]] = {
    f.__name__: f
    for f in (clip_values, zero_between, siamese, summed, teacher, adversarial, frozen_for_a_while, thawed_later)
}


def run_loop(name: str, zero: int) -> Distance:
    torch.manual_seed(0)
    models = [Encoder(), Encoder()]
    plain = [rank0_copy(m) for m in models]
    if name == "teacher":
        for model in (models[1], plain[1]):
            model.requires_grad_(False).eval()
    compiled: Models = [torch.compile(m, backend=autoshard.backend(config(zero))) for m in models]
    optimizers, references = ([optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in ms] for ms in (models, plain))
    distance, world = Distance(), dist.get_world_size()
    for inputs in inputs_of(5):
        LOOPS[name](compiled, optimizers, inputs[dist.get_rank()], 1.0, Place(True, True))
        for rank, x in enumerate(inputs):
            LOOPS[name](plain, references, x, 1 / world, Place(rank == 0, rank == world - 1))
    for model, reference in zip(models, plain):
        see_state(distance, model, reference)
    return distance


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("zero", [in_full(0), 3])
def test_a_loop_trains_as_unsharded(two: Cluster, name: str, zero: int) -> None:
    for distance in two.run(run_loop, name, zero):
        assert distance.worst <= TOLERANCE, distance


# --- models that share parameters


class Actor(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x)).pow(2).mean()


class Critic(Actor):
    """Of another class, so that it has its first call by itself."""


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        trunk = Encoder()
        self.actor, self.critic = Actor(trunk), Critic(trunk)


def a_trunk_of_two() -> Distance:
    """An actor and a critic, compiled each for itself with one backend; whole on all processes, as it must be."""
    torch.manual_seed(0)
    model, backend = Both(), autoshard.backend(config(0))
    plain = rank0_copy(model)
    actor, critic = (torch.compile(m, backend=backend) for m in (model.actor, model.critic))
    optimizer, reference = (optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    distance, world = Distance(), dist.get_world_size()
    for inputs in inputs_of(3):
        (actor(inputs[dist.get_rank()]) + critic(inputs[dist.get_rank()])).backward()
        for x in inputs:
            ((plain.actor(x) + plain.critic(x)) / world).backward()
        see_gradients(distance, model, plain)
        step_each(optimizer, reference)
    see_state(distance, model, plain)
    return distance


def test_two_models_may_share_a_trunk(two: Cluster) -> None:
    for distance in two.run(a_trunk_of_two):
        assert distance.worst <= TOLERANCE, distance


# --- hooks


def hooks(zero: int) -> Distance:
    """Gradient hooks, registered after the first call: one that changes it, one that steps in backward."""
    model, plain, compiled = compiled_pair(config(zero))
    compiled(inputs_of(1)[0, dist.get_rank()]).backward()
    model.zero_grad()
    distance = Distance()
    model.up.weight.register_hook(lambda g: g * 2)
    seen = []
    model.down.weight.register_post_accumulate_grad_hook(lambda p: seen.append(whole(p.grad)))
    for inputs in inputs_of(3):
        backward_beside(compiled, plain, inputs)
        plain.up.weight.grad.mul_(2)
        see_gradients(distance, model, plain)
        distance.see("gradient", seen[-1], plain.down.weight.grad)
        model.zero_grad()
        plain.zero_grad()
    return distance


@pytest.mark.parametrize("zero", [0, in_full(1), 3])
def test_gradient_hooks_see_the_mean(two: Cluster, zero: int) -> None:
    for distance in two.run(hooks, zero):
        assert distance.worst <= TOLERANCE, distance


# --- averages of a model


def average(zero: int, wrapped: bool) -> Distance:
    """An EMA that starts after the first call, and evaluates whole and compiled."""
    model, plain, compiled = compiled_pair(config(zero))
    optimizer, reference = (optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    distance = Distance()
    averages: Any = None
    for inputs in inputs_of(4):
        backward_beside(compiled, plain, inputs)
        step_each(optimizer, reference)
        if averages is None:
            multi = optim.swa_utils.get_ema_multi_avg_fn(0.5)
            source = compiled if wrapped else model
            averages = [optim.swa_utils.AveragedModel(m, multi_avg_fn=multi) for m in (source, plain)]
        averages[0].update_parameters(model)
        averages[1].update_parameters(plain)
    ours, theirs = averages
    x = inputs_of(1)[0, 0]
    inner = getattr(ours.module, "_orig_mod", ours.module)
    see_state(distance, inner, theirs.module)
    with autoshard.gathered(inner), torch.no_grad():
        distance.see("loss", inner(x), theirs(x))
    again: Any = torch.compile(inner, backend=autoshard.backend(config(zero)))
    with torch.no_grad():
        distance.see("loss", again(x), theirs(x))
    see_state(distance, model, plain)
    return distance


@pytest.mark.parametrize(
    ("zero", "wrapped"),
    [(0, False), (3, True), in_full(0, True), in_full(1, False), in_full(1, True), in_full(3, False)],
)
def test_averaged_models(two: Cluster, zero: int, wrapped: bool) -> None:
    for distance in two.run(average, zero, wrapped):
        assert distance.worst <= TOLERANCE, distance


# --- graphs, dtypes, seeds, and the model as a whole


def backward_twice(zero: int, late: bool) -> Distance:
    """late: the first backward of a graph lets go of it."""
    model, plain, compiled = compiled_pair(config(zero))
    distance = Distance()
    for step, inputs in enumerate(inputs_of(2)):
        loss, times = compiled(inputs[dist.get_rank()]), 1 if late and step == 0 else 2
        for left in reversed(range(times)):
            loss.backward(retain_graph=left > 0)
        backward_of_all(plain, inputs, times)
        see_gradients(distance, model, plain)
    return distance


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("zero", [in_full(0), 3])
def test_a_graph_that_is_kept_is_right_again(two: Cluster, zero: int, late: bool) -> None:
    for distance in two.run(backward_twice, zero, late):
        assert distance.worst <= TOLERANCE, distance


def written_between(how: str) -> str:
    """Forward's rows are others by the time that backward gathers them again."""
    model, plain, compiled = compiled_pair(config(3))
    loss = compiled(ALONE[0])
    if how == "loaded":
        model.load_state_dict({name: value * 2 for name, value in plain.state_dict().items()})
    elif how == "in place":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
    return what_is_said(loss.backward)


WRITTEN = "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace"


@pytest.mark.parametrize(("how", "said"), [("loaded", WRITTEN), ("in place", WRITTEN), ("not at all", "nothing")])
def test_a_parameter_that_is_written_before_its_backward_is_refused_as_torch_does(two: Cluster, how: str, said: str) -> None:
    for text in two.run(written_between, how):
        assert text.startswith(said), text


def written_between_two() -> list[str]:
    """The second forward's rows are the new ones, whatever its backward comes behind."""
    model, _, compiled = compiled_pair(config(3))
    early = compiled(ALONE[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    late = compiled(ALONE[1])
    return [what_is_said(early.backward), what_is_said(late.backward)]


def test_a_forward_behind_a_write_has_its_backward(two: Cluster) -> None:
    for early, late in two.run(written_between_two):
        assert early.startswith(WRITTEN) and late == "nothing", (early, late)


def cast_after(zero: int) -> tuple[Distance, set[torch.dtype]]:
    """model.to(dtype) after the first step."""
    model, plain, compiled = compiled_pair(config(zero))
    distance = Distance()
    for step, inputs in enumerate(inputs_of(3)):
        if step == 1:
            model.to(torch.float64)
            plain.to(torch.float64)
        inputs = inputs.to(plain.up.weight.dtype)
        backward_beside(compiled, plain, inputs)
        see_gradients(distance, model, plain)
        model.zero_grad()
        plain.zero_grad()
    return distance, {p.dtype for p in model.parameters()}


@pytest.mark.parametrize("zero", [in_full(0), in_full(1), 3])
def test_a_model_may_be_cast_later(two: Cluster, zero: int) -> None:
    for distance, dtypes in two.run(cast_after, zero):
        assert distance.worst <= TOLERANCE, distance
        assert dtypes == {torch.float64}


def seeds(zero: int) -> tuple[Tensor, Tensor, Tensor]:
    """What dropout lets through: (with this process's seed, with the same seed again, with another)."""
    compiled: Any = torch.compile(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), backend=autoshard.backend(config(zero))
    )
    compiled(torch.ones(2, 8))
    outs = []
    for seed in (dist.get_rank(), dist.get_rank(), 9):
        torch.manual_seed(seed)
        outs.append(compiled(torch.ones(2, 8)).detach())
    return outs[0], outs[1], outs[2]


@pytest.mark.parametrize("zero", [in_full(0), 3])
def test_dropout_is_each_process_s_own_and_repeats_by_seed(two: Cluster, zero: int) -> None:
    (first, again, common), (second, again_too, common_too) = two.run(seeds, zero)
    assert torch.equal(first, again) and torch.equal(second, again_too) and not torch.equal(first, second)
    assert torch.equal(common, common_too) and not torch.equal(common, first)


def generate_inside(zero: int) -> bool:
    model, plain, compiled = compiled_pair(config(zero), CASES["llama"].build)
    batch = CASES["llama"].batch(torch.Generator().manual_seed(0))
    compiled(**batch)
    with autoshard.gathered(compiled):
        ours = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
    return torch.equal(ours, plain.generate(batch["input_ids"], max_new_tokens=4, do_sample=False))


@pytest.mark.full
def test_generate_works_inside_gathered(two: Cluster) -> None:
    assert all(two.run(generate_inside, 3))


def stepped_in_one(zero: int) -> Distance:
    """One function takes the whole step; Dynamo compiles what is around its backward."""
    torch.manual_seed(0)
    model = Net()
    plain = rank0_copy(model)
    optimizer, reference = (optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.backward()
        step_each(optimizer)
        return loss

    compiled = torch.compile(step, backend=autoshard.backend(config(zero)))
    distance = Distance()
    for inputs in inputs_of(4):
        expected = plain(inputs[dist.get_rank()])
        distance.see("loss", compiled(inputs[dist.get_rank()]).detach(), expected.detach())
        backward_of_all(plain, inputs)
        step_each(reference)
    see_state(distance, model, plain)
    return distance


@pytest.mark.parametrize("zero", [in_full(0), in_full(1), in_full(2), 3])
def test_a_step_may_be_compiled_with_its_backward(two: Cluster, zero: int) -> None:
    for distance in two.run(stepped_in_one, zero):
        assert distance.worst <= TOLERANCE, distance
