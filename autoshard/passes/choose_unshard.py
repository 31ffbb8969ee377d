"""Decision: which gathered copies stay from forward to backward, between stage 2, where all do, and stage 3.

Backward needs first what forward used last. So that copy stays even at stage 3, as it would be gathered again at once; and of the
others, where there is a budget, as many as fit, from the last used on: those lie there for the shortest time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoshard.plan import ParameterGroup, Plan


def dropped(plan: Plan) -> list[ParameterGroup]:
    """Whose copies backward gathers again, in the order of last use."""
    groups = [(g.last_use, i, g) for i, g in enumerate(plan.groups) if g.degrees.parameter > 1]
    return [group for *_, group in sorted(groups)]


def keeping(plan: Plan, count: int) -> Plan:
    """The plan with that many more copies kept."""
    names = {g.name for g in dropped(plan)[len(dropped(plan)) - count :]}
    groups = (replace(g, degrees=replace(g.degrees, parameter=1)) if g.name in names else g for g in plan.groups)
    return replace(plan, groups=tuple(groups))


def keeping_none(plan: Plan) -> Plan:
    """The plan with every copy dropped that is sharded as those that are."""
    groups = (replace(g, degrees=replace(g.degrees, parameter=g.degrees.gradient)) for g in plan.groups)
    return replace(plan, groups=tuple(groups))


def choose_unshard(plan: Plan, fits: Callable[[Plan], bool]) -> int:
    """How many more copies can be kept: the most that fit, if the plan itself does."""
    fewest, most = 0, len(dropped(plan))
    while fewest < most:
        middle = (fewest + most + 1) // 2
        fewest, most = (middle, most) if fits(keeping(plan, middle)) else (fewest, middle - 1)
    return fewest
