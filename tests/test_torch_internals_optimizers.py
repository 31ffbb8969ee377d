"""One test for each private name of optimizers and modules: a torch release that moves one fails here, by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoshard import torch_internals
from tests.cluster import Cluster
from tests.small import same


def test_step_hooks_of_one_optimizer_are_seen() -> None:
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        assert not torch_internals.has_step_hooks(optimizer)
        getattr(optimizer, register)(lambda *_: None)
        assert torch_internals.has_step_hooks(optimizer)


def test_buffers_of_no_state_dict_are_told() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("cached", torch.ones(2), persistent=False)
    assert torch_internals.kept_buffers(module) == [n for n in module.state_dict() if n not in ("weight", "bias")]


def test_hooks_are_told_of_a_load_that_assigns() -> None:
    module, found = nn.Linear(1, 1), list[bool]()
    module.register_load_state_dict_pre_hook(lambda _, state, prefix, metadata, *rest: found.append(torch_internals.assigns(metadata)))
    for assign in (True, False):
        module.load_state_dict(module.state_dict(), assign=assign)
    assert found == [True, False]


def test_a_state_dict_need_not_remember_that_it_was_assigned() -> None:
    module, state = nn.Linear(1, 1), nn.Linear(1, 1).state_dict()
    module.load_state_dict(state, assign=True)
    (versions,) = torch_internals.versions_of(state).values()
    assert torch_internals.assigns(versions)
    torch_internals.forget_assigned(versions)
    before = module.weight
    module.load_state_dict(state)
    assert module.weight is before


def test_state_dicts_have_versions() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    assert torch_internals.versions_of(state) == {"": {"version": 2}} and torch_internals.versions_of(dict(state)) == {}
    made = torch_internals.with_versions(dict(state), {"": {"version": 1}})
    del made["num_batches_tracked"]  # as files of version 1, which has none
    assert nn.BatchNorm1d(2).load_state_dict(made).missing_keys == []


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by its class alone."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_a_hook_sees_what_an_optimizer_loads() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    state = optimizer.state_dict()
    torch_internals.before_loading(Wrapper(optimizer), lambda *_: None)
    torch_internals.before_loading(optimizer, lambda _, given: {**given, "param_groups": [{**given["param_groups"][0], "lr": 0.2}]})
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.2
    seen: list[Any] = []

    def note(which: Any, _: Any) -> None:
        seen.append(which)

    for _ in range(2):
        torch_internals.before_loading(optimizer, note)
    optimizer.load_state_dict(state)
    assert seen == [optimizer]


def test_hooks_around_all_steps_are_seen() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    torch_internals.surround_steps(lambda *_: None, lambda *_: None)
    assert not torch_internals.has_step_hooks(optimizer)
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *_: None)
        assert torch_internals.has_step_hooks(optimizer)
        handle.remove()


@pytest.mark.parametrize("compiled", [False, True])
def test_dynamo_does_not_look_into_what_surrounds_a_step(compiled: bool) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    looked = []

    def hook(stepping: torch.optim.Optimizer, *_: object) -> None:
        if stepping is optimizer:
            looked.append(torch.compiler.is_compiling() or torch_internals.get_eval_frame_callback() is not None)

    torch_internals.surround_steps(hook, hook)

    def train(x: torch.Tensor) -> None:
        (parameter * x).sum().backward()
        optimizer.step()

    for number in range(3):
        (torch.compile(train, backend="eager") if compiled else train)(torch.full((2,), float(number)))
    assert looked == [False] * 6


def test_a_step_is_taken_without_hooks() -> None:
    parameter, seen = nn.Parameter(torch.ones(2)), []
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append("hook"))
    parameter.grad = torch.ones(2)
    torch_internals.step_without_hooks(optimizer)
    assert not seen and bool((parameter < 1).all())


@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_of_a_scaler_is_seen(enabled: bool) -> None:
    parameter, seen = nn.Parameter(torch.ones(2)), []
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), torch.amp.GradScaler("cpu", enabled=enabled)
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch_internals.is_scaled_step()))
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    optimizer.step()
    assert seen == [enabled, False]


def test_a_step_within_a_step_is_seen() -> None:
    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            other.step()
            super().step(closure)

    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)  # whose making surrounds SGD.step with hooks
    outer = Outer([nn.Parameter(torch.ones(2))], lr=0.1)
    seen: list[tuple[str, bool]] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append((type(optimizer).__name__, torch_internals.within_step(optimizer)))

    for optimizer in (outer, other):
        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(note)
    outer.step()
    assert seen == [("Outer", False), *[("SGD", False)] * 2, *[("Outer", True)] * 2, ("Outer", False)]


def test_a_copy_without_hooks_leaves_the_original_its_own() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    optimizer.register_step_pre_hook(lambda *_: None)
    alone, loaded = torch_internals.without_hooks(copy.copy(optimizer)), []
    assert not torch_internals.has_step_hooks(alone) and torch_internals.has_step_hooks(optimizer)
    torch_internals.before_loading(alone, lambda which, _: loaded.append(which))
    optimizer.load_state_dict(optimizer.state_dict())
    assert not loaded


def test_fused_steps_are_torchs() -> None:
    theirs = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    ours = [p.detach().clone() for p in theirs]
    for p in theirs:
        p.grad = torch.full_like(p, 0.5)
    torch.optim.AdamW(theirs[:1], fused=True).step()
    torch.optim.Adam(theirs[1:2], fused=True).step()
    torch.optim.SGD(theirs[2:], lr=0.1, momentum=0.9, fused=True).step()
    grads, common = [torch.full_like(p, 0.5) for p in ours], {"lr": 1e-3, "maximize": False}
    adam = {**common, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False}
    for i, decay in ((0, 0.01), (1, 0.0)):
        steps = [torch.zeros(())]
        torch_internals.add_to_each(steps, 1.0)
        lists = ([ours[i]], [grads[i]], [torch.zeros(4)], [torch.zeros(4)], [], steps)
        torch_internals.fused_adam(lists, decoupled=i == 0, weight_decay=decay, **adam)
    momentum = {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
    torch_internals.fused_sgd(([ours[2]], [grads[2]], [torch.zeros(4)]), **{**common, "lr": 0.1}, **momentum)
    assert same(ours, theirs)


def test_lists_of_tensors_are_gone_through_at_once() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([6.0])]
    assert [t.tolist() for t in torch_internals.each_divided(tensors, torch.tensor(2.0))] == [[1.5, 2.0], [3.0]]
    assert [float(n) for n in torch_internals.norm_of_each(tensors)] == [5.0, 6.0]
    assert torch_internals.norm_of_each([t.bfloat16() for t in tensors])[0].dtype is torch.float32
    assert all(ours is t for ours, t in zip(torch_internals.rows_of_each(tensors), tensors, strict=True))
    assert torch_internals.placements_of_each(tensors) == [None, None]


class Recording(torch.optim.Optimizer):
    def __init__(self, parameter: torch.nn.Parameter) -> None:
        super().__init__([parameter], {})
        self.found: list[tuple[float, float]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.found.append((float(self.grad_scale), float(self.found_inf)))  # type: ignore[attr-defined]


def test_a_scaler_leaves_scaled_gradients_to_an_optimizer_that_takes_them() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = Recording(parameter), torch.amp.GradScaler("cpu", init_scale=8.0)
    torch_internals.takes_scaled_gradients(Recording)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert optimizer.found == [(8.0, 0.0)]
    assert parameter.grad is not None and parameter.grad.tolist() == [8.0, 8.0]


def laid_out() -> list[bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows, other = (distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]) for _ in range(2))
    whole, like = distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]), torch_internals.like_rows(rows)(torch.ones(1, 2))
    found = [torch_internals.lie_alike([rows], [each]) for each in (rows, like, other, whole, torch.ones(2, 2))]
    local = torch_internals.rows_of_each([rows, whole, like])
    return [*found, all(ours is each._local_tensor for ours, each in zip(local, (rows, whole, like)))]


def test_tensors_lie_alike_whose_placements_are_equal(two: Cluster) -> None:
    assert torch_internals.lie_alike([torch.ones(2)], [torch.ones(3)])
    assert two.run(laid_out) == [[True, True, True, False, False, True]] * 2
