"""Adafactor on rows, beside torch's on the whole."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import distribute_tensor

import autoshard
from autoshard.errors import ConfigError, UnsupportedError
from autoshard.runtime import factored
from tests.cluster import Cluster
from tests.parity import Distance, rank0_copy, see_state
from tests.small import (
    TOLERANCE,
    backward_beside,
    compiled_pair,
    config,
    in_full,
    inputs_of,
    interpreter_loops,
    step_each,
    what_is_said,
)

needs_triton = pytest.mark.skipif(
    not interpreter_loops(),
    reason="the kernels are Triton's, whose older interpreter takes no loop whose end is an argument",
)
SHAPES = ((), (5,), (7, 3), (1, 6), (6, 1), (2, 3, 4), (3, 1, 2, 5), (9, 8))


def made(shapes: Any, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=random, dtype=torch.float64).to(dtype)) for s in shapes]


def given_gradients(parameters: list[nn.Parameter], step: int) -> None:
    random = torch.Generator().manual_seed(100 + step)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=random, dtype=torch.float64).to(p.dtype)


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
    st.sampled_from([(None, 1e-3), (1e-4, 1e-2)]),
    st.sampled_from([1.0, 3.0]),
)
def test_steps_are_torchs(shapes: Any, decay: float, maximize: bool, eps: Any, d: float) -> None:
    ours, theirs = made(shapes, torch.float64), made(shapes, torch.float64)
    options: Any = {"lr": 0.05, "weight_decay": decay, "maximize": maximize, "eps": eps, "d": d}
    optimizers = autoshard.optim.Adafactor(ours, **options), optim.Adafactor(theirs, **options)
    for step in range(4):
        for parameters, optimizer in zip((ours, theirs), optimizers):
            given_gradients(parameters, step)
            optimizer.step()
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in zip(ours, theirs))


# Of one step's result where each number is rounded to this dtype; the interpreter cuts bfloat16 off where a GPU rounds.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-6}


@needs_triton
@settings(max_examples=6)
@given(
    st.lists(st.one_of(st.just((18, 144)), st.just((2, 17, 130)), st.lists(st.integers(1, 6), max_size=4)), min_size=1, max_size=3),
    st.sampled_from(list(ROUNDING)),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
    st.sampled_from([1.0, 8.0]),
)
def test_kernels_step_as_torch_does_in_float64(
    shapes: Any, dtype: torch.dtype, decay: float, maximize: bool, scale: float
) -> None:
    """Each step from the same state. The kernels divide gradients by the scale."""
    ours = made(shapes, dtype)
    options: Any = {"lr": 0.05, "weight_decay": decay, "maximize": maximize, "eps": (1e-3, 1e-3), "d": 1.2, "beta2_decay": -0.7}
    optimizer = autoshard.optim.Adafactor(ours, **options)
    for step in range(2):
        theirs = [nn.Parameter(p.detach().double()) for p in ours]
        reference = optim.Adafactor(theirs, **options)
        reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        given_gradients(ours, step)
        for p, whole in zip(ours, theirs):
            assert p.grad is not None
            whole.grad = p.grad.double()
            p.grad = p.grad * scale
        factored.take(optimizer, torch.tensor(scale), interpret=True)
        reference.step()
        for p, whole in zip(ours, theirs):
            assert torch.allclose(p.double(), whole, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
            for key, value in optimizer.state[p].items():
                assert torch.allclose(value.double(), reference.state[whole][key].double(), rtol=ROUNDING[dtype], atol=ROUNDING[dtype]), key


@pytest.mark.parametrize("interpret", [False, pytest.param(True, marks=needs_triton)])
def test_small_gradients_with_all_the_weight_are_the_mean(interpret: bool) -> None:
    """As in torch: nothing of means that were large stays in them."""
    ours, theirs = made([(5,), (7, 3)]), made([(5,), (7, 3)])
    options: Any = {"lr": 0.05, "beta2_decay": 0.0, "eps": (1e-16, 1e-3)}
    optimizer, reference = autoshard.optim.Adafactor(ours, **options), optim.Adafactor(theirs, **options)
    for scale in (1.0, 1e-12):
        for parameters in (ours, theirs):
            given_gradients(parameters, 0)
            for p in parameters:
                p.grad = p.grad * scale  # type: ignore[operator]
        factored.take(optimizer, interpret=True) if interpret else optimizer.step()
        reference.step()
    for p, q in zip(ours, theirs):
        assert torch.allclose(p, q, rtol=1e-5)
        for key, value in optimizer.state[p].items():
            assert torch.allclose(value.double(), reference.state[q][key].double(), rtol=1e-5, atol=0), key


@needs_triton
def test_both_ways_lay_out_what_processes_add_up_alike() -> None:
    """One process may take kernels where another cannot."""
    found = []
    for interpret in (False, True):
        (parameter,) = made([(18, 144)])
        optimizer = autoshard.optim.Adafactor([parameter])
        given_gradients([parameter], 0)
        entry = factored.Factors(parameter, optimizer.param_groups[0], factored.state_of(optimizer, parameter), None)
        entry.state["step"] += 1
        found.append(factored.Together([entry], None, interpret).sums())
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(*found, strict=True))


@needs_triton
def test_an_infinite_gradient_shows_with_kernels_too() -> None:
    parameters = made([(18, 144), (5,)])
    given_gradients(parameters, 0)
    parameters[0].grad[0, 0] = torch.inf  # type: ignore[index]
    factored.take(autoshard.optim.Adafactor(parameters), interpret=True)
    assert bool(parameters[0].isnan().any()) and not bool(parameters[1].isnan().any())


@needs_triton
def test_a_graph_of_before_the_step_is_refused_after_kernels() -> None:
    (parameter,) = made([(18, 144)])
    loss = (parameter * parameter).sum()
    loss.backward(retain_graph=True)
    factored.take(autoshard.optim.Adafactor([parameter]), interpret=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_hundred_steps_and_state_dicts_are_torchs() -> None:
    """In fp32, the optimizers changing places half way."""
    ours, theirs = made(SHAPES), made(SHAPES)
    first, second = autoshard.optim.Adafactor(ours), optim.Adafactor(theirs)
    for step in range(100):
        if step == 50:
            kept = copy.deepcopy((first.state_dict(), second.state_dict()))
            first, second = optim.Adafactor(ours), autoshard.optim.Adafactor(theirs)  # type: ignore[assignment]
            first.load_state_dict(kept[0])
            second.load_state_dict(kept[1])
        for parameters, optimizer in ((ours, first), (theirs, second)):
            given_gradients(parameters, step)
            optimizer.step()
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, theirs))


def test_halves_are_computed_with_in_float32() -> None:
    half = made(SHAPES, torch.bfloat16)
    given_gradients(half, 0)
    exact = [nn.Parameter(p.detach().float()) for p in half]
    for p, q in zip(half, exact):
        q.grad = p.grad.float()  # type: ignore[union-attr]
    for parameters in (half, exact):
        autoshard.optim.Adafactor(parameters, lr=0.05, eps=(1e-3, 1e-3)).step()
    assert all(torch.allclose(a.float(), b, rtol=2**-7, atol=2e-4) for a, b in zip(half, exact))


def test_infinite_gradients_show_and_none_are_left_alone() -> None:
    parameters = made(SHAPES)
    given_gradients(parameters, 0)
    parameters[1].grad, untouched = None, parameters[1].detach().clone()
    parameters[2].grad[0, 0] = torch.inf  # type: ignore[index]
    autoshard.optim.Adafactor(parameters).step()
    assert torch.equal(parameters[1], untouched)
    assert bool(parameters[2].isnan().any())


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigError, match="max_norm: 0 is not legal"):
        autoshard.optim.Adafactor(made(SHAPES), max_norm=0)
    (parameter,) = made([(3, 3)])
    parameter.grad = torch.eye(3).to_sparse()
    with pytest.raises(UnsupportedError, match="not dense and real"):
        autoshard.optim.Adafactor([parameter]).step()


class Many(nn.Module):
    """Matrices wide and high, a stack of kernels, experts that are cut along their rows, vectors; more processes than rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.thin, self.last = nn.Linear(8, 7), nn.Linear(7, 1), nn.Linear(1, 5)
        self.kernels = nn.Conv1d(1, 3, 2)
        self.expert, self.experts = nn.Parameter(torch.randn(1, 17, 128)), nn.Parameter(torch.randn(2, 17, 128))
        self.squares = nn.Parameter(torch.randn(1, 5, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self.thin(torch.tanh(self.first(x))))
        z = sum(torch.tanh(x @ e[..., :8].mT + e.mean()).pow(2).mean() for e in (self.expert, self.experts)) + self.squares.pow(3).mean()
        return torch.tanh(self.kernels(y.unsqueeze(-2))).pow(2).mean() + z


def trained(zero: int, begun: bool, by_kernels: bool = False, kind: Any = autoshard.optim.Adafactor) -> Distance:
    """begun: the optimizer has stepped before the model was sharded. by_kernels: as on a GPU, by Triton's interpreter. kind: of
    optimizer."""
    torch.manual_seed(0)
    model = Many()
    plain = rank0_copy(model)
    optimizer, reference = kind(model.parameters()), optim.Adafactor(plain.parameters())
    distance = Distance()
    if begun:
        for m, o in ((model, optimizer), (plain, reference)):
            m(inputs_of(1)[0, 0]).backward()
            step_each(o)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(zero)))
    for inputs in inputs_of(4):
        backward_beside(compiled, plain, inputs)
        if by_kernels:
            factored.take(optimizer, interpret=True)
            optimizer.zero_grad()
        else:
            step_each(optimizer)
        step_each(reference)
    see_state(distance, model, plain)
    whole = autoshard.state_dict(optimizer)
    for kept, expected in zip(whole.get("state", {}).values(), reference.state_dict()["state"].values()):
        for key in expected:
            distance.see("parameter", kept[key], expected[key])
    return distance


@pytest.mark.parametrize(("zero", "begun"), [(3, True), in_full(3, False), in_full(0, False), in_full(1, False)])
def test_rows_step_as_the_whole(two: Cluster, zero: int, begun: bool) -> None:
    for distance in two.run(trained, zero, begun):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.parametrize(("zero", "begun"), [(3, True), in_full(0, True), in_full(1, False)])
def test_torch_s_own_steps_on_rows_too(two: Cluster, zero: int, begun: bool) -> None:
    """torch's step fails on DTensors."""
    for distance in two.run(trained, zero, begun, False, optim.Adafactor):
        assert distance.worst <= TOLERANCE, distance


def test_torch_s_own_is_torch_s_on_a_cpu() -> None:
    ours, theirs = made(SHAPES), made(SHAPES)
    optimizers = autoshard.fuse(optim.Adafactor(ours)), optim.Adafactor(theirs)
    for parameters, optimizer in zip((ours, theirs), optimizers):
        given_gradients(parameters, 0)
        optimizer.step()
    assert all(map(torch.equal, ours, theirs))


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize(("zero", "begun"), [(3, True), in_full(0, False), in_full(2, False)])
def test_kernels_step_rows_as_the_whole(two: Cluster, zero: int, begun: bool) -> None:
    for distance in two.run(trained, zero, begun, True):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.full
@pytest.mark.parametrize("by_kernels", [False, pytest.param(True, marks=needs_triton)])
def test_three_processes_and_fewer_rows(three: Cluster, by_kernels: bool) -> None:
    for distance in three.run(trained, 3, False, by_kernels):
        assert distance.worst <= TOLERANCE, distance


def resumed() -> Distance:
    """The state goes through torch's full state dict into a new optimizer, and through its own."""
    model, plain, compiled = compiled_pair(config(3), Many)
    optimizer: Any = autoshard.optim.Adafactor(model.parameters())
    reference = optim.Adafactor(plain.parameters())
    for i, inputs in enumerate(inputs_of(6)):
        if i == 2:
            kept = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
            optimizer = autoshard.optim.Adafactor(model.parameters())
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_optimizer_state_dict(model, optimizer, kept, options=options)
        if i == 4:
            own = optimizer.state_dict()
            optimizer = autoshard.optim.Adafactor(model.parameters())
            optimizer.load_state_dict(own)
        backward_beside(compiled, plain, inputs)
        step_each(optimizer, reference)
    distance = Distance()
    see_state(distance, model, plain)
    return distance


def test_its_state_goes_through_checkpoints(two: Cluster) -> None:
    for distance in two.run(resumed):
        assert distance.worst <= TOLERANCE, distance


def columns(shape: tuple[int, ...], *dims: int) -> None:
    """A parameter that someone else sharded by columns, or along two dimensions."""
    mesh = dist.init_device_mesh("cpu", (2, 1)[: len(dims)])
    parameter = nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [dist.tensor.Shard(dim) for dim in dims]))
    parameter.grad = torch.ones_like(parameter)
    autoshard.optim.Adafactor([parameter]).step()


@pytest.mark.parametrize("lies", [((4, 4), 1), ((2, 4, 4), 2), ((2, 4, 4), 0, 1)])
def test_columns_are_refused(two: Cluster, lies: tuple[Any, ...]) -> None:
    refused = two.run(what_is_said, functools.partial(columns, *lies))
    assert all("legal: whole, or sharded by rows" in text for text in refused)
