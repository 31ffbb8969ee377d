"""ModelState: what a model that was sharded carries with it."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoshard import torch_internals
from autoshard.errors import DivergenceError, UnsupportedError
from autoshard.family import members_of
from autoshard.inventory import names_of
from autoshard.ops.early import Early
from autoshard.plan import Plan
from autoshard.runtime import fused_step, local_step, scaler
from autoshard.runtime.accumulation import Accumulation
from autoshard.runtime.dtensors import refuse_strange_rows
from autoshard.runtime.fingerprint import fingerprints
from autoshard.runtime.lockstep import Call, Lockstep
from autoshard.runtime.lost_peers import naming_lost_peers
from autoshard.runtime.optimizers import check_steps_on_shards, scatter_loaded, stands_still
from autoshard.runtime.processes import World
from autoshard.runtime.regions import Regions
from autoshard.runtime.replicas import Replicas
from autoshard.runtime.residue import Residue, refuse_lost, residues_of
from autoshard.runtime.shard import full_value, places_of

Swapped = tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]  # where, name, shard, full
ATTRIBUTE, FAILURE = "_autoshard_state", "_autoshard_failure"


@dataclass(eq=False)
class ModelState:
    """One per model or family, found under `ATTRIBUTE` of each module that was compiled.

    compiled: ids of the parameters that compiled graphs were called with (Dynamo may call one graph for several
    blocks). regions: its blocks that repeat, where a trace can go through them once. fuses: whether optimizers that are known
    are stepped at once. early: gathers that start when an optimizer has stepped, where the plan has them.
    steps: how those that stepped did, by class. copied: how often it was. reporter: makes the report of this.
    """

    model: nn.Module
    plan: Plan
    world: World
    mesh: DeviceMesh | None = None
    lockstep: Lockstep | None = None
    replicas: Replicas | None = None
    copied: int = 0
    accumulation: Accumulation = field(default_factory=Accumulation)
    compiled: set[int] = field(default_factory=set)
    regions: Regions | None = None
    fuses: bool = False
    early: Early | None = None
    steps: dict[str, str] = field(default_factory=dict)
    reporter: Callable[[ModelState], Any] | None = None

    def names(self) -> dict[int, str]:
        """The names by id of the parameters that the model has now, those of the first call where they had one then (a
        module may have moved); stand-ins for what lies elsewhere have them too."""
        first = self.__dict__.get("ids", {})
        names = {key: first.get(key, name) for key, name in names_of(self.model).items()}
        for prefix, module in self.model.named_modules():
            for attribute, leaf in module.__dict__.get("_autoshard_absent", {}).items():
                names.setdefault(id(leaf), f"{prefix}.{attribute}" if prefix else attribute)
        return names

    @functools.cached_property
    def ids(self) -> dict[int, str]:
        """The parameters' names by id, as of the first call."""
        return names_of(self.model)

    @functools.cached_property
    def residues(self) -> dict[int, Residue]:
        """Of the parameters whose gradients go in low rank, by id."""
        return {id(m._parameters[name]): r for m in self.model.modules() for name, r in residues_of(m).items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        """Of a copy of the model, which `memo` has already. It may be compiled, gathered and loaded on its own."""
        accumulation = copy.deepcopy(self.accumulation, memo)
        self.copied += 1
        made = replace(
            self,
            model=copy.deepcopy(self.model, memo),
            accumulation=accumulation,
            lockstep=self.lockstep and self.lockstep.for_copy(self.copied),
            replicas=self.replicas and self.replicas.for_copy(self.copied),
            copied=0,
            compiled=set(),
            early=self.early and Early(),
        )
        if not self.plan.leaves_alone:
            _live.add(made)
            _copies.add(made)
        return made

    def attach(self) -> None:
        """Lets the model carry this, and load whole state dicts from here on."""
        for member in members_of(self.model):
            member.__dict__[ATTRIBUTE] = self
        self.ids = names_of(self.model)
        if not self.plan.leaves_alone:
            _live.add(self)
            watch_steps()
        for module in self.model.modules():
            if any(isinstance(p, DTensor) for p in module._parameters.values()):
                module.register_load_state_dict_pre_hook(_scatter_loaded)

    def noting_parameters(
        self, run: Callable[..., Any], positions: tuple[int, ...]
    ) -> Callable[..., Any]:
        """`run`, a compiled graph, with a note of the parameters among its arguments, called in lockstep."""

        @functools.wraps(run)
        def noted(*args: Any) -> Any:
            parameters = [args[i] for i in positions]
            self._enter(parameters)
            given = {id(p) for p in parameters}
            self.compiled |= given
            out = run(*args)
            if self.accumulation.mode == "flush" and torch.is_grad_enabled():
                self.accumulation.take(given)
            return out

        return noted

    def _enter(self, parameters: Sequence[Tensor]) -> None:
        """A call of a graph on these begins: in lockstep, where it will gather them or reduce their gradients."""
        training, holds = torch.is_grad_enabled(), self.accumulation.mode == "hold"
        reduces = training and not holds and any(p.requires_grad for p in parameters)
        if self.lockstep is not None and (reduces or any(isinstance(p, DTensor) for p in parameters)):
            self.lockstep.enter(Call(training, holds, tuple(map(id, parameters))), self.names)

    def check_before_step(self, optimizer: Optimizer, stepped: list[nn.Parameter], closure: bool) -> None:
        """Refuses a step on gradients that no compiled graph reduced: processes would drift apart."""
        if self.plan.sharded:
            check_steps_on_shards(optimizer, closure)
        if self.accumulation.waiting():
            raise DivergenceError(
                "gradients of backwards inside no_sync still wait: run the last microbatch before a step outside of it"
            )
        refuse_lost(self.residues, stepped)
        apart = [self.ids[id(p)] for p in stepped if id(p) in self.ids and id(p) not in self.compiled]
        if apart and not stands_still(optimizer):
            raise DivergenceError(
                f"parameter {apart[0]!r} got a gradient outside of any graph that autoshard compiled, so "
                "processes would silently differ; see torch.compile's graph breaks (TORCH_LOGS=graph_breaks)"
            )
        if self.replicas is not None and (whole := self._whole()):
            self.replicas.before_step(whole)

    def _whole(self) -> dict[str, nn.Parameter]:
        """The parameters that all processes have whole."""
        named = self.model.named_parameters()
        return {n: p for n, p in named if not isinstance(p, DTensor) or all(at.is_replicate() for at in p.placements)}


_live: weakref.WeakSet[ModelState] = weakref.WeakSet()
_copies: weakref.WeakSet[ModelState] = weakref.WeakSet()


def copies() -> list[ModelState]:
    """The states of models that are copies of sharded ones."""
    return list(_copies)


@functools.cache
def watch_steps() -> None:
    """Installs, once, what surrounds every optimizer step, by torch's public hooks."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(lambda optimizer, *_: _stepped(optimizer))


def _stepped(optimizer: Optimizer) -> None:
    _after_step(optimizer)
    if any(state.early for state in _live):  # few ask for it, and this is in every step
        for early in sorted((s.early for s in _of(optimizer) if s.early), key=lambda early: early.number):
            naming_lost_peers(early.start)()


def _of(optimizer: Optimizer) -> list[ModelState]:
    """The states of the models whose parameters an optimizer has."""
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [state for state in _live if not parameters.isdisjoint(state.ids)]


def _after_step(optimizer: Optimizer) -> None:
    local_step.after_step(optimizer)
    fused_step.after_step(optimizer)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _after_step(optimizer)  # where the last step failed, the hooks after it did not run
    closure = kwargs.get("closure", next(iter(args[1:]), None)) is not None  # args[0] is the optimizer
    states = _of(optimizer)
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for state in states:
        state.check_before_step(optimizer, stepped, closure)
    strange = [p for p in stepped if not any(id(p) in s.ids for s in states)]
    if states and strange and not stands_still(optimizer):
        raise DivergenceError(
            f"the optimizer steps a parameter of shape {tuple(strange[0].shape)} that is in no model compiled with "
            "autoshard, beside some that are: nothing averages its gradient, so processes would silently differ"
        )
    sharded = any(state.plan.sharded for state in states)
    if sharded:
        scaler.check(optimizer, stepped)
        scatter_loaded(optimizer)
    how = _step(optimizer, closure, sharded, any(state.fuses for state in states))
    for state in states:
        state.steps[type(optimizer).__name__] = how


def _step(optimizer: Optimizer, closure: bool, sharded: bool, fuses: bool) -> str:
    """Prepares a step, or takes it; how, in words."""
    fuses = fuses or optimizer in fused_step.asked_for
    if how := fused_step.steps_itself(optimizer):
        return how
    if fuses and fused_step.before_step(optimizer, closure):
        return "all parameters at once"
    if sharded and local_step.before_step(optimizer, closure):
        return "on rows, by torch"
    return "by torch"


def make_unusable(model: nn.Module, error: Exception) -> None:
    """Every further call of the model raises `error`: it is half sharded."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def refuse(*_: Any) -> None:
        raise error

    for member in members_of(model):
        member.register_forward_pre_hook(refuse)
        member.__dict__[FAILURE] = error


def refuse_unusable(model: nn.Module) -> None:
    """Where a trace begins, which is before the model's hooks run."""
    for module in model.modules():
        if FAILURE in module.__dict__:
            raise module.__dict__[FAILURE]


def state_of(model: nn.Module) -> ModelState | None:
    """The state that a model carries, compiled or not; None before its first call."""
    return torch_internals.original_of(model).__dict__.get(ATTRIBUTE)


def states_in(model: nn.Module) -> list[ModelState]:
    """The states of a model and of what was compiled inside it, each once."""
    found = [state_of(module) for module in torch_internals.original_of(model).modules()]
    return list(dict.fromkeys(state for state in found if state is not None))


def _scatter_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Plain full tensors of a loaded state dict become shards like the parameters that they go to."""
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if not isinstance(parameter, DTensor) or value is None:
            continue
        refuse_strange_rows(f"parameter {prefix + name!r}", value, parameter)
        if not isinstance(value, DTensor) and value.shape == parameter.shape:
            state_dict[prefix + name] = distribute_tensor(
                value.to(parameter.device), parameter.device_mesh, parameter.placements
            )


def _marks_of(swapped: Sequence[Swapped]) -> list[tuple[int, ...]]:
    """What changes with the values of the full ones, through `.data` too, which leaves a tensor's version as it is."""
    full = [each[-1] for each in swapped]
    return [(f.data_ptr(), *mark) for f, mark in zip(full, fingerprints(full))]


@contextlib.contextmanager
def gathered(state: ModelState) -> Iterator[None]:
    """The model has whole, plain parameters, for reading; see `autoshard.gathered`."""
    if state.accumulation.gathered:
        yield
        return
    swapped: list[Swapped] = []
    for places in places_of(state.model).values():
        shard = places[0].module._parameters[places[0].attribute]
        assert shard is not None
        if isinstance(shard, DTensor):
            full = nn.Parameter(full_value(shard), requires_grad=False)
            for place in places:
                swapped.append((place.module._parameters, place.attribute, shard, full))
                place.module._parameters[place.attribute] = full
    before = _marks_of(swapped)
    state.accumulation.gathered = True
    try:
        yield
    finally:
        state.accumulation.gathered = False
        replaced = [name for parameters, name, _, full in swapped if parameters.get(name) is not full]
        for parameters, name, shard, _ in swapped:
            parameters[name] = shard
    after = _marks_of(swapped)
    written = [name for (_, name, *_), was, now in zip(swapped, before, after) if was != now]
    changed = list(dict.fromkeys(replaced + written))
    if changed:
        raise UnsupportedError(
            f"parameters {changed} were written inside `gathered`; the writes are lost. Write to the shards, "
            "or load a state dict"
        )
