"""Decision: reductions of how many groups are on their way at once. Two, so that the link never waits for the computation; one where
memory is short and a simulated step hardly takes longer: each holds the gradients that it was packed of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoshard.plan import Plan
from autoshard.units import bytes_text

HARDLY = 1.01  # times as long, at most: what does not fit otherwise is computed again


def choose_behind(plan: Plan, budget: int | None, forecast: Callable[[Plan], Plan]) -> Plan:
    """With as many as fit, or as few as take hardly longer. budget: bytes a process; None: no limit is known."""
    before = plan.predicted
    if budget is None or before.footprint <= budget or not before.step_seconds or plan.behind == 1:
        return plan
    found = forecast(replace(plan, behind=1))
    spared, took = before.footprint - found.predicted.footprint, found.predicted.step_seconds
    if spared <= 0 or not took or took > HARDLY * before.step_seconds:
        return plan
    return found.because(f"each reduction is waited for before the next is packed: {bytes_text(spared)} less")
