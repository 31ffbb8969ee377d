"""Decision: which groups every process has whole, as at stage 0, where the others' rows are shared. What is whole is not gathered, so
forward waits for less; its gradients are summed for all, which takes a link about twice as long in backward. Where gathers are waited
for and backward computes longer than its reductions take, or where it waits for those while forward leaves the link alone, some groups of
each kind take less of a step than all of one.

From the fastest of one kind on, groups become of the other one by one. Whole ones in the order in which forward gathers them: it waits for
the first. Shared ones in the order in which backward reduces them: before these are gathered forward has computed for longest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from autoshard.passes.choose_unshard import has_room
from autoshard.plan import Degrees, Plan
from autoshard.units import counted

LOOKS = 8  # forecasts, each of which takes seconds; where there are more groups, every eighth goes with the first
EACH = 0.997  # of the time without, at most: a look that spares less is not taken
WORTH = 0.97  # of the time of the best of one stage, at most: what spares less was measured to be no faster
WAITING = 0.05  # of a step; of who waits less a third would hardly be worth the looks
BACKWARD = 2 / 3  # of what is computed, as matmuls have it
_TRAVELLING = ("gathered", "communication")  # categories that whole groups may have nothing of


def choose_whole(
    chosen: Plan, fitting: Sequence[Plan], budget: int | None, forecast: Callable[[Plan], Plan], states: Callable[[Plan], int]
) -> Plan:
    """The chosen plan, or one of those that fit with some of its groups whole, where its step is shorter. chosen: the fastest of `fitting`,
    of one stage each. budget: bytes a process; None: no limit is known. states: bytes of rows and of the optimizer's state, which need no
    forecast."""
    shared = [plan for plan in fitting if plan.sharded and not plan.compression and not plan.early]
    if not shared or not _may_gain(chosen):
        return chosen
    least, found = min(shared, key=_seconds), chosen
    looks = _looks(least)
    kept = states(least)
    whole = set[str]() if chosen.sharded else {name for names in looks for name in names}
    for names in reversed(looks) if chosen.sharded else looks:
        others = whole.symmetric_difference(names)
        looked_at = with_whole(least, others)
        if budget is not None and _at_least(least, states(looked_at) - kept) > budget:
            continue  # without a forecast, of which each takes seconds
        further = forecast(looked_at)
        if has_room(further, found, budget) and _seconds(further) <= EACH * _seconds(found):
            found, whole = further, others
    if _seconds(found) > WORTH * _seconds(chosen):
        return chosen
    return found.because(_reason(found, least, chosen))


def _may_gain(plan: Plan) -> bool:
    """Whether enough is waited for, and, if rows are shared, a link has less to do than compute in backward; not where nothing was
    simulated."""
    predicted = plan.predicted
    backward = sum(traffic.seconds for traffic in predicted.traffic if traffic.phase == "backward")
    room = not plan.sharded or backward < BACKWARD * predicted.seconds.get("compute", 0.0)
    return predicted.seconds.get("waiting", 0.0) > WAITING * _seconds(plan) and room


def _at_least(least: Plan, more: int) -> int:
    """Bytes of a step with so many more of states, though nothing of what travels were there."""
    memory = least.predicted.memory
    return least.predicted.peak_bytes + more - sum(memory.get(category, 0) for category in _TRAVELLING)


def with_whole(plan: Plan, names: Collection[str]) -> Plan:
    """The plan with these groups whole in every process."""
    whole = Degrees.of_stage(0, plan.shard_size)
    groups = (replace(g, degrees=whole, reduction="reduce_scatter") if g.name in names else g for g in plan.groups)
    return replace(plan, groups=tuple(groups))


def _looks(plan: Plan) -> list[list[str]]:
    """The shared groups that are looked at together, as far from each other as they can be."""
    shared = [group for group in plan.groups if group.degrees.optimizer > 1]
    names = [group.name for group in sorted(shared, key=lambda group: -group.last_use)]
    return [names[first::LOOKS] for first in range(min(LOOKS, len(names)))]


def _seconds(plan: Plan) -> float:
    return plan.predicted.step_seconds or 0.0


def _reason(found: Plan, least: Plan, chosen: Plan) -> str:
    whole = sum(now.degrees.stage < before.degrees.stage for now, before in zip(found.groups, least.groups))
    less = 1 - _seconds(found) / _seconds(chosen)
    why = "forward gathers less, and backward has time to sum more" if chosen.sharded else "of the others forward gathers what backward sums less"
    return (
        f"ZeRO-{found.stage} with {counted(whole, 'group', 'groups')} whole in every process: {why}; "
        f"a step of {_seconds(found):.3g} s, {less:.1%} less than the best of one stage"
    )
