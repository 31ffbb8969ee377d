"""The backend that torch.compile calls: the first time with whole parameters, then with shards.

[Note: The first call] The first graph of a model is only read: an inventory, an agreement of all processes,
a plan. Then the model is sharded in place and the trace starts again, on shards; that graph, and all later
ones, are compiled. After the agreement nothing in compilation communicates, because recompiles may happen on
one process alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard import torch_internals
from autoshard.codegen import Compilation, has_compiler
from autoshard.config import Config
from autoshard.console import Phases
from autoshard.cost_model.hardware import DEVICES, Topology, device_named_like, free_memory
from autoshard.errors import AutoshardError, ShardingError, UnsupportedError
from autoshard.inventory import Inventory, take_inventory
from autoshard.passes import registry
from autoshard.passes.base import Context
from autoshard.passes.choose_zero import Circumstances, make_plan
from autoshard.passes.dump import Dump
from autoshard.passes.manager import PassManager
from autoshard.plan import Plan
from autoshard.planning import budget_bytes
from autoshard.runtime import optimizers, processes
from autoshard.runtime.agreement import Agreement, Statement
from autoshard.runtime.shard import Sharder
from autoshard.runtime.state import ModelState, state_of
from autoshard.report import Report
from autoshard.units import bytes_text
from autoshard.version import __version__


class Backend:
    """A backend for torch.compile, one for each model or shared by several; see `autoshard.backend`."""

    __name__ = "autoshard"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self._states: list[ModelState] = []
        self._manager: PassManager | None = None
        self._phases = Phases(shown=False)

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        state = self._state_for(inputs)
        if state is None:
            model = find_owner(inputs)
            state = self._first_call(model, gm, inputs) if model is not None else None
        if state is not None and state.failed:
            raise ShardingError(state.failed)
        return self._compile(state, gm, inputs)

    def _state_for(self, inputs: Sequence[Any]) -> ModelState | None:
        """The state of the model whose parameters these are, if it had its first call."""
        for state in self._states:
            names = state.names()
            if any(id(x) in names for x in inputs):
                return state
        return None

    def _first_call(self, model: nn.Module, gm: GraphModule, inputs: Sequence[Any]) -> ModelState:
        """Plans, shards, restarts the trace. Returns only where the model is left alone."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        world = processes.join(device, timedelta(seconds=self.config.timeout))
        self._phases = Phases(shown=self.config.verbose and world.rank == 0)
        state = state_of(model) or FirstCall(self, model, gm, inputs, world).carry_out()
        state.reporter = self.report
        self._states.append(state)
        if not state.plan.leaves_alone:
            torch_internals.restart_trace("autoshard sharded the parameters")
        return state

    def manager(self, rank: int) -> PassManager:
        """The passes of this backend, with their history over all graphs."""
        if self._manager is None:
            pipeline = registry.pipeline_for(self.config.passes, self.config.disable_passes)
            self._manager = PassManager(pipeline, Dump.of(self.config.dump_dir, rank))
        return self._manager

    def report(self, state: ModelState) -> Report:
        """What was planned for a model, and what compiling it did."""
        names = set(state.names().values())
        return Report(
            plan=state.plan,
            compiled=len(state.compiled & names) / len(names) if names else 1.0,
            phases=tuple(self._phases.seconds.items()),
            passes=tuple(self._manager.history) if self._manager else (),
        )

    def _compile(
        self, state: ModelState | None, gm: GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        rank = state.world.rank if state else 0
        plan = state.plan if state else Plan(1, (("shard", 1),), ())
        names = state.names() if state else {}
        context = Context(
            plan=plan,
            parameters={i: names[id(x)] for i, x in enumerate(inputs) if id(x) in names},
            buffers=_buffers(state, inputs),
            everyone=dist.group.WORLD.group_name if dist.is_initialized() and dist.group.WORLD else "",
        )
        compilation = Compilation(self.manager(rank), context, self._inductor())
        with self._phases.phase("compile", f"graph of {len(gm.graph.nodes)} nodes"):
            run = compilation.compile(gm, inputs)
        if state is not None:
            state.compiled.update(context.parameters.values())
        return run

    def _inductor(self) -> bool:
        if self.config.codegen == "inductor" and not has_compiler():
            self._phases.warn("no C++ compiler found (CXX, g++, clang++): codegen is 'eager' instead")
            self.config = self.config.replaced(codegen="eager")
        return self.config.codegen == "inductor"


def registered(gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The entry point of `torch.compile(model, backend="autoshard", options={...})`."""
    return _backend_of(json.dumps(options, sort_keys=True, default=str), options)(gm, inputs)


_registered: dict[str, Backend] = {}


def _backend_of(key: str, options: dict[str, Any]) -> Backend:
    """One backend for each set of options, so that a model's later graphs find its state."""
    if key not in _registered:
        _registered[key] = Backend(Config.from_options(options))
    return _registered[key]


def _buffers(state: ModelState | None, inputs: Sequence[Any]) -> frozenset[int]:
    ids = {id(b) for b in state.model.buffers()} if state else set()
    return frozenset(i for i, x in enumerate(inputs) if id(x) in ids)


class FirstCall:
    """All that happens between the first graph and the restart of the trace."""

    def __init__(
        self,
        backend: Backend,
        model: nn.Module,
        gm: GraphModule,
        inputs: Sequence[Any],
        world: processes.World,
    ) -> None:
        self.backend, self.config, self.phases = backend, backend.config, backend._phases
        self.model, self.gm, self.world = model, gm, world
        self.used = [x for x in inputs if isinstance(x, nn.Parameter)]
        self.optimizers = optimizers.holding(model.parameters())

    def carry_out(self) -> ModelState:
        """Plan and shard. Everything is checked before anything is touched; after that, failure is final."""
        refuse_what_cannot_be_sharded(self.model, self.gm)
        inventory = take_inventory(self.model, self.used)
        with self.phases.phase("plan", f"{self.world.size} processes"):
            plan = self._agree(inventory)
            check_plan_fits(plan, inventory, self.world.size)
            if plan.sharded:
                for optimizer in self.optimizers:
                    optimizers.check_steps_on_shards(optimizer)
        self._describe(plan)
        state = ModelState(self.model, plan, self.world)
        if not plan.leaves_alone:
            self._shard(state)
        state.attach()
        _watch_optimizers(state)
        return state

    def _agree(self, inventory: Inventory) -> Plan:
        if self.world.size == 1:
            return self._decide(inventory, [self._statement(inventory)])
        topic = f"model{next(_count_first_calls)}"
        agreement = Agreement(self.world, topic, self.config.timeout, self.phases.warn)
        text = agreement.reach(
            self._statement(inventory), lambda all: self._decide(inventory, all).to_json()
        )
        return Plan.from_json(text)

    def _statement(self, inventory: Inventory) -> Statement:
        names = {id(p): name for name, p in self.model.named_parameters()}
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        return {
            "version": {"autoshard": __version__, "torch": torch.__version__},
            "config": self.config.described(),
            "model": inventory.model,
            "parameters": {p.name: [list(p.shape), p.dtype, p.trained] for p in inventory.parameters},
            "graph": [p.name for p in inventory.parameters if p.used],
            "optimizers": [optimizers.describe(o, names) for o in self.optimizers],
            "_free": free_memory(device),
        }

    def _decide(self, inventory: Inventory, statements: list[Statement]) -> Plan:
        pinned = self.config.resolved_plan()
        if pinned is not None:
            return pinned
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        states = [optimizers.states_of(o) for o in self.optimizers]
        where = Circumstances(
            topology=local_topology(self.world.size, device),
            budget=budget_bytes(self.config, min(s["_free"] for s in statements)),
            optimizer_states=max(states) if states else None,
        )
        return make_plan(inventory, self.config, where)

    def _describe(self, plan: Plan) -> None:
        for reason in plan.why:
            self.phases.say(f"           [dim]{reason}[/]")
        dump = self.backend.manager(self.world.rank).dump
        dump.note("plan.json", plan.to_json())
        dump.note(
            "environment.txt",
            f"autoshard {__version__}\ntorch {torch.__version__}\npython {sys.version}\n"
            f"passes {self.backend.manager(self.world.rank).spec}\nconfig {self.config.described()}\n",
        )

    def _shard(self, state: ModelState) -> None:
        total = sum(p.numel() * p.element_size() for p in self.model.parameters())
        repoint = optimizers.Repointer(self.optimizers)
        try:
            with self.phases.phase("shard", f"{bytes_text(total)} of parameters"):
                state.mesh = processes.build_mesh(self.world.device_type, state.plan.axes)
                sharder = Sharder(self.model, state.plan, state.mesh)
                state.accumulation = sharder.accumulation
                for old, new in sharder.shard():
                    repoint.replace(old, new)
        except Exception as error:
            state.failed = (
                f"sharding {type(self.model).__name__} failed half way ({type(error).__name__}: {error}); "
                "the model cannot be used any more in this process"
            )
            state.attach()
            self.backend._states.append(state)
            raise ShardingError(state.failed) from error


def _counter() -> Iterator[int]:
    n = 0
    while True:
        yield n
        n += 1


_count_first_calls = _counter()


def _watch_optimizers(state: ModelState) -> None:
    """Checks before each step of any optimizer that what it steps on is sound."""

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        ours = {id(p) for p in state.model.parameters()}
        if state.plan.sharded and any(id(p) in ours for g in optimizer.param_groups for p in g["params"]):
            optimizers.check_steps_on_shards(optimizer)
        state.check_before_step(optimizer)

    register_optimizer_step_pre_hook(before_step)


def find_owner(inputs: Sequence[Any]) -> nn.Module | None:
    """The module that is being compiled: the innermost one on the stack that was given to torch.compile or
    called `.compile()` and owns a parameter of the graph; for a compiled function, the smallest module that
    owns all of them. None if the graph has no parameters.
    """
    wanted = {id(x) for x in inputs if isinstance(x, nn.Parameter)}
    if not wanted:
        return None
    for module in _compiled_modules_on_the_stack():
        if wanted & {id(p) for p in module.parameters()}:
            return module
    return _smallest_owner(wanted)


def _compiled_modules_on_the_stack() -> Iterator[nn.Module]:
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, torch_internals.OptimizedModule):
            yield module._orig_mod
        elif isinstance(module, nn.Module) and getattr(module, "_compiled_call_impl", None) is not None:
            yield module
        frame = frame.f_back  # type: ignore[assignment]


def _smallest_owner(wanted: set[int]) -> nn.Module:
    import gc

    owners = []
    for module in gc.get_objects():
        if issubclass(type(module), nn.Module) and "_parameters" in module.__dict__:
            owned = {id(p) for p in module.parameters()}
            if wanted <= owned and not isinstance(module, torch_internals.OptimizedModule):
                owners.append((len(owned), module))
    if not owners:
        raise UnsupportedError("the compiled function uses parameters that no single nn.Module owns")
    return min(owners, key=lambda entry: entry[0])[1]


def refuse_what_cannot_be_sharded(model: nn.Module, gm: GraphModule) -> None:
    """Named errors for what would be silently wrong, before anything is touched."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FSDPModule):
            raise UnsupportedError(
                f"module {name or 'itself'!r} is wrapped by {type(module).__mro__[1].__name__}; autoshard takes the plain module"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UnsupportedError(f"parameter {name!r} is a DTensor already; autoshard takes plain parameters")
    _refuse_writes(gm)
    if torch_internals.suppressed_errors():
        raise UnsupportedError("torch._dynamo.config.suppress_errors is set: a failure would train unsharded")


def _refuse_writes(gm: GraphModule) -> None:
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, nn.Parameter) and value._version > 0:
            raise UnsupportedError(
                f"forward writes to parameter {node.target} in place (an embedding's max_norm, say); "
                "on a shard that write would be lost"
            )


def check_plan_fits(plan: Plan, inventory: Inventory, world: int) -> None:
    """A pinned plan must be of this model and this many processes."""
    from autoshard.errors import PlanError

    if plan.world != world:
        raise PlanError(f"plan: made for {plan.world} processes; the job has {world}")
    names = {p.name for p in inventory.parameters}
    missing, unknown = names - plan.group_of.keys(), plan.group_of.keys() - names
    if missing or unknown:
        raise PlanError(
            f"plan: not of this model: {sorted(missing or unknown)[0]!r} is "
            f"{'in no group' if missing else 'no parameter of it'}"
        )


def local_topology(world: int, device: torch.device) -> Topology:
    """What the launcher's variables say of the machine."""
    import os

    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    kind = device_named_like(name) if device.type == "cuda" else DEVICES["cpu"]
    return Topology(max(1, world // per_node), min(per_node, world), kind)
