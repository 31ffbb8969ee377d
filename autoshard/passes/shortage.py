"""What would help where no plan fits into its budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.config import Config
from autoshard.cost_model.allocator import EXPANDABLE
from autoshard.inventory import Inventory
from autoshard.passes.choose_blocks import blocks_of
from autoshard.passes.costs import all_rows_apart, scarce_rows
from autoshard.passes.group_parameters import REPLICATE_BELOW
from autoshard.plan import Plan
from autoshard.prediction import AT_THE_STEP
from autoshard.units import bytes_text, enough_text

_LOWER = (0, 1, 2)
_SHARED = ("parameters", "gradients", "optimizer")


def leaving_more_open(config: Config) -> Config:
    """The config without what keeps processes from sharing all that they can."""
    changed = replace(config, zero="auto" if config.zero in _LOWER else config.zero, mesh=None)
    return replace(changed, replicate_below="auto") if _keeps_whole(config) else changed


def cheapest_fix(least: Plan, leanest: Plan, inventory: Inventory, config: Config, budget: int, unable: str) -> str:
    """In words, of the plan that takes the least. leanest: of those without a forecast that `leaving_more_open` admits. unable: as of
    `Circumstances`."""
    memory, enough = least.predicted.memory, f"a budget of {enough_text(least.predicted.footprint)}"
    expanding = least.predicted.expanding
    if expanding is not None and expanding <= budget:
        return f"{EXPANDABLE} set, by which CUDA's allocator should reserve {bytes_text(expanding)} (never compared with a measurement), or {enough}"
    if least.low_rank:
        return f"another compression, with which rows can be sharded, or {enough}"
    if unable:
        return f"another optimizer than {unable}, with which rows can be sharded, or {enough}"
    divided, others = _divided(least, leanest)
    largest = max((c for c in memory if c not in _shared(least)), key=lambda c: memory[c], default="activations")
    again = config.recompute in ("none", "selective") and bool(blocks_of(least.group_of, least.stacks))
    if again and largest == "activations" and least.predicted.footprint - memory.get(largest, 0) < budget:
        return f'recompute="auto", or {enough}'
    in_the_way = " and ".join(_in_the_way(least, config))
    if in_the_way and divided + others < budget:
        return f"{in_the_way}, or {enough}"
    if said := scarce_rows(least, inventory) or all_rows_apart(least, inventory):
        return f"{enough}, since more processes would not help: {said}"
    if others < budget:
        more = "more than one process (torchrun starts them)" if least.world == 1 else f"more than {least.world} processes"
        return f"{more}{in_the_way and ', with ' + in_the_way}, or {enough}"
    taken, short = memory.get(largest, 0), least.predicted.footprint - budget
    smaller = "a smaller batch, or " if largest in ("activations", "temporaries", "inputs") and 2 * taken > short else ""
    return f"{smaller}{enough}, of which {largest} {'take' if largest.endswith('s') else 'takes'} {bytes_text(taken)}"


def _divided(least: Plan, leanest: Plan) -> tuple[int, int]:
    """Bytes that more processes have less of, where nothing is in the way; and all others, most of which only a forecast knows."""
    known, memory = leanest.predicted.memory, least.predicted.memory
    divided = sum(known.get(category, memory.get(category, 0)) for category in _shared(least))
    left = sum(memory.values()) - sum(memory.get(category, 0) for category in {*known, *_shared(least)})
    apart = sum(size for category, size in known.items() if category not in _SHARED)
    return divided, left + apart + least.predicted.footprint - least.predicted.peak_bytes


def _shared(least: Plan) -> tuple[str, ...]:
    """What more processes have less of; of what a step has for a while, that is so where it is the optimizer's."""
    return (*_SHARED, "temporaries") if least.predicted.place == AT_THE_STEP else _SHARED


def _in_the_way(least: Plan, config: Config) -> Iterator[str]:
    """What else the user would have to say, for processes to share all that they can."""
    if config.zero in _LOWER:
        yield 'zero="auto" or zero=3'
    if config.mesh is not None and least.shard_size < least.world:
        yield "no mesh, or one that shards over more processes"
    if _keeps_whole(config):
        yield 'replicate_below="auto"'


def _keeps_whole(config: Config) -> bool:
    return config.replicate_below != "auto" and config.replicate_below > REPLICATE_BELOW
