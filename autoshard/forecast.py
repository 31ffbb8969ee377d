"""What a plan's step will take: its graphs rehearsed, then simulated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autoshard.capture import Capture
from autoshard.config import CODEGENS
from autoshard.console import doing
from autoshard.cost_model import accuracy, allocator, optimizer
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import Group
from autoshard.cost_model.convolutions import are_channels_last
from autoshard.cost_model.fusion import fuse
from autoshard.cost_model.hardware import is_known
from autoshard.cost_model.kernels import seconds
from autoshard.cost_model.liveness import Curve, Peak, simulate
from autoshard.cost_model.optimizer import Make, OptimizerMemory, Rows
from autoshard.cost_model.program import Category, Operation, Program
from autoshard.cost_model.schedule import Schedule
from autoshard.cost_model.step_memory import Held, Listed, program_of
from autoshard.cost_model.step_time import StepTime, group_name, schedule, step_time, traffic
from autoshard.cost_model.timeline import land
from autoshard.cost_model.work import kind_of, work_of
from autoshard.cost_model.workspace import add_workspaces
from autoshard.inventory import ParameterInfo, is_trained
from autoshard.passes.base import Pass
from autoshard.passes.choose_elementwise import fuses
from autoshard.passes.choose_partition import better
from autoshard.passes.choose_prefetch import waits
from autoshard.passes.choose_recompute import (
    Aim,
    Block,
    Option,
    choose,
    choose_with_spare,
    least,
    peak_of,
    placed,
    policies_of,
    shifted,
)
from autoshard.passes.choose_unshard import copies_of_blocks, keeping_of
from autoshard.passes.outline_blocks import OutlineBlocks
from autoshard.passes.partition_activations import ALL, Parted, parted
from autoshard.plan import Plan
from autoshard.prediction import AT_THE_STEP, BEHIND_A_BREAK, Traffic
from autoshard.rehearsal import (
    DEFAULT,
    Kind,
    Known,
    Outlined,
    Prepared,
    Rehearsed,
    body_of,
    groups_of,
    outline,
    rows_of,
)
from autoshard.savings import Copies, Savings, Step, kept_of

TRIALS = 6  # how many choices are simulated
MISSED = 0.05  # of a budget that a least peak may be above it to be looked for further
SHIFTS, NEAR = 3, 4  # how often, and how many, where nothing fits, to find the least peak
AIMS = 32  # for how many aims they are made: those for several may be one
Key = tuple[object, ...]
Simulated = tuple[Program, Curve, StepTime, tuple[str, ...]]


@dataclass
class Forecaster:
    """Predicts plans of one captured model on one cluster. Plans that differ only in what the graphs do not show share
    a rehearsal. passes: that a job would run. known: what was traced before of it, with the same codegen, passes and device.
    accumulation: as in Config."""

    captured: Capture
    make_optimizers: Make
    cluster: Cluster
    codegen: str
    passes: Sequence[Pass] = DEFAULT
    known: Known = field(default_factory=Known)
    accumulation: str | None = None
    _simulated: dict[Key, Simulated] = field(default_factory=dict)
    _predicted: dict[Key, dict[str, Any]] = field(default_factory=dict)
    _ready: dict[Key, Prepared] = field(default_factory=dict)
    _usual: dict[Key, Rehearsed] = field(default_factory=dict)
    _choices: dict[Key, list[Block]] = field(default_factory=dict)
    _alone: dict[Key, dict[str, Option]] = field(default_factory=dict)
    _holds: dict[Key, tuple[Held, tuple[str, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.codegen in CODEGENS, self.codegen  # whatever else came here was taken for eager once

    @property
    def inductor(self) -> bool:
        """Whether Inductor generates code."""
        return self.codegen == "inductor"

    def __call__(self, plan: Plan) -> Plan:
        """The plan with what its step will take in its prediction."""
        key = self._key(plan)
        if key not in self._predicted:
            self._predicted[key] = self._predict(plan)
        return replace(plan, predicted=replace(plan.predicted, **self._predicted[key]))

    def _predict(self, plan: Plan) -> dict[str, Any]:
        """What is predicted of a step, by the prediction's names for it."""
        doing(f"simulating a step by {plan.summary}")
        program, curve, took, _ = self.simulated(plan)
        peak = curve.peak()
        return {
            "memory": {category: size for category, size in peak.categories.items() if size},
            "traffic": tuple(Traffic(*sent) for sent in traffic(program, self.cluster, groups_of(plan, self.cluster))),
            "place": _place(program, peak),
            "error": accuracy.memory_error(self.cluster.device, self.codegen),
            "unknown": self.unknown(plan),
            "seconds": _parts(took),
            "seconds_error": accuracy.time_error(self.cluster.device, self.codegen),
            **({} if self.cluster.device.is_cpu else self._reserved(program)),
            "accumulating": self._accumulating(plan, curve),
        }

    def _reserved(self, program: Program) -> dict[str, Any]:
        """What CUDA's allocator reserves, by its settings here and where segments expand; only without any it was measured."""
        expandable, expanding = allocator.expands(), allocator.reserved(program, expanding=True)
        return {
            "reserved": expanding if expandable else allocator.reserved(program),
            "reserved_error": None if allocator.settings() else accuracy.reserved_error(self.cluster.device, self.codegen),
            "expandable": expandable,
            "expanding": expanding,
        }

    def unknown(self, plan: Plan) -> tuple[str, ...]:
        """What its prediction leaves out, or had to assume."""
        *_, unknown = self.simulated(plan)
        early = ("copies that are gathered before a step begins",) if plan.early else ()
        broken = (BEHIND_A_BREAK,) if self.captured.inventory.broken else ()
        return (*unknown, *early, *_strange(self.cluster), *_behind(self.captured), *broken)

    def _accumulating(self, plan: Plan, curve: Curve) -> int | None:
        """The peak where gradients of an earlier backward are there from the start; when the optimizer steps there are no others.
        None where these are in the curve."""
        if self.accumulation is not None:
            return None
        *during, step = (int(total) for total in curve.at().sum(1))
        earlier = _bytes_of(plan, filter(is_trained, self.captured.inventory.parameters))
        return max(max(during) + earlier, step) if earlier and during else None

    def simulated(self, plan: Plan) -> Simulated:
        """The plan's program, its curve, its time, and what had to be assumed or guessed."""
        key = self._key(plan)
        if key not in self._simulated:
            held, unknown = self._held(plan)
            program, curve, took = self._simulate(plan, self._rehearsed(plan).listed, held)
            self._simulated[key] = program, curve, took, (*unknown, *_guessed(program), *_strangers(program, groups_of(plan, self.cluster)))
        return self._simulated[key]

    def costs(self, plan: Plan) -> tuple[Curve, Schedule]:
        """The plan's memory and time for all values of the sizes that the capture left open. What Inductor fuses, and what
        else is decided by sizes, is as at the traced ones."""
        program, curve, _, _ = self.simulated(plan)
        held, _ = self._held(plan)
        return curve, schedule(program, held, self.cluster, groups_of(plan, self.cluster), self.inductor)

    def _simulate(self, plan: Plan, listed: Listed, held: Held) -> tuple[Program, Curve, StepTime]:
        program = self._program(listed, held)
        took = step_time(program, held, self.cluster, groups_of(plan, self.cluster), self.inductor)
        land(program, took.timeline)
        return program, simulate(program), took

    def at_least(self, plan: Plan) -> int:
        """Bytes that a process has when the optimizer steps, whatever the graphs do: its rows, their gradients, and the state."""
        return self.states(plan) + _bytes_of(plan, filter(is_trained, self.captured.inventory.parameters))

    def states(self, plan: Plan) -> int:
        """Bytes of its rows and of the optimizer's state, which are there all the time."""
        held, _ = self._held(plan)
        return held.optimizer + _bytes_of(plan, self.captured.inventory.parameters)

    def fit(self, plan: Plan, budget: int) -> Plan:
        """The plan with recomputation that brings its peak into the budget in the least time; if nothing does, with that
        of the least peak. Its prediction is there. Regions of several blocks are looked at where nothing fits without."""
        best, blocks = self(plan), self.blocks(plan)
        found = self._fitted(plan, blocks, best, budget) if blocks else best
        if not blocks or found.predicted.footprint <= budget:
            return found
        across = self._savings(plan).regions(blocks)
        return self._fitted(plan, across, found, budget) if across != blocks else found

    def _fitted(self, plan: Plan, blocks: Sequence[Block], best: Plan, budget: int) -> Plan:
        """The best of this one and those with a choice of these."""
        aim, tried = Aim(budget), dict[tuple[Option, ...], Plan]()
        for _ in range(AIMS):
            taken = (choose(blocks, aim.at) if tried else choose_with_spare(blocks, budget)) or least(blocks)
            if aim.settled or len({*tried, taken}) > TRIALS:
                break
            found = tried[taken] = tried.get(taken) or self._with(plan, blocks, taken)
            best = found if better(found, best, budget) else best
            aim = aim.after(found.predicted.footprint - budget)
        return best if best.predicted.footprint <= budget else min(best, self._lowest(plan, blocks, budget), key=_height)

    def _lowest(self, plan: Plan, blocks: Sequence[Block], budget: int) -> Plan:
        """That of the least peak: where the sums of blocks' bytes have it, and then, since a step takes not quite these, where whole steps
        have it that differ from the best so far in one block. That takes seconds, so it is done where it may bring a step into the budget,
        or where none was said: 0."""
        lowest = least(blocks)
        found = {taken: self._with(plan, blocks, taken) for taken in (lowest, choose(blocks, peak_of(lowest)) or lowest)}
        for _ in range(SHIFTS):
            first = min(found, key=lambda taken: _height(found[taken]))
            if budget and found[first].predicted.footprint > (1 + MISSED) * budget:
                break
            near = [taken for taken in shifted(blocks, first) if taken not in found][:NEAR]
            found |= {taken: self._with(plan, blocks, taken) for taken in near}
            if not any(_height(found[taken]) < _height(found[first]) for taken in near):
                break
        return min(found.values(), key=_height)

    def alike(self, plan: Plan) -> list[Parted]:
        """What could be kept in parts of what the plan saves, as forward makes it."""
        cut = self._rehearsed(replace(plan, partition_activations=(ALL,)))
        return list(parted(cut.forward).values())

    def _with(self, plan: Plan, blocks: Sequence[Block], taken: Sequence[Option]) -> Plan:
        """The plan with these options of its blocks, simulated."""
        kept = {block.name for option, of in placed(blocks, taken) for block in of if option.keeps}
        return self(replace(keeping_of(plan, kept), recompute=tuple(policies_of(blocks, taken))))

    def blocks(self, plan: Plan) -> list[Block]:
        """What can be chosen, whatever the budget."""
        key = *_regathered(plan), plan.behind
        if key not in self._choices:
            self._choices[key] = self._savings(plan).blocks(plan)
        return self._choices[key]

    def _savings(self, plan: Plan) -> Savings:
        held, _ = self._held(plan)
        usual = replace(plan, recompute=())
        program, curve, took, _ = self.simulated(usual)
        return Savings(
            self._prepared(usual),
            self._kinds(usual),
            usual=_step(program, curve, took),
            kept=kept_of(self._rehearsed(replace(usual, partition_activations=()))),
            simulate=lambda listed: _step(*self._simulate(plan, listed, held)),
            simulate_alone=lambda listed: _step(*self._simulate(plan, listed, Held({}, 0, by_itself=True))),
            seconds_of=self._seconds_of,
            copies=self._copies(usual),
            known=self._alone,
        )

    def _copies(self, plan: Plan) -> dict[str, Copies]:
        """What backward gathers again, by block, if it waits for that. The seconds that keeping all of it spares are shared out by
        bytes."""
        again = {name: size for name, size in copies_of_blocks(plan, self.captured.inventory).items() if size}
        if not again or not waits(self(plan)):
            return {}
        spared = (self(plan).predicted.step_seconds or 0.0) - (self(keeping_of(plan, again)).predicted.step_seconds or 0.0)
        return {name: Copies(size, spared * size / sum(again.values())) for name, size in again.items()} if spared > 0 else {}

    def _kinds(self, plan: Plan) -> Sequence[Kind]:
        """What each block would be as a graph of its own: to list that is to list less than all of the step."""
        prepared = self._prepared(plan)
        if prepared.kinds or OutlineBlocks not in map(type, self.passes):
            return prepared.kinds
        passes = [replace(p, least=1) if isinstance(p, OutlineBlocks) else p for p in self.passes]
        return self._outlined(plan, passes).kinds

    def _outlined(self, plan: Plan, passes: Sequence[Pass]) -> Outlined:
        fused = fuses(self.codegen, self.cluster.device)
        return outline(self.captured, plan, self.inductor, fused, passes, self.known)

    def _seconds_of(self, operation: Operation) -> float:
        return float(seconds(work_of(operation).at(self.captured.open.number), self.cluster.device))

    def _rehearsed(self, plan: Plan) -> Rehearsed:
        """Blocks that are graphs of their own make another graph around them when they save something else."""
        usual = self._prepared(replace(plan, recompute=()))
        if plan.recompute:
            exchanged = usual.cut_exchanged(plan, self.known) if usual.kinds else None
            return exchanged or (self._prepared(plan) if usual.kinds or plan.through else usual).cut(plan)
        key = *_regathered(plan), plan.ahead, plan.behind
        if key not in self._usual:
            self._usual[key] = usual.cut(plan)
        return self._usual[key]

    def _prepared(self, plan: Plan) -> Prepared:
        """Stages that differ in what backward gathers again have this in common."""
        key = (*_layouts(plan), plan.recompute)
        if key not in self._ready:
            self._ready[key] = self._outlined(plan, self.passes).prepared()
        return self._ready[key]

    def _program(self, listed: Listed, held: Held) -> Program:
        program = program_of(listed, held, body_of, self.cluster.device.inside.scatters, self.captured.open)
        device = self.cluster.device
        channels_last = self.inductor and are_channels_last(program, device.is_cpu)
        program = fuse(program, channels_last) if self.inductor else program
        add_workspaces(program, device, channels_last)
        return program

    def _held(self, plan: Plan) -> tuple[Held, tuple[str, ...]]:
        """What lies there besides the graphs, and what of it had to be assumed."""
        key = (*_layouts(plan), *self._left(plan))
        if key not in self._holds:
            self._holds[key] = self._find_held(plan)
        return self._holds[key]

    def _find_held(self, plan: Plan) -> tuple[Held, tuple[str, ...]]:
        infos = self.captured.inventory.parameters
        trained = [_rows(p, plan) for p in filter(is_trained, infos)]
        memory = optimizer.memory(self.make_optimizers, trained, foreach=not self.cluster.device.is_cpu)
        categories: dict[int, Category] = dict.fromkeys(self.captured.parameters, "parameters")
        categories |= dict.fromkeys(self.captured.buffers, "buffers")
        count = len(self.captured.inputs)  # behind them a rehearsal puts what is kept of gradients
        categories |= dict.fromkeys(range(count, count + 2 * len(infos)), "compression")
        apart = _bytes_of(plan, (p for p in infos if not p.used))
        assumed = () if memory else ("the optimizer's own state and step (Adam's are assumed)",)
        memory = memory or _as_adam(trained)
        sharded = sum(plan.group_of[p.name].degrees.optimizer > 1 for p in filter(is_trained, infos))
        later = _bytes_of(plan, (p for p in infos if p.later and is_trained(p)))
        held = Held(categories, memory.state, memory.scratch, apart, memory.moved, len(trained) - sharded, sharded)
        return replace(held, earlier=self._earlier(plan), later=later), assumed

    def _earlier(self, plan: Plan) -> int:
        """Bytes of gradients of earlier batches when a step's last one comes: inside `no_sync` they are whole where they may be."""
        if self.accumulation is None:
            return 0
        apart = {name for group, degree in zip(plan.groups, self._left(plan)) if degree == 1 for name in group.parameters}
        trained = [p for p in self.captured.inventory.parameters if is_trained(p)]
        whole = sum(_bytes((p.shape, getattr(torch, p.dtype))) for p in trained if p.name in apart)
        return whole + _bytes_of(plan, (p for p in trained if p.name not in apart))

    def _left(self, plan: Plan) -> Key:
        """What of a plan only gradients that `no_sync` leaves show."""
        return tuple(g.degrees.gradient for g in plan.groups) if self.accumulation == "no_sync" else ()

    def _key(self, plan: Plan) -> Key:
        """All of it that a step depends on."""
        return (*_regathered(plan), plan.recompute, plan.ahead, plan.behind, *self._left(plan))


def _parts(took: StepTime) -> dict[str, float]:
    parts = {"compute": took.timeline.compute, "waiting": took.timeline.exposed, "optimizer": took.optimizer}
    return parts | {name: spent for name, spent in (("overhead", took.overhead), ("launching", took.launching)) if spent}


def _step(program: Program, curve: Curve, took: StepTime) -> Step:
    spent = {span.operation: span.end - span.start for span in took.timeline.spans if span.stream == "compute"}
    totals = [int(b) for b in curve.at().sum(1)]
    return Step(program, totals, [spent.get(i, 0.0) for i in range(len(program.operations))])


def _layouts(plan: Plan) -> Key:
    """What of a plan the graphs show before forward and backward are parted."""
    groups = tuple((g.parameters, g.ranks, g.degrees.optimizer, g.reduction) for g in plan.groups)
    travel = (plan.compression, plan.low_rank, plan.sparse, plan.tied, plan.message, plan.apart, plan.node)
    return (*groups, plan.axes, plan.stacks, plan.direct, plan.direct_sums, plan.bucket, plan.shared_bucket, *travel)


def _regathered(plan: Plan) -> Key:
    """What of it they show after that, but for what is computed again."""
    return (*_layouts(plan), plan.partition_activations, *(g.degrees.parameter for g in plan.groups))


def _strange(cluster: Cluster) -> tuple[str, ...]:
    """A device that no preset is of."""
    return () if is_known(cluster.device) else (f"{cluster.device.name} itself (speeds and links are an L4's)",)


def _behind(captured: Capture) -> tuple[str, ...]:
    """What a loop may do with more than a loss."""
    results = tree_leaves([n.meta.get("example_value") for n in captured.graph.graph.output_node().all_input_nodes])
    large = any(isinstance(t, Tensor) and t.dim() for t in results)
    return ("what a loop computes of outputs, or keeps of them",) if large else ()


def _guessed(program: Program) -> tuple[str, ...]:
    """What operations have no rule; their bytes stand for them."""
    names = {o.name for o in program.operations if not o.parts[1:] and kind_of(o.node) == "other"}
    return tuple(f"a rule for {name} (costed by bytes)" for name in sorted(names))


def _strangers(program: Program, groups: Mapping[str, Group]) -> tuple[str, ...]:
    """What collectives are among processes that no plan knows."""
    names = {o.name.split(".")[1] for o in program.operations if o.starts_collective and group_name(o) not in groups}
    return (f"the processes of the model's own {', '.join(sorted(names))} (all of the job's are assumed)",) if names else ()


def _rows(info: ParameterInfo, plan: Plan) -> Rows:
    return rows_of(info.shape, plan.group_of[info.name], plan), getattr(torch, info.dtype)


def _bytes_of(plan: Plan, infos: Iterable[ParameterInfo]) -> int:
    """Of a process's rows of these."""
    return sum(_bytes(_rows(p, plan)) for p in infos)


def _bytes(rows: Rows) -> int:
    return math.prod(rows[0]) * rows[1].itemsize


def _as_adam(rows: Sequence[Rows]) -> OptimizerMemory:
    """Which reads rows, gradients and two moments, and writes all of that but the gradients."""
    each, largest = sum(map(_bytes, rows)), max(map(_bytes, rows), default=0)
    return OptimizerMemory(2 * each, (largest, largest), ((7 * each, 0),))


def _height(plan: Plan) -> tuple[int, float]:
    return plan.predicted.footprint, plan.predicted.step_seconds or 0.0


def _place(program: Program, peak: Peak) -> str:
    if peak.operation == len(program.operations):
        return AT_THE_STEP
    operation = program.operations[peak.operation]
    return f"{operation.name.removeprefix('aten.')} in {operation.half}" + (f", {operation.where}" if operation.where else "")
