"""Measures the machine that it runs on: `autoshard calibrate`, alone or, for collectives, under torchrun.

Each figure is the median of repeated runs over buffers that together are larger than the caches, as a step's are. Results are
kept for a while: one that took the place of the one before would be written into the caches, and a step's are not. All rows are
measured several times, one after the other, and the median counts: a machine that others use too is slow for seconds at a time, and
rows that were measured then would not go with the rest.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable
from dataclasses import asdict, replace

import torch
from rich.console import Console
from rich.progress import track

from autoshard.calibration.clock import median_of, together
from autoshard.calibration.device import device_here, measured_device
from autoshard.calibration.kernels import beyond_cubes, kernels, one_by_one
from autoshard.calibration.messages import collectives, packs
from autoshard.calibration.processor import beside_kernels
from autoshard.calibration.row import Row
from autoshard.calibration.sharing import sharing
from autoshard.codegen import has_compiler
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import Group, measured
from autoshard.cost_model.hardware import Table
from autoshard.runtime import processes
from autoshard.runtime.freed_memory import keep_freed_memory
from autoshard.runtime.presence import Patience

PASSES = 3
SHARINGS = 5  # times that is measured how compute and collectives get on beside each other: it depends on where threads were put


def calibrate(timeout: float = 60.0) -> Cluster:
    """The cluster that this process is part of, measured. A collective call under a launcher."""
    device = device_here()
    if device.type == "cpu":
        keep_freed_memory()  # as in a job
    world = processes.join(device, Patience(timeout, None, Console(stderr=True).print))
    group = processes.build_mesh(device.type, (("shard", world.size),), timeout).get_group().group_name if world.size > 1 else ""
    where = Group(world.size, world.size // int(together(processes.per_node([platform.node()] * world.size))))
    tables = _tables(list(_rows(device, where, group)), device, shown=world.rank == 0)
    made = measured_device(device, beyond_cubes(tables))
    if group:
        shared = [asdict(sharing(device, group)) for _ in range(SHARINGS)]
        made = replace(measured(made, where), **{name: statistics.median(s[name] for s in shared) for name in shared[0]})
    return Cluster(where.nodes, where.per_node, made)


def _rows(device: torch.device, where: Group, group: str) -> Iterable[Row]:
    """All that is measured. group: of the processes; none where there is one process."""
    serial = device.type == "cpu" and not together(not has_compiler())
    yield from kernels(device)
    yield from one_by_one() if serial else ()
    yield from (*packs(device), *collectives(device, where, group)) if group else ()
    yield from beside_kernels(device, where.size)


def _tables(rows: list[Row], device: torch.device, shown: bool) -> dict[str, Table]:
    """Of each row the median of several passes over all."""
    found: dict[str, dict[float, list[float]]] = {}
    for row in track(rows * PASSES, "measuring", console=Console(stderr=True), disable=not shown, transient=True):
        found.setdefault(row.table, {}).setdefault(row.size, []).append(median_of(row, device))
    return {name: rising((size, statistics.median(taken)) for size, taken in sizes.items()) for name, sizes in found.items()}


def rising(points: Iterable[tuple[float, float]]) -> Table:
    """By size, no row faster than a smaller one (noise of small sizes)."""
    out: list[tuple[float, float]] = []
    for size, seconds in sorted(points):
        out.append((size, max(seconds, out[-1][1] if out else 0.0)))
    return tuple(out)
