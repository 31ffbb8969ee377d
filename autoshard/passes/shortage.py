"""What would help where no plan fits into its budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.config import Config
from autoshard.inventory import Inventory
from autoshard.passes.choose_blocks import blocks_of
from autoshard.passes.costs import scarce_rows
from autoshard.plan import Plan
from autoshard.units import bytes_text, enough_text

REPLICATE_BELOW = 10_000  # norms and biases of every current model; their rows would not pay for the gather
_LOWER = (0, 1, 2)
_SHARED = ("parameters", "gradients", "optimizer")  # what more processes have less of


def leaving_more_open(config: Config) -> Config:
    """The config without what keeps processes from sharing all that they can."""
    changed = replace(config, zero="auto" if config.zero in _LOWER else config.zero, mesh=None)
    return replace(changed, replicate_below="auto") if _keeps_whole(config) else changed


def cheapest_fix(least: Plan, leanest: Plan, inventory: Inventory, config: Config, budget: int) -> str:
    """In words, of the plan that takes the least. leanest: of those without a forecast that `leaving_more_open` admits."""
    memory, enough = least.predicted.memory, f"a budget of {enough_text(least.predicted.footprint)}"
    if least.low_rank:
        return f"another compression, with which rows can be sharded, or {enough}"
    divided, others = _divided(least, leanest)
    largest = max((c for c in memory if c not in _SHARED), key=lambda c: memory[c], default="activations")
    again = config.recompute in ("none", "selective") and bool(blocks_of(least.group_of, least.stacks))
    if again and largest == "activations" and least.predicted.footprint - memory.get(largest, 0) < budget:
        return f'recompute="auto", or {enough}'
    in_the_way = " and ".join(_in_the_way(least, config))
    if in_the_way and divided + others < budget:
        return f"{in_the_way}, or {enough}"
    if said := scarce_rows(least, inventory):
        return f"{enough}, since more processes would not help: {said}"
    if others < budget or (least.world == 1 and others < divided):
        more = "more than one process" if least.world == 1 else f"more than {least.world} processes"
        return f"{more}{in_the_way and ', with ' + in_the_way}, or {enough}"
    smaller = "a smaller batch, or " if largest in ("activations", "temporaries", "inputs") else ""
    return f"{smaller}{enough}, of which {largest} take {bytes_text(memory.get(largest, 0))}"


def _divided(least: Plan, leanest: Plan) -> tuple[int, int]:
    """Bytes that more processes have less of, where nothing is in the way; and all others, most of which only a forecast knows."""
    known = leanest.predicted.memory
    divided = sum(known.get(category, 0) for category in _SHARED)
    left = least.predicted.footprint - sum(least.predicted.memory.get(category, 0) for category in known)
    return divided, left + leanest.predicted.peak_bytes - divided


def _in_the_way(least: Plan, config: Config) -> Iterator[str]:
    """What else the user would have to say, for processes to share all that they can."""
    if config.zero in _LOWER and least.world > 1:
        yield 'zero="auto" or zero=3'
    if config.mesh is not None and least.shard_size < least.world:
        yield "no mesh, or one that shards over more processes"
    if _keeps_whole(config):
        yield 'replicate_below="auto"'


def _keeps_whole(config: Config) -> bool:
    return config.replicate_below != "auto" and config.replicate_below > REPLICATE_BELOW
