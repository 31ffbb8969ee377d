"""Models as a plan knows them, and where they would run, for tests of decisions."""

from __future__ import annotations

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.inventory import Inventory, ParameterInfo
from autoshard.passes.choose_zero import Circumstances


def info(name: str, *shape: int) -> ParameterInfo:
    return ParameterInfo(name, shape, "float32", 4, True, True)


def blocks(count: int = 4) -> Inventory:
    members = [info(f"layers.{i}.{n}", 256, 256) for i in range(count) for n in ("up", "down")]
    return Inventory("Net", (info("embed.weight", 1000, 256), *members, info("norm.weight", 256)))


def where(world: int = 8, budget: int | None = None) -> Circumstances:
    return Circumstances(Cluster(1, world, DEVICES["h100"]), budget)
