"""Decision: which gathered copies stay from forward to backward, between stage 2, where all do, and stage 3.

Backward needs first what forward used last. So that copy stays even at stage 3, as it would be gathered again at once; and of the
others, where there is a budget, as many as fit, from the last used on: those lie there for the shortest time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

from autoshard.inventory import Inventory
from autoshard.passes.choose_blocks import block_of
from autoshard.passes.costs import costs_of
from autoshard.plan import ParameterGroup, Plan
from autoshard.prediction import Prediction
from autoshard.units import counted


def dropped(plan: Plan) -> list[ParameterGroup]:
    """Whose copies backward gathers again, in the order of last use."""
    groups = [(g.last_use, i, g) for i, g in enumerate(plan.groups) if g.degrees.parameter > 1]
    return [group for *_, group in sorted(groups)]


def keeping(plan: Plan, count: int) -> Plan:
    """The plan with that many more copies kept."""
    return keeping_of(plan, {g.name for g in dropped(plan)[len(dropped(plan)) - count :]})


def keeping_of(plan: Plan, names: Collection[str]) -> Plan:
    """The plan with the copies of these groups kept, and of the groups of these blocks."""
    groups = (replace(g, degrees=replace(g.degrees, parameter=1)) if {g.name, _block(plan, g)} & set(names) else g for g in plan.groups)
    return replace(plan, groups=tuple(groups))


def keeping_none(plan: Plan) -> Plan:
    """The plan of a stage 3 with every whole copy dropped."""
    again = max(g.degrees.parameter for g in plan.groups)
    groups = (replace(g, degrees=replace(g.degrees, parameter=min(g.degrees.gradient, again))) for g in plan.groups)
    return replace(plan, groups=tuple(groups))


def copies_of_blocks(plan: Plan, inventory: Inventory) -> dict[str, int]:
    """Bytes of the copies that backward gathers again, by block, which may have two groups; of a group that is of no block by its own
    name. In the order of last use."""
    sizes, found = _copies_of(plan, inventory), Counter[str]()
    for group in dropped(plan):
        found[_block(plan, group)] += sizes[group.name]
    return dict(found)


def _copies_of(plan: Plan, inventory: Inventory) -> dict[str, int]:
    """Bytes of the copies that backward gathers again, by group, in the order of last use."""
    costs = dict(zip((g.name for g in plan.groups), costs_of(plan, inventory)))
    return {group.name: costs[group.name].whole for group in dropped(plan)}


def _block(plan: Plan, group: ParameterGroup) -> str:
    return block_of(group.parameters[0], plan.stacks) or group.name


def choose_unshard(plan: Plan, budget: int | None, forecast: Callable[[Plan], Plan], inventory: Inventory) -> Plan:
    """Forecast, and at stage 3 with as many copies kept as the budget has room for. None: no budget was said."""
    found = forecast(plan)
    if budget is None or not dropped(plan):
        return found
    if found.predicted.footprint > budget:
        none = forecast(keeping_none(plan)).because("no whole copy kept for backward: the budget has no room")
        return none if none.predicted.footprint < found.predicted.footprint else found
    if not found.predicted.seconds:  # nothing was simulated, so who knows what activations take
        return found
    taken = itertools.accumulate(reversed(_copies_of(plan, inventory).values()))
    guess = sum(bytes <= budget - found.predicted.footprint for bytes in taken)
    count = _most(len(dropped(plan)), guess, lambda more: at_most(forecast(keeping(plan, more)).predicted) <= budget)
    kept = f"{counted(count, 'gathered copy', 'gathered copies')} more kept for backward, as there is room"
    return forecast(keeping(plan, count)).because(kept) if count else found


def _most(of: int, guess: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `of` that fits; 0 does. Each look takes seconds, so the first are where a guess says."""
    fewest, most, at, stride = 0, of, min(guess + 1, of), 1
    while fewest < most:
        at = at if fewest < at <= most else (fewest + most + 1) // 2
        if fits(at):
            fewest, at = at, at + stride
        else:
            most, at = at - 1, at - stride
        stride *= 2
    return fewest


def has_room(further: Plan, found: Plan, budget: int | None) -> bool:
    """Whether a step that is faster may be taken: it takes no more than the one before, or less than the budget by what predictions have been off."""
    return budget is None or further.predicted.footprint <= found.predicted.footprint or at_most(further.predicted) <= budget


def at_most(predicted: Prediction) -> float:
    """Bytes that a step may take, fragments and what predictions have been off by in them."""
    return predicted.footprint * (1 + max(predicted.error[1] if predicted.error else 0.0, 0.0))
