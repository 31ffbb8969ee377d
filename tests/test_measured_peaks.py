"""The peak that a plan says, beside what two processes take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.report import plan_tables, rendered
from autoshard.runtime.dtensors import local
from tests.cluster import Cluster
from tests.peaks import above_held, grown, grown_in_a_step
from tests.recomputed import Deep, inputs
from tests.small import compiled_pair, config, in_full, residues, step_each


class Wide(nn.Module):
    """Each weight is a group of its own, and as large as all activations together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(256, 256), nn.GELU())), nn.Linear(256, 16))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), torch.zeros(len(x), dtype=torch.long))


def measured(plan: autoshard.Plan, codegen: str) -> int:
    """By how many bytes a step goes above what is predicted to be there between steps."""
    model, _, compiled = compiled_pair(config("auto", plan=plan, codegen=codegen, replicate_below="auto"), Wide)
    x, optimizer = torch.randn(64, 256), torch.optim.SGD(model.parameters())
    return grown_in_a_step(lambda: compiled(x), optimizer) + sum(r.error.nbytes + r.factor.nbytes for r in residues(model))


@pytest.mark.parametrize(("compression", "codegen"), [(None, "eager"), in_full(None, "inductor"), in_full("powersgd", "inductor"), in_full("powersgd", "eager")])
def test_the_peak_is_the_measured_one(two: Cluster, compression: str | None, codegen: str) -> None:
    """Of stage 0: how much of gathers overlaps in a step this small is a question of time."""
    settings = config(0, codegen=codegen, optimizer="sgd", compression=compression)
    plan = autoshard.plan(Wide(), torch.randn(64, 256), settings, Machines(1, 2, DEVICES["cpu"]), torch.optim.SGD)
    for found in two.run(measured, plan, codegen):
        assert above_held(plan.predicted) == pytest.approx(found, rel=0.03), plan.predicted


class OfALoss(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.loss = nn.Linear(8, 256), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.up(x).sigmoid(), y)


@pytest.mark.parametrize("name", ["mse_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss"])
def test_losses_are_there_until_backward_is_over(name: str) -> None:
    """As large as they lie; of one process."""
    model, given = OfALoss(getattr(nn.functional, name)), (torch.rand(512, 8), torch.rand(512, 256))
    settings = config(0, optimizer="sgd")
    plan = autoshard.plan(model, given, settings, Machines(1, 1, DEVICES["cpu"]), torch.optim.SGD)
    compiled = torch.compile(model, backend=autoshard.backend(settings))
    found = grown_in_a_step(lambda: compiled(*given), torch.optim.SGD(model.parameters()))
    assert above_held(plan.predicted) == pytest.approx(found, rel=0.01), plan.predicted


def measured_with_gradients(plan: autoshard.Plan, apart: bool = False) -> tuple[int, int]:
    """By how many bytes a step goes above what is there before it, earlier gradients among that; and the bytes of these. apart: they
    are of a backward inside `no_sync`."""
    model, _, compiled = compiled_pair(config("auto", plan=plan, replicate_below="auto"), Wide)
    x, optimizer = torch.randn(64, 256), torch.optim.SGD(model.parameters())
    grown_in_a_step(lambda: compiled(x), optimizer)
    with autoshard.no_sync(model) if apart else nullcontext():
        compiled(x).backward()
    gradients = sum(local(p.grad).nbytes for p in model.parameters() if p.grad is not None)

    def second() -> None:
        compiled(x).backward()
        step_each(optimizer)

    return grown(second), gradients


def test_the_peak_with_earlier_gradients_is_the_measured_one(two: Cluster) -> None:
    plan = autoshard.plan(Wide(), torch.randn(64, 256), config(0, optimizer="sgd"), Machines(1, 2, DEVICES["cpu"]), torch.optim.SGD)
    predicted = plan.predicted
    assert predicted.accumulating is not None and predicted.accumulating > predicted.peak_bytes
    assert "added up over several batches" in rendered(plan_tables(plan))
    for found, gradients in two.run(measured_with_gradients, plan):
        assert gradients > 0
        assert predicted.accumulating - predicted.peak_bytes + above_held(predicted) - gradients == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize(("accumulation", "zero"), [in_full("reduced", 0), in_full("reduced", 1), in_full("no_sync", 0), ("no_sync", 1)])
def test_a_budget_counts_earlier_gradients_where_the_config_says_so(two: Cluster, accumulation: str, zero: int) -> None:
    def planned(**options: Any) -> autoshard.Plan:
        settings = config(zero, optimizer="sgd", **options)
        return autoshard.plan(Wide(), torch.randn(64, 256), settings, Machines(1, 2, DEVICES["cpu"]), torch.optim.SGD)

    without, plan = planned(), planned(accumulation=accumulation)
    assert plan.predicted.accumulating is None and plan.hash == without.hash
    if accumulation == "reduced":
        assert plan.predicted.peak_bytes == without.predicted.accumulating
    for found, gradients in two.run(measured_with_gradients, plan, accumulation == "no_sync"):
        assert above_held(plan.predicted) - gradients == pytest.approx(found, rel=0.03)
    budget = without.predicted.peak_bytes
    assert planned(memory_budget=budget).predicted.footprint <= budget
    with pytest.raises(autoshard.AutoshardError, match="over the budget|does not fit|takes"):
        planned(memory_budget=budget, accumulation=accumulation)


def grown_by_each(plans: list[autoshard.Plan], codegen: str) -> list[int]:
    """By how many bytes a step goes above what is there between steps, by each plan."""
    found, x = [], inputs(64)
    for plan in plans:
        model, _, compiled = compiled_pair(config("auto", plan=plan, codegen=codegen, replicate_below="auto"), Deep)
        optimizer = torch.optim.AdamW(model.parameters())
        found.append(grown_in_a_step(partial(compiled, x), optimizer))
    return found


@pytest.mark.parametrize(("zero", "codegen"), [(3, "eager"), in_full(2, "eager"), in_full(0, "inductor"), in_full(3, "inductor")])
@pytest.mark.parametrize("shares", [(14, 10), in_full((16, 14, 12, 10))], ids=["two", "four"])
def test_peaks_follow_budgets_on_two_processes(two: Cluster, zero: int, codegen: str, shares: tuple[int, ...]) -> None:
    def planned(budget: int | None) -> autoshard.Plan:
        settings = config(zero, codegen=codegen, memory_budget=budget, recompute="auto" if budget else "none")
        return autoshard.plan(Deep(), inputs(64), settings, Machines(1, 2, DEVICES["cpu"]))

    top = planned(None).predicted.peak_bytes
    budgets = [top * share // 16 for share in shares]
    plans = [planned(budget) for budget in budgets]
    assert plans[-1].recompute
    for found in two.run(grown_by_each, plans, codegen):
        above = [above_held(plan.predicted) for plan in plans]
        assert found == pytest.approx(above, rel=0.03)
        taken = [plan.predicted.peak_bytes - more + grew for plan, more, grew in zip(plans, above, found)]
        assert all(peak <= budget * 1.001 for peak, budget in zip(taken, budgets)), (taken, budgets)
        assert all(later <= peak * 1.001 for peak, later in zip(taken, taken[1:])), taken
