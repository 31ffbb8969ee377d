"""Budgets of memory, and the peaks of steps that are computed again until they fit."""

from __future__ import annotations

import importlib
import itertools
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import autoshard
from autoshard import Cluster, Config
from autoshard.cost_model.hardware import DEVICES
from autoshard.errors import BudgetError
from autoshard.plan import Plan
from autoshard.report import plan_tables, rendered
from autoshard.units import parse_bytes
from tests import models
from tests.peaks import above_held
from tests.recomputed import TEXT, Codegen, Deep, Stack, forecaster_of, grown_by, inputs, planned
from tests.small import in_full


def _pictures(g: torch.Generator) -> models.Batch:
    return {"pixel_values": torch.randn(64, 3, 16, 16, generator=g), "labels": torch.zeros(64, dtype=torch.long)}


FAMILIES = {
    "stack": models.Case(Stack, lambda g: {"x": inputs(64)}, lambda loss: loss),
    "deep": models.Case(Deep, lambda g: {"x": inputs(64)}, lambda loss: loss),
    "llama": models.Case(partial(models.llama, 4), TEXT),
    "gpt2": models.Case(partial(models.gpt2, 4), TEXT),
    "bert": models.Case(partial(models.bert, 4), TEXT),
    "vit": models.Case(partial(models.vit, 4), _pictures),
    "conv": models.Case(partial(models.ResNet, 16), models.features(32, 16, 10, 10), lambda out: out[1]),
}


@pytest.mark.full
@pytest.mark.parametrize("name", ["train_llama", "train_trainer"])
def test_in_the_budgets_that_examples_name_only_rows_fit(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whole copies do not, whatever is computed again."""
    root, ids = Path(__file__).parents[1], torch.zeros(8, 128, dtype=torch.long)
    monkeypatch.syspath_prepend(root / "examples")
    example = importlib.import_module(name)
    trained = example.build()[:2] if name == "train_llama" else (example.make_llama(256, 4), {"input_ids": ids, "labels": ids})
    (budget,) = re.findall(r"--memory-budget (\w+)", example.__doc__)
    assert name == "train_trainer" or f"$(or $(BUDGET),{budget})" in (root / "Makefile").read_text()
    plans = [autoshard.plan(*trained, Config(zero=z, recompute="full", codegen="eager"), Cluster(1, 2, DEVICES["cpu"])) for z in (3, 0)]
    rows, whole = (plan.predicted.peak_bytes for plan in plans)
    assert rows < parse_bytes(budget) < whole


def test_dropout_of_generated_code_in_blocks_that_are_graphs_of_their_own() -> None:
    """The seeds that Inductor draws belong to no block."""
    forecaster = forecaster_of(Deep(), inputs(64), "inductor")
    plan = planned(forecaster)
    fitted = forecaster.fit(plan, int(0.8 * plan.predicted.peak_bytes))
    assert fitted.recompute and fitted.predicted.peak_bytes <= 0.8 * plan.predicted.peak_bytes


@pytest.mark.parametrize(
    ("name", "codegen"),
    [*(in_full(name, "eager") for name in FAMILIES), *(in_full(name, "inductor") for name in ("llama", "gpt2", "bert", "vit"))],
)
def test_the_peak_follows_the_budget(name: str, codegen: Codegen) -> None:
    """Predicted and measured, from all that torch saves down to the least that is possible."""
    if codegen == "inductor" and torch.__version__ < (2, 13):
        pytest.skip("how Inductor fuses is foreseen as torch 2.13 does")
    case = FAMILIES[name]
    batch = case.batch(torch.Generator().manual_seed(0))
    forecaster = forecaster_of(case.build().train(), batch, codegen)
    plan = planned(forecaster)
    floor = forecaster.fit(plan, 0).predicted.peak_bytes
    top, seconds, measured = plan.predicted.peak_bytes, 0.0, math.inf
    assert floor < 0.8 * top
    for eighth in range(8, -1, -2 if name == "deep" or codegen == "inductor" else -1):
        budget = floor + eighth * (top - floor) // 8
        found = forecaster.fit(plan, budget)
        predicted, before = found.predicted, measured
        assert predicted.peak_bytes <= budget
        assert (predicted.step_seconds or 0) >= seconds * (1 - 1e-6)
        seconds = predicted.step_seconds or 0.0
        grown, held = grown_by(case, batch, found, codegen), predicted.peak_bytes - above_held(predicted)
        measured = held + grown
        assert grown == pytest.approx(above_held(predicted), rel=0.03)
        assert measured <= budget * 1.001 and measured <= before * 1.001


class Rectified(torch.nn.Module):
    """Before a wide head. Inductor computes the masks of all blocks' activations when forward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = torch.nn.ModuleList(Up() for _ in range(5)), torch.nn.Linear(32, 600)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).log_softmax(-1).square().mean()


class Up(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 256, bias=False), torch.nn.Linear(256, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def test_no_more_is_computed_again_than_a_budget_needs() -> None:
    """What ends forward is of no one block: where the peak is there, each of the blocks may bring it down."""
    forecaster = forecaster_of(Rectified(), inputs(16), "inductor")
    usual = planned(forecaster)
    for count in range(1, 4):
        first = forecaster(replace(usual, recompute=tuple((f"layers.{i}", "full") for i in range(count))))
        found = forecaster.fit(usual, int(1.001 * first.predicted.footprint))
        assert first.predicted.footprint < usual.predicted.footprint
        assert found.predicted.footprint <= 1.001 * first.predicted.footprint
        assert (found.predicted.step_seconds or 0) <= 1.001 * (first.predicted.step_seconds or 0), (count, found.recompute)


class Normed(Up):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(super().forward(self.norm(x)), 0.1)


class Narrow(Stack):
    """Of blocks with few operations."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = torch.nn.ModuleList(Normed() for _ in range(2))


def test_more_is_computed_again_beside_gradients_of_earlier_batches() -> None:
    """One that counts them finds as much room as there is beside them, and no less."""

    def of(**options: object) -> Plan:
        config = Config(zero=0, codegen="eager", **options)  # type: ignore[arg-type]
        return autoshard.plan(Deep(), inputs(64), config, Cluster(1, 1, DEVICES["cpu"]))

    free = of()
    budget, earlier = free.predicted.peak_bytes, (free.predicted.accumulating or 0) - free.predicted.peak_bytes
    assert earlier > 0 and not of(memory_budget=budget).recompute
    beside = of(memory_budget=budget, accumulation="reduced")
    assert beside.recompute and budget - earlier < beside.predicted.peak_bytes <= budget
    assert beside.recompute == of(memory_budget=budget - earlier).recompute
    assert not of(memory_budget=budget + earlier, accumulation="reduced").recompute


@pytest.mark.full
def test_what_is_chosen_takes_no_longer_than_the_best_of_all_that_could_be_saved() -> None:
    """All subsets of what costs something to compute again, of each of two blocks, as a plan's file could say."""
    forecaster = forecaster_of(Narrow(), inputs(64))
    usual = planned(forecaster)
    operations = ("native_layer_norm#0", "mm#0", "relu#0", "mm#1", "native_dropout#0")
    kept = itertools.chain.from_iterable(itertools.combinations(operations, n) for n in range(1, len(operations) + 1))
    policies = ["none", "full", *(f"save {' '.join(names)}" for names in kept)]
    every = [forecaster(replace(usual, recompute=tuple(zip(("layers.0", "layers.1"), both)))) for both in itertools.product(policies, repeat=2)]
    steps = sorted((p.predicted.footprint, p.predicted.step_seconds or 0.0) for p in every)
    for i in range(0, len(steps), len(steps) // 12):
        budget = steps[i][0]
        found, best = forecaster.fit(usual, budget).predicted, min(seconds for footprint, seconds in steps if footprint <= budget)
        assert found.footprint <= budget and (found.step_seconds or 0.0) <= 1.01 * best, (i, budget, found.step_seconds, best)


@pytest.mark.full
def test_a_budget_decides_and_says_so() -> None:
    x = inputs(64)
    plain = autoshard.plan(Stack(), x, Config(codegen="eager", recompute="none"))
    top = plain.predicted.peak_bytes
    made = autoshard.plan(Stack(), x, Config(codegen="eager", memory_budget=round(top * 0.8)))
    assert not plain.recompute and made.recompute and made.predicted.peak_bytes <= top * 0.8
    text = rendered(plan_tables(made))
    assert "recomputed in backward" in text and any("recompute: " in reason for reason in made.why), text
    assert Plan.from_json(made.to_json()).hash == made.hash
    with pytest.raises(BudgetError, match="with recomputation, a step takes .* \\(at "):
        autoshard.plan(Stack(), x, Config(codegen="eager", memory_budget=round(top * 0.1)))
