"""The backend that torch.compile calls: the first time with whole parameters, then with shards.

[Note: The first call] The first graph of a model is only read: an inventory, an agreement of all processes,
a plan. Then the model is sharded in place and the trace starts again, on shards; that graph, and all later
ones, are compiled. After the agreement nothing in compilation communicates, because recompiles may happen on
one process alone.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.fx import GraphModule

from autoshard import skipped, torch_internals
from autoshard.codegen import Compilation, has_compiler
from autoshard.config import Config
from autoshard.console import Phases
from autoshard.first_call import FirstCall, refuse_unplanned
from autoshard.inventory import device_of
from autoshard.owner import find_owner, with_family
from autoshard.passes import registry
from autoshard.passes.base import Context
from autoshard.passes.dump import Dump
from autoshard.passes.manager import PassManager
from autoshard.plan import Plan
from autoshard.report import Report
from autoshard.runtime import processes
from autoshard.runtime.presence import Patience, SignsOfLife
from autoshard.runtime.state import ModelState, copies, state_of


class Backend:
    """A backend for torch.compile, one for each model or shared by several; see `autoshard.backend`."""

    __name__ = "autoshard"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self._states: weakref.WeakSet[ModelState] = weakref.WeakSet()
        self._manager: PassManager | None = None
        self._phases = Phases(shown=False)
        self._warned = False
        self._signs = SignsOfLife() if processes.launched_size() > 1 else None
        torch_internals.ignore_messages_given_once()

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What torch.compile asks of a backend: something that runs `gm`."""
        state = self._state_for(inputs)
        if state is None:
            model = find_owner(inputs)
            state = self._first_call(model, gm, inputs) if model is not None else None
        return self._compile(state, gm, inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        return self  # as a function would be: a copy of a compiled module has the same one

    def _state_for(self, inputs: Sequence[Any]) -> ModelState | None:
        """The state of the model whose parameters these are, if it had its first call: with this backend, or, as a
        copy of a sharded model, with none."""
        for state in (*self._states, *copies()):
            names = state.names()
            if any(id(x) in names for x in inputs):
                self._states.add(state)
                return state
        return None

    def _first_call(self, model: nn.Module, gm: GraphModule, inputs: Sequence[Any]) -> ModelState:
        """Plans, shards, restarts the trace. Returns only where the model is left alone."""
        try:
            state = self._planned(model, gm, inputs)
        finally:
            self._end_signs()
        state.reporter = self.report
        self._states.add(state)
        if not state.plan.leaves_alone:
            torch_internals.restart_trace("autoshard sharded the parameters")
        return state

    def _planned(self, model: nn.Module, gm: GraphModule, inputs: Sequence[Any]) -> ModelState:
        """The state of a model that was planned and sharded, now or by another backend."""
        patience = self._patience()
        world = processes.join(device_of(model), patience)
        self._phases = Phases(shown=self.config.verbose and world.rank == 0)
        state = state_of(model)
        if state is None:  # another backend may have had the first call
            if world.size > 1 and torch_internals.behind_a_break():
                self._phases.warn(
                    "the first graph begins behind a graph break: what came before it ran, in this first call, on each "
                    "process's own values; give all processes the same (torch.manual_seed, one checkpoint)"
                )
            model, manager = with_family(model), self.manager(world.rank)
            state = FirstCall(self.config, manager, self._phases, model, gm, inputs, world, patience).carry_out()
        return state

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
            phases=tuple(self._phases.seconds.items()),
            passes=tuple(self._manager.history) if self._manager else (),
        )

    def _compile(
        self, state: ModelState | None, gm: GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        rank = state.world.rank if state else 0
        plan = state.plan if state else Plan(1, (("shard", 1),), ())
        apart = state is None or state.accumulation.gathered  # whole parameters, nobody else takes part
        names = state.names() if state and not apart else {}
        self._warn_of_breaks(gm, rank)
        if state and not plan.leaves_alone and not apart:
            refuse_unplanned(state, inputs)
        context = Context(
            plan=plan,
            parameters={i: names[id(x)] for i, x in enumerate(inputs) if id(x) in names},
            buffers=_buffers(state, inputs) if not apart else frozenset(),
            everyone=processes.name_of_everyone(),
        )
        compilation = Compilation(self.manager(rank), context, self._inductor(), self._phases)
        with self._phases.phase("compile", "in all so far"):
            run = compilation.compile(gm, inputs)
        if state and state.regions:
            state.regions.on = False  # see [Note: Regions]
        return state.noting_parameters(run, tuple(context.parameters)) if state else run

    def _warn_of_breaks(self, gm: GraphModule, rank: int) -> None:
        """Once: what is behind a graph break is compiled apart, and gathers less far ahead."""
        found = torch_internals.graph_break(gm)
        if found and rank == 0 and not self._warned:
            self._warned = True
            self._phases.warn(
                f"graph break at {found[0]} ({found[1]}): the model is compiled in pieces, with less to overlap; "
                "TORCH_LOGS=graph_breaks shows all"
            )

    def _inductor(self) -> bool:
        if self.config.codegen == "inductor" and not has_compiler():
            self._phases.warn("no C++ compiler found (CXX, g++, clang++): codegen is 'eager' instead")
            self.config = replace(self.config, codegen="eager")
        return self.config.codegen == "inductor"


def registered(
    gm: GraphModule, inputs: Sequence[Any], options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The entry point of `torch.compile(model, backend="autoshard", options={...})`."""
    options = options or {}
    return _backend_of(json.dumps(options, sort_keys=True, default=str), options)(gm, inputs)


_registered: dict[str, Backend] = {}
skipped.watch(lambda backend: backend is registered or isinstance(backend, Backend))


def _backend_of(key: str, options: dict[str, Any]) -> Backend:
    """One backend for each set of options, so that a model's later graphs find its state."""
    if key not in _registered:
        _registered[key] = Backend(Config.from_options(options))
    return _registered[key]


def _buffers(state: ModelState | None, inputs: Sequence[Any]) -> frozenset[int]:
    ids = {id(b) for b in state.model.buffers()} if state else set()
    return frozenset(i for i, x in enumerate(inputs) if id(x) in ids)
