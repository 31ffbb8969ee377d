"""Which batch fits, and how fast it is: all plans of a model, for every batch, sequence and number of processes, from one trace.

[Note: Sweeps] A model is traced once for each dtype that it computes in, with its batch and its sequence open; each stage of ZeRO
on each number of processes, as it is and with all blocks recomputed, is rehearsed once; that does not differentiate again what stages
and numbers of processes have in common. What follows are arrays: memory and time of a hundred thousand points and ways take a second.
What Inductor fuses, what the partitioner saves and how collectives lie beside kernels is as at the sizes of the trace, so far from them
`plan` is the better judge; for code that is not generated the bytes are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import sympy
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torch.optim import Optimizer

from autoshard import torch_internals
from autoshard.capture import Capture
from autoshard.config import Config
from autoshard.console import doing
from autoshard.cost_model import accuracy
from autoshard.cost_model.allocator import expands, reserved
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.liveness import Curve
from autoshard.cost_model.optimizer import Existing, Make
from autoshard.cost_model.program import Program
from autoshard.cost_model.schedule import Schedule
from autoshard.cost_model.sizes import Open, truth
from autoshard.errors import SweepError
from autoshard.forecast import Forecaster
from autoshard.inventory import Inventory
from autoshard.passes.choose_behind import one_at_a_time, spares_much
from autoshard.passes.choose_blocks import blocks_of
from autoshard.passes.choose_unshard import dropped, keeping_none
from autoshard.passes.choose_zero import Circumstances, at_stages
from autoshard.plan import Plan
from autoshard.planning import (
    asked_for,
    check_can_step,
    circumstances,
    forecaster_of,
    optimizers_of,
    pinned_plan,
    trace,
)
from autoshard.rehearsal import Known
from autoshard.units import counted

MOST = 1 << 16  # the largest batch that is looked for
_FEW = 32  # points of each of which it is computed what an allocator reserves
PROCESSES = "processes"  # what their number is called among sizes
Points: TypeAlias = "dict[str, NDArray[np.float64]]"


@dataclass(frozen=True)
class Way:
    """One way to train: a plan, its memory and its time for all sizes. unknown: what these leave out. program: on GPUs, whose allocator
    holds more than that."""

    plan: Plan
    curve: Curve
    schedule: Schedule
    unknown: tuple[str, ...] = ()
    program: Program | None = None
    _reserved: dict[tuple[int, ...], int] = field(default_factory=dict, compare=False, repr=False)

    def fitting(self, budget: int, values: Points) -> NDArray[np.bool_]:
        """Which points fit; on GPUs by what the allocator reserves, of many points as if that rose with the peak, as it nearly does."""
        peaks = self.curve.peaks(values)
        if self.program is None:
            return peaks <= budget
        below = np.flatnonzero(peaks <= budget)
        heights, first = np.unique(peaks[below], return_index=True)

        def held(i: int) -> int:
            return self._held({name: int(each[below[first[i]]]) for name, each in values.items()})

        if len(heights) > _FEW:
            return peaks <= _last_within(budget, heights, held)
        return np.isin(peaks, [height for i, height in enumerate(heights) if held(i) <= budget])

    def _held(self, sizes: dict[str, int]) -> int:
        """By the allocator, at one point."""
        assert self.program is not None
        if (point := tuple(sizes.values())) not in self._reserved:
            self._reserved[point] = reserved(self.program, sizes, expanding=expands())
        return self._reserved[point]


def _last_within(budget: float, heights: NDArray[np.float64], held: Callable[[int], int]) -> float:
    """The last of some peaks, which rise, of which no more is held than the budget; less than all where there is none. Between the nearest
    ones that are known it is looked for where a straight line has the budget, and every third time in the middle."""
    fits, exceeds, known = -1, len(heights), dict[int, int]()
    while exceeds - fits > 1:
        guess = len(heights) - 1
        if known:
            (low, least), (high, most) = ((heights[i], known[i]) if i in known else (0.0, 0) for i in (fits, exceeds))
            likely = int(np.searchsorted(heights, low + (high - low) * (budget - least) / (most - least), "right")) - 1
            guess = min(max((fits + exceeds) // 2 if len(known) % 3 == 0 else likely, fits + 1), exceeds - 1)
        known[guess] = held(guess)
        fits, exceeds = (guess, exceeds) if known[guess] <= budget else (fits, guess)
    return float(heights[fits]) if fits >= 0 else -1.0


@dataclass(frozen=True)
class Swept:
    """The fastest way that fits, for each point; where none does, that of the least peak. All arrays have the points'
    shape. way: its index in `Sweep.ways`. peak: bytes a process. seconds: of a step."""

    way: NDArray[np.int64]
    peak: NDArray[np.float64]
    seconds: NDArray[np.float64]
    fits: NDArray[np.bool_]


@dataclass(frozen=True)
class Sweep:
    """The ways to train a model on a cluster, or on several of different sizes. budget: bytes a process; None: no limit is known.
    open: the sizes that may be any, and what they were in the trace. holds: what the trace took for granted of them. error,
    seconds_error: how far measurements were off from predictions like these, as shares of them."""

    ways: tuple[Way, ...]
    budget: int | None
    open: Open
    holds: tuple[sympy.Basic, ...] = ()
    error: tuple[float, float] | None = None
    seconds_error: tuple[float, float] | None = None

    @property
    def world(self) -> int:
        """Processes of the job; the first number of several."""
        return self.worlds[0]

    @property
    def worlds(self) -> tuple[int, ...]:
        """How many processes the job may have."""
        return tuple(dict.fromkeys(way.plan.world for way in self.ways))

    def at(self, **sizes: ArrayLike) -> Swept:
        """What comes of sizes, numbers or arrays of one shape: `sweep.at(batch=[1, 2, 4], sequence=2048, processes=8)`. What is not
        given is as it was in the trace; processes, as many as the first cluster has. SweepError of a size that the trace has as a
        number, or for which it does not hold."""
        values = self._values(sizes)
        for condition in self.holds:
            if not truth(condition, values).all():
                raise SweepError(f"the trace holds for {condition} only, which not all of these sizes are")
        peaks, seconds = self._peaks(values), self._seconds(values)
        fits = self._fits(values)
        way = np.where(fits.any(0), np.where(fits, seconds, np.inf).argmin(0), peaks.argmin(0))
        chosen: list[Any] = [np.take_along_axis(each, way[None], 0)[0] for each in (peaks, seconds, fits)]
        return Swept(way, *chosen)

    def largest(self, **sizes: ArrayLike) -> int:
        """The largest batch that fits and that the trace holds for, other sizes as given; 0 if none does; MOST where more may. SweepError
        without a budget."""
        if self.budget is None:
            raise SweepError("memory_budget: without one every batch fits; legal: bytes, '72GiB', ...")
        batches = np.arange(1, MOST + 1)
        values = self._values({**sizes, "batch": batches})
        return int(batches[self._fits(values).any(0) & self._held(values)].max(initial=0))

    def valid(self, **sizes: ArrayLike) -> NDArray[np.bool_]:
        """Whether the trace holds for these sizes."""
        return self._held(self._values(sizes))

    def _peaks(self, values: Points) -> NDArray[np.float64]:
        """By way and point; infinite where a point has another number of processes."""
        return self._of_each(lambda way, values: way.curve.peaks(values), values, np.inf)

    def _seconds(self, values: Points) -> NDArray[np.float64]:
        return self._of_each(lambda way, values: way.schedule.seconds(values), values, np.inf)

    def _fits(self, values: Points) -> NDArray[np.bool_]:
        budget = self.budget
        if budget is None:
            return np.isfinite(self._peaks(values))
        return self._of_each(lambda way, values: way.fitting(budget, values), values, False)

    def _of_each(self, figure: Callable[[Way, Points], NDArray[Any]], values: Points, elsewhere: Any) -> NDArray[Any]:
        found = np.full((len(self.ways), *values[PROCESSES].shape), elsewhere)
        for i, way in enumerate(self.ways):
            here = values[PROCESSES] == way.plan.world
            if here.any():
                found[i, here] = figure(way, {name: each[here] for name, each in values.items()})
        return found

    def _held(self, values: Points) -> NDArray[np.bool_]:
        held = np.ones(next(iter(values.values())).shape, dtype=bool)
        for condition in self.holds:
            held = held & truth(condition, values)
        return held

    def _values(self, sizes: dict[str, ArrayLike]) -> Points:
        traced = {**self.open.sizes, PROCESSES: self.world}
        unknown = sizes.keys() - traced.keys()
        if unknown:
            raise SweepError(f"{sorted(unknown)[0]}: this model's trace has it as a number; open are: {', '.join(traced)}")
        given = {name: np.asarray(sizes.get(name, size), dtype=np.float64) for name, size in traced.items()}
        for name, values in given.items():
            if (wrong := values[~(values >= 1) | (values != np.floor(values)) | np.isinf(values)]).size:
                raise SweepError(f"{name}: {wrong.flat[0]:g} is not legal; legal: whole numbers, 1 or more")
        if (wrong := given[PROCESSES][~np.isin(given[PROCESSES], self.worlds)]).size:
            legal = ", ".join(map(str, self.worlds))
            raise SweepError(f"{PROCESSES}: {wrong.flat[0]:g} is not legal; legal: {legal}, as the sweep was made for")
        shape = np.broadcast_shapes(*(v.shape for v in given.values()))
        return {name: np.broadcast_to(v, shape) for name, v in given.items()}


@torch_internals.without_libraries_of_cpus()
def sweep(
    model: nn.Module,
    example_inputs: Any,
    config: Config | None = None,
    cluster: Cluster | Sequence[Cluster] | None = None,
    optimizer: Make | Existing | None = None,
) -> Sweep:
    """All ways to train `model` on a cluster that `config` leaves open; arguments and errors as of `autoshard.plan`.

    Batch is the first dimension of the inputs, sequence the second of those that hold whole numbers. cluster: or several, of as many
    sizes: SweepError where two have as many processes, or other devices.
    """
    config = config or Config()
    clusters = list(cluster) if isinstance(cluster, Sequence) else [asked_for(config, cluster)[1]]
    _check_clusters(clusters)
    captures = _captures(model, example_inputs, config, clusters)
    traced = {dtype: (captured, Known()) for dtype, captured in captures.items()}
    steppers, device, open = optimizers_of(model, optimizer), clusters[0].device, next(iter(captures.values())).open
    return Sweep(
        tuple(way for each in clusters for way in _ways_on(each, *traced[config.dtypes_on(each.world)[0]], config, optimizer, steppers)),
        circumstances(config, clusters[0]).budget,
        open,
        tuple(dict.fromkeys(held for each in captures.values() for held in each.open.conditions(each.tracing.guards()))),
        accuracy.memory_error(device, config.codegen),
        accuracy.time_error(device, config.codegen),
    )


def _check_clusters(clusters: Sequence[Cluster]) -> None:
    if not clusters:
        raise SweepError("cluster: [] is not legal; legal: one or more")
    (world, _), *_ = Counter(cluster.world for cluster in clusters).most_common(1)
    alike = [f"{cluster.nodes} x {cluster.per_node}" for cluster in clusters if cluster.world == world]
    if len(alike) > 1:
        raise SweepError(f"cluster: {' and '.join(alike)} are all {counted(world, 'process', 'processes')}; legal: one of each number of them")
    first, others = clusters[0].device, [cluster.device.name for cluster in clusters if cluster.device != clusters[0].device]
    if others:
        raise SweepError(f"cluster: {others[0]} beside {first.name} is not legal; legal: the same device in all of them")


def _captures(model: nn.Module, example_inputs: Any, config: Config, clusters: Sequence[Cluster]) -> Mapping[torch.dtype | None, Capture]:
    """By what is computed in: one process trains as its model is."""
    worlds = {config.dtypes_on(world)[0]: world for world in sorted(cluster.world for cluster in clusters)}
    captures = {dtype: trace(model, example_inputs, config, world, open=True) for dtype, world in worlds.items()}
    if not all(captured.open.traced for captured in captures.values()):
        raise SweepError(f"{type(model).__name__}: its trace has every size as a number, so there is nothing to sweep")
    if len({tuple(captured.open.sizes) for captured in captures.values()}) > 1:
        raise SweepError(f"{type(model).__name__}: other sizes are open on one process than on several; legal: a sweep of each alone")
    return captures


def _ways_on(
    cluster: Cluster, captured: Capture, known: Known, config: Config, optimizer: Make | Existing | None, steppers: Sequence[Optimizer] | None
) -> Iterator[Way]:
    forecast = forecaster_of(captured, config, cluster, optimizer, known)
    plans = _plans(forecast, config, circumstances(config, cluster, steppers))
    for plan in plans:
        check_can_step(plan, steppers)  # before one is simulated
    for i, plan in enumerate(plans, 1):
        doing(f"simulating configuration {i} of {len(plans)}: {plan.summary}")
        program = None if cluster.device.is_cpu else forecast.simulated(plan)[0]
        yield Way(plan, *forecast.costs(plan), forecast.unknown(plan), program)


def _plans(forecast: Forecaster, config: Config, where: Circumstances) -> list[Plan]:
    """What the config leaves open; a pinned plan leaves nothing."""
    inventory = forecast.captured.inventory
    pinned = pinned_plan(config, inventory, where.cluster.world)
    if pinned is not None:
        return [pinned]
    plans = [q for p in at_stages(inventory, config, where) for q in ((p, keeping_none(p)) if dropped(p) else (p,))]
    possible = [p for p in plans if where.budget is None or forecast.at_least(p) <= where.budget]
    possible = possible or [min(reversed(plans), key=forecast.at_least)]  # which of its equals keeps no copies
    return [p for stage in possible for p in _on_less(_recomputed(stage, config), inventory, where.budget)]


def _on_less(plans: Sequence[Plan], inventory: Inventory, budget: int | None) -> Sequence[Plan]:
    """The plans, and the last of them, which takes the least, with one reduction on its way where that may count."""
    return [*plans, one_at_a_time(plans[-1])] if spares_much(plans[-1], inventory, budget) else plans


def _recomputed(plan: Plan, config: Config) -> Sequence[Plan]:
    """The plan, and with all of its blocks recomputed where that is to be chosen."""
    blocks = blocks_of(plan.group_of, plan.stacks)
    if config.recompute != "auto" or not blocks:
        return [plan]
    return [plan, replace(plan, recompute=tuple((block, "full") for block in blocks))]
