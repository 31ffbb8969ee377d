"""What is chosen to be computed again: against brute force, and what no plan can say."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autoshard
from autoshard import Config
from autoshard.candidates import LEVELS, LITTLE, fills, levels
from autoshard.capture import Capture, capture
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES, Link
from autoshard.cost_model.optimizer import NAMED
from autoshard.errors import ConfigError, PlanError
from autoshard.forecast import Forecaster
from autoshard.passes.choose_recompute import (
    CLOSE,
    SPARE,
    Aim,
    Block,
    Option,
    choose,
    choose_with_spare,
    least,
    shifted,
)
from autoshard.passes.choose_unshard import dropped
from autoshard.passes.choose_zero import Circumstances, make_plan
from autoshard.plan import Plan
from autoshard.rehearsal import Prepared
from tests.recomputed import Deep, Few, Looped, Plain, Stack, forecaster_of, inputs, planned
from tests.small import in_full


@st.composite
def blocks(draw: st.DrawFn) -> list[Block]:
    def option(number: int) -> Option:
        saved, more = draw(st.integers(0, 20)), draw(st.integers(0, 20))
        return Option(str(number), saved, saved + more, float(draw(st.integers(1, 20))))

    def several(at: int) -> list[Option]:
        """Of as many blocks as there are up to this one, at most."""
        spans = draw(st.lists(st.integers(2, at + 1), max_size=2)) if at else []
        return [replace(option(10 + k), spans=n) for k, n in enumerate(spans)]

    return [Block(str(i), (*map(option, range(draw(st.integers(1, 3)))), *several(i))) for i in range(draw(st.integers(1, 4)))]


def _every(blocks: list[Block]) -> Iterator[tuple[Option, ...]]:
    """All choices."""
    if not blocks:
        yield ()
    for option in blocks[-1].options if blocks else ():
        yield from ((*before, option) for before in _every(blocks[: len(blocks) - option.spans]))


def _peak(taken: tuple[Option, ...]) -> int:
    before = itertools.accumulate((o.saved for o in taken), initial=0)
    return max(b + o.peak for b, o in zip(before, taken))


@pytest.mark.parametrize(
    ("make", "count", "codegen"),
    [(Few, 3, "eager"), (Looped, 1, "inductor"), in_full(Few, 3, "inductor"), in_full(Looped, 1, "eager")],
)
def test_blocks_are_listed_by_themselves_and_say_what_the_whole_step_takes(
    monkeypatch: pytest.MonkeyPatch, make: type[nn.Module], count: int, codegen: Any
) -> None:
    forecaster = forecaster_of(make(), inputs(16), codegen)
    plan = planned(forecaster)
    with monkeypatch.context() as patch:
        patch.setattr(Prepared, "cut", lambda *_: pytest.fail("the whole step was cut"))
        blocks = forecaster.blocks(plan)
    assert [b.name for b in blocks] == [f"layers.{i}" for i in range(count)] and len(blocks[0].options) > 4
    for which in (1, 2, 4, -1):
        taken = tuple(b.options[which] for b in blocks)
        simulated = forecaster._with(plan, blocks, taken).predicted
        assert _peak(taken) == pytest.approx(simulated.peak_bytes, rel=0.02)
        assert sum(o.seconds for o in taken) == pytest.approx(simulated.step_seconds - simulated.seconds["optimizer"], rel=0.02)


@pytest.mark.parametrize(("codegen", "shares"), [("eager", (0.8, 1.0)), in_full("eager", (0.9,)), in_full("inductor", (0.75, 1.0))])
def test_gathered_copies_and_activations_share_a_budget(monkeypatch: pytest.MonkeyPatch, codegen: Any, shares: tuple[float, ...]) -> None:
    """Where processes wait for gathers, computing again makes room for copies that are not gathered again; also where all would fit as it is.
    On Inductor and in 0.8 of the memory one block alone leaves room for all copies, whether that was looked for or not. Without a budget
    a stage's own memory is one."""
    plain, alone = _at_stage_3(SLOW, codegen, fits=False), _at_stage_3(SLOW, codegen)
    for share in shares:
        budget = int(share * plain.predicted.peak_bytes)
        together = _at_stage_3(SLOW, codegen, budget)
        with monkeypatch.context() as patch:
            patch.setattr(Forecaster, "_copies", lambda *_: {})
            apart = _at_stage_3(SLOW, codegen, budget)
        assert together.recompute and len(dropped(together)) < len(dropped(apart)), share
        assert together.predicted.peak_bytes <= budget
        assert together.predicted.step_seconds < 0.98 * apart.predicted.step_seconds
        assert any("kept for backward" in why for why in together.why)
    assert alone.recompute and len(dropped(alone)) < len(dropped(plain))
    assert alone.predicted.peak_bytes <= plain.predicted.peak_bytes
    assert alone.predicted.step_seconds < 0.98 * plain.predicted.step_seconds
    assert any("no budget was said" in why for why in alone.why)


def test_a_stage_that_does_not_wait_for_gathers_is_left_as_it_is() -> None:
    fast = replace(SLOW, device=replace(SLOW.device, across=Link(latency=1e-6, bandwidth=1e12, scatters=False), wake=0.0))
    plain, alone = _at_stage_3(fast, "eager", fits=False), _at_stage_3(fast, "eager")
    assert dropped(plain) and alone == plain


SLOW = Cluster(2, 1, replace(DEVICES["cpu"], across=Link(latency=1e-3, bandwidth=1e7, scatters=False)))


@functools.cache
def _captured() -> Capture:
    return capture(Few(), inputs(64))


def _at_stage_3(cluster: Cluster, codegen: Any, budget: int | None = None, fits: bool = True) -> Plan:
    """fits: whether anything may be computed again."""
    config = Config(zero=3, replicate_below=0, codegen=codegen, memory_budget=budget)
    forecaster = Forecaster(_captured(), NAMED["adamw"], cluster, codegen)
    fit = forecaster.fit if fits else None
    return make_plan(_captured().inventory, config, Circumstances(cluster, budget), forecaster, fit)


class Frozen(Few):
    """First blocks without a backward; `deep` of them."""

    def __init__(self, deep: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Plain() for _ in range(deep + 3))
        for layer in self.layers[:deep]:
            layer.requires_grad_(False)


class Chain(nn.Sequential):
    """Of numbered layers, one without parameters, some without an operation, some that generated code makes parts of others."""

    def __init__(self) -> None:
        super().__init__(nn.Tanh(), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Identity(), nn.Linear(64, 32), nn.GELU(), nn.LayerNorm(32))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
@pytest.mark.parametrize(("make", "gains"), [(Frozen, True), (Chain, False), (functools.partial(Frozen, 8), False)])
def test_blocks_of_all_kinds_are_looked_at(make: Callable[[], nn.Module], gains: bool, codegen: Any) -> None:
    """Of single layers what enters each is saved; what lies behind frozen blocks that are graphs of their own is torch's to decide."""
    forecaster = forecaster_of(make().train(), inputs(16), codegen)
    plan = planned(forecaster)
    fitted = forecaster.fit(plan, plan.predicted.peak_bytes // 2).predicted
    assert fitted.peak_bytes < (0.8 if gains else 1.001) * plan.predicted.peak_bytes


class Switched(Few):
    """Blocks that cannot be graphs of their own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return super().forward(x)


class Cloning(Plain):
    """Backward reads the clone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clone().sin()


class Cloned(Switched):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cloning() for _ in self.layers)


def test_what_is_chosen_to_be_saved_has_the_names_that_the_step_has_for_it() -> None:
    """Where the choice is made, a clone of each parameter is in the place of its gathered copy."""
    cluster = Cluster(1, 2, DEVICES["cpu"])
    forecaster = Forecaster(capture(Cloned(), inputs(16)), NAMED["adamw"], cluster, "eager")
    plan = make_plan(forecaster.captured.inventory, Config(zero=3, replicate_below=0), Circumstances(cluster, None), forecaster)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        choices = [(block.name, option.policy) for block in forecaster.blocks(plan) for option in block.options if "clone#" in option.policy]
        forecaster(replace(plan, recompute=(choices[0],)))
    assert not [str(w.message) for w in said if "is no operation of" in str(w.message)]


def test_a_look_at_what_blocks_would_be_by_themselves_warns_of_nothing() -> None:
    forecaster = forecaster_of(Switched(), inputs(16))
    plan = planned(forecaster)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert all(len(block.options) > 4 for block in forecaster.blocks(plan))
    assert not any("outline_blocks" in str(w.message) for w in said)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(0, 100), st.integers(1, 1000))
def test_aims_end_at_the_highest_that_is_met(peaks: list[int], more: int, budget: int) -> None:
    """Of choices by their peaks, each simulated a little higher than it was taken to be."""
    peaks = sorted({*peaks, 1})

    def simulated(aim: Aim) -> int:
        return max([p for p in peaks if p <= aim.at], default=peaks[0]) + more

    aim, found = Aim(budget), []
    for _ in range(40):
        found.append(simulated(aim))
        aim = aim.after(found[-1] - budget)
        if aim.settled:
            break
    fitting = [p + more for p in peaks if p + more <= budget]
    assert aim.settled == bool(fitting)
    if fitting:
        assert max(p for p in found if p <= budget) >= max(fitting) * (1 - 2 * CLOSE) - more - 1


@given(st.lists(st.integers(1, 1 << 20), max_size=3 * LEVELS))
def test_levels_save_one_value_more_each_where_they_can(sizes: list[int]) -> None:
    found = levels(sizes)
    large = [i for i, size in enumerate(sizes, 1) if size >= LITTLE * sum(sizes)]
    assert found == sorted(set(found)) and len(found) <= LEVELS and found[-1:] == ([len(sizes)] if sizes else [])
    if len(large) < LEVELS:
        assert found[: len(large)] == large


@given(st.lists(st.integers(1, 1 << 20), max_size=2 * LEVELS))
def test_fills_lack_one_smaller_value_of_a_point(sizes: list[int]) -> None:
    values = {str(i): size for i, size in enumerate(sizes)}
    points = [list(values)[:count] for count in levels(sizes)]
    found = list(fills(points, values))
    for fill in found:
        (point,) = [point for point in points if len(point) == len(fill) + 1 and set(fill) < set(point) and point[-1] == fill[-1]]
        (lacks,) = set(point) - set(fill)
        assert LITTLE * sum(sizes) <= values[lacks] < values[point[-1]]
    assert bool(found) == any(LITTLE * sum(sizes) <= values[k] < values[point[-1]] for point in points for k in point)


@given(blocks(), st.integers(0, 80))
def test_the_choice_is_that_of_brute_force(blocks: list[Block], budget: int) -> None:
    every = list(_every(blocks))
    lowest = min(map(_peak, every))
    assert _peak(least(blocks)) == lowest
    assert sum(o.saved for o in least(blocks)) == min(sum(o.saved for o in taken) for taken in every if _peak(taken) == lowest)
    fitting = [sum(o.seconds for o in taken) for taken in every if _peak(taken) <= budget]
    taken = choose(blocks, budget)
    assert (taken is None) == (not fitting)
    if taken is not None:
        assert _peak(taken) <= budget and sum(o.seconds for o in taken) == min(fitting)
    spared = choose_with_spare(blocks, budget)
    assert (spared is None) == (taken is None)
    if spared is not None:
        assert _peak(spared) <= budget and sum(o.seconds for o in spared) <= (1 + SPARE) * min(fitting)


@given(blocks())
def test_a_shifted_choice_differs_in_one_block_which_is_as_its_neighbour(blocks: list[Block]) -> None:
    taken = tuple(block.options[0] for block in blocks)
    for other in shifted(blocks, taken):
        (at,) = [i for i, (a, b) in enumerate(zip(taken, other, strict=True)) if a != b]
        assert other[at] in blocks[at].options and other[at].spans == 1
        assert other[at].policy in {taken[i].policy for i in (at - 1, at + 1) if 0 <= i < len(taken)}


def test_both_of_two_neighbours_may_be_as_the_other() -> None:
    low, high, over = Option("full", 0, 9, 2.0), Option("none", 5, 9, 1.0), Option("full", 0, 9, 2.0, spans=2)
    blocks = [Block(name, (low, high)) for name in "abc"]
    assert list(shifted(blocks, (high, high, low))) == [(high, low, low), (high, high, high)]
    assert not list(shifted(blocks, (high, high, high))) and not list(shifted(blocks, (over, low)))


DECIDE = """
import sys
from tests.recomputed import Few, forecaster_of, inputs, planned
forecaster = forecaster_of(Few(), inputs(16), "inductor")
plan = planned(forecaster)
for share in (0.0, 0.9, 0.95):
    sys.stdout.write(forecaster.fit(plan, int(share * plan.predicted.peak_bytes)).to_json())
"""


@pytest.mark.full
def test_plans_are_the_same_whatever_order_sets_have() -> None:
    """To the byte, in processes of their own."""
    found = set()
    for seed in ("0", "1", "2"):
        done = subprocess.run([sys.executable, "-c", DECIDE], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=120)
        assert not done.returncode, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


def test_a_little_of_a_budget_is_left_where_that_costs_nothing() -> None:
    same, other = (Block("a", (Option("none", 0, 8192, 1.0), Option("full", 0, 8000, seconds))) for seconds in (1.0, 2.0))
    assert [choose_with_spare([block], 8192)[0].policy for block in (same, other)] == ["full", "none"]  # type: ignore[index]


@pytest.mark.parametrize("stepped", [True, in_full(False)])
def test_an_evaluation_that_comes_first_is_planned_as_training_if_an_optimizer_waits(stepped: bool) -> None:
    torch.compiler.reset()
    model = Deep()
    budget = int(0.8 * planned(forecaster_of(Deep(), inputs(64))).predicted.footprint)
    optimizer = torch.optim.AdamW(model.parameters()) if stepped else None
    run = torch.compile(model, backend=autoshard.backend(Config(memory_budget=budget, codegen="eager", verbose=False)))
    with torch.no_grad():
        run(inputs(64))
    plan = autoshard.plan_of(model)
    assert plan is not None and bool(plan.recompute) == stepped
    del optimizer


def test_bad_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="recompute: 'some' is not legal"):
        Config(recompute="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Linear has none"):
        autoshard.plan(nn.Linear(2, 2), torch.ones(1, 2), Config(recompute="full"))
    text = autoshard.plan(Stack(), inputs(), Config(recompute="full")).to_json()
    with pytest.raises(PlanError, match="recompute: 'most' is not legal"):
        Plan.from_json(text.replace('"full"', '"most"'))
    with pytest.raises(PlanError, match=r"recompute: .*, 7\).* is not legal; legal: a list, each \[a text, a text\]"):
        Plan.from_json(text.replace('"full"', "7"))
    for policy in ("offload addmm#0", "save addmm#0 offload addmm#1", "save addmm#0 addmm#0", "save addmm#0 save", "save addmm", "save"):
        with pytest.raises(PlanError, match=rf"recompute: '{policy}' is not legal; .*, or operations behind a verb \(save\), as in 'save mm#0'"):
            Plan.from_json(text.replace('"full"', f'"{policy}"'))
    with pytest.raises(PlanError, match="recompute: 'layers.0' has two policies; legal: one a block"):
        Plan.from_json(text.replace('"layers.1"', '"layers.0"'))
