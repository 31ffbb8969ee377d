"""Decision: how many groups ahead of their use gathers start. One, unless a simulated step is shorter with more: where computation
is uneven a link has something to do meanwhile, for the memory of one more gathered copy each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoshard.passes.choose_unshard import has_room
from autoshard.plan import Plan

MOST = 4
WORTH = 0.99  # of the time with one less, at most
IDLE = 0.02  # of a step; who waits less for collectives has nothing to gain


def choose_prefetch(plan: Plan, budget: int | None, forecast: Callable[[Plan], Plan]) -> Plan:
    """With the prefetch that a forecast says is worth it. budget: bytes a process, those of its device where none were
    said; None: no limit is known."""
    found = plan
    while found.ahead < MOST and waits(found):
        further = forecast(replace(found, ahead=found.ahead + 1))
        before, after = found.predicted.step_seconds, further.predicted.step_seconds
        if not has_room(further, found, budget) or not before or not after or after > WORTH * before:
            break
        found = further
    if found is plan:
        return plan
    less = 1 - (found.predicted.step_seconds or 0.0) / (plan.predicted.step_seconds or 1.0)
    return found.because(f"gathers start {found.ahead} groups before their use: {less:.1%} less time than with {plan.ahead}")


def waits(plan: Plan) -> bool:
    """Whether gathers may be waited for; not where nothing was simulated."""
    spent = plan.predicted.seconds
    return plan.sharded and bool(spent) and spent.get("waiting", 0.0) > IDLE * sum(spent.values())
