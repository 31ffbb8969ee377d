"""Decision: reductions of how many groups are on their way at once. Two, so that the link never waits for the computation; one where
memory is short and a simulated step hardly takes longer, or where nothing else makes it fit: each holds the gradients that it was packed of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoshard.inventory import Inventory
from autoshard.passes.choose_partition import Fit
from autoshard.passes.costs import costs_of
from autoshard.plan import Plan

HARDLY = 1.01  # times as long, at most: what does not fit otherwise is computed again
MUCH = 0.01  # of a budget


def packed(plan: Plan, inventory: Inventory) -> int:
    """Bytes of gradients that one reduction holds, at most."""
    return max((cost.reduced for cost in costs_of(plan, inventory)), default=0)


def spares_much(plan: Plan, inventory: Inventory, budget: int | None) -> bool:
    """Whether fewer reductions on their way may be what makes a step fit."""
    return budget is not None and not _has_one(plan) and packed(plan, inventory) > MUCH * budget


def choose_behind(plan: Plan, budget: int | None, forecast: Callable[[Plan], Plan]) -> Plan:
    """With one, where two do not fit, and that hardly takes longer. budget: bytes a process; None: no limit is known."""
    before = plan.predicted
    if budget is None or before.footprint <= budget or not before.step_seconds or _has_one(plan):
        return plan
    found = forecast(one_at_a_time(plan))
    took = found.predicted.step_seconds
    fewer = found.predicted.footprint < before.footprint
    return found if fewer and took and took <= HARDLY * before.step_seconds else plan


def fitting_behind(plan: Plan, budget: int, fitted: Fit, look: Fit, short: int) -> Plan:
    """The plan brought into the budget by `fitted`; where that does not do it, one with a single reduction on its way if that takes less,
    however long. short: of what lacks more bytes this is not tried."""
    found = fitted(plan, budget)
    return leaner(found, plan, budget, fitted, look) if 0 < found.predicted.footprint - budget <= short else found


def leaner(found: Plan, plan: Plan, budget: int, fitted: Fit, look: Fit) -> Plan:
    """A plan as it was found to fit best, or with one reduction on its way: the one that takes less."""
    if _has_one(found) or not found.predicted.step_seconds:
        return found
    other = fitted(look(one_at_a_time(plan), budget), budget)
    return min(found, other, key=lambda each: each.predicted.footprint)


def _has_one(plan: Plan) -> bool:
    """At most, as a lone process has none."""
    return plan.behind == 1 or plan.leaves_alone


def one_at_a_time(plan: Plan) -> Plan:
    """With one reduction on its way."""
    said = f"memory is short: each reduction is waited for before the next is packed, where {plan.behind} could be on their way"
    return replace(plan, behind=1).because(said)
