"""The backend that torch.compile calls: the first time with whole parameters, then with shards.

[Note: The first call] The first graph of a model is only read: an inventory, an agreement of all processes,
a plan. Then the model is sharded in place, and traced on shards; that graph, and all later ones, are compiled. After the
agreement nothing in compilation communicates, because recompiles may happen on one process alone.

A module's first graph is captured before Dynamo traces the module itself (`before_trace`), from a copy without values. What cannot be
captured, a function or blocks that are compiled one by one, is traced whole, and once more on shards.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from rich.markup import escape
from torch import Tensor, nn
from torch.fx import GraphModule

from autoshard import skipped, torch_internals
from autoshard.capture import capture_call
from autoshard.codegen import Compilation, has_compiler
from autoshard.config import Config
from autoshard.console import Phases
from autoshard.cost_model.hardware import Device
from autoshard.errors import ConfigError, first_line
from autoshard.family import Family
from autoshard.first_call import FirstCall, kind_of
from autoshard.first_graph import FirstGraph
from autoshard.heap import one_look
from autoshard.inventory import device_of, names_of
from autoshard.kernels import launcher
from autoshard.ops.collectives import Collectives
from autoshard.ops.unshard_parameter import unshard_parameter
from autoshard.owner import find_owner, with_family
from autoshard.passes import registry
from autoshard.passes.base import Context
from autoshard.passes.choose_elementwise import fuses
from autoshard.passes.dump import Dump
from autoshard.passes.manager import PassManager
from autoshard.plan import Plan
from autoshard.report import Report
from autoshard.runtime import optimizers, processes
from autoshard.runtime.live import copies
from autoshard.runtime.presence import Patience, SignsOfLife
from autoshard.runtime.residue import giving_leaves
from autoshard.runtime.state import ModelState, state_of
from autoshard.unshardable import refuse_unplanned, refuse_what_cannot_be_sharded

_made: weakref.WeakSet[Backend] = weakref.WeakSet()


class Backend:
    """A backend for torch.compile, one for each model or shared by several; see `autoshard.backend`."""

    __name__ = "autoshard"

    def __init__(self, config: Config | None = None) -> None:
        if processes.launched_size() > 1 and not torch_internals.compiles():
            raise ConfigError(
                "torch.compile is told to compile nothing (by TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE in the environment, or by "
                "`disable` of Dynamo's config), so processes would silently differ; legal: none of these, or codegen='eager' to look for errors"
            )
        self.config = config or Config()
        self.called = False  # whether a first call with it was begun
        _made.add(self)
        self._states: weakref.WeakSet[ModelState] = weakref.WeakSet()
        self._manager: PassManager | None = None
        self._phases = Phases(shown=False)
        self._warned = False
        self._said = set[str]()
        self._signs = SignsOfLife() if processes.launched_size() > 1 else None
        torch_internals.ignore_messages_given_once()
        torch_internals.before_traces(_before_trace)

    def before_trace(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first call of `model`, called with these, where it is that and can be captured."""
        new = state_of(model) is None and next(model.parameters(), None) is not None
        if processes.launched_size() == 1 or not new or torch_internals.behind_a_break():
            return
        with one_look():
            whole = with_family(model)
            if not isinstance(whole, Family):
                self._first_call(model, whole, lambda: self._captured(model, args, kwargs))

    def _captured(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FirstGraph | None:
        try:
            with self._phases.phase("trace", "of a copy without values"):
                captured = capture_call(model, args, kwargs, self.config.dtypes()[0])
        except Exception as error:  # of the user's code under tracing, of any kind
            self._phases.say(f"tracing the model itself: {escape(first_line(error))}")
            return None
        return FirstGraph.captured(captured)

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], **said: Any) -> Callable[..., Any]:
        """What torch.compile asks of a backend: something that runs `gm`. ConfigError if torch.compile was said more."""
        _refuse(said)
        torch_internals.fall_back_in_spite_of(unshard_parameter, gm)
        if any(isinstance(x, nn.Parameter) and not x.requires_grad for x in inputs):
            torch_internals.guard_parameters()
        state = self._state_for(inputs)
        if state is None:
            model = find_owner(inputs)
            if model is not None:
                whole = model if state_of(model) else with_family(model)
                state = self._first_call(model, whole, lambda: FirstGraph.given(whole, gm, inputs))
                if state is not None and not state.plan.leaves_alone:
                    torch_internals.restart_trace("autoshard sharded the parameters")
        return self._compile(state, gm, inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        return self  # as a function would be: a copy of a compiled module has the same one

    def _state_for(self, inputs: Sequence[Any]) -> ModelState | None:
        """The state of the model whose parameters these are, if it had its first call: with this backend, or, as a
        copy of a sharded model, with none. Of models that share parameters, that with the most of these."""
        ids = set(map(id, inputs))
        found = {state: len(ids & state.names().keys()) for state in (*self._states, *copies())}
        owner = max(found, key=lambda state: (found[state], state.number), default=None)
        if owner is None or not found[owner]:
            return None
        self._states.add(owner)
        return owner

    def _first_call(
        self, model: nn.Module, whole: nn.Module, look: Callable[[], FirstGraph | None]
    ) -> ModelState | None:
        """Plans and shards `whole`, of which `model` is called; None where there is no graph to look at. An evaluation that comes first
        is planned as the training is that follows, if an optimizer waits for it."""
        self.called = True
        training = torch.is_grad_enabled() or bool(optimizers.holding(names_of(whole)))
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(training):  # or parameters could never be trained
                state = self._planned(model, whole, look)
        finally:
            self._end_signs()
        return state and self._adopted(state)

    def _adopted(self, state: ModelState) -> ModelState:
        state.reporter = self.report
        self._states.add(state)
        return state

    def _planned(
        self, model: nn.Module, whole: nn.Module, look: Callable[[], FirstGraph | None]
    ) -> ModelState | None:
        """The state of a model that was planned and sharded, now or by another backend."""
        world = self._join(model)
        if (state := state_of(model)) is not None:  # another backend may have had the first call
            self._warn_of_another(state)
            return state
        if world.size > 1:
            self._warn_behind_a_break()
            refuse_what_cannot_be_sharded(whole)
        if (graph := look()) is None:
            return None
        manager, patience = self.manager(world.rank), self._patience()
        return FirstCall(self.config, manager, self._phases, whole, graph, world, patience).carry_out()

    def _warn_of_another(self, state: ModelState) -> None:
        """That the other backend's config counts."""
        other = getattr(state.reporter, "__self__", self)
        changed = [f.name for f in fields(Config) if getattr(other.config, f.name) != getattr(self.config, f.name)]
        if changed and state.world.rank == 0:
            self._phases.warn(
                f"this model was sharded by another backend, whose config it keeps: another {changed[0]} is for a model before its "
                "first call"
            )

    def _warn_behind_a_break(self) -> None:
        if torch_internals.behind_a_break():
            self._phases.warn(
                "the first graph begins behind a graph break: what came before it ran, in this first call, on each "
                "process's own values; give all processes the same (torch.manual_seed, one checkpoint)"
            )

    def _join(self, model: nn.Module) -> processes.World:
        world = processes.join(device_of(model), self._patience())
        self._phases.shown = self.config.verbose and world.rank == 0
        return world

    def _patience(self) -> Patience:
        """With the others; where this process gives no signs of life, neither do they."""
        silence = 8.0 if processes.on_one_machine() else 60.0  # machines of a job may start far apart
        arrival = silence if self.config.arrival == "auto" else self.config.arrival
        return Patience(self.config.timeout, arrival if self._signs else None, self._phases.warn)

    def _end_signs(self) -> None:
        """Nobody is to wait for this process because of this call any longer."""
        if self._signs:
            self._signs.end()
            self._signs = None

    def manager(self, rank: int) -> PassManager:
        """The passes of this backend, with their history over all graphs."""
        if self._manager is None:
            pipeline = registry.pipeline_for(self.config.passes, self.config.disable_passes)
            self._manager = PassManager(pipeline, Dump.of(self.config.dump_dir, rank))
        return self._manager

    def report(self, state: ModelState) -> Report:
        """What was planned for a model, and what compiling it did."""
        ids = state.names().keys()
        return Report(
            plan=state.plan,
            compiled=len(state.compiled & ids) / len(ids) if ids else 1.0,
            steps=tuple(state.steps.items()),
            phases=tuple(self._phases.seconds.items()),
            passes=tuple(self._manager.history) if self._manager else (),
        )

    def _compile(
        self, state: ModelState | None, gm: GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        rank = state.world.rank if state else processes.launched_rank()
        plan = state.plan if state else Plan(1, (("shard", 1),), ())
        apart = state is None or state.accumulation.gathered  # whole parameters, nobody else takes part
        names = state.names() if state and not apart else {}
        if rank == 0 and not self._warned:
            self._warn_of_breaks(gm, state, inputs)
        if state and not plan.leaves_alone and not apart:
            refuse_unplanned(state, names, inputs)
        context = Context(
            plan=plan,
            parameters={i: names[id(x)] for i, x in enumerate(inputs) if id(x) in names},
            buffers=_buffers(state, inputs) if state and not apart else {},
            everyone=processes.name_of_everyone(),
            rank=rank,
            fuses=self._fuses(inputs),
            early=state.early if state and not apart else None,
        )
        collectives = Collectives(tuple(context.parameters.values()), tuple(context.buffers.values()))
        compilation = Compilation(self.manager(rank), context, self._inductor(), self._phases, collectives=collectives)
        with self._phases.phase("compile", "in all so far"):
            run = giving_leaves(compilation.compile(gm, inputs), inputs)
        positions, buffers = tuple(context.parameters), tuple(context.buffers)
        if state is None or (plan.leaves_alone and not positions):
            return run
        if plan.leaves_alone:
            return self._noting_models(run, positions, state)
        return state.noting_parameters(run, positions, buffers, collectives)

    def _noting_models(self, run: Callable[..., Any], positions: tuple[int, ...], first: ModelState) -> Callable[..., Any]:
        """`run`, a compiled graph of one process, with a note of the parameters among its arguments. There modules keep their class, so
        Dynamo calls it for other models too that are alike; they come and go, and each has a state of its own."""
        make = functools.partial(ModelState, plan=first.plan, world=first.world, topic=first.topic)
        last = weakref.ref(first)

        @functools.wraps(run)
        def noted(*args: Any) -> Any:
            nonlocal last
            state, given = last(), [args[i] for i in positions]
            if state is None or not state.compiled.issuperset(map(id, given)):
                state = self._state_of_owner(given, make)
                state.compiled.update(map(id, given))
                last = weakref.ref(state)
            return run(*args)

        return noted

    def _state_of_owner(self, parameters: Sequence[Any], make: Callable[[nn.Module], ModelState]) -> ModelState:
        """The state of the model that is called with these, made if there is none."""
        model = find_owner(parameters)
        assert model is not None  # there are parameters
        state = state_of(model)
        if state is None:
            state = self._adopted(make(model))
            state.attach()
        return state

    def _warn_of_breaks(self, gm: GraphModule, state: ModelState | None, inputs: Sequence[Any]) -> None:
        """Once: what is behind a graph break is compiled apart, and gathers less far ahead. Of a break in front of which a function had
        nothing to compile (only a call of one that breaks too) Dynamo gives no graph: it shows in what comes behind it, beside the
        parameters of an earlier piece."""
        found = torch_internals.graph_break(gm)
        if found is None and state and state.compiled - set(map(id, inputs)) and (where := torch_internals.behind_a_break()):
            found = where, "inside of what is called there"
        if found:
            self._warned = True
            self._phases.warn(
                f"graph break at {found[0]} ({found[1]}): the model is compiled in pieces, with less to overlap; "
                "TORCH_LOGS=graph_breaks shows all"
            )

    def _fuses(self, inputs: Sequence[Any]) -> Device | None:
        """See `Context`."""
        if self.config.codegen != "triton":
            return None
        devices = [x.device for x in inputs if isinstance(x, Tensor)]
        found = next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
        if where := _without_kernels(found):
            self._warn_once(f"codegen 'triton' is for GPUs: {where} it is 'eager' instead")
            return None
        return fuses(self.config.codegen, kind_of(found))

    def _inductor(self) -> bool:
        if self.config.codegen != "inductor" or has_compiler():
            return self.config.codegen == "inductor"
        self._warn_once("no C++ compiler found (CXX, g++, clang++): codegen is 'eager' instead")
        return False

    def _warn_once(self, text: str) -> None:
        """Of what holds for graph after graph."""
        if text not in self._said:
            self._said.add(text)
            self._phases.warn(text)


def _without_kernels(device: torch.device) -> str:
    """Where Triton can launch none, in words; "" of a device where it can."""
    if device.type != "cuda":
        return f"on {device.type}"
    return f"without {launcher.lacking()}" if launcher.lacking() else ""


def registered(
    gm: GraphModule, inputs: Sequence[Any], options: dict[str, Any] | None = None, **said: Any
) -> Callable[..., Any]:
    """The entry point of `torch.compile(model, backend="autoshard", options={...})`."""
    return _backend_with(options or {})(gm, inputs, **said)


def _refuse(said: Mapping[str, Any]) -> None:
    for name, value in said.items():
        raise ConfigError(
            f"torch.compile: {name}={value!r} is for Inductor alone; legal: autoshard.backend(autoshard.Config(...)) without, "
            'or backend="autoshard" with options={...} of Config\'s fields'
        )


_registered: dict[str, Backend] = {}
skipped.watch(lambda backend: backend is registered or isinstance(backend, Backend), _made)


def _backend_with(options: dict[str, Any]) -> Backend:
    """One backend for each set of options, so that a model's later graphs find its state."""
    key = json.dumps(options, sort_keys=True, default=str)
    if key not in _registered:
        _registered[key] = Backend(Config.from_options(options))
    return _registered[key]


def _before_trace() -> None:
    """Where a module is called that was compiled with one of our backends."""
    call = next(torch_internals.compiled_calls(), None)
    if call is None or call.module is None:
        return
    named, said = call.backend is registered, dict(call.said)
    backend = _backend_with(said.pop("options", {})) if named else call.backend
    if isinstance(backend, Backend):
        _refuse(said)  # while nothing is sharded
        backend.before_trace(call.module, call.arguments, call.keywords)


torch_internals.before_traces(_before_trace)  # for backends by name, which are made when their first graph is there


def _buffers(state: ModelState, inputs: Sequence[Any]) -> dict[int, str]:
    names = {id(b): name for name, b in state.model.named_buffers()}
    return {i: names[id(x)] for i, x in enumerate(inputs) if id(x) in names}
