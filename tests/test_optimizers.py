"""Optimizers on sharded parameters, on two processes, against the same optimizer on the unsharded model."""

from __future__ import annotations

import copy
import gc
import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import autoshard
from autoshard.runtime import loaded
from autoshard.runtime.dtensors import local
from autoshard.runtime.local_step import can_step_locally
from autoshard.runtime.optimizers import states_of
from tests.cluster import Cluster
from tests.parity import Distance, rank0_copy, see_state, whole
from tests.small import (
    TOLERANCE,
    Net,
    backward_beside,
    compiled_pair,
    config,
    in_full,
    inputs_of,
    step_each,
    trained_beside,
    what_is_said,
)


class Damped(optim.Optimizer):
    """An optimizer that a user might write; elementwise, with state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.5)
                p.sub_(mean, alpha=group["lr"])


class Mine(optim.AdamW):
    """A subclass of torch's own."""


def grouped(parameters: Any) -> optim.Optimizer:
    first, *rest = parameters
    return optim.AdamW([{"params": [first], "lr": 0.1, "weight_decay": 0.0}, {"params": rest}], lr=0.01)


def hooked_globally(parameters: Any) -> optim.Optimizer:
    """With hooks around all optimizers' steps."""
    optimizer = optim.SGD(parameters, lr=0.1, momentum=0.9)

    this = weakref.ref(optimizer)

    def clip(o: optim.Optimizer, *_: Any) -> None:
        if o is this():
            torch.nn.utils.clip_grad_norm_(o.param_groups[0]["params"], 0.01)

    def clamp(o: optim.Optimizer, *_: Any) -> None:
        for p in o.param_groups[0]["params"] if o is this() else ():
            p.detach().clamp_(-0.1, 0.1)

    for handle in (register_optimizer_step_pre_hook(clip), register_optimizer_step_post_hook(clamp)):
        weakref.finalize(optimizer, handle.remove)
    return optimizer


def hooked(parameters: Any) -> optim.Optimizer:
    """With a hook that must see whole gradients' norm, not the rows'."""
    optimizer = optim.SGD(parameters, lr=0.1)

    def clip(o: optim.Optimizer, *_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(o.param_groups[0]["params"], 0.01)

    optimizer.register_step_pre_hook(clip)
    return optimizer


OPTIMIZERS: dict[str, Any] = {
    "AdamW": optim.AdamW,
    "AdamW foreach": lambda ps: optim.AdamW(ps, foreach=True),
    "AdamW fused": lambda ps: optim.AdamW(ps, fused=True),
    "AdamW amsgrad": lambda ps: optim.AdamW(ps, amsgrad=True),
    "AdamW tensor lr": lambda ps: optim.AdamW(ps, lr=torch.tensor(1e-2)),
    "Adam": optim.Adam,
    "SGD": lambda ps: optim.SGD(ps, lr=0.1),
    "SGD momentum": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD fused": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adamax": optim.Adamax,
    "RMSprop": optim.RMSprop,
    "Adagrad": optim.Adagrad,
    "Adadelta": optim.Adadelta,
    "ASGD": optim.ASGD,
    "Rprop": lambda ps: optim.Rprop(ps, lr=1e-3),
    "groups": grouped,
    "own": Damped,
    "subclass": Mine,
    "hooked": hooked,
    "hooked globally": hooked_globally,
}
ALWAYS = ("AdamW", "AdamW fused", "SGD momentum", "Adagrad", "own", "hooked", "hooked globally")
LOCALLY = OPTIMIZERS.keys() - {"own", "subclass", "hooked", "hooked globally"}


def train(name: str, early: bool, zero: int) -> tuple[Distance, bool, set[str]]:
    """(distance, whether it steps on rows, kinds of its state): steps beside the reference, with a schedule.

    early: the optimizer is made before the model is compiled.
    """
    make = OPTIMIZERS[name]
    model, plain, compiled = compiled_pair(config(zero))
    optimizer = make(model.parameters()) if early else None
    reference = make(plain.parameters())
    distance, schedules = Distance(), []
    for step, inputs in enumerate(inputs_of(5)):
        backward_beside(compiled, plain, inputs)
        optimizer = optimizer or make(model.parameters())
        if step == 0:
            schedules = [optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, reference)]
        step_each(optimizer, reference)
        for schedule in schedules:
            schedule.step()
    see_state(distance, model, plain)
    assert optimizer is not None
    state = optimizer.state[model.up.weight].items()
    return distance, can_step_locally(optimizer), {type(v).__name__ for k, v in state if v is not None and v.shape}


@pytest.mark.parametrize(
    ("name", "early"),
    [(name, True) if name in ALWAYS else in_full(name, True) for name in OPTIMIZERS]
    + [(name, False) if name in ("AdamW", "SGD fused") else in_full(name, False) for name in OPTIMIZERS],
)
def test_an_optimizer_steps_as_on_the_whole_model(two: Cluster, name: str, early: bool) -> None:
    for distance, locally, state in two.run(train, name, early, 3):
        assert distance.worst <= TOLERANCE, distance
        assert locally == (name in LOCALLY)
        assert state == (set() if name in ("SGD", "hooked") else {"DTensor"})


def train_compiled(name: str, zero: int, fuse: Any) -> Distance:
    """Steps that torch.compile compiled too."""
    model, plain, compiled = compiled_pair(config(zero, fuse_optimizer=fuse))
    optimizer, reference = (OPTIMIZERS[name](m.parameters()) for m in (model, plain))
    step = torch.compile(optimizer.step, backend="eager")
    distance = Distance()
    for inputs in inputs_of(4):
        backward_beside(compiled, plain, inputs)
        step()
        reference.step()
        for o in (optimizer, reference):
            o.zero_grad()
        see_state(distance, model, plain)
    return distance


@pytest.mark.parametrize(
    ("name", "zero", "fuse"),
    [("AdamW", 3, False), ("SGD momentum", 0, "auto"), *(in_full(*case) for case in (("AdamW", 3, "auto"), ("own", 3, False)))],
)
def test_a_step_that_is_compiled_is_the_same_step(two: Cluster, name: str, zero: int, fuse: Any) -> None:
    for distance in two.run(train_compiled, name, zero, fuse):
        assert distance.worst <= TOLERANCE, distance


def train_parts(zero: int) -> Distance:
    """An optimizer for each part of a model, one of them made later."""
    model, plain, compiled = compiled_pair(config(zero))
    pairs = [[optim.SGD(m.up.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]]
    for step, inputs in enumerate(inputs_of(4)):
        backward_beside(compiled, plain, inputs)
        if step == 1:
            pairs.append([optim.AdamW(m.down.parameters(), lr=0.01) for m in (model, plain)])
        for pair in pairs:
            for o in pair:
                o.step()
                o.zero_grad()
        if step == 0:
            model.zero_grad()
            plain.zero_grad()
    distance = Distance()
    see_state(distance, model, plain)
    return distance


@pytest.mark.parametrize("zero", [in_full(0), in_full(1), 3])
def test_several_optimizers_share_a_model(two: Cluster, zero: int) -> None:
    for distance in two.run(train_parts, zero):
        assert distance.worst <= TOLERANCE, distance


def train_without_a_rate() -> Distance:
    """Steps of an optimizer that chooses its rate itself: it has None."""
    model, plain, compiled = compiled_pair(config(0))
    return trained_beside(model, plain, compiled, [transformers.Adafactor(m.parameters()) for m in (model, plain)])


def test_an_optimizer_may_have_no_rate(two: Cluster) -> None:
    for distance in two.run(train_without_a_rate):
        assert distance.worst <= TOLERANCE, distance


def strange_rows_looked_for() -> int:
    """In a step over state that the steps before it made."""
    model, _, compiled = compiled_pair(config(3))
    optimizer = optim.AdamW(model.parameters())
    for _ in range(2):
        compiled(inputs_of(1)[0][dist.get_rank()]).backward()
        with mock.patch.object(loaded, "refuse_strange_rows") as looked_for:
            optimizer.step()
    return sum(isinstance(call.args[1], DTensor) for call in looked_for.call_args_list)


def test_a_step_over_its_own_rows_looks_for_no_others(two: Cluster) -> None:
    assert two.run(strange_rows_looked_for) == [0, 0]


def seen_by_a_hook(name: str) -> tuple[bool, bool]:
    """Whether a hook of the user's own finds rows in state that was loaded whole into an optimizer that is new, and once more after a step."""
    model, _, compiled = compiled_pair(config(3))
    compiled(inputs_of(1)[0][dist.get_rank()]).backward()
    optimizer = getattr(autoshard.optim, name)(model.parameters(), lr=0.1)
    found: list[bool] = []

    def hook(*_: Any) -> None:
        values = [v for state in optimizer.state.values() for key, v in state.items() if key in ("exp_avg", "variance")]
        found.append(bool(values) and all(isinstance(v, DTensor) for v in values))

    optimizer.register_step_pre_hook(hook)
    for p in model.parameters():
        optimizer.state[p] |= {"step": torch.tensor(1.0)}
        if name == "AdamW":
            optimizer.state[p] |= {"exp_avg": torch.ones(p.shape), "exp_avg_sq": torch.ones(p.shape)}
        elif p.ndim == 1:
            optimizer.state[p] |= {"variance": torch.ones(p.shape)}
    for _ in range(2):
        optimizer.step()
    return found[0], found[1]


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_a_hook_of_the_user_s_own_finds_rows(two: Cluster, name: str) -> None:
    assert two.run(seen_by_a_hook, name) == [(True, True)] * 2


def swapped_state() -> float:
    """How far a fused step is from what it is to be where state was exchanged for other of the same objects."""
    model, _, compiled = compiled_pair(config(3))
    optimizer = autoshard.optim.AdamW(model.parameters(), lr=0.1)
    compiled(inputs_of(1)[0][dist.get_rank()]).backward()
    for _ in range(3):
        optimizer.step()
    for p in model.parameters():
        torch.utils.swap_tensors(optimizer.state[p]["exp_avg"], torch.zeros_like(p.detach()))
    optimizer.step()
    states = [(optimizer.state[p]["exp_avg"], p.grad) for p in model.parameters()]
    return max(float((local(mean) - 0.1 * local(grad)).abs().max()) for mean, grad in states if local(mean).numel())


def test_state_that_was_exchanged_in_place_is_stepped(two: Cluster) -> None:
    assert max(two.run(swapped_state)) < 1e-6


# --- optimizers that were there before


def continue_training(name: str, zero: int) -> Distance:
    """Two plain steps, of each process on its own, then sharded ones: rank 0's state is carried over."""
    torch.manual_seed(0)
    make = OPTIMIZERS[name]
    model = Net()
    optimizer = make(model.parameters())
    for x in torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(dist.get_rank())):
        model(x).backward()
        step_each(optimizer)
    plain = rank0_copy(model)
    reference, state = make(plain.parameters()), [copy.deepcopy(optimizer.state_dict())]
    dist.broadcast_object_list(state, 0)
    reference.load_state_dict(state[0])
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(zero)))
    return trained_beside(model, plain, compiled, (optimizer, reference))


@pytest.mark.parametrize("name", ["AdamW", in_full("Adagrad"), in_full("SGD momentum"), "own"])
@pytest.mark.parametrize("zero", [in_full(0), 2])
def test_optimizer_state_is_carried_over(two: Cluster, name: str, zero: int) -> None:
    for distance in two.run(continue_training, name, zero):
        assert distance.worst <= TOLERANCE, distance


def state_in_another_order() -> bool:
    """Whether the moments are rank 0's where other processes made them in another order."""
    torch.manual_seed(0)
    model = Net()
    optimizer = optim.AdamW(model.parameters(), lr=0.0)
    model(torch.ones(4, 8) * (1 + dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()
    expected: list[Any] = [[{k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()]]
    dist.broadcast_object_list(expected, 0)
    if dist.get_rank():
        for p, state in list(optimizer.state.items()):
            optimizer.state[p] = dict(reversed(state.items()))
    torch.compile(model, backend=autoshard.backend(config(3, fuse_optimizer=False)))(torch.ones(4, 8))
    found = [[whole(optimizer.state[p][key]) for key in expected[0][0]] for p in model.parameters()]
    return all(map(torch.equal, itertools.chain(*found), itertools.chain(*map(dict.values, expected[0]))))


def test_state_that_was_made_in_another_order_is_rank_0_s(two: Cluster) -> None:
    assert two.run(state_in_another_order) == [True] * 2


COUNTED: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": optim.SGD,
    "momentum": lambda ps: optim.SGD(ps, momentum=0.9),
    "AdamW": optim.AdamW,
    "amsgrad": lambda ps: optim.AdamW(ps, amsgrad=True),
    "RMSprop": optim.RMSprop,
    "centered": lambda ps: optim.RMSprop(ps, centered=True, momentum=0.9),
    "ASGD": optim.ASGD,
    "Muon": optim.Muon,
    "Lion": autoshard.optim.Lion,
    "Adagrad": optim.Adagrad,
    "Adamax": optim.Adamax,
    "Rprop": optim.Rprop,
}


@pytest.mark.parametrize("name", COUNTED)
def test_it_is_known_how_many_states_a_parameter_will_have(name: str) -> None:
    parameter = nn.Parameter(torch.ones(8, 8))
    optimizer = COUNTED[name]([parameter])
    parameter.grad = torch.ones(8, 8)
    optimizer.step()
    kept = [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor) and v.shape == parameter.shape]
    assert states_of(optimizer) == len(kept)


def beside_one_that_nobody_holds(frozen: bool) -> tuple[dict[str, str], set[str]]:
    """(how optimizers stepped, what one has that was made before the first call); on rank 0 another one lies about, in a cycle.
    frozen: all this by gc.freeze()."""
    model, _, compiled = compiled_pair(config(3))
    optimizer = optim.AdamW(model.parameters(), foreach=True)
    gc.disable()
    try:
        if dist.get_rank() == 0:
            other: Any = optim.SGD(model.parameters())
            other.itself = other
            del other
        if frozen:
            gc.freeze()
        compiled(inputs_of(1)[0, dist.get_rank()]).backward()
    finally:
        gc.unfreeze()
        gc.enable()
    optimizer.step()
    return dict(autoshard.report(model).steps), {type(p).__name__ for p in optimizer.param_groups[0]["params"]}


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_frozen_is_found_and_what_nobody_holds_is_not(two: Cluster, frozen: bool) -> None:
    assert two.run(beside_one_that_nobody_holds, frozen) == [({"AdamW": "on rows, by torch"}, {"DTensor"})] * 2


# --- what is refused


def refusal(kind: str) -> None:
    """What the first step says of an optimizer, closure or hook that cannot be right on rows."""
    model, _, compiled = compiled_pair(config(3))
    x = inputs_of(1)[0, dist.get_rank()]
    compiled(x).backward()
    optimizer = _unfit(kind, list(model.parameters()))
    optimizer.step(lambda: compiled(x)) if kind == "Adagrad closure" else optimizer.step()


def _unfit(kind: str, parameters: list[nn.Parameter]) -> Any:
    if kind.endswith("hook"):
        optimizer: Any = getattr(optim, kind.split()[0])(parameters)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer
    if kind == "AdamW8bit":
        return type("AdamW8bit", (optim.AdamW,), {})(parameters)
    chosen = [p for p in parameters if p.ndim == 2] if kind == "Muon" else parameters
    return getattr(optim, kind.split()[0])(chosen)


@pytest.mark.parametrize("kind", [in_full("Adafactor hook"), "Muon", in_full("LBFGS"), "Adagrad hook", in_full("Adagrad closure"), "AdamW8bit"])
def test_what_cannot_step_on_shards_is_refused_by_name(two: Cluster, kind: str) -> None:
    for text in two.run(what_is_said, refusal, kind):
        assert text.startswith(f"UnsupportedError: optimizer {kind.split()[0]}") and "cannot step on sharded parameters" in text


def fail_in_a_step(name: str, option: str) -> tuple[bool, bool, list[bool]]:
    """(whether the optimizer has its parameters again, zero_grad's effect on these, and its state is of whole ones) after a step
    that failed half way."""
    model, _, compiled = compiled_pair(config(3))
    x = inputs_of(1)[0, dist.get_rank()]
    optimizer: Any = getattr(optim, name)(model.parameters())
    for right in (optimizer.param_groups[0][option], "wrong"):
        compiled(x).backward()
        optimizer.param_groups[0][option] = right
        try:
            optimizer.step()
        except (TypeError, ValueError):
            assert right == "wrong"
    optimizer.zero_grad()
    mine = optimizer.param_groups[0]["params"]
    state = autoshard.state_dict(optimizer).get("state", {}).values()  # rank 0 has it
    kept = [v.shape in {p.shape for p in mine} for s in state for v in s.values() if v.dim()]
    return all(map(operator.is_, mine, model.parameters())), all(p.grad is None for p in mine), kept


@pytest.mark.parametrize(("name", "option"), [("AdamW", "betas"), ("RMSprop", "alpha")])
def test_a_step_that_failed_loses_nothing(two: Cluster, name: str, option: str) -> None:
    first, second = two.run(fail_in_a_step, name, option)
    assert first[:2] == second[:2] == (True, True)
    assert all(first[2]) and len(first[2]) >= 4 and not second[2]
