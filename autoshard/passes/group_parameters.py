"""Decision: which parameters travel together. One group a repeated block; what lies between blocks is joined."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

import torch

from autoshard.inventory import Inventory, ParameterInfo
from autoshard.ops import wire
from autoshard.passes.choose_blocks import block_of

WHOLE = "replicated"
REPLICATE_BELOW = 10_000  # numbers: norms and biases of every current model; their rows would not pay for the gather


def group_parameters(
    inventory: Inventory, replicate_below: int, stacks: Collection[str]
) -> list[tuple[str, tuple[ParameterInfo, ...], bool]]:
    """(name, parameters, may be sharded) in the order of first use. stacks: see [Note: Stacks].

    Parameters of one block form a group even if others come between; those of no block form a group with
    their neighbours. What is too small or cannot be cut (no rows, a dtype that not every transport takes) is one group of whole parameters,
    whose uses are spread: it has no gather, and its one reduction is complete when backward comes to what forward used first of it.
    """
    cut = [p for p in inventory.parameters if _can_cut(p, replicate_below)]
    whole = tuple(p for p in inventory.parameters if not _can_cut(p, replicate_below))
    groups = [(name, tuple(members), True) for name, members in _by_block(cut, stacks).items()]
    groups += [(WHOLE, whole, False)] if whole else []
    place = {p.name: i for i, p in enumerate(inventory.parameters)}
    return sorted(groups, key=lambda group: place[group[1][0].name])


def _can_cut(p: ParameterInfo, replicate_below: int) -> bool:
    return p.elements >= max(replicate_below, 1) and can_lie_in_rows(p)


def can_lie_in_rows(p: ParameterInfo) -> bool:
    """Whether its rows can lie on several processes, and be gathered by any transport."""
    return len(p.shape) > 0 and getattr(torch, p.dtype) in wire.TAKEN


def _by_block(parameters: Iterable[ParameterInfo], stacks: Collection[str]) -> dict[str, list[ParameterInfo]]:
    groups: dict[str, list[ParameterInfo]] = {}
    for block, run in itertools.groupby(parameters, key=lambda p: block_of(p.name, stacks)):
        members = list(run)
        groups.setdefault(block or _joint_name(members, groups), []).extend(members)
    return groups


def _joint_name(members: list[ParameterInfo], taken: dict[str, list[ParameterInfo]]) -> str:
    """A name for neighbours without a block: their module's, with a number if that is taken."""
    base = members[0].name.rpartition(".")[0] or members[0].name
    names = itertools.chain([base], (f"{base}#{i}" for i in itertools.count(2)))
    return next(name for name in names if name not in taken)
