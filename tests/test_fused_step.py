"""Optimizers that step all parameters at once: autoshard.optim, fuse, and those that a first call finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import autoshard
from autoshard.errors import ConfigError, UnsupportedError
from autoshard.runtime.norm import norm_of
from tests.cluster import Cluster
from tests.parity import Distance, see_state, whole
from tests.small import TOLERANCE, Net, compiled_pair, config, in_full, inputs_of

ALONE = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(3))  # [step, batch, feature], for one process
LIMIT = 0.05  # of the gradients' norm, so that every step is clipped
OURS: dict[str, Any] = {
    "AdamW": lambda ps, **more: autoshard.optim.AdamW(ps, lr=0.01, amsgrad=True, **more),
    "Adam": lambda ps, **more: autoshard.optim.Adam(ps, lr=0.01, weight_decay=0.1, **more),
    "SGD": lambda ps, **more: autoshard.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5, **more),
    "Lion": lambda ps, **more: autoshard.optim.Lion(ps, lr=0.001, weight_decay=0.1, **more),
}
TORCHS: dict[str, Any] = {
    "AdamW": lambda ps: optim.AdamW(ps, lr=0.01, amsgrad=True),
    "Adam": lambda ps: optim.Adam(ps, lr=0.01, weight_decay=0.1),
    "SGD": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.5),
    "Lion": OURS["Lion"],
}


# --- autoshard.optim


def clipped(name: str, zero: int, below: int) -> tuple[Distance, bool]:
    """(distance, whether some parameters are rows and some are whole): clipping folded into the step, with a schedule."""
    model, plain, compiled = compiled_pair(config(zero, replicate_below=below))
    optimizer, reference = OURS[name](model.parameters(), max_norm=LIMIT), TORCHS[name](plain.parameters())
    schedules = [optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, reference)]
    distance = Distance()
    for inputs in inputs_of(5):
        compiled(inputs[dist.get_rank()]).backward()
        for x in inputs:
            (plain(x) / len(inputs)).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), LIMIT)
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
        for schedule in schedules:
            schedule.step()
        distance.see("norm", optimizer.norm, norm)
    see_state(distance, model, plain)
    return distance, len({getattr(p, "placements", None) for p in model.parameters()}) == 2


CASES = [(name, zero, 0) for name in OURS for zero in (0, 3)] + [("AdamW", 3, 10)]
ALWAYS = {("SGD", 3, 0), ("Lion", 3, 0), ("AdamW", 3, 10)}


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
        for x in inputs:
            (plain(x) / len(inputs)).backward()
        distance.see("norm", optimizer.norm, nn.utils.clip_grad_norm_(plain.parameters(), LIMIT))
        reference.step()
        reference.zero_grad()
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


# --- torch.optim's


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
        ({"fuse_optimizer": False}, "fuse", "all parameters at once"),
        ({}, "foreach", "on rows, by torch"),
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


# --- what is refused


def test_refusals_name_the_value() -> None:
    net = Net()
    with pytest.raises(ConfigError, match="max_norm: 0 is not legal"):
        autoshard.optim.AdamW(net.parameters(), max_norm=0)
    with pytest.raises(ConfigError, match=r"betas=\(0.9, 1.5\)"):
        autoshard.optim.Lion(net.parameters(), betas=(0.9, 1.5))
    with pytest.raises(UnsupportedError, match="Adagrad cannot be fused: legal: Adam, AdamW, SGD"):
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
