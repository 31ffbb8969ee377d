"""Whose parameters a compiled function uses: methods, functions over several models, and what they are found by."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import autoshard
from tests.cluster import Cluster
from tests.parity import Distance, rank0_copy, see_gradients, see_state
from tests.small import TOLERANCE, Encoder, config, in_full, inputs_of, what_is_said

Compile = Callable[[Any], Any]
Built = tuple[list[nn.Module], Callable[[list[nn.Module], Compile], Callable[[Tensor], Tensor]]]


class Parts(nn.Module):
    """Of two methods, which are compiled by themselves, or in a loop that breaks the graph between them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), Encoder()

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x).tanh()

    def decode(self, x: Tensor) -> Tensor:
        return self.decoder(x).pow(2).mean()

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x)
        torch._dynamo.graph_break()
        return self.decode(x)


class Loop:
    """Of which a method is compiled."""

    def __init__(self, models: Any) -> None:
        self.models = models

    def step(self, x: Tensor) -> Tensor:
        return _of_all(self.models, x)


def _of_all(models: Any, x: Tensor) -> Tensor:
    for model in models:
        x = model(x)
    return x.pow(2).mean()


def methods() -> Built:
    def make(models: list[nn.Module], compile: Compile) -> Callable[[Tensor], Tensor]:
        encode, decode = compile(models[0].encode), compile(models[0].decode)
        return lambda x: decode(encode(x))

    return [Parts()], make


def method_of_a_loop() -> Built:
    return [Parts()], lambda models, compile: compile(Loop(models).step)


def several() -> Built:
    def make(models: list[nn.Module], compile: Compile) -> Callable[[Tensor], Tensor]:
        first, second = models
        return compile(lambda x: second(first(x)).pow(2).mean())

    return [Encoder(), Parts().encoder], make


def with_a_frozen_one() -> Built:
    models, make = several()
    models[1].requires_grad_(False)
    return models, make


class Called(Loop):
    """Which is compiled itself."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.step(x)


def object_of_a_loop() -> Built:
    return [Encoder(), nn.Linear(8, 8)], lambda models, compile: compile(Called(models))


def argument_of_a_loop() -> Built:
    """As where a method is compiled in its class."""

    def make(models: list[nn.Module], compile: Compile) -> Callable[[Tensor], Tensor]:
        return functools.partial(compile(Loop.step), Loop(models))

    return [Encoder(), nn.Linear(8, 8)], make


def by_default() -> Built:
    def make(models: list[nn.Module], compile: Compile) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor, first: nn.Module = models[0], second: nn.Module = models[1]) -> Tensor:
            return _of_all([first, second], x)

        return compile(step)

    return [Encoder(), nn.Linear(8, 8)], make


def by_a_helper() -> Built:
    def make(models: list[nn.Module], compile: Compile) -> Callable[[Tensor], Tensor]:
        def helper(x: Tensor) -> Tensor:
            return _of_all(models, x)

        return compile(lambda x: helper(x))

    return [Encoder(), nn.Linear(8, 8)], make


def wrapped() -> Built:
    """As by a decorator."""

    def make(models: list[nn.Module], compile: Compile) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            return _of_all(models, x)

        @functools.wraps(step)
        def decorated(*args: Any) -> Any:
            return again(*args)

        again = step
        return compile(decorated)

    return [Encoder(), nn.Linear(8, 8)], make


def compiled_before() -> Built:
    """What a loop holds is what torch.compile returned."""

    def make(models: list[nn.Module], compile: Compile) -> Callable[[Tensor], Tensor]:
        return compile(Loop([compile(model) for model in models]).step)

    return [Parts()], make


def several_of_a_loop() -> Built:
    return [Encoder(), nn.Linear(8, 8)], lambda models, compile: compile(Loop(tuple(models)).step)


def partial_of_both() -> Built:
    def of(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        return _of_all([first, second], x)

    return [Encoder(), nn.Linear(8, 8)], lambda models, compile: compile(functools.partial(of, *models))


def trained(build: Callable[[], Built], zero: int) -> tuple[Distance, list[bool]]:
    """How far from the same without sharding, and whether each model has a plan, one for all, and whole parameters to look at."""
    torch.manual_seed(0)
    models, make = build()
    plain = [rank0_copy(model) for model in models]
    backend = autoshard.backend(config(zero))
    compiled, reference = make(models, functools.partial(torch.compile, backend=backend)), make(plain, lambda function: function)
    optimizers = [optim.AdamW([p for m in each for p in m.parameters()], lr=0.01, eps=1e-3) for each in (models, plain)]
    distance = Distance()
    for inputs in inputs_of(3):
        compiled(inputs[dist.get_rank()]).backward()
        for x in inputs:
            (reference(x) / len(inputs)).backward()
        for model, other in zip(models, plain):
            see_gradients(distance, model, other)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    plans = [autoshard.plan_of(model) for model in models]
    for model, other in zip(models, plain):
        see_state(distance, model, other)
        with autoshard.gathered(model):
            for p, q in zip(model.parameters(), other.parameters()):
                distance.see("parameter", p, q)
    return distance, [plan is not None and plan is plans[0] for plan in plans]


OTHERS = (
    methods, with_a_frozen_one, several_of_a_loop, object_of_a_loop, argument_of_a_loop, by_default, by_a_helper, wrapped, compiled_before,
)  # fmt: skip
KINDS = [method_of_a_loop, several, partial_of_both, *map(in_full, OTHERS)]


@pytest.mark.parametrize("zero", [in_full(0), in_full(1), 3])
@pytest.mark.parametrize("build", KINDS)
def test_functions_train_what_they_reach(two: Cluster, build: Callable[[], Built], zero: int) -> None:
    for distance, planned in two.run(trained, build, zero):
        assert distance.worst <= TOLERANCE and all(planned), distance


def copied(zero: int) -> Distance:
    """A copy of several models is trained by itself."""
    models, make = several()
    compile = functools.partial(torch.compile, backend=autoshard.backend(config(zero)))
    x = inputs_of(2)[:, dist.get_rank()]
    make(models, compile)(x[0]).backward()
    copies = copy.deepcopy(models)
    plain = [rank0_copy(model) for model in several()[0]]
    for model, other in zip(models, plain):
        other.load_state_dict(autoshard.state_dict(model, keep=True))
    optimizers = [optim.SGD([p for m in each for p in m.parameters()], lr=0.1) for each in (copies, plain)]
    optimizers[0].zero_grad()
    make(copies, compile)(x[1]).backward()
    for own in inputs_of(2)[1]:
        (make(plain, lambda function: function)(own) / dist.get_world_size()).backward()
    distance = Distance()
    for optimizer in optimizers:
        optimizer.step()
    for model, other in zip(copies, plain):
        see_state(distance, model, other)
    return distance


@pytest.mark.parametrize("zero", [in_full(0), 3])
def test_a_copy_of_several_is_trained(two: Cluster, zero: int) -> None:
    for distance in two.run(copied, zero):
        assert distance.worst <= TOLERANCE, distance


def test_one_process_trains_what_a_function_reaches() -> None:
    """Twice, as with other models that are alike, which Dynamo does not trace again; and some of them with others."""
    (first, second), make = several()
    for models in ([first, second], several()[0], [first, Encoder()]):
        first.zero_grad()
        function, plain = make(models, functools.partial(torch.compile, backend=autoshard.backend(config(1)))), copy.deepcopy(models)
        x = torch.randn(4, 8)
        for _ in range(2):
            function(x).backward()
        (2 * plain[1](plain[0](x)).pow(2).mean()).backward()
        for model, other in zip(models, plain):
            assert autoshard.plan_of(model) is not None
            for p, q in zip(model.parameters(), other.parameters()):
                torch.testing.assert_close(p.grad, q.grad)


def apart() -> str:
    """What is said where one of several had a first call by itself."""
    models, make = several()
    compile = functools.partial(torch.compile, backend=autoshard.backend(config(3)))
    x = inputs_of(1)[0, dist.get_rank()]
    compile(models[0])(x)
    return what_is_said(make(models, compile), x)


def test_one_of_several_that_had_a_first_call_is_named(two: Cluster) -> None:
    for said in two.run(apart):
        assert "Models that one function computes with have their first call together: call that function before any of them alone" in said
