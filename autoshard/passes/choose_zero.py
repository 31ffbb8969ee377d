"""Decision: the ZeRO stage, and whether to compute again rather than to save. The stages are looked at in the order of
their time on the wire, until one fits into the memory budget as it is; the next stands against it if its messages take hardly longer,
since its optimizer may step less, and so does each of those before that recomputation makes fit. The fastest is taken, or one with some
groups whole (`choose_whole`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from autoshard.config import Config
from autoshard.cost_model import step
from autoshard.cost_model.cluster import Cluster
from autoshard.dtypes import name_of_dtype
from autoshard.errors import BudgetError, ConfigError
from autoshard.inventory import Inventory, is_trained
from autoshard.passes.choose_behind import choose_behind, fitting_behind, leaner, packed
from autoshard.passes.choose_blocks import blocks_of, choose_stacks
from autoshard.passes.choose_halves import choose_halves
from autoshard.passes.choose_partition import Alike, Fit, Forecast, fitting_in_parts, pays
from autoshard.passes.choose_prefetch import choose_prefetch, waits
from autoshard.passes.choose_travel import choose_sums, choose_travel
from autoshard.passes.choose_unshard import choose_unshard, dropped, keeping
from autoshard.passes.choose_whole import choose_whole
from autoshard.passes.costs import costs_of, scarce_rows
from autoshard.passes.group_parameters import REPLICATE_BELOW, group_parameters
from autoshard.passes.shortage import cheapest_fix, leaving_more_open
from autoshard.plan import COMPRESSIONS, OPTIMIZER_STATES, POWERSGD, Degrees, ParameterGroup, Plan
from autoshard.prediction import Prediction, Traffic
from autoshard.units import bytes_text, counted

HARDLY = 1.2  # times as long


Axes = tuple[tuple[str, int], ...]
Look = Callable[[Plan, int | None], Plan]


@dataclass(frozen=True)
class Circumstances:
    """Where a plan will run. budget: bytes a process may use for state; None: no limit is known. unable: an optimizer that cannot step
    on rows, by name; "": all can."""

    cluster: Cluster
    budget: int | None
    optimizer_states: int | None = None
    unable: str = ""

    def states(self, config: Config) -> int:
        """Numbers an optimizer keeps for each parameter: of the one that was seen, or else the one assumed."""
        if self.optimizer_states is not None:
            return self.optimizer_states
        return OPTIMIZER_STATES[config.optimizer]


def make_plan(
    inventory: Inventory,
    config: Config,
    where: Circumstances,
    forecast: Forecast = lambda plan: plan,
    fit: Fit | None = None,
    alike: Alike = lambda plan: (),
    states: Callable[[Plan], int] = lambda plan: 0,
) -> Plan:
    """The plan for this model, here. BudgetError if nothing fits, ConfigError if the mesh does not.

    forecast: completes a plan's prediction, which has parameters and what belongs to them only. fit: brings a plan into a
    budget by recomputation, as far as that goes, where that is to be chosen. alike: see `choose_partition`. states: see
    `choose_whole`.
    """
    fit = fit if config.recompute == "auto" else None
    plans = at_stages(inventory, config, where)

    def whole(plan: Plan) -> Plan:
        return forecast(predict(plan, inventory, config, where))

    fit = fitting_in_parts(fit, alike, whole) if config.partition_activations else fit

    def look(plan: Plan, budget: int | None) -> Plan:
        return choose_behind(choose_unshard(plan, budget, whole, inventory), budget, whole)

    def bring(plan: Plan, budget: int) -> Plan:
        return _fitted(plan, budget, fit, look)

    def fitted(plan: Plan, budget: int) -> Plan:
        return fitting_behind(plan, budget, bring, look, packed(plan, inventory))

    def at_last(found: Plan, plan: Plan) -> Plan:
        assert where.budget is not None  # or it would fit
        return leaner(found, plan, where.budget, bring, look)

    def mixed(plan: Plan) -> Plan:
        return whole(choose_sums(plan, inventory, where.cluster))

    if config.zero == "auto":
        chosen, fitting = _choose(plans, inventory, config, where, look, fitted, at_last)
        return choose_prefetch(choose_whole(chosen, fitting, where.budget, mixed, states), where.budget, whole)
    budget = where.budget if config.memory_budget is not None else None
    plan = look(plans[0], budget)
    found = fitted(plan, budget) if budget is not None else _in_its_own_memory(plan, fit, look)
    plan = at_last(found, plan) if budget is not None and found.predicted.footprint > budget else found
    _check_budget(plan, inventory, config, where)
    return choose_prefetch(plan.because(f"zero={config.zero} was asked for"), where.budget, whole)


def at_stages(inventory: Inventory, config: Config, where: Circumstances) -> list[Plan]:
    """The plan of each stage that the config admits, with what is known before a forecast. ConfigError if the mesh does not
    fit."""
    stacks = choose_stacks(inventory)
    return [_at_stage(inventory, config, where, axes, stacks, stage) for axes, stage in _points(config, where)]


def _points(config: Config, where: Circumstances) -> list[tuple[Axes, int]]:
    """Meshes and stages that the config admits. Where it leaves both open, rows are shared by all processes, or by those of each
    node: then only sums of gradients go between nodes, while each node holds all of the rows."""
    cluster = where.cluster
    axes = config.mesh_axes() or (("shard", cluster.world),)
    _check_axes(axes, cluster.world)
    if config.zero != "auto":
        return [(axes, config.zero)]
    if cluster.world == 1 or config.compression == POWERSGD or where.unable:
        return [(axes, 0)]
    points = [(axes, stage) for stage in range(4)]
    if cluster.nodes > 1 and cluster.per_node > 1 and config.mesh is None and config.hierarchy == "auto":
        nodes = ("replicate", cluster.nodes), ("shard", cluster.per_node)
        points += [(nodes, stage) for stage in range(1, 4)]
    return points


def _names(config: Config, where: Circumstances) -> list[str]:
    """Of the plans of `at_stages`."""
    points = _points(config, where)
    return [f"ZeRO-{stage}" + (" in each node" if axes != points[0][0] else "") for axes, stage in points]


def _check_axes(axes: Axes, world: int) -> None:
    size = math.prod(n for _, n in axes)
    if size != world:
        raise ConfigError(f"mesh: {dict(axes)} makes {size} processes; the job has {world}")


def _choose(
    plans: list[Plan], inventory: Inventory, config: Config, where: Circumstances, look: Look, fitted: Fit, at_last: Callable[[Plan, Plan], Plan]
) -> tuple[Plan, list[Plan]]:
    """The fastest, and all that were asked about and fit. Asks for forecasts in the order of preference, until one fits as it is, and for
    the next one if its messages hardly take longer, by themselves or together with the optimizer's step; stages whose messages take as long as
    each other's, as those of 1 and 2, count as one. What cannot fit is not asked about further; but for the leanest stage, of which it is
    said by how much. at_last: takes what is found to take the least, and as it was before, and looks once more before all is refused."""
    looked, fitting, whole = dict[int, Plan](), list[int](), list[int]()  # as they are; all that fit; those of them that do as they are
    wire = [plan.predicted.communication_seconds for plan in plans]

    def fits(which: int) -> bool:
        return where.budget is None or plans[which].predicted.footprint <= where.budget

    known = [time + _moved_by_a_step(plan) / where.cluster.device.bandwidth for time, plan in zip(wire, plans)]
    order = sorted(range(len(plans)), key=lambda s: (wire[s], plans[s].predicted.footprint))
    leanest = min(reversed(order), key=lambda s: plans[s].predicted.footprint)

    def may_fit(which: int) -> bool:
        return which == leanest or where.budget is None or _for_certain(plans[which]) <= where.budget

    for which in order:
        if len({wire[one] for one in whole}) > 1 or (whole and all(took[which] > HARDLY * took[whole[0]] for took in (wire, known))):
            break
        if may_fit(which):
            plans[which] = looked[which] = look(plans[which], where.budget)
        if fits(which):
            whole.append(which)
        if where.budget is not None and may_fit(which):
            plans[which] = fitted(plans[which], where.budget)
        if fits(which):
            fitting.append(which)
    if not fitting:  # of what was not looked at it is not known what it takes
        last = min(reversed(looked), key=lambda s: plans[s].predicted.footprint)
        plans[last] = at_last(plans[last], looked[last])
        _check_budget(plans[last], inventory, config, where)
        fitting.append(last)
    chosen = min(fitting, key=lambda s: plans[s].predicted.step_seconds or 0.0)
    simulated = len(fitting) > 1 and plans[chosen].predicted.step_seconds is not None
    least = "the least time of those that were simulated and fit" if simulated else "the least time on the wire of those that fit"
    names = _names(config, where)
    said = [_reason(name, p, least if i == chosen else "", where.budget) for i, (name, p) in enumerate(zip(names, plans))]
    if where.unable and where.cluster.world > 1:
        said.append(f"optimizer {where.unable} cannot step on rows, so every process has all of them")
    return plans[chosen].because(*said), [plans[which].because(*said) for which in fitting]


def _moved_by_a_step(plan: Plan) -> int:
    """Bytes that an optimizer's step reads and writes, about."""
    memory = plan.predicted.memory
    return 2 * (memory.get("parameters", 0) + memory.get("optimizer", 0)) + memory.get("gradients", 0)


def _for_certain(plan: Plan) -> int:
    """Bytes that a step takes whatever it computes again; of one that was not simulated only rows and their gradients are certain."""
    kept = ("parameters", "gradients", *(("optimizer", "compression", "buffers", "gathered") if plan.predicted.place else ()))
    return sum(plan.predicted.memory.get(category, 0) for category in kept)


def _fitted(plan: Plan, budget: int, fit: Fit | None, look: Look) -> Plan:
    """The plan, or with what it has to compute again: to fit, or to have room for gathered copies that it waits for."""
    if fit is None or (plan.predicted.footprint <= budget and not (dropped(plan) and waits(plan))):
        return plan
    found, before = fit(plan, budget), plan.predicted.step_seconds
    kept = len(dropped(plan)) - len(dropped(found))
    if not (found.recompute or found.partition_activations or kept) or before is None:
        return found
    more = (found.predicted.step_seconds or 0.0) / before - 1
    found = found.because(f"{', '.join(_what_was_fitted(plan, found, kept, budget))}; {more:+.1%} of a step's time")
    return look(found, budget) if found.predicted.footprint <= budget and waits(found) else found


def _in_its_own_memory(plan: Plan, fit: Fit | None, look: Look) -> Plan:
    """A stage that was asked for, and no budget: in the memory that it takes by itself copies may stay that it would wait for, if
    backward computes again what else is saved there."""
    if fit is None or not dropped(plan) or not waits(plan):
        return plan
    own = plan.predicted.footprint
    found = _fitted(plan.because(f"no budget was said: the {bytes_text(own)} that it takes by itself are one"), own, fit, look)
    return found if pays(found, plan, own) else plan


def _what_was_fitted(plan: Plan, found: Plan, kept: int, budget: int) -> Iterator[str]:
    """Why a plan is as it was found to fit: what is computed again, what that is for, and how many copies are kept."""
    if found.recompute:
        through = f", {len(found.through)} of them from where a region begins" if found.through else ""
        yield f"recompute: {counted(len(found.recompute), 'block', 'blocks')} in backward{through}"
    if found.partition_activations:
        yield f"{counted(len(found.partition_activations), 'saved value', 'saved values')} that all processes have alike kept in parts"
    if plan.predicted.footprint > budget:
        yield f"to go from {bytes_text(plan.predicted.footprint)} to {bytes_text(found.predicted.footprint)}"
    if kept:
        yield f"{counted(kept, 'more gathered copy', 'more gathered copies')} kept for backward"


def _reason(name: str, plan: Plan, chosen: str, budget: int | None) -> str:
    """What there is to say of a plan. chosen: why it was; "": it was not."""
    predicted = plan.predicted
    memory = bytes_text(predicted.footprint) + (" at least" if predicted.of_a_part else " at most" if predicted.place else " and activations")
    memory += _with(plan)
    text = f"{name}: {memory}, {predicted.communication_seconds:.3g} s on the wire"
    text += f", a step of {predicted.step_seconds:.3g} s" if predicted.step_seconds else ""
    if chosen:
        return f"{text} (chosen: {chosen})"
    if budget is not None and predicted.footprint > budget:
        return text + f" ({bytes_text(predicted.footprint - budget)} over the budget)"
    return text


def _with(plan: Plan) -> str:
    """What else a stage is with."""
    others = ["recomputation"] * bool(plan.recompute) + ["values in parts"] * bool(plan.partition_activations)
    return f" with {' and '.join(others)}" if others else ""


def _check_budget(least: Plan, inventory: Inventory, config: Config, where: Circumstances) -> None:
    """Fails if what takes the least does not fit; a stage that the user pinned is held to a budget only if one was said."""
    if where.budget is None or (config.zero != "auto" and config.memory_budget is None):
        return
    short = least.predicted.footprint - where.budget
    if short <= 0:
        return
    leanest = min(at_stages(inventory, leaving_more_open(config), where), key=lambda plan: plan.predicted.footprint)
    place = f" (at {least.predicted.place})" if least.predicted.place else ""
    raise BudgetError(
        f"memory_budget: {bytes_text(where.budget)} a process is {bytes_text(short)} ({short} bytes) short: at best, "
        f"ZeRO-{least.stage} on {counted(least.world, 'process', 'processes')}"
        f"{_with(least)}, a step takes {bytes_text(least.predicted.footprint)}{place}. "
        f"Cheapest fix: {cheapest_fix(least, leanest, inventory, config, where.budget, where.unable)}"
    )


def _at_stage(
    inventory: Inventory,
    config: Config,
    where: Circumstances,
    axes: Axes,
    stacks: tuple[str, ...],
    stage: int,
) -> Plan:
    below = REPLICATE_BELOW if config.replicate_below == "auto" else config.replicate_below
    size = dict(axes).get("shard", 1)
    grouped = group_parameters(inventory, below, stacks)
    groups = tuple(
        ParameterGroup(
            name,
            tuple(p.name for p in members),
            Degrees.of_stage(stage if cut else 0, size),
            last_use=max(p.last_use for p in members),
        )
        for name, members, cut in grouped
    )
    compute, reduce = config.dtypes_on(where.cluster.world)
    plan = Plan(
        world=where.cluster.world,
        axes=axes,
        groups=groups,
        compute=name_of_dtype(compute) if compute else "",
        reduce=name_of_dtype(reduce) if reduce else "",
        compression=config.compression if config.compression in COMPRESSIONS else "",
        low_rank=config.compression_rank if config.compression == POWERSGD else 0,
        buffers=config.buffers,
        stacks=stacks,
        recompute=_asked_for(config, inventory, stacks),
        covered=inventory.covered,
    )
    plan = _on_precision(plan, config, inventory)
    plan = choose_halves(choose_travel(plan, inventory, where.cluster, config.hierarchy), inventory, where.cluster)
    plan = keeping(plan, 1) if stage == 3 and len(dropped(plan)) > 1 else plan
    plan = _with_early_gathers(plan) if config.early_gathers else plan
    if said := scarce_rows(plan, inventory):
        plan = plan.because(said)
    return predict(plan, inventory, config, where)


def _on_precision(plan: Plan, config: Config, inventory: Inventory) -> Plan:
    """What of a precision that was asked for is not as many expect it."""
    if config.dtypes() == (None, None):
        return plan
    if plan.leaves_alone:
        return plan.because("precision: one process trains in the dtypes of its model, as they are (torch.autocast or model.to() change that)")
    narrow = {p.dtype for p in inventory.parameters if is_trained(p) and p.itemsize < torch.float32.itemsize}
    if not narrow:
        return plan
    dtypes = " and ".join(sorted(narrow))
    return plan.because(f"precision: rows and what the optimizer keeps of them are {dtypes}, as the model is (model.float() would make them fp32)")


def _with_early_gathers(plan: Plan) -> Plan:
    if not plan.sharded:
        return plan.because("early_gathers: nothing is gathered where all parameters are whole")
    return replace(plan, early=True).because("gathers that forward starts with start when the optimizer has stepped, as was asked for")


def _asked_for(config: Config, inventory: Inventory, stacks: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The policy that the user chose, for every block."""
    if config.recompute in ("auto", "none"):
        return ()
    blocks = blocks_of((p.name for p in inventory.parameters), stacks)
    if not blocks:
        raise ConfigError(
            f"recompute: {config.recompute!r} is for models with blocks under a number, such as layers.0, and "
            f"{inventory.model} has none; legal here: 'auto' or 'none'"
        )
    return tuple((block, config.recompute) for block in blocks)


def predict(plan: Plan, inventory: Inventory, config: Config, where: Circumstances) -> Plan:
    """The plan with what the cost model says of it."""
    costs = costs_of(plan, inventory)
    traffic = tuple(Traffic(*entry) for entry in step.traffic(costs, where.cluster))
    prediction = Prediction(step.memory(costs, where.states(config)), traffic, step.UNKNOWN, budget=where.budget)
    return replace(plan, predicted=prediction)
