"""ModelState: what a model that was sharded carries with it."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
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
from autoshard.runtime.dtensors import Written, refuse_strange_rows
from autoshard.runtime.fingerprint import fingerprints
from autoshard.runtime.lockstep import BUFFER, Call, Lockstep, before_backward
from autoshard.runtime.lost_peers import naming_lost_peers
from autoshard.runtime.optimizers import options_of
from autoshard.runtime.parameters import LOADING
from autoshard.runtime.processes import World
from autoshard.runtime.replicas import Replicas
from autoshard.runtime.residue import Residue, refuse_lost, residues_of
from autoshard.runtime.shard import full_value, places_of
from autoshard.units import counted

Swapped = tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]  # where, name, shard, full
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
            model=copy.deepcopy(self.model, memo),
            accumulation=accumulation,
            lockstep=self.lockstep and self.lockstep.for_copy(),
            replicas=self.replicas and self.replicas.for_copy(),
            compiled=set(),
            early=self.early and Early(),
            written=Written(),
        )
        if not self.plan.leaves_alone:
            _remember(made)
            _copies.add(made)
        return made

    def attach(self) -> None:
        """Lets the model carry this, and load whole state dicts from here on."""
        for member in members_of(self.model):
            member.__dict__[ATTRIBUTE] = self
        self.ids = names_of(self.model)
        if self.plan.leaves_alone:
            return
        _remember(self)
        self.buffers = Buffers(self.model)
        for module in self.model.modules():  # those without parameters too: the outermost one is given all that is loaded
            if not isinstance(module, torch.jit.ScriptModule):
                module.__dict__[LOADING] = module.register_load_state_dict_pre_hook(_scatter_loaded).id

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


# No WeakSet, which takes long to give what is in it: each step asks twice.
_live: list[weakref.ref[ModelState]] = []
_copies: weakref.WeakSet[ModelState] = weakref.WeakSet()


def _remember(state: ModelState) -> None:
    _live.append(weakref.ref(state, _live.remove))


def copies() -> list[ModelState]:
    """The states of models that are copies of sharded ones."""
    return list(_copies)


def stepped_by(optimizer: Optimizer) -> list[ModelState]:
    """The states of the models whose parameters an optimizer has, in the same order on all processes."""
    parameters = [group["params"] for group in optimizer.param_groups]
    here = [state for ref in tuple(_live) if (state := ref()) is not None]  # one of them may go meanwhile
    found = [state for state in here if not state.ids.keys().isdisjoint(map(id, itertools.chain.from_iterable(parameters)))]
    return sorted(found, key=operator.attrgetter("topic", "number")) if len(found) > 1 else found


def any_live() -> bool:
    """Whether there is a model that several processes train, or a copy of one."""
    return bool(_live)


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


def _state_with(parameter: nn.Parameter) -> ModelState | None:
    return next((state for ref in tuple(_live) if (state := ref()) is not None and id(parameter) in state.ids), None)


def has_rows_of_another(module: nn.Module) -> bool:
    """Whether it has parameters of a model that carries a state, as a part of that has."""
    return any(_state_with(p) is not None for p in torch_internals.original_of(module).parameters())


_distribute = naming_lost_peers(distribute_tensor)


def _scatter_loaded(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, _strict: bool, missing: list[str], *_: Any
) -> None:
    """Plain full tensors of a loaded state dict become shards like the parameters that they go to, with rank 0's values.
    UnsupportedError where they are to take the place of parameters, since optimizers would go on with the old ones."""
    _come_to_load(module, state_dict, prefix, missing)
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if parameter is None or value is None:
            continue
        state = _state_with(parameter)
        if state is not None and torch_internals.assigns(metadata):
            raise UnsupportedError(
                f"load_state_dict(assign=True) would put another in the place of parameter {prefix + name!r}, and optimizers would "
                "go on with the old one; legal after the first call: load_state_dict(assign=False)"
            )
        if not isinstance(parameter, DTensor):
            continue
        refuse_strange_rows(f"parameter {prefix + name!r}", value, parameter)
        if _is_whole(value, parameter):
            state_dict[prefix + name] = _distribute(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def _come_to_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, missing: list[str]) -> None:
    """With all that the outermost module is given, before any of it is sent."""
    state = next((found for p in module.parameters() if (found := _state_with(p)) is not None), None)
    if state is None:
        return
    here = module.named_parameters(recurse=not state.is_loading(missing), remove_duplicate=False)
    named = [(state.ids.get(id(p)), p, state_dict.get(prefix + name)) for name, p in here]
    if names := [name for name, p, value in named if name is not None and isinstance(p, DTensor) and _is_whole(value, p)]:
        state.come_to_load(names, missing)


def _is_whole(value: Any, parameter: DTensor) -> bool:
    """Whether a value of a state dict is to become rows of this; of what has no values torch says so."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape


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
    state.come("autoshard.gathered")
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
    try:
        with state.accumulation.as_gathered():
            yield
    finally:
        replaced = [shard for parameters, name, shard, full in swapped if parameters.get(name) is not full]
        for parameters, name, shard, _ in swapped:
            parameters[name] = shard
    after = _marks_of(swapped)
    written = [shard for (*_, shard, _), was, now in zip(swapped, before, after) if was != now]
    changed = list(dict.fromkeys(state.names()[id(shard)] for shard in replaced + written))
    if changed:
        raise UnsupportedError(
            f"parameters {changed} were written inside `gathered`, or loaded there; that is lost. Outside of it write to the shards, "
            "or load a state dict"
        )
