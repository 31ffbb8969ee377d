"""Optimizers of torch.optim that step all parameters at once: those that a first call finds, and those given to `fuse`."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import autoshard
from tests.cluster import Cluster
from tests.parity import whole
from tests.small import ALONE, Net, config, in_full, inputs_of, step_each


def found(options: dict[str, Any], of_its_own: str) -> tuple[str, bool]:
    """(how the report says that an optimizer steps, whether it stepped)."""
    torch.manual_seed(0)
    net = Net()
    model = torch.compile(net, backend=autoshard.backend(config(3, **options)))
    optimizer = optim.AdamW(net.parameters(), foreach=True if of_its_own == "foreach" else None)
    if of_its_own == "hook":
        optimizer.register_step_post_hook(lambda *_: None)
    if of_its_own == "fuse":
        autoshard.fuse(optimizer)
    model(inputs_of(1)[0][dist.get_rank()]).backward()
    before = whole(net.up.weight).detach().clone()
    optimizer.step()
    (line,) = (text for text in str(autoshard.report(model)).splitlines() if text.startswith("AdamW steps: "))
    return line.removeprefix("AdamW steps: "), not torch.equal(before, whole(net.up.weight))


@pytest.mark.parametrize(
    ("options", "of_its_own", "how"),
    [
        ({}, "", "all parameters at once"),
        ({"fuse_optimizer": False}, "", "on rows, by torch"),
        in_full({"fuse_optimizer": False}, "fuse", "all parameters at once"),
        in_full({}, "foreach", "on rows, by torch"),
        ({}, "hook", "by torch"),
    ],
)
def test_the_report_says_how_an_optimizer_steps(two: Cluster, options: dict[str, Any], of_its_own: str, how: str) -> None:
    assert two.run(found, options, of_its_own) == [(how, True)] * 2


def test_fuse_goes_on_with_a_schedule_that_was_there() -> None:
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [optim.AdamW(net.parameters(), lr=0.1) for net in nets]
    schedules = [optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    autoshard.fuse(optimizers[0])
    for inputs in ALONE:
        for net, optimizer, schedule in zip(nets, optimizers, schedules):
            net(inputs).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(nets[0].parameters(), nets[1].parameters()))
    assert [g["params"] for g in optimizers[0].param_groups] == [list(nets[0].parameters())]


def stepped_beside(change: Any, **options: Any) -> float:
    """How far a fused optimizer is from torch's own after steps, of which `change` changes the model before the third."""
    models = [nn.Conv2d(2, 3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [optim.AdamW(m.parameters(), lr=0.1, **options) for m in models]
    autoshard.fuse(optimizers[0])
    for step in range(4):
        for model, optimizer in zip(models, optimizers):
            if step == 2:
                change(model)
            for i, p in enumerate(model.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step * 9 + i)).to(p)
            if step == 3:
                model.weight.grad = model.weight.grad.transpose(2, 3)
            optimizer.step()
    return max(float((a - b).detach().abs().max()) for a, b in zip(models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}])
@pytest.mark.parametrize("ours", [False, True])
def test_sgd_of_few_bits_is_torch_s_but_for_rounding(dtype: torch.dtype, options: dict[str, float], ours: bool) -> None:
    start = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    parameters = [nn.Parameter(start.clone()) for _ in range(2)]
    made = [autoshard.optim.SGD(parameters[:1], lr=0.1, **options) if ours else autoshard.fuse(optim.SGD(parameters[:1], lr=0.1, **options))]
    made += [optim.SGD(parameters[1:], lr=0.1, **options)]
    for step in range(3):
        for parameter, optimizer in zip(parameters, made):
            parameter.grad = torch.randn(64, generator=torch.Generator().manual_seed(step)).to(dtype)
            optimizer.step()
    torch.testing.assert_close(*parameters, rtol=0.05, atol=0.05)


CHANGES: dict[str, Any] = {
    "nothing": lambda m: None,
    "layout": lambda m: m.to(memory_format=torch.channels_last),
    "data": lambda m: setattr(m.weight, "data", m.weight.data + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_lies_elsewhere_is_stepped_there(change: str) -> None:
    assert stepped_beside(CHANGES[change]) < 1e-5


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "turned": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
}
MADE: dict[str, Callable[..., tuple[optim.Optimizer, optim.Optimizer]]] = {
    "AdamW": lambda p, q: (autoshard.optim.AdamW([p], lr=0.1), optim.AdamW([q], lr=0.1)),
    "Adam": lambda p, q: (autoshard.fuse(optim.Adam([p], lr=0.1, amsgrad=True)), optim.Adam([q], lr=0.1, amsgrad=True)),
    "SGD": lambda p, q: (autoshard.optim.SGD([p], lr=0.1, momentum=0.9), optim.SGD([q], lr=0.1, momentum=0.9)),
    "Lion": lambda p, q: (autoshard.optim.Lion([p], lr=0.1), autoshard.optim.Lion([q], lr=0.1)),
}


@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (6, 1, 3, 3), (6, 4, 1, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MADE)
def test_a_parameter_may_lie_in_any_order_of_dimensions(name: str, layout: str, shape: tuple[int, ...]) -> None:
    """Beside torch's on one that is contiguous; state that is loaded is contiguous too, and gradients come in either order."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    one, other = nn.Parameter(LAYOUTS[layout](start)), nn.Parameter(start.clone())
    ours, plain = MADE[name](one, other)
    for step in range(5):
        other.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step + 1))
        one.grad = LAYOUTS[layout](other.grad) if step % 2 else other.grad.clone()
        ours.step()
        plain.step()
        if step == 2:
            ours.load_state_dict(copy.deepcopy(plain.state_dict()))
        torch.testing.assert_close(one, other)
    assert one.stride() == LAYOUTS[layout](start).stride()
    longer = [d for d, size in enumerate(shape) if size > 1]
    for value in (v for v in ours.state[one].values() if v.shape == one.shape):
        assert [value.stride(d) for d in longer] == [one.stride(d) for d in longer]


def stepped_in_channels_last(zero: int) -> float:
    """How far a convolution is from one that is stepped by torch, and lies as ever."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    model = torch.compile(nets[0].to(memory_format=torch.channels_last), backend=autoshard.backend(config(zero, replicate_below=0)))
    optimizers = [autoshard.optim.AdamW(nets[0].parameters(), lr=0.1), optim.AdamW(nets[1].parameters(), lr=0.1)]
    for step in range(3):
        batches = torch.randn(2, 2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        model(batches[dist.get_rank()]).square().mean().backward()
        torch.stack([nets[1](batch).square().mean() for batch in batches]).mean().backward()
        for optimizer in optimizers:
            step_each(optimizer)
    return max(float((whole(p) - q).detach().abs().max()) for p, q in zip(nets[0].parameters(), nets[1].parameters()))


@pytest.mark.parametrize("zero", [0, 3])
def test_channels_last_is_stepped_on_rows(two: Cluster, zero: int) -> None:
    assert max(two.run(stepped_in_channels_last, zero)) < 1e-4


def test_a_parameter_that_goes_to_another_group_is_stepped_by_its_options() -> None:
    models = [Net() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [optim.AdamW([{"params": m.up.parameters()}, {"params": m.down.parameters(), "lr": 0.0}], lr=0.1) for m in models]
    autoshard.fuse(optimizers[0])
    for step in range(4):
        for model, optimizer in zip(models, optimizers):
            if step == 2:  # of the same parameters, in the same order
                optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
            model(ALONE[0]).backward()
            step_each(optimizer)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(models[0].parameters(), models[1].parameters()))


def exchanged(state: Any, p: nn.Parameter, q: nn.Parameter) -> None:
    first, second = state.pop(p), state.pop(q)
    state[q], state[p] = first, second


def turned(state: Any, p: nn.Parameter, q: nn.Parameter) -> None:
    state[p]["exp_avg"].data = state[p]["exp_avg"].data.t().contiguous().t()


@pytest.mark.parametrize("change", [exchanged, turned])
def test_state_that_goes_to_another_parameter_or_lies_otherwise_is_stepped_so(change: Callable[..., None]) -> None:
    found = []
    for fused in (True, False):
        parameters = [nn.Parameter(torch.ones(3, 4)) for _ in range(2)]
        optimizer = optim.AdamW(parameters, lr=0.1)
        if fused:
            autoshard.fuse(optimizer)
        for step in range(5):
            if step == 3:
                change(optimizer.state, *parameters)
            for i, p in enumerate(parameters):
                p.grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(9 * step + i))
            optimizer.step()
        found.append(parameters)
    for ours, torchs in zip(*found):
        torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("infinite", [False, True])
def test_a_scaler_and_torchs_own_fused_optimizer(infinite: bool) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer, scaler = optim.SGD([parameter], lr=0.1, fused=True), torch.amp.GradScaler("cpu", init_scale=1024.0)
    autoshard.fuse(optimizer)
    scaler.scale(parameter.sum() * (torch.inf if infinite else 1.0)).backward()
    scaler.step(optimizer)
    assert torch.allclose(parameter, torch.ones(3) if infinite else torch.full((3,), 0.9))


def test_a_model_that_is_cast_after_a_step_steps_on() -> None:
    for make in (lambda ps: autoshard.optim.SGD(ps, lr=0.1), lambda ps: autoshard.fuse(optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5))):
        nets = [Net(), Net()]
        nets[1].load_state_dict(nets[0].state_dict())
        ours = make(nets[0].parameters())
        options = {name: ours.defaults[name] for name in ("lr", "momentum", "dampening")}
        optimizers = [ours, optim.SGD(nets[1].parameters(), **options)]
        for x in (ALONE[0], ALONE[1].double(), ALONE[2].double()):
            for net in nets:
                net.to(x.dtype)(x).backward()
            step_each(*optimizers)
        assert all(p.dtype is torch.float64 for p in nets[0].parameters())
        for p, q in zip(nets[0].parameters(), nets[1].parameters()):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_state_of_no_parameter_is_left_alone() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = autoshard.fuse(optim.AdamW([p], lr=0.1, weight_decay=0.0))
    optimizer.state["epoch"] = 3  # type: ignore[index, assignment]
    p.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state["epoch"] == 3 and torch.allclose(p, torch.full((3,), 0.9))  # type: ignore[index, comparison-overlap]


@pytest.mark.parametrize("make", [autoshard.optim.AdamW, lambda ps: autoshard.fuse(optim.AdamW(ps))])
def test_state_is_let_go_of_when_other_is_loaded(make: Callable[[list[nn.Parameter]], optim.Optimizer]) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = make([p])
    for _ in range(2):
        p.grad = torch.ones(3)
        optimizer.step()
    before = weakref.ref(optimizer.state[p]["exp_avg"])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    gc.collect()
    assert before() is None
    p.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[p]["step"] == 3
