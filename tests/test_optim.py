"""autoshard.optim's own optimizers: beside torch's, with clipping and scaling in the step, and what they refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import autoshard
from autoshard.errors import ConfigError, UnsupportedError
from autoshard.runtime import families, fused_step
from autoshard.runtime.norm import norm_of
from tests.cluster import Cluster
from tests.parity import Distance, see_state, whole
from tests.small import (
    ALONE,
    TOLERANCE,
    Net,
    backward_beside,
    backward_of_all,
    compiled_pair,
    config,
    in_full,
    inputs_of,
    step_each,
)

LIMIT = 0.05  # of the gradients' norm, so that every step is clipped
OURS: dict[str, Any] = {
    "AdamW": lambda ps, **more: autoshard.optim.AdamW(ps, lr=0.01, amsgrad=True, **more),
    "Adam": lambda ps, **more: autoshard.optim.Adam(ps, lr=0.01, weight_decay=0.1, **more),
    "SGD": lambda ps, **more: autoshard.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5, **more),
    "Lion": lambda ps, **more: autoshard.optim.Lion(ps, lr=0.001, weight_decay=0.1, **more),
    "Adafactor": lambda ps, **more: autoshard.optim.Adafactor(ps, lr=0.01, weight_decay=0.1, **more),
}
TORCHS: dict[str, Any] = {
    "AdamW": lambda ps: optim.AdamW(ps, lr=0.01, amsgrad=True),
    "Adam": lambda ps: optim.Adam(ps, lr=0.01, weight_decay=0.1),
    "SGD": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5),
    "Lion": OURS["Lion"],
    "Adafactor": lambda ps: optim.Adafactor(ps, lr=0.01, weight_decay=0.1),
}


def clipped(name: str, zero: int, below: int) -> tuple[Distance, bool]:
    """(distance, whether some parameters are rows and some are whole): clipping folded into the step, with a schedule."""
    model, plain, compiled = compiled_pair(config(zero, replicate_below=below))
    optimizer, reference = OURS[name](model.parameters(), max_norm=LIMIT), TORCHS[name](plain.parameters())
    schedules = [optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, reference)]
    distance = Distance()
    for inputs in inputs_of(5):
        backward_beside(compiled, plain, inputs)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), LIMIT)
        step_each(optimizer, reference)
        for schedule in schedules:
            schedule.step()
        distance.see("norm", optimizer.norm, norm)
    see_state(distance, model, plain)
    return distance, len({getattr(p, "placements", None) for p in model.parameters()}) == 2


CASES = [(name, zero, 0) for name in OURS for zero in (0, 3)] + [("AdamW", 3, 10)]
ALWAYS = {("SGD", 3, 0), ("Lion", 3, 0), ("AdamW", 3, 10), ("Adafactor", 3, 0)}


@pytest.mark.parametrize(("name", "zero", "below"), [case if case in ALWAYS else in_full(*case) for case in CASES])
def test_clipping_in_the_step_is_clipping_before_it(two: Cluster, name: str, zero: int, below: int) -> None:
    for distance, both in two.run(clipped, name, zero, below):
        assert distance.worst <= TOLERANCE, distance
        assert both == (below > 0)


def scaled() -> tuple[Distance, list[float], bool]:
    """GradScaler leaves unscaling to the step; in the second one process's gradient is infinite, so none may step."""
    model, plain, compiled = compiled_pair(config(3))
    optimizer, reference = autoshard.optim.AdamW(model.parameters(), max_norm=LIMIT), optim.AdamW(plain.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    distance, scales, stayed = Distance(), [], True
    for step, inputs in enumerate(inputs_of(4)):
        scaler.scale(compiled(inputs[dist.get_rank()])).backward()
        if step == 1 and dist.get_rank() == 1:
            model.down.weight.grad.to_local()[0, 0] = float("inf")
        before = whole(model.up.weight).detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        if step == 1:
            stayed = torch.equal(before, whole(model.up.weight))
            continue
        backward_of_all(plain, inputs)
        distance.see("norm", optimizer.norm, nn.utils.clip_grad_norm_(plain.parameters(), LIMIT))
        step_each(reference)
    see_state(distance, model, plain)
    return distance, scales, stayed


def test_a_scaler_leaves_unscaling_to_the_step(two: Cluster) -> None:
    for distance, scales, stayed in two.run(scaled):
        assert distance.worst <= TOLERANCE, distance
        assert scales == [1024.0, 512.0, 512.0, 512.0] and stayed


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_state_dicts_are_torchs(name: str) -> None:
    """Three steps of one, then three of the other from its state, are six of either."""
    nets = [Net() for _ in range(3)]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())

    def trained(net: nn.Module, optimizer: Any) -> Any:
        for inputs in ALONE:
            net(inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    ours, theirs = trained(nets[0], OURS[name](nets[0].parameters())), trained(nets[1], TORCHS[name](nets[1].parameters()))
    begun = (OURS[name](nets[1].parameters()), TORCHS[name](nets[0].parameters()))
    begun[0].load_state_dict(theirs.state_dict())
    begun[1].load_state_dict(ours.state_dict())
    reference = trained(nets[2], TORCHS[name](nets[2].parameters()))
    trained(nets[2], reference)
    for net, optimizer in zip((nets[1], nets[0]), begun):
        trained(net, optimizer)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(net.parameters(), nets[2].parameters()))


def test_a_closure_is_called_once_and_returned() -> None:
    net, calls = Net(), []
    optimizer = autoshard.optim.SGD(net.parameters(), lr=0.1)
    before = net.up.weight.detach().clone()

    def closure() -> torch.Tensor:
        calls.append(1)
        loss: torch.Tensor = net(ALONE[0])
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad and calls == [1]
    assert not torch.equal(before, net.up.weight)


@pytest.mark.parametrize("turned_on", ["amsgrad", "momentum"])
def test_an_option_turned_on_later_counts_from_then_on(turned_on: str) -> None:
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    kind = "AdamW" if turned_on == "amsgrad" else "SGD"
    ours = getattr(autoshard.optim, kind)(nets[0].parameters(), lr=0.01)
    theirs = getattr(optim, kind)(nets[1].parameters(), lr=0.01)
    for step, x in enumerate((*ALONE, *ALONE)):
        for net, optimizer in zip(nets, (ours, theirs)):
            if step == 2:
                optimizer.param_groups[0][turned_on] = True if turned_on == "amsgrad" else 0.9
                for p in net.parameters() if turned_on == "amsgrad" and optimizer is theirs else ():
                    theirs.state[p]["max_exp_avg_sq"] = torch.zeros_like(p)  # which torch would miss
            net(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(nets[0].parameters(), nets[1].parameters()))


def test_a_copy_clips_too_and_goes_on() -> None:
    net = Net()
    optimizer = autoshard.optim.AdamW(net.parameters(), max_norm=LIMIT)
    net(ALONE[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    copied = copy.deepcopy((net, optimizer))
    for model, stepper in (copied, (net, optimizer)):
        model(ALONE[1]).backward()
        stepper.step()
    assert copied[1].max_norm == LIMIT and torch.equal(copied[0].up.weight, net.up.weight)


def test_the_checkpoint_of_an_older_torch_loads() -> None:
    net = Net()
    net(ALONE[0]).backward()
    optimizer = optim.AdamW(net.parameters())
    optimizer.step()
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["decoupled_weight_decay"]
    ours = autoshard.optim.AdamW(net.parameters())
    ours.load_state_dict(saved)
    ours.step()
    assert float(ours.state[net.up.weight]["step"]) == 2


def test_a_graph_of_before_the_step_does_not_go_backward() -> None:
    net = Net()
    optimizer = autoshard.optim.SGD(net.parameters(), lr=0.1)
    loss = net(ALONE[0])
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_clipping_leaves_the_gradient_and_sees_large_half_ones() -> None:
    for kind in (autoshard.optim.SGD, autoshard.optim.Lion):
        parameter = nn.Parameter(torch.ones(4, dtype=torch.float16))
        optimizer = kind([parameter], lr=1.0, max_norm=1.0)
        optimizer.grad_scale = torch.tensor([65536.0])
        parameter.grad = torch.full_like(parameter, 40000.0)
        optimizer.step()
        assert optimizer.norm is not None and abs(float(optimizer.norm) - 80000 / 65536) < 1e-3
        assert bool((parameter != 1).all()) and bool((parameter.grad == 40000).all())


@pytest.mark.parametrize("interpret", [True, False])
def test_lion_shows_what_is_no_number(interpret: bool) -> None:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.full_like(parameter, torch.nan)
    assert not fused_step.take(autoshard.optim.Lion([parameter]), families.LION, interpret=interpret)
    assert bool(parameter.isnan().all())


def test_its_own_state_dict_loads_after_momentum_was_turned_off() -> None:
    net = Net()
    net(ALONE[0]).backward()
    optimizer = autoshard.optim.SGD(net.parameters(), momentum=0.9)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.0
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()


def cast() -> tuple[bool, bool]:
    """Rows that a cast puts elsewhere while the parameter stays the same object, and that steps go on with them."""
    model, _, compiled = compiled_pair(config(3))
    optimizer = autoshard.optim.AdamW(model.parameters())
    for _ in range(2):
        compiled(inputs_of(1)[0, dist.get_rank()]).backward()
        optimizer.step()
    parameter = model.up.weight
    model.double().float()
    before = whole(model.up.weight).detach().clone()
    optimizer.step()
    return parameter is model.up.weight, not torch.equal(before, whole(model.up.weight))


def test_rows_that_are_elsewhere_are_stepped_there(two: Cluster) -> None:
    assert two.run(cast) == [(True, True)] * 2


def test_what_was_cast_without_its_state_is_named() -> None:
    net = Net()
    optimizer = OURS["SGD"](net.parameters())
    net(ALONE[0]).backward()
    step_each(optimizer)
    net.double()(ALONE[1].double()).backward()
    with pytest.raises(UnsupportedError, match="was cast to torch.float64 and its state not, which is torch.float32; torch.optim's may"):
        optimizer.step()


def test_tables_are_made_on_the_host_whatever_the_default_device() -> None:
    for make in (OURS["AdamW"], OURS["SGD"], OURS["Lion"]):
        p = nn.Parameter(torch.ones(64, 3))
        optimizer, p.grad = make([p]), torch.ones(64, 3)
        with torch.device("meta"):
            assert fused_step.take(optimizer, optimizer.family, interpret=True) == ""
        assert bool((p != 1).all())


def test_what_a_hook_gives_is_loaded() -> None:
    """Two parameters in another order, with masters."""
    pairs = [[nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2)] for _ in range(2)]
    saved, loaded = (autoshard.optim.AdamW(ps, master_weights=True) for ps in (pairs[0], pairs[1][::-1]))
    for sign, p in zip((1, -1), pairs[0]):
        p.grad = sign * torch.ones_like(p)
    saved.step()

    def other_way_round(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "state": {0: given["state"][1], 1: given["state"][0]}}

    loaded.register_load_state_dict_pre_hook(other_way_round)
    loaded.load_state_dict(saved.state_dict())
    for p, q in zip(*pairs):
        for key in ("exp_avg", "exp_avg_sq", "master"):
            assert torch.equal(saved.state[p][key], loaded.state[q][key]), key


# --- what is refused


def test_refusals_name_the_value() -> None:
    net = Net()
    with pytest.raises(ConfigError, match="max_norm: 0 is not legal"):
        autoshard.optim.AdamW(net.parameters(), max_norm=0)
    with pytest.raises(ConfigError, match=r"betas=\(0.9, 1.5\)"):
        autoshard.optim.Lion(net.parameters(), betas=(0.9, 1.5))
    with pytest.raises(UnsupportedError, match="Adagrad cannot be fused: legal: Adafactor, Adam, AdamW, SGD"):
        autoshard.fuse(optim.Adagrad(net.parameters()))
    with pytest.raises(UnsupportedError, match="foreach=True says how it steps"):
        autoshard.fuse(optim.AdamW(net.parameters(), foreach=True))


def test_a_state_dict_of_another_optimizer_is_refused() -> None:
    net = Net()
    net(ALONE[0]).backward()
    sgd, adam = optim.SGD(net.parameters(), momentum=0.9), optim.AdamW(net.parameters())
    sgd.step()
    adam.step()
    with pytest.raises(ConfigError, match="not AdamW's: a parameter group in it has no"):
        autoshard.optim.AdamW(net.parameters()).load_state_dict(sgd.state_dict())
    mixed = {**adam.state_dict(), "state": sgd.state_dict()["state"]}
    with pytest.raises(ConfigError, match="not AdamW's: it has 'momentum_buffer', legal: step, exp_avg, exp_avg_sq"):
        autoshard.optim.AdamW(net.parameters()).load_state_dict(mixed)


def test_adafactor_refuses_them_too_and_loads_torch_s() -> None:
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    adam, theirs = optim.AdamW(nets[0].parameters()), TORCHS["Adafactor"](nets[0].parameters())
    ours = OURS["Adafactor"](nets[1].parameters())
    nets[0](ALONE[0]).backward()
    nets[1](ALONE[0]).backward()
    for optimizer in (theirs, ours):
        optimizer.step()
    adam.step()
    with pytest.raises(ConfigError, match="not Adafactor's: a parameter group in it has no 'beta2_decay'"):
        ours.load_state_dict(adam.state_dict())
    with pytest.raises(ConfigError, match="not Adafactor's: it has 'exp_avg', legal: step, row_var, col_var, variance"):
        ours.load_state_dict({**theirs.state_dict(), "state": adam.state_dict()["state"]})
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    assert float(ours.state[nets[1].up.weight]["step"]) == 2


@pytest.mark.parametrize("name", OURS)
def test_no_step_is_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    optimizer = OURS[name](net.parameters())
    net(ALONE[0]).backward()
    monkeypatch.setattr(fused_step, "while_captured", lambda: "while a CUDA graph is captured")
    with pytest.raises(UnsupportedError, match=f"{name} cannot step while a CUDA graph is captured"):
        optimizer.step()
    assert not optimizer.state


def test_what_kernels_cannot_step_is_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match=r"AdamW cannot step a parameter of shape \(4, 2\).*sparse"):
        autoshard.optim.AdamW(embedding.parameters()).step()
    strange = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    strange.grad = torch.zeros_like(strange)
    with pytest.raises(UnsupportedError, match="torch.complex64 on cpu"):
        autoshard.optim.SGD([strange]).step()


def test_the_norm_of_nothing_is_zero() -> None:
    assert norm_of([]) == 0


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_a_compiled_step_is_the_same_step(name: str) -> None:
    """What torch.compile makes of a step leaves ours to Python."""
    torch.compiler.reset()
    options: dict[str, Any] = {"lr": 0.1, "max_norm": 0.5}
    models = [nn.Linear(4, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [getattr(autoshard.optim, name)(m.parameters(), **options) for m in models]
    compiled = torch.compile(optimizers[0].step, backend="aot_eager")
    for step, of_each in enumerate((compiled, optimizers[1].step) * 3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step // 2))
        models[step % 2](x).square().sum().backward()
        of_each()
        optimizers[step % 2].zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("max_norm", ["1", 0, -1.0])
def test_a_norm_to_clip_to_is_checked(max_norm: Any) -> None:
    with pytest.raises(ConfigError, match=f"max_norm: {max_norm!r} is not legal"):
        autoshard.optim.AdamW(nn.Linear(2, 2).parameters(), max_norm=max_norm)
