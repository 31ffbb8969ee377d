"""Loops that people write, on two processes, each beside the same loop on the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.errors import UnsupportedError
from autoshard.runtime.dtensors import local
from autoshard.runtime.state import state_of
from tests.cluster import Cluster
from tests.parity import Distance, clipped_step, rank0_copy, see_gradients, see_state, whole
from tests.small import (
    TOLERANCE,
    Net,
    backward_beside,
    compiled_pair,
    config,
    in_full,
    inputs_of,
    step_each,
    what_is_said,
)

Models = list[Any]


@dataclass(frozen=True)
class Place:
    """Where one process's batch stands among those that make one step: the reference runs all of them."""

    first: bool
    last: bool


Optimizers = list[optim.Optimizer]


class Encoder(nn.Module):
    """Without a loss of its own, for loops that put several outputs together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 15), nn.Linear(15, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def finish(model: Any, optimizer: optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def clip_values(models: Models, optimizers: Optimizers, x: Tensor, scale: float, at: Place) -> None:
    (models[0](x).pow(2).mean() * scale).backward()
    if at.last:
        nn.utils.clip_grad_value_(models[0].parameters(), 1e-3)
        finish(models[0], optimizers[0])


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
        finish(models[0], optimizers[0])


def summed(models: Models, optimizers: Optimizers, x: Tensor, scale: float, at: Place) -> None:
    """One loss over several calls of other sizes."""
    losses = [models[0](part).pow(2).mean() for part in (x[:1], x[1:], x)]
    (sum(losses[1:], losses[0]) * scale).backward()
    if at.last:
        finish(models[0], optimizers[0])


def teacher(models: Models, optimizers: Optimizers, x: Tensor, scale: float, at: Place) -> None:
    """A frozen teacher, sharded too, and a student."""
    with torch.no_grad():
        wanted = models[1](x)
    ((models[0](x) - wanted).pow(2).mean() * scale).backward()
    if at.last:
        finish(models[0], optimizers[0])


def adversarial(models: Models, optimizers: Optimizers, x: Tensor, scale: float, at: Place) -> None:
    """A GAN's two losses, with the generator's output detached for the first."""
    fake = models[0](x)
    ((models[1](fake.detach()) - models[1](x)).pow(2).mean() * scale).backward()
    (models[1](fake).abs().mean() * scale).backward(inputs=list(models[0].parameters()))
    if at.last:
        for model, optimizer in zip(models, optimizers):
            finish(model, optimizer)


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
        finish(models[0], optimizers[0])


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
        finish(model, optimizer)
        finish(plain, reference)
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


# --- fp16


def scaled(zero: int) -> tuple[Distance, list[float], list[bool]]:
    """GradScaler; in the second step one process's gradient is infinite, so none may step."""
    model, plain, compiled = compiled_pair(config(zero))
    optimizer, reference = (optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    distance, rank, world = Distance(), dist.get_rank(), dist.get_world_size()
    scales, skipped = [], []
    for step, inputs in enumerate(inputs_of(4)):
        scaler.scale(compiled(inputs[rank])).backward()
        if step == 1 and (zero == 0 or rank == 1):  # of rows, one process has the infinite one
            local = model.down.weight.grad
            (local.to_local() if isinstance(local, DTensor) else local)[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = whole(model.up.weight).detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(torch.equal(before, whole(model.up.weight)))
        scales.append(scaler.get_scale())
        if step != 1:
            for x in inputs:
                (plain(x) / world).backward()
            distance.see("norm", whole(norm), nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
            finish(plain, reference)
    see_state(distance, model, plain)
    return distance, scales, skipped


def scaled_late(kind: str) -> tuple[list[bool], float, str]:
    """(what was left as it was, the scale, what was refused): by default small parameters stay whole, and the first of all is. kind:
    the optimizer's; of one that is refused since the scaler comes late, whether it stepped before."""
    torch.manual_seed(0)
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if "late" not in kind else None
    below: Any = "auto" if "late" not in kind else 10
    compiled = torch.compile(model, backend=autoshard.backend(config(3, replicate_below=below)))
    compiled(inputs_of(1)[0, dist.get_rank()])
    parameters = sorted(model.parameters(), key=lambda p: p.numel())
    make = autoshard.optim.Adafactor if kind == "Adafactor" else optim.RMSprop if "late" in kind else getattr(optim, kind)
    optimizer = make(parameters, lr=1e-2)
    if kind == "later":
        compiled(inputs_of(1)[0, dist.get_rank()]).backward()
        step_each(optimizer)
    scaler = scaler or torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(compiled(inputs_of(1)[0, dist.get_rank()])).backward()
    if dist.get_rank() == 1 and "late" not in kind:
        model.up.weight.grad.to_local()[0, 0] = float("inf")  # type: ignore[union-attr, operator]
    before = [whole(p).detach().clone() for p in parameters]
    try:
        scaler.step(optimizer)
    except UnsupportedError as error:
        return [], 0.0, str(error)
    scaler.update()
    return [torch.equal(b, whole(p)) for b, p in zip(before, parameters)], scaler.get_scale(), ""


@pytest.mark.parametrize("kind", ["Adafactor", in_full("AdamW"), in_full("RMSprop")])
def test_an_infinite_gradient_is_seen_where_the_first_is_small(two: Cluster, kind: str) -> None:
    for same, scale, _ in two.run(scaled_late, kind):
        assert all(same) and scale == 512.0


@pytest.mark.parametrize("kind", ["late", "later"])
def test_a_scaler_that_comes_late_is_refused(two: Cluster, kind: str) -> None:
    assert all("Make the GradScaler before the model's first call" in text for *_, text in two.run(scaled_late, kind))


@pytest.mark.parametrize("zero", [in_full(0), in_full(1), 3])
def test_an_infinite_gradient_on_one_process_skips_the_step_on_all(two: Cluster, zero: int) -> None:
    for distance, scales, skipped in two.run(scaled, zero):
        assert distance.worst <= TOLERANCE, distance
        assert skipped == [False, True, False, False] and scales == [1024.0, 512.0, 512.0, 512.0]


# --- clipping by the largest


class Narrow(Net):
    """Of its last layer one of two processes has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(15, 1)


def clipped_by_the_largest(zero: int, error_if_nonfinite: bool) -> Distance:
    """As torch's norm over all gradients, of no finite order."""
    model, plain, compiled = compiled_pair(config(zero))
    distance = Distance()
    for inputs in inputs_of(2):
        backward_beside(compiled, plain, inputs)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e-3, torch.inf, error_if_nonfinite) for m in (model, plain)]
        distance.see("norm", *map(whole, norms))
        see_gradients(distance, model, plain)
        model.zero_grad()
        plain.zero_grad()
    return distance


@pytest.mark.parametrize("zero", [in_full(0), in_full(1), 3])
@pytest.mark.parametrize("error_if_nonfinite", [False, in_full(True)])
def test_clipping_by_the_largest_gradient_is_global(two: Cluster, zero: int, error_if_nonfinite: bool) -> None:
    for distance in two.run(clipped_by_the_largest, zero, error_if_nonfinite):
        assert distance.worst <= TOLERANCE, distance


def largest_of_nothing(below: int) -> str:
    """Each process looks at its own rows, and goes no further."""
    model, _, compiled = compiled_pair(config(3, replicate_below=below), Narrow)
    compiled(inputs_of(1)[0, dist.get_rank()]).backward()
    return what_is_said(torch.linalg.vector_norm, model.down.weight.grad, torch.inf)


def test_there_is_no_largest_of_no_rows(two: Cluster) -> None:
    first, second = two.run(largest_of_nothing, 0)
    assert first == "nothing" and "on an empty tensor" in second, second
    assert two.run(largest_of_nothing, 100) == ["nothing"] * 2


# --- drawing parameters anew


def drawn_anew(zero: int, below: int, name: str, alike: bool) -> tuple[Tensor, Tensor, str]:
    """(what a process has of a parameter that was drawn in place, what its own generator draws of that shape, what the next step
    says)"""
    model, _, compiled = compiled_pair(config(zero, replicate_below=below))
    compiled(inputs_of(1)[0, dist.get_rank()]).backward()
    parameter = model.get_parameter(name)
    drawn: list[Tensor] = []
    for tensor in (parameter, torch.empty(local(parameter).shape)):
        torch.manual_seed(7 if alike else dist.get_rank())
        drawn.append(local(nn.init.uniform_(tensor)).detach().clone())
    return drawn[0], drawn[1], what_is_said(optim.SGD(model.parameters(), lr=0.1).step)


@pytest.mark.parametrize(("zero", "below", "name"), [in_full(0, 0, "up.weight"), (3, 0, "up.weight"), (3, 10, "down.bias")])
@pytest.mark.parametrize("alike", [True, False])
def test_each_process_draws_what_it_has_by_its_own_generator(two: Cluster, zero: int, below: int, name: str, alike: bool) -> None:
    """With one seed rows repeat, and what is whole stays alike; with others what is whole parts, which the next step names."""
    (first, drawn, said), (second, drawn_too, said_too) = two.run(drawn_anew, zero, below, name, alike)
    assert torch.equal(first, drawn) and torch.equal(second, drawn_too)
    shared = min(len(first), len(second))
    assert torch.equal(first[:shared], second[:shared]) == alike
    parted = f"DivergenceError: before step 1, parameter '{name}' is not on rank 1 what it is on rank 0"
    for text in (said, said_too):
        assert text == "nothing" if alike or (zero, below) == (3, 0) else text.startswith(parted), text


def loaded_anew(zero: int) -> tuple[Tensor, Tensor]:
    """(a weight that was loaded from a layer which each process drew by itself, that layer's)"""
    model, _, compiled = compiled_pair(config(zero))
    compiled(inputs_of(1)[0, dist.get_rank()])
    torch.manual_seed(dist.get_rank())
    new = nn.Linear(8, 15)
    model.up.load_state_dict(new.state_dict())
    return whole(model.up.weight).detach(), new.weight.detach()


@pytest.mark.parametrize("zero", [in_full(1), 3])
def test_a_new_layer_that_is_loaded_is_rank_0_s(two: Cluster, zero: int) -> None:
    (first, new), (second, _) = two.run(loaded_anew, zero)
    assert torch.equal(first, new) and torch.equal(second, new)


# --- LBFGS


def in_double() -> nn.Module:
    return Net().double()


def by_lbfgs(search: str | None, steps: int) -> Distance:
    """With a closure that gives the mean loss over all processes."""
    model, plain, compiled = compiled_pair(config(0), in_double)
    optimizer, reference = (optim.LBFGS(m.parameters(), lr=0.1, max_iter=3, line_search_fn=search) for m in (model, plain))
    distance, world = Distance(), dist.get_world_size()
    for inputs in inputs_of(steps).double():

        def closure(inputs: Tensor = inputs) -> Tensor:
            optimizer.zero_grad()
            loss = compiled(inputs[dist.get_rank()])
            loss.backward()
            dist.all_reduce(mean := loss.detach() / world)
            return mean

        def of_all(inputs: Tensor = inputs) -> Tensor:
            reference.zero_grad()
            loss: Tensor = sum(plain(x) for x in inputs) / world  # type: ignore[assignment]
            loss.backward()
            return loss.detach()

        distance.see("loss", optimizer.step(closure), reference.step(of_all))
        see_state(distance, model, plain)
    return distance


@pytest.mark.parametrize("search", ["strong_wolfe", None])
def test_lbfgs_by_the_mean_loss(two: Cluster, search: str | None) -> None:
    for distance in two.run(by_lbfgs, search, 3):
        assert distance.worst <= TOLERANCE, distance


def by_its_own_loss() -> None:
    """A line search looks at losses, which processes have of their own."""
    model, _, compiled = compiled_pair(config(0, timeout=4))
    optimizer = optim.LBFGS(model.parameters(), max_iter=20, max_eval=64, line_search_fn="strong_wolfe")
    for inputs in inputs_of(4):

        def closure(inputs: Tensor = inputs) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = compiled((1 + 3 * dist.get_rank()) * inputs[dist.get_rank()])
            loss.backward()
            return loss

        optimizer.step(closure)


def test_lbfgs_by_losses_of_their_own_is_named(two: Cluster) -> None:
    said = two.answers(by_its_own_loss)
    assert [kind for kind, _ in said] == ["error", "error"]
    named = {name: text for _, (name, text, _) in said}
    assert "before step " in named.get("DivergenceError", "") or "did not come to step " in named.get("DisagreementError", ""), said


# --- what is refused, or right


class Penalized(Net):
    """Uses its parameters directly, as a penalty on weights may."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(p.pow(2).sum() for p in self.parameters())


def penalized(zero: int) -> str:
    compiled: Any = torch.compile(Penalized(), backend=autoshard.backend(config(zero)))
    try:
        compiled(inputs_of(1)[0, dist.get_rank()]).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("zero", [0, 3])
def test_parameters_used_inside_forward_are_refused(two: Cluster, zero: int) -> None:
    for text in two.run(penalized, zero):
        assert "UnsupportedError: forward uses parameter 'up.weight' other than through its module" in text, text


def backward_twice(zero: int) -> Distance:
    model, plain, compiled = compiled_pair(config(zero))
    distance, world = Distance(), dist.get_world_size()
    for inputs in inputs_of(2):
        loss = compiled(inputs[dist.get_rank()])
        loss.backward(retain_graph=True)
        loss.backward()
        for x in inputs:
            (2 * plain(x) / world).backward()
        see_gradients(distance, model, plain)
    return distance


@pytest.mark.parametrize("zero", [in_full(0), 3])
def test_a_graph_that_is_kept_is_right_again(two: Cluster, zero: int) -> None:
    for distance in two.run(backward_twice, zero):
        assert distance.worst <= TOLERANCE, distance


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
    (first, again, _), (second, again_too, _) = two.run(seeds, zero)
    assert torch.equal(first, again) and torch.equal(second, again_too) and not torch.equal(first, second)


def generate_inside(zero: int) -> bool:
    from tests.models import CASES

    torch.manual_seed(0)
    model: Any = CASES["llama"].build()
    plain = rank0_copy(model)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(zero)))
    batch = CASES["llama"].batch(torch.Generator().manual_seed(0))
    compiled(**batch)
    with autoshard.gathered(compiled):
        ours = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
    return torch.equal(ours, plain.generate(batch["input_ids"], max_new_tokens=4, do_sample=False))


@pytest.mark.full
def test_generate_works_inside_gathered(two: Cluster) -> None:
    assert all(two.run(generate_inside, 3))


# --- blocks compiled one by one


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
