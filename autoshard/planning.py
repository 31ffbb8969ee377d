"""Making a plan without processes: for `autoshard.plan` and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoshard.attention import as_on
from autoshard.capture import Capture, capture
from autoshard.config import Config
from autoshard.cost_model.cluster import Cluster, measured_here
from autoshard.cost_model.optimizer import NAMED, Existing, Make, made_by
from autoshard.errors import ConfigError, PassError, PlanError
from autoshard.forecast import Forecaster
from autoshard.inventory import Inventory, is_trained, take_inventory
from autoshard.optim import Adafactor
from autoshard.passes.base import Pass
from autoshard.passes.choose_unshard import dropped
from autoshard.passes.choose_zero import Circumstances, make_plan, predict
from autoshard.passes.group_parameters import can_lie_in_rows
from autoshard.passes.registry import pipeline_for
from autoshard.plan import Plan
from autoshard.rehearsal import Known
from autoshard.runtime.fused_step import unfusable
from autoshard.runtime.optimizers import check_steps_on_shards, first_unable, states_of
from autoshard.units import parse_bytes
from autoshard.unshardable import refuse_kinds

MOST_MESSAGES = 100_000  # of a plan, which somebody may have edited: each has operations and simulated time of its own
RESERVE = 0.1  # share of free memory that is left to fragmentation and the libraries


def plan(
    model: nn.Module,
    example_inputs: Any,
    config: Config | None = None,
    cluster: Cluster | None = None,
    optimizer: Make | Existing | None = None,
) -> Plan:
    """The plan for training `model` on a cluster, from its graph alone; nothing runs, nothing is allocated.

    example_inputs: a tensor, a tuple of arguments or a dict of keywords, meta tensors too.
    cluster: None: the one of config.cluster; where that says none either, one process on CPUs as they were measured here.
    optimizer: makes the optimizer, or several, from a list of parameters, or has those that are made; None: as config.optimizer says.
    Raises BudgetError if nothing fits, ConfigError if the mesh does not or the budget is a share of what is not known, ClusterError
    if config.cluster is a file that cannot be read, PlanError if a pinned plan is not of this model and this many processes,
    UnsupportedError of what a job refuses.
    """
    config, cluster = asked_for(config, cluster)
    steppers = optimizers_of(model, optimizer)
    where = circumstances(config, cluster, steppers)
    forecast = forecaster(model, example_inputs, config, cluster, optimizer)
    inventory = forecast.captured.inventory
    pinned = pinned_plan(config, inventory, cluster.world)
    if pinned is not None:
        made = forecast(predict(pinned, inventory, config, where))
    else:
        made = make_plan(inventory, config, where, forecast, forecast.fit, forecast.alike, forecast.states)
    check_can_step(made, steppers)
    return made


def asked_for(config: Config | None, cluster: Cluster | None) -> tuple[Config, Cluster]:
    """What stands for those that were not given, as `plan` has them."""
    config = config or Config()
    return config, cluster or machines(config, "cpu")


def machines(config: Config, device: str) -> Cluster:
    """The cluster that the config says; where it says none, one process on a device of this name, as it was measured here."""
    return config.resolved_cluster() or Cluster(1, 1, measured_here(device))


def forecaster(
    model: nn.Module, example_inputs: Any, config: Config, cluster: Cluster, optimizer: Make | Existing | None
) -> Forecaster:
    """What forecasts plans of `model` on a cluster; arguments as of `plan`."""
    return forecaster_of(trace(model, example_inputs, config, cluster.world), config, cluster, optimizer)


def trace(model: nn.Module, example_inputs: Any, config: Config, world: int, open: bool = False) -> Capture:
    """The model's graph as so many processes compute it, which refuse what a job does; open as of `capture`."""
    if world > 1:
        refuse_kinds(model)
    return capture(model, example_inputs, config.dtypes_on(world)[0], open)


def forecaster_of(
    captured: Capture, config: Config, cluster: Cluster, optimizer: Make | Existing | None, known: Known | None = None
) -> Forecaster:
    """The same of a trace, whose attention becomes what this cluster's device has. known: what was traced of it for clusters of this
    device, by the same config."""
    as_on(cluster.device, captured.graph)
    make = stepping(optimizer, captured.inventory, config, cluster)
    passes = pipeline_for(config.passes, config.disable_passes)
    return Forecaster(captured, make, cluster, config.codegen, passes, known or Known(), config.accumulation)


def stepping(optimizer: Make | Existing | None, inventory: Inventory, config: Config, cluster: Cluster) -> Make:
    """Makes a job's optimizers for the parameters of an inventory that are trained; None: as config.optimizer says."""
    if isinstance(optimizer, Existing):
        optimizer = optimizer.on([p.name for p in filter(is_trained, inventory.parameters)])
    return as_they_will_step(optimizer or NAMED[config.optimizer], config, cluster)


def as_they_will_step(make: Make, config: Config, cluster: Cluster) -> Make:
    """Makes optimizers that step all parameters at once, or on rows, where a job's will; and of torch's Adafactor, which asks for values,
    one that takes as much without them."""
    fuses = config.fuse_optimizer and cluster.world > 1

    def changed(optimizer: Optimizer) -> Optimizer:
        if type(optimizer) is torch.optim.Adafactor:
            return Adafactor(optimizer.param_groups)
        for group in optimizer.param_groups if fuses and not unfusable(optimizer) else ():
            group["fused"] = True
        return optimizer

    return lambda parameters: list(map(changed, made_by(make, parameters)))


def first_look(model: nn.Module, config: Config, cluster: Cluster, optimizer: Make | Existing | None = None) -> Plan:
    """What can be said before the model is traced: groups, stages and collectives, and the memory of parameters, gradients
    and optimizer, as if every parameter were used. Arguments and errors as of `plan`."""
    return make_plan(take_inventory(model, ()), config, circumstances(config, cluster, optimizers_of(model, optimizer)))


def circumstances(config: Config, cluster: Cluster, optimizers: Sequence[Optimizer] | None = None) -> Circumstances:
    """A cluster, the budget that the config says or a device leaves, and what these optimizers keep and can; None: as the config's."""
    kept = None if optimizers is None else max(map(states_of, optimizers), default=0)
    return Circumstances(cluster, budget_bytes(config, cluster.device.memory or None), kept, first_unable(optimizers or ()))


def check_can_step(plan: Plan, optimizers: Sequence[Optimizer] | None) -> None:
    """A job refuses a plan that shards what its optimizers cannot step on."""
    if plan.sharded:
        for each in optimizers or ():
            check_steps_on_shards(each)


def optimizers_of(model: nn.Module, optimizer: Make | Existing | None) -> Sequence[Optimizer] | None:
    """Those that exist, or as they are made for parameters like the model's; None where none was given."""
    if optimizer is None:
        return None
    if isinstance(optimizer, Existing):
        return optimizer.optimizers
    if not callable(optimizer):
        raise ConfigError(f"optimizer: {optimizer!r} is not legal; legal: what makes one of a list of parameters; by name in Config(optimizer=...)")
    shown = [nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()]
    return made_by(optimizer, shown) if shown else ()


def pinned_plan(config: Config, inventory: Inventory, world: int) -> Plan | None:
    """The plan that the config has, if any. PlanError if it is not of this model and this many processes."""
    pinned = config.resolved_plan()
    if pinned is not None:
        check_plan_fits(pinned, inventory, world)
    return pinned


def check_plan_fits(plan: Plan, inventory: Inventory, world: int) -> None:
    """A pinned plan must be of this model and this many processes."""
    if plan.world != world:
        raise PlanError(f"plan: made for {plan.world} processes; the job has {world}")
    names = {p.name for p in inventory.parameters}
    missing, unknown = names - plan.group_of.keys(), plan.group_of.keys() - names
    if missing or unknown:
        raise PlanError(
            f"plan: not of this model: {sorted(missing or unknown)[0]!r} is "
            f"{'in no group' if missing else 'no parameter of it'}"
        )
    for p in inventory.parameters:
        if plan.group_of[p.name].degrees.optimizer > 1 and not can_lie_in_rows(p):
            raise PlanError(
                f"plan: {p.name!r}, {p.dtype} of shape {p.shape}, cannot be sharded; legal: a group with degrees of 1"
            )
    if plan.message and (pieces := sum(p.elements * p.itemsize for p in inventory.parameters) // plan.message) > MOST_MESSAGES:
        raise PlanError(f"plan: message: {plan.message} bytes make {pieces} messages of this model; legal: 0, or at most {MOST_MESSAGES} messages")
    for stack in plan.stacks:
        if not any(name.startswith(f"{stack}.") for name in names):
            raise PlanError(f"plan: stacks: {stack!r} is not legal; legal: modules of this model, with parameters in them")


def check_passes_carry_out(plan: Plan, pipeline: Sequence[Pass], buffers: bool) -> None:
    """What no pass carries out would be left out in silence. buffers: whether the model has any."""
    needs: dict[str, tuple[str, object]] = {
        "recompute": ("recompute", plan.recompute),
        "repeat_blocks": ("recompute", plan.through),
        "regather": ("parameters' degrees", dropped(plan)),
        "two_levels": ("node", plan.node),
        "sync_buffers": ("buffers", buffers and plan.buffers == "broadcast" and not plan.leaves_alone),
        "compress": ("compression", plan.compression),
        "early_gathers": ("early", plan.early),
        "partition_activations": ("partition_activations", plan.partition_activations and not plan.leaves_alone),
    }
    there = {p.name for p in pipeline}
    for name, (setting, needed) in needs.items():
        if needed and name not in there:
            raise PassError(f"passes: no pass {name!r}, which carries out the plan's {setting}; legal: passes with it, or a plan without")


def budget_bytes(config: Config, free: int | None) -> int | None:
    """Bytes a process may use: what the config says, or what is free less a reserve; None without a limit. free: None where that is
    not known, of which a share is a ConfigError."""
    budget = config.memory_budget
    if isinstance(budget, str):
        return parse_bytes(budget)
    if isinstance(budget, int):
        return budget
    if free is not None:
        return int(free * (budget if budget is not None else 1 - RESERVE))
    if budget is None:
        return None
    raise ConfigError(f"memory_budget: {budget} is a share of memory that is not known; legal here: bytes, '72GiB', '80GB'")
