"""ModelState: what a model that was sharded carries with it."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autoshard import torch_internals
from autoshard.errors import DivergenceError, UnsupportedError
from autoshard.family import members_of
from autoshard.inventory import names_of
from autoshard.ops.collectives import Collectives
from autoshard.ops.early import Early
from autoshard.plan import Plan
from autoshard.runtime.accumulation import Accumulation
from autoshard.runtime.buffers import Buffers
from autoshard.runtime.dtensors import Written
from autoshard.runtime.live import note_copy, remember
from autoshard.runtime.loaded_parameters import let_load
from autoshard.runtime.lockstep import BUFFER, Call, Lockstep, before_backward
from autoshard.runtime.optimizers import options_of
from autoshard.runtime.processes import World
from autoshard.runtime.replicas import Replicas
from autoshard.runtime.residue import Residue, refuse_lost, residues_of
from autoshard.units import counted

ATTRIBUTE, FAILURE = "_autoshard_state", "_autoshard_failure"


@dataclass(eq=False)
class ModelState:
    """One per model or family, found under `ATTRIBUTE` of each module that was compiled.

    topic: of what processes say of it to each other: the same on all of them and new for each model, whose copies have it too.
    number: the later it was made the higher; that of a copy need not be the same on all. compiled: ids of the parameters that
    compiled graphs were called with (Dynamo may call one graph for several blocks). fuses: whether optimizers that are known are
    stepped at once. early: gathers that start when an optimizer has stepped, where the plan has them. steps: how those that stepped
    did, by class. reporter: makes the report of this.
    """

    model: nn.Module
    plan: Plan
    world: World
    topic: str
    mesh: DeviceMesh | None = None
    lockstep: Lockstep | None = None
    replicas: Replicas | None = None
    number: int = field(default_factory=itertools.count().__next__, init=False)
    accumulation: Accumulation = field(default_factory=Accumulation)
    written: Written = field(default_factory=Written)
    compiled: set[int] = field(default_factory=set)
    fuses: bool = False
    early: Early | None = None
    steps: dict[str, str] = field(default_factory=dict)
    reporter: Callable[[ModelState], Any] | None = None
    _loads: list[str] | None = field(default=None, init=False)
    _announced: set[str] = field(default_factory=set, init=False)

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
    def buffers(self) -> Buffers:
        """As they were behind the last call of one of its graphs."""
        return Buffers(self.model)

    @functools.cached_property
    def residues(self) -> dict[int, Residue]:
        """Of the parameters whose gradients go in low rank, by id."""
        return {id(m._parameters[name]): r for m in self.model.modules() for name, r in residues_of(m).items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        """Of a copy of the model, which `memo` has already. It may be compiled, gathered and loaded on its own."""
        accumulation = copy.deepcopy(self.accumulation, memo)
        made = replace(
            self,
            accumulation=accumulation,
            lockstep=self.lockstep and self.lockstep.for_copy(),
            replicas=self.replicas and self.replicas.for_copy(),
            compiled=set(),
            early=self.early and Early(),
            written=Written(),
        )
        memo[id(self)] = made  # each of several models has it
        made.model = copy.deepcopy(self.model, memo)
        if not self.plan.leaves_alone:
            remember(made)
            note_copy(made)
        return made

    def attach(self) -> None:
        """Lets the model carry this, and load whole state dicts from here on."""
        for holder in (self.model, *members_of(self.model)):
            holder.__dict__[ATTRIBUTE] = self
        self.ids = names_of(self.model)
        if self.plan.leaves_alone:
            return
        remember(self)
        self.buffers = Buffers(self.model)
        let_load(self.model)

    def noting_parameters(
        self, run: Callable[..., Any], positions: tuple[int, ...], buffers: tuple[int, ...], collectives: Collectives
    ) -> Callable[..., Any]:
        """`run`, a compiled graph, with a note of the parameters among its arguments, called in lockstep. positions, buffers: of these
        among its arguments. Dynamo keeps it as long as the user's function is there; it does not keep the model."""
        here = weakref.ref(self)

        @functools.wraps(run)
        def noted(*args: Any) -> Any:
            state = here()
            assert state is not None  # its model has it, and is called
            given, training = tuple(id(args[i]) for i in positions), torch.is_grad_enabled()
            changed = state._changed()
            sent = state.buffers.names_of(args[i] for i in buffers) if collectives.sends_buffers else ()
            called = state._in_lockstep(given, training, collectives, sent, changed)
            state.compiled.update(given)
            if changed:
                everyones = state.buffers.take_rank_0_s(changed)
                args = tuple(everyones.get(id(arg), arg) for arg in args)
            rows = [args[i] for i in positions] if training and state.plan.sharded else []
            state.written.tell(rows)
            out = run(*args)
            if state._shares_buffers:
                state.buffers.note()
            called(out)
            if rows:
                before_backward(out, functools.partial(state.written.tell, rows))
            if state.accumulation.mode == "flush" and training:
                state.accumulation.take(collectives.reduced(given))
            return out

        return noted

    @property
    def _shares_buffers(self) -> bool:
        """Whether all processes have rank 0's. Not inside of `gathered`, where a process may call by itself."""
        return self.plan.buffers == "broadcast" and not self.accumulation.gathered

    def _changed(self) -> list[str]:
        """The names of buffers that are to become rank 0's before a call, see [Note: Changed buffers]."""
        return self.buffers.changed() if self._shares_buffers else []

    def _in_lockstep(
        self, given: tuple[int, ...], training: bool, made: Collectives, buffers: tuple[str, ...], changed: Sequence[str]
    ) -> Callable[[Any], None]:
        """A graph is about to be called with these parameters and buffers, and some buffers changed: in lockstep, from its first collective
        on. What the function is to be called with is what it gave."""
        lockstep, forward = self.lockstep, bool(made.forward or changed)
        if lockstep is None or not (forward or (training and made.backward)):
            return lambda out: None
        text, order = made.said(given, self.names, buffers)
        text = "\n".join([text, *(BUFFER + name for name in changed)])
        call = Call(training, text, lockstep.skipped, lockstep.stepped or not training, order)
        if forward:
            lockstep.enter(call)

        def backward_comes() -> None:
            if not forward:
                lockstep.enter(call)
            lockstep.skipped = False

        return lambda out: before_backward(out, backward_comes) if training else None

    def come(self, what: str) -> None:
        """All processes must come to this before what communicates outside of graphs. DisagreementError if one does not."""
        if self.plan.sharded and self.lockstep is not None:
            self.lockstep.come(what)

    def come_to_load(self, names: Collection[str], missing: list[str]) -> None:
        """As `come`, in each load of a state dict, which is told by its list of missing keys; once for all of it, and again for what a hook
        gave a name behind that. names: of what is loaded."""
        if missing is not self._loads:
            self._loads, self._announced = missing, set()
        if names := set(names) - self._announced:
            self._announced |= names
            code = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:8]
            self.come(f"load_state_dict, of {min(names)!r} to {max(names)!r} (code {code} of {counted(len(names), 'name', 'names')})")

    def is_loading(self, missing: list[str]) -> bool:
        """Whether it came to this load."""
        return missing is self._loads

    def check_step(self, optimizer: Optimizer, stepped: Callable[[], Sequence[nn.Parameter]], still: bool) -> None:
        """Refuses a step on gradients that no compiled graph reduced, or not alike, or by other options than on other processes, which
        would drift apart. stepped: gives the parameters of the optimizer that have gradients. still: it changes none of them."""
        if waiting := self.accumulation.waiting():
            raise DivergenceError(
                f"gradients of backwards inside no_sync still wait, that of {self.names().get(id(waiting[0]))!r} for one: run the last "
                "microbatch before a step outside of it, one that uses the same parameters"
            )
        if still:
            return
        if self.plan.sharded and self.accumulation.gathered:
            raise UnsupportedError(
                "a step inside autoshard.gathered(model) would leave its whole parameters as they are; legal: after the `with` block"
            )
        if self.residues:
            refuse_lost(self.residues, stepped())
        never = self.ids.keys() - self.compiled
        if never and (apart := {*map(id, stepped())} & never):
            raise DivergenceError(
                f"parameter {min(map(self.ids.__getitem__, apart))!r} got a gradient outside of any graph that autoshard compiled, so "
                "processes would silently differ; see torch.compile's graph breaks (TORCH_LOGS=graph_breaks)"
            )
        if self.replicas is not None:
            self.replicas.before_step(self._whole, lambda: options_of(optimizer))
        if self.lockstep is not None:
            self.lockstep.stepped = True

    def _whole(self) -> dict[str, nn.Parameter]:
        """The parameters that all processes have whole, of those that the plan knows."""
        named = [(n, p) for n, p in self.model.named_parameters() if id(p) in self.ids]
        return {n: p for n, p in named if not isinstance(p, DTensor) or all(at.is_replicate() for at in p.placements)}


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


def accumulations_in(model: nn.Module) -> list[Accumulation]:
    """Those of a model and of what was compiled inside it; before a first call the model's, which will be that one's."""
    return [state.accumulation for state in states_in(model)] or [Accumulation.of(model)]
