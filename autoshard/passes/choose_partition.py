"""Decision: which saved values that every process has alike are kept in parts.

Each is gathered for backward, which takes time on the wire, so as few as bring a step into its budget: those first that take the most for
the longest, since what forward makes first backward takes last. That stands against computing again, and where neither is enough both
are done. See [Note: Partitioned activations] in ops/part.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autoshard.passes.partition_activations import Parted
from autoshard.plan import Plan

WORTH = 1.02  # times a step's time: nearer than that, one that sends less is as likely to be faster
Forecast = Callable[[Plan], Plan]
Fit = Callable[[Plan, int], Plan]
Alike = Callable[[Plan], Sequence[Parted]]  # a plan's saved values that every process has alike, as forward makes them


def better(plan: Plan, than: Plan, budget: int) -> bool:
    """Whether it fits, and is faster than what fits; or else has the lower peak."""
    fits, fitted = (p.predicted.footprint <= budget for p in (plan, than))
    if fits and fitted:
        return (plan.predicted.step_seconds or 0.0) < (than.predicted.step_seconds or 0.0)
    return fits or (not fitted and plan.predicted.footprint < than.predicted.footprint)


def pays(plan: Plan, than: Plan, budget: int) -> bool:
    """Whether it fits where the other does not, or is faster by more than such a difference is foreseen to."""
    seconds, others = (p.predicted.step_seconds or 0.0 for p in (plan, than))
    return than.predicted.footprint > budget or WORTH * seconds < others


def fitting_in_parts(fit: Fit | None, alike: Alike, forecast: Forecast) -> Fit:
    """Brings a plan into a budget as `fit` does, or in parts, or by both: the fastest of what fits."""

    def fitted(plan: Plan, budget: int) -> Plan:
        again = fit(plan, budget) if fit else plan
        in_parts = choose_partition(plan, budget, alike, forecast)
        if fit and in_parts.predicted.footprint > budget:
            in_parts = _as_saved(fit(in_parts, budget), alike)
        return in_parts if better(in_parts, again, budget) and pays(in_parts, again, budget) else again

    return fitted


def _as_saved(plan: Plan, alike: Alike) -> Plan:
    """Without the values that it computes again."""
    saved = {value.name for value in alike(plan)}
    return replace(plan, partition_activations=tuple(name for name in plan.partition_activations if name in saved))


def choose_partition(plan: Plan, budget: int, alike: Alike, forecast: Forecast) -> Plan:
    """The plan with as few in parts as fit, by halves of what is left to try; else with all, if its peak is lower so."""
    names = _by_what_they_hold(alike(plan)) if plan.predicted.footprint > budget else []

    def with_first(count: int) -> Plan:
        return forecast(replace(plan, partition_activations=tuple(names[:count])))

    if not names:
        return plan
    found, few, most = with_first(len(names)), 1, len(names)
    if found.predicted.footprint > budget:
        return found if better(found, plan, budget) else plan
    while few < most:
        count = (few + most) // 2
        tried = with_first(count)
        few, most = (few, count) if tried.predicted.footprint <= budget else (count + 1, most)
        found = tried if better(tried, found, budget) else found
    return found


def _by_what_they_hold(alike: Sequence[Parted]) -> list[str]:
    """Their names, by bytes and how long these wait."""
    held = [value.bytes * (len(alike) - made) for made, value in enumerate(alike)]
    return [alike[i].name for i in sorted(range(len(alike)), key=lambda i: -held[i])]
