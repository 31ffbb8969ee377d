"""The first call: inventory, agreement, plan, shard; all that lies before the trace on shards."""

from __future__ import annotations

import itertools
import platform
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rich.markup import escape
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autoshard.capture import Capture, capture_call
from autoshard.config import Config
from autoshard.console import Phases
from autoshard.cost_model.cluster import Cluster, as_measured, measured_here, with_processor, with_rate
from autoshard.cost_model.collectives import GATHERS, table_name
from autoshard.cost_model.hardware import Device, device_named_like
from autoshard.cost_model.optimizer import Existing
from autoshard.errors import ConfigError, PeerLostError, PlanError, ShardingError, first_line
from autoshard.family import Family, members_of
from autoshard.first_graph import FirstGraph
from autoshard.forecast import Forecaster
from autoshard.inventory import Inventory, device_of, names_of
from autoshard.ops.early import Early
from autoshard.owner import call_of
from autoshard.passes.choose_partition import Alike
from autoshard.passes.choose_unshard import keeping_none
from autoshard.passes.choose_zero import Circumstances, at_stages, make_plan
from autoshard.passes.manager import PassManager
from autoshard.plan import Plan
from autoshard.planning import budget_bytes, check_passes_carry_out, check_plan_fits, stepping
from autoshard.runtime import loaded, optimizers, processes, scaler
from autoshard.runtime.agreement import Agreement, Statement
from autoshard.runtime.available_memory import available_memory
from autoshard.runtime.fingerprint import arithmetic
from autoshard.runtime.freed_memory import keep_freed_memory
from autoshard.runtime.link import link_rate
from autoshard.runtime.lockstep import Lockstep
from autoshard.runtime.meetings import Meetings
from autoshard.runtime.presence import Patience
from autoshard.runtime.processor import Processor, processor_here
from autoshard.runtime.replicas import Replicas
from autoshard.runtime.shard import Sharder
from autoshard.runtime.shared_memory import refuse_shared_memory
from autoshard.runtime.state import ModelState, make_unusable
from autoshard.runtime.steps import watch_steps
from autoshard.units import bytes_text, counted
from autoshard.unshardable import refuse_unsent
from autoshard.version import __version__

LONG = 2e-3  # seconds a parameter that all gathers of a step take
Found = tuple[float, Processor]  # bytes a second of links, and of processors, measured now


class FirstCall:
    """All that happens between the first graph and the trace on shards."""

    def __init__(
        self,
        config: Config,
        manager: PassManager,
        phases: Phases,
        model: nn.Module,
        graph: FirstGraph,
        world: processes.World,
        patience: Patience,
    ) -> None:
        self.patience = patience
        self.config, self.manager, self.phases = config, manager, phases
        self.model, self.graph, self.world = model, graph, world
        self.optimizers = optimizers.holding(names_of(model))
        self.topic = f"model{next(_count_first_calls)}"

    def carry_out(self) -> ModelState:
        """Plan and shard. Everything is checked before anything is touched; after that, failure is final."""
        if self.world.size > 1:
            self.graph.refuse_writes()
            self.graph.refuse_direct_uses()
        inventory = self.graph.inventory
        with self.phases.phase("plan", counted(self.world.size, "process", "processes")):
            plan = self._agree(inventory)
            check_plan_fits(plan, inventory, self.world.size)
            check_passes_carry_out(plan, self.manager.pipeline, next(self.model.buffers(), None) is not None)
            if plan.buffers == "broadcast" and not plan.leaves_alone:
                refuse_unsent(self.model)
            if plan.sharded:
                refuse_shared_memory(self.model)
                self.graph.refuse_transformed()
                for optimizer in self.optimizers:
                    optimizers.check_steps_on_shards(optimizer)
        self._describe(plan)
        state = ModelState(self.model, plan, self.world, self.topic, fuses=self.config.fuse_optimizer == "auto", early=self._early(plan))
        if not plan.leaves_alone:
            self._shard(state)
        if device_of(self.model).type == "cpu" and keep_freed_memory():
            self.phases.say("           [dim]this process keeps what it frees, for the next step[/]")
        state.attach()
        if not plan.leaves_alone:
            watch_steps()
        return state

    def _agree(self, inventory: Inventory) -> Plan:
        if self.world.size == 1:
            return self._decide(inventory, [self._statement(inventory)])
        statements: list[Statement] = []  # rank 0 will have them

        def measures(all: list[Statement]) -> str:
            statements.extend(all)
            return "measure" if self._links_unknown([s["_host"] for s in all]) else ""

        unknown = self._agreement("links").reach(self._statement(inventory), measures)
        found = (link_rate(self.config.timeout), processor_here()) if unknown else None
        text = self._agreement("plan").reach({}, lambda _: self._decide(inventory, statements, found).to_json())
        return Plan.from_json(text)

    def _agreement(self, about: str) -> Agreement:
        return self.world.agreement(f"{self.topic}.{about}", "the first call of this model", self.patience)

    def _links_unknown(self, hosts: Sequence[str]) -> bool:
        """Whether all there is of the links is round figures, and processors send. See [Note: Links at the first call]."""
        if self.config.cluster != "auto" or self.config.resolved_plan() or device_of(self.model).type != "cpu":
            return False
        cluster = local_cluster(self.config, hosts, device_of(self.model))
        return table_name("all_gather", cluster.group(cluster.world)) not in cluster.device.tables

    def _cluster(self, hosts: Sequence[str], found: Found | None) -> Cluster:
        """What is known of the machines. found: of links, and of processors where nobody has measured them."""
        known = local_cluster(self.config, hosts, device_of(self.model))
        if found is None:
            return known
        rate, processor = found
        self.phases.say(f"           [dim]links carry {bytes_text(int(rate))}/s[/]")
        known = with_rate(known, rate)
        if known.device.tables:
            return known
        said = f"matmuls reach {processor.flops['fp32'] / 1e9:.3g} GFLOP/s, memory {bytes_text(int(processor.bandwidth))}/s"
        self.phases.say(f"           [dim]{said}[/]")
        return with_processor(known, processor.flops, processor.bandwidth)

    def _statement(self, inventory: Inventory) -> Statement:
        names = names_of(self.model)
        return {
            "version": {"autoshard": __version__, "torch": torch.__version__},
            "config": self.config.described(),
            "model": inventory.model,
            "parameters": {p.name: [list(p.shape), p.dtype, p.trained] for p in inventory.parameters},
            "graph": [p.name for p in inventory.parameters if p.used],
            "optimizers": [optimizers.describe(o, names) for o in self.optimizers],
            "scaler": self.world.size > 1 and scaler.is_there(),
            "_free": available_memory(device_of(self.model)),
            "_held": _held(self.model, self.optimizers),
            "_host": platform.node(),
            "_arithmetic": arithmetic(device_of(self.model)),
        }

    def _decide(self, inventory: Inventory, statements: list[Statement], found: Found | None = None) -> Plan:
        pinned, kinds = self.config.resolved_plan(), [s["_arithmetic"] for s in statements]
        if pinned is not None:
            refuse_parts_of_unlike(pinned, kinds)
            return pinned
        states, hosts = [optimizers.states_of(o) for o in self.optimizers], [s["_host"] for s in statements]
        shared = device_of(self.model).type == "cpu" and processes.said_of_this_node() is None
        where = Circumstances(
            cluster=self._cluster(hosts, found),
            budget=budget_bytes(self.config, least_free(statements, shared)),
            optimizer_states=max(states) if states else None,
            unable=optimizers.first_unable(self.optimizers),
        )
        config = self.config
        if statements[0]["scaler"] and config.replicate_below == "auto":  # see [Note: Infinite gradients]
            config = replace(config, replicate_below=0)
        config = _without_nodes(config, hosts, where.cluster.per_node)
        if len(set(kinds)) > 1 or isinstance(self.model, Family):  # whose copies share a graph
            config = replace(config, partition_activations=False)
        long = self.graph.capture is not None and waits_for_gathers(inventory, config, where)
        forecast = self._forecaster(where) if self._chooses() or long else None
        fit = forecast.fit if forecast else None
        alike: Alike = forecast.alike if forecast else lambda _: ()
        held: Callable[[Plan], int] = forecast.states if forecast else lambda _: 0
        plan = self._of_family(make_plan(inventory, config, where, forecast or _as_it_is, fit, alike, held))
        return warned_of_rounding(plan, kinds, self.config.partition_activations)

    def _chooses(self) -> bool:
        """Whether something depends on how much a step takes: nothing is simulated for its own sake here."""
        chooses = self.config.recompute == "auto" or self.config.zero == 3 or self.config.partition_activations
        limited = self.config.memory_budget is not None and chooses
        return limited or (self.config.zero == "auto" and self.world.size > 1)

    def _of_family(self, plan: Plan) -> Plan:
        """Blocks that are compiled one by one have a graph each, which starts late, and in which what has a number is a part of the block;
        those that are alike share it, so all copies are gathered again or none."""
        if not isinstance(self.model, Family):
            return plan
        if plan.early:
            plan = plan.because("early_gathers: blocks that are compiled one by one each start with gathers, and take none early")
        if self.config.partition_activations:
            plan = plan.because("partition_activations: blocks that are compiled one by one share a graph, and keep nothing in parts")
        plan = keeping_none(replace(plan, stacks=()))  # which have other names in a block's graph
        return replace(plan, recompute=(("", plan.recompute[0][1]),)) if plan.recompute else plan

    def _early(self, plan: Plan) -> Early | None:
        return Early() if plan.early and not isinstance(self.model, Family) else None

    def _forecaster(self, where: Circumstances) -> Forecaster | None:
        """Simulates what this call will take by each plan; None where the model cannot be traced by itself."""
        captured, config = self.graph.capture or self._capture(), self.config
        if captured is None:
            return None
        there = Existing(self.optimizers, names_of(self.model)) if self.optimizers else None
        make = stepping(there, captured.inventory, config, where.cluster)
        return Forecaster(captured, make, where.cluster, config.codegen, self.manager.pipeline, accumulation=config.accumulation)

    def _capture(self) -> Capture | None:
        call = call_of(self.model)
        if call is None:
            self.phases.say("activations are not predicted: a function, or blocks one by one, were compiled")
            return None
        try:
            return capture_call(self.model, *call, self.config.dtypes_on(self.world.size)[0])
        except Exception as error:  # of the user's code under tracing, of any kind; the job itself goes on
            self.phases.warn(f"activations are not predicted: {first_line(error)}")
            return None

    def _describe(self, plan: Plan) -> None:
        for reason in plan.why:
            self.phases.say(f"           [dim]{escape(reason)}[/]")
        dump = self.manager.dump
        dump.note("plan.json", plan.to_json())
        dump.note(
            "environment.txt",
            f"autoshard {__version__}\ntorch {torch.__version__}\npython {sys.version}\n"
            f"passes {self.manager.spec}\nconfig {self.config.described()}\n",
        )

    def _shard(self, state: ModelState) -> None:
        total = sum(p.numel() * p.element_size() for p in self.model.parameters())
        repoint = optimizers.Repointer(self.optimizers)
        try:
            with self.phases.phase("shard", f"{bytes_text(total)} of parameters"):
                state.mesh = processes.build_mesh(self.world.device_type, state.plan.axes, self.config.timeout)
                sharder = Sharder(self.model, state.plan, state.mesh)
                state.accumulation = sharder.accumulation
                meetings = Meetings(self.world, self.topic, Patience(self.config.timeout, None, self.phases.warn))
                state.lockstep = Lockstep(meetings.of("calls"))
                state.replicas = Replicas(meetings.of("steps"), arithmetic(device_of(self.model)))
                for old, new in sharder.shard():
                    repoint.replace(old, new)
                for optimizer in self.optimizers:
                    loaded.load_rows(optimizer)
        except PeerLostError as error:
            make_unusable(self.model, error)
            raise
        except Exception as error:
            final = ShardingError(
                f"sharding {type(members_of(self.model)[0]).__name__} failed half way ({type(error).__name__}: {error}); "
                "the model cannot be used any more in this process"
            )
            make_unusable(self.model, final)
            raise final from error


def _as_it_is(plan: Plan) -> Plan:
    return plan


def _held(model: nn.Module, steppers: Sequence[Optimizer]) -> int:
    """Bytes on the model's device that the model and its optimizers have already, which a plan counts as well."""
    state = [value for optimizer in steppers for of_one in optimizer.state.values() for value in tree_leaves(of_one)]
    tensors = [*model.parameters(), *model.buffers(), *(value for value in state if isinstance(value, Tensor))]
    return sum(t.numel() * t.element_size() for t in tensors if t.device == device_of(model))


def least_free(statements: Sequence[Statement], shared: bool) -> int:
    """Bytes that every process may have, what it has already among them. shared: what is free on a host is there for all of its processes
    together."""
    sharers = Counter(s["_host"] for s in statements) if shared else Counter[str]()
    return min(int(s["_free"]) // max(1, sharers[s["_host"]]) + int(s["_held"]) for s in statements)


def refuse_parts_of_unlike(plan: Plan, kinds: Sequence[str]) -> None:
    """Of a value that processes round differently each would bring another part. kinds: of each rank's arithmetic."""
    if plan.partition_activations and len(set(kinds)) > 1:
        raise PlanError(
            f"plan: partition_activations on {', '.join(sorted(set(kinds)))}, which round differently; legal: a plan without, or processes "
            "on processors of one kind"
        )


def warned_of_rounding(plan: Plan, kinds: Sequence[str], partitions: bool = False) -> Plan:
    """The plan; a reason more where processes make their parameters, or what they save, equal by computing alike, and do not. kinds: of
    each rank's arithmetic. partitions: whether values that are equal were to be kept in parts."""
    if len(set(kinds)) == 1:
        return plan
    named = ", ".join(sorted(set(kinds)))
    if partitions:
        plan = plan.because(f"partition_activations on {named}: processes round differently, so no value is the same on all")
    if not plan.low_rank:
        return plan
    return plan.because(f"PowerSGD on {named}: processes will round differently, and their parameters drift apart by that")


def waits_for_gathers(inventory: Inventory, config: Config, where: Circumstances) -> bool:
    """Whether gathers of the stage that was asked for take so long that simulating how far ahead they should start, and which copies
    should stay, which takes longer the more parameters there are, will have paid after some hundred steps."""
    if config.zero in ("auto", 0):
        return False
    plan, *_ = at_stages(inventory, config, where)
    gathers = sum(t.seconds for t in plan.predicted.traffic if t.collective in GATHERS)
    return gathers > LONG * len(inventory.parameters)


def _without_nodes(config: Config, hosts: Sequence[str], per_node: int) -> Config:
    """The config, with one step for all rows where ranks that follow each other are not on one host. hosts: of each rank."""
    runs = [sorted(set(hosts[at : at + per_node])) for at in range(0, len(hosts), per_node)]
    apart = next((run for run in runs if len(run) > 1), None)
    if config.hierarchy == "flat" or apart is None:
        return config
    if config.hierarchy != "auto":
        raise ConfigError(
            f"hierarchy: {config.hierarchy!r} is for ranks that fill one host after the other; here {per_node} in a row are on "
            f"{', '.join(apart)}; legal here: 'auto' or 'flat'"
        )
    return replace(config, hierarchy="flat")


_count_first_calls = itertools.count()


def local_cluster(config: Config, hosts: Sequence[str], device: torch.device) -> Cluster:
    """What the config, the launcher's variables and the ranks' hosts say of the machines."""
    said, per_node = config.resolved_cluster(), processes.per_node(hosts)
    return Cluster(len(hosts) // per_node, per_node, said.device if said else kind_of(device))


def kind_of(device: torch.device) -> Device:
    """What the cost model knows of a device here."""
    if device.type != "cuda":
        return measured_here("cpu")
    found = torch.cuda.get_device_properties(device)
    kind = device_named_like(found.name, found.total_memory)
    return replace(as_measured(kind), memory=kind.memory)
