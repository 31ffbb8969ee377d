from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autoshard
from autoshard import Config, Degrees, ParameterGroup, Plan
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.errors import BudgetError, ConfigError, PassError, PlanError
from autoshard.inventory import Inventory
from autoshard.passes.choose_unshard import _most, copies_of_blocks, keeping_none, keeping_of
from autoshard.passes.choose_zero import Circumstances, make_plan
from autoshard.passes.registry import pipeline_for
from autoshard.planning import check_passes_carry_out, check_plan_fits, first_look
from autoshard.units import parse_bytes
from tests.inventories import blocks, info, where


def test_a_stage_is_three_degrees() -> None:
    assert [str(Degrees.of_stage(s, 8)) for s in range(4)] == ["1/1/1", "1/1/8", "1/8/8", "8/8/8"]
    assert [Degrees.of_stage(s, 8).stage for s in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("degrees", [(2, 1, 1), (0, 1, 1), (2, 4, 8)])
def test_impossible_degrees_are_refused(degrees: tuple[int, int, int]) -> None:
    with pytest.raises(PlanError, match="legal:"):
        Degrees(*degrees)


def test_groups_follow_blocks_and_order_of_use() -> None:
    plan = make_plan(blocks(), Config(zero=3), where())
    assert [g.name for g in plan.groups] == [
        "embed", "layers.0", "layers.1", "layers.2", "layers.3", "replicated",
    ]  # fmt: skip
    assert plan.groups[-1].parameters == ("norm.weight",)
    assert str(plan.groups[-1].degrees) == "1/1/1"


def test_plans_survive_json_and_their_hash_ignores_predictions() -> None:
    plan = make_plan(blocks(), Config(precision="bf16"), where(budget=2**40))
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.hash == plan.hash and again.predicted == plan.predicted
    assert dataclasses.replace(plan, why=(), predicted=type(plan.predicted)()).hash == plan.hash
    assert dataclasses.replace(plan, compute="").hash != plan.hash
    older = {**json.loads(plan.to_json()), "regions": True}
    assert Plan.from_json(json.dumps(older)) == plan


def _taking(seconds: dict[int, float]) -> tuple[Callable[[Plan], Plan], list[int]]:
    """A forecast in which a step at each stage takes so long, and of which stages it was asked."""
    asked: list[int] = []

    def forecast(plan: Plan) -> Plan:
        stage = max(g.degrees.stage for g in plan.groups)
        asked.append(stage)
        return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, seconds={"compute": seconds[stage]}))

    return forecast, asked


@pytest.mark.parametrize(("slow", "chosen"), [(2.0, 1), (1.0, 0)])
def test_a_stage_whose_messages_take_hardly_longer_is_looked_at_too(slow: float, chosen: int) -> None:
    """An optimizer steps a part of what it does at stage 0."""
    forecast, asked = _taking({0: slow, 1: 1.5, 2: 0.1, 3: 0.1})
    large = Inventory("Net", tuple(info(f"layers.{i}.up", 8192, 8192) for i in range(4)))
    plan = make_plan(large, Config(), where(), forecast)
    assert max(g.degrees.stage for g in plan.groups) == chosen and set(asked) == {0, 1}


@pytest.mark.parametrize(("states", "seen"), [(0, [0]), (24, [0, 1])])
def test_a_stage_whose_step_makes_up_for_its_messages_is_looked_at_too(states: int, seen: list[int]) -> None:
    """Of small groups a gather and a reduction take longer than a sum, by what each message takes."""
    forecast, asked = _taking({0: 2.0, 1: 1.5, 2: 1.5, 3: 0.1})
    small = Inventory("Net", tuple(info(f"layers.{i}.up", 512, 512) for i in range(4)))
    make_plan(small, Config(), dataclasses.replace(where(8), optimizer_states=states), forecast)
    assert asked == seen


def test_an_optimizer_is_made_by_what_can_be_called() -> None:
    with pytest.raises(ConfigError, match=r"optimizer: 'sgd' is not legal; legal: what makes one .* by name in Config\(optimizer="):
        autoshard.plan(nn.Linear(8, 8), torch.zeros(2, 8), optimizer="sgd")  # type: ignore[arg-type]


def test_stages_1_and_2_are_as_long_on_the_wire_and_do_not_hide_a_third_that_is_no_longer() -> None:
    forecast, asked = _taking({0: 1.0, 1: 1.5, 2: 1.5, 3: 0.1})
    large = Inventory("Net", tuple(info(f"layers.{i}.up", 8192, 8192) for i in range(4)))
    plan = make_plan(large, Config(), Circumstances(Cluster(4, 1, DEVICES["cpu"]), None), forecast)
    assert max(g.degrees.stage for g in plan.groups) == 0 and asked == [1, 2, 0]


def test_one_process_trains_in_its_model_s_dtypes_and_says_so() -> None:
    plan = make_plan(blocks(), Config(precision="bf16"), where(1))
    assert (plan.compute, plan.reduce) == ("", "") and any(reason.startswith("precision: one process") for reason in plan.why)
    assert not any("precision" in reason for reason in make_plan(blocks(), Config(), where(1)).why)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 9}', '{"format": 1, "world": 2}'])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="plan:"):
        Plan.from_json(text)


@pytest.mark.parametrize("text", ["{}", "[]", "7"])
def test_a_plan_file_that_cannot_be_used_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(PlanError, match=f"^{file}: plan: not a plan file \\(no 'format' is in it\\)"):
        Plan.load(file)


def test_a_plan_file_that_is_not_there_is_named() -> None:
    with pytest.raises(PlanError, match="plan: 'nowhere.json' cannot be read"):
        Plan.load("nowhere.json")


def test_a_plan_file_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    file, plan = tmp_path / "plan.json", make_plan(blocks(), Config(zero=2), where())
    file.write_text(plan.to_json(), encoding="utf-8-sig")
    assert Plan.load(file) == plan


def test_nothing_is_called_simulated_that_was_not() -> None:
    """What the command line shows before a model is traced: all fit, and no step of them is known."""
    plan = first_look(nn.Linear(4096, 4096), Config(), Cluster(2, 8, DEVICES["h100"]))
    assert sum("over the budget" not in reason for reason in plan.why) == 7
    assert any(reason.endswith("(chosen: the least time on the wire of those that fit)") for reason in plan.why)


@pytest.mark.parametrize("name", ["direct", "direct_sums", "early"])
def test_what_is_done_or_not_is_true_or_false(name: str) -> None:
    """A text such as "no", edited into a file, is true to Python."""
    text = make_plan(blocks(), Config(zero=2), where()).to_json()
    with pytest.raises(PlanError, match=f"plan: {name}: 'no' is not legal; legal: true, false"):
        Plan.from_json(json.dumps({**json.loads(text), name: "no"}))


@pytest.mark.parametrize(
    ("part_of", "key", "value", "says"),
    [
        ((), "recomputte", [], "plan: 'recomputte' is not known; did you mean 'recompute'?"),
        ((), "axis", [], "plan: 'axis' is not known; did you mean 'axes'?"),
        (("groups", 0), "last_used", 3, "plan: groups: 'last_used' is not known; did you mean 'last_use'?"),
        (("groups", 0, "degrees"), "optimiser", 8, "plan: groups: degrees: 'optimiser' is not known; did you mean 'optimizer'?"),
        (("predicted",), "memry", {}, "plan: predicted: 'memry' is not known; did you mean 'memory'?"),
        (("predicted", "traffic", 0), "byte", 3, "plan: predicted: traffic: 'byte' is not known; did you mean 'bytes'?"),
        (("predicted",), "error", [0.1], r"plan: predicted: error: \(0.1,\) is not legal; legal: \[a number, a number\], or null"),
        ((), "axes", [["shard", 2, 4]], r"plan: axes: .*'shard', 2, 4.* is not legal; legal: a list, each \[a text, a whole number\]"),
        ((), "axes", [["shard", 8.0]], r"plan: axes: .*'shard', 8.0.* is not legal; legal: a list, each \[a text, a whole number\]"),
        ((), "axes", 8, r"plan: axes: 8 is not legal; legal: a list, each \[a text, a whole number\]"),
        ((), "world", 8.0, "plan: world: 8.0 is not legal; legal: a whole number"),
        ((), "world", True, "plan: world: True is not legal; legal: a whole number"),
        ((), "bucket", None, "plan: bucket: None is not legal; legal: a whole number"),
        ((), "recompute", ["layers.0"], r"plan: recompute: \('layers.0',\) is not legal; legal: a list, each \[a text, a text\]"),
        ((), "groups", {}, "plan: groups: {} is not legal; legal: a list, each ParameterGroup"),
        (("groups", 0), "degrees", 8, "plan: groups: degrees: 8 is not legal; legal: {...} of parameter, gradient, optimizer"),
        (("groups", 0), "last_use", "3", "plan: group '.*': last_use: '3' is not legal; legal: a whole number"),
        (("groups", 0), "parameters", "w", "plan: group '.*': parameters: 'w' is not legal; legal: a list, each a text"),
        (("groups", 0, "degrees"), "optimizer", "8", "degrees: optimizer: '8' is not legal; legal: a whole number"),
        (("predicted",), "memory", {"parameters": "1 GiB"}, "plan: predicted: memory: .* is not legal; legal: {a text: a whole number, ...}"),
        ((), "buffers", "rank0", "plan: buffers: 'rank0' is not legal; legal: broadcast, local"),
    ],
)
def test_what_a_plan_file_cannot_say_is_refused_by_name(part_of: tuple[Any, ...], key: str, value: Any, says: str) -> None:
    data = json.loads(make_plan(blocks(), Config(zero=2), where()).to_json())
    part = data
    for step in part_of:
        part = part[step]
    part[key] = value
    with pytest.raises(PlanError, match=says):
        Plan.from_json(json.dumps(data))


def test_a_plan_must_fit_its_mesh() -> None:
    with pytest.raises(PlanError, match="world says 8"):
        Plan(8, (("shard", 4),), ())
    with pytest.raises(PlanError, match="legal: 1 or the shard axis, 4"):
        Plan(4, (("shard", 4),), (ParameterGroup("a", ("a",), Degrees(1, 1, 2)),))
    alone = Degrees(1, 1, 1)
    with pytest.raises(PlanError, match="plan: 'b' is in two groups; legal: one a parameter"):
        Plan(4, (("shard", 4),), (ParameterGroup("a", ("a", "b"), alone), ParameterGroup("b", ("b",), alone)))
    with pytest.raises(ConfigError, match="makes 4 processes; the job has 8"):
        make_plan(blocks(), Config(mesh={"shard": 4}), where(8))


def test_what_a_plan_file_does_not_say_is_named() -> None:
    data = json.loads(make_plan(blocks(), Config(zero=2), where()).to_json())
    del data["groups"][0]["degrees"]["gradient"]
    with pytest.raises(PlanError, match="plan: groups: degrees: 'gradient' is missing; legal: all of parameter, gradient, optimizer"):
        Plan.from_json(json.dumps(data))


def test_a_plan_of_more_messages_than_a_step_can_have_is_refused() -> None:
    large = Inventory("Net", (info("up", 8192, 8192),))
    plan = Plan(4, (("shard", 4),), (ParameterGroup("", ("up",), Degrees(1, 4, 4)),))
    check_plan_fits(replace(plan, message=2**12), large, 4)
    with pytest.raises(PlanError, match="plan: message: 1 bytes make 268435456 messages of this model; legal: 0, or at most 100000 messages"):
        check_plan_fits(replace(plan, message=1), large, 4)


def test_a_plan_must_fit_its_model() -> None:
    scale = Inventory("Net", (info("scale"),))
    sharded, whole = (Plan(4, (("shard", 4),), (ParameterGroup("a", ("scale",), Degrees(1, 1, n)),)) for n in (4, 1))
    check_plan_fits(whole, scale, 4)
    with pytest.raises(PlanError, match=r"plan: 'scale', float32 of shape \(\), cannot be sharded; legal: a group with degrees of 1"):
        check_plan_fits(sharded, scale, 4)


@pytest.mark.parametrize(
    ("without", "config", "setting"),
    [
        ("sync_buffers", Config(zero=0), "buffers"),
        ("regather", Config(zero=3), "parameters' degrees"),
        ("recompute", Config(zero=0, recompute="full"), "recompute"),
        ("compress", Config(zero=0, compression="bf16"), "compression"),
        ("early_gathers", Config(zero=3, early_gathers=True), "early"),
    ],
)
def test_passes_that_a_plan_needs_must_be_there(without: str, config: Config, setting: str) -> None:
    plan = make_plan(blocks(), config, where())
    check_passes_carry_out(plan, pipeline_for(None, ()), buffers=True)
    with pytest.raises(PassError, match=f"passes: no pass '{without}', which carries out the plan's {setting}; legal: passes with it"):
        check_passes_carry_out(plan, [p for p in pipeline_for(None, ()) if p.name != without], buffers=True)
    check_passes_carry_out(make_plan(blocks(), Config(zero=0), where()), [], buffers=False)


def test_auto_takes_the_cheapest_that_fits() -> None:
    free = make_plan(blocks(), Config(), where())
    stages = [make_plan(blocks(), Config(zero=s), where()) for s in range(4)]
    cheapest = min(p.predicted.communication_seconds for p in stages)
    assert free.predicted.communication_seconds == cheapest
    tight = stages[3].predicted.peak_bytes
    chosen = make_plan(blocks(), Config(), where(budget=tight))
    assert max(g.degrees.stage for g in chosen.groups) == 3


def test_what_cannot_fit_is_not_asked_about_further() -> None:
    """Rows and gradients of stage 0 are too much, and so are the copies of stages 1 and 2, whatever is computed again."""
    asked: list[int] = []
    brought: list[int] = []

    def forecast(plan: Plan) -> Plan:
        stage = max(g.degrees.stage for g in plan.groups)
        asked.append(stage)
        memory = {"gathered": 2**30 if stage < 3 else 2**28, "activations": 2**30}
        return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, memory=memory, place="mm", seconds={"compute": 1.0}))

    def fit(plan: Plan, budget: int) -> Plan:
        brought.append(max(g.degrees.stage for g in plan.groups))
        return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, memory={"gathered": 2**28}))

    large = Inventory("Net", tuple(info(f"layers.{i}.up", 8192, 8192) for i in range(4)))
    plan = make_plan(large, Config(), where(8, 2**29 + 2**28), forecast, fit)
    assert max(g.degrees.stage for g in plan.groups) == 3 and set(asked) == {1, 2, 3} and brought == [3]
    assert any(why.startswith("ZeRO-0: ") and "and activations" in why for why in plan.why)
    with pytest.raises(BudgetError, match="ZeRO-3 on 8 processes"):
        make_plan(large, Config(), where(8, 2**27), forecast, fit)


def test_the_budget_that_an_error_names_is_enough() -> None:
    """Where a stage's rows and gradients alone are too much, nobody knows what its activations would add. What is named is not rounded
    to less."""

    def forecast(plan: Plan) -> Plan:
        memory = {**plan.predicted.memory, "activations": 2**33 + 2**20}
        return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, memory=memory, place="mm", seconds={"compute": 1.0}))

    large = Inventory("Net", tuple(info(f"layers.{i}.up", 8192, 8192) for i in range(4)))
    for zero in ("auto", 3):
        with pytest.raises(BudgetError, match="at best, ZeRO-3 on 8 processes") as caught:
            make_plan(large, Config(zero=zero, memory_budget=2**27), where(8, 2**27), forecast)
        enough = re.search("a budget of ([0-9.]+ GiB)", str(caught.value))
        assert enough
        budget = parse_bytes(enough[1])
        assert make_plan(large, Config(zero=zero, memory_budget=budget), where(8, budget), forecast).predicted.footprint <= budget


def test_the_choice_is_said_to_be_of_what_was_looked_at() -> None:
    """Where there is one, nothing else was simulated."""

    def forecast(plan: Plan) -> Plan:
        size = {"activations": (100 - 10 * max(g.degrees.stage for g in plan.groups)) << 20}
        return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, memory=size, seconds={"compute": 1.0}))

    def fit(plan: Plan, budget: int) -> Plan:
        found = dataclasses.replace(plan, recompute=(("layers.0", "full"),))
        return dataclasses.replace(found, predicted=dataclasses.replace(plan.predicted, memory={"activations": budget}))

    simulated = "the least time of those that were simulated and fit"
    for compression, budget, said in (("powersgd", None, "the least time on the wire of those that fit"), (None, 75 << 20, simulated)):
        plan = make_plan(blocks(), Config(compression=compression), where(8, budget), forecast, fit)  # type: ignore[arg-type]
        assert [why for why in plan.why if "chosen" in why] == [why for why in plan.why if f"(chosen: {said})" in why] != []


@given(st.integers(1, 64), st.integers(10_000, 100_000_000))
def test_auto_never_exceeds_the_budget(world: int, budget: int) -> None:
    try:
        plan = make_plan(blocks(), Config(), where(world, budget))
        assert plan.predicted.peak_bytes <= budget
    except BudgetError as error:
        assert "Cheapest fix: " in str(error) and "short" in str(error)


def test_memory_is_the_sum_that_anyone_can_check() -> None:
    inventory = Inventory("One", (info("w", 1000, 1000),))
    memory = make_plan(inventory, Config(zero=3), where(8)).predicted.memory
    assert memory["parameters"] == memory["gradients"] == 4_000_000 // 8
    assert memory["optimizer"] == 2 * 4_000_000 // 8
    assert memory["gathered"] == 4_000_000


def test_hsdp_is_a_point_of_the_same_space() -> None:
    plan = make_plan(blocks(), Config(zero=3, mesh={"replicate": 2, "shard": 4}), where(8))
    assert str(plan.groups[1].degrees) == "4/4/4" and plan.shard_size == 4
    assert {t.collective for t in plan.predicted.traffic} == {"all_gather", "reduce_scatter", "all_reduce"}


def test_on_many_nodes_the_processes_of_each_share_rows_where_that_is_faster() -> None:
    """A gather over all of them takes as many hops; but what the user said of the mesh holds."""
    many, few = (Circumstances(Cluster(nodes, 8, DEVICES["h100"]), 6 << 20) for nodes in (125, 2))
    budget = {"memory_budget": 6 << 20}
    plan = make_plan(blocks(), Config(**budget), many)  # type: ignore[arg-type]
    assert plan.axes == (("replicate", 125), ("shard", 8)) and plan.summary == "ZeRO-3 over 8 processes"
    assert any(why.startswith("ZeRO-3 in each node: ") and "chosen" in why for why in plan.why)
    for options in ({"mesh": {"shard": 1000}}, {"hierarchy": "flat"}, {"zero": 3}):
        assert make_plan(blocks(), Config(**budget, **options), many).axes == (("shard", 1000),)  # type: ignore[arg-type]
    said = make_plan(blocks(), Config(**budget), few).why  # type: ignore[arg-type]
    assert sum("in each node" in why for why in said) == 3


def _simulated(plan: Plan) -> Plan:
    """As if a step without activations had been."""
    return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, seconds={"compute": 1.0}))


def test_copies_are_kept_for_a_budget_only_where_a_step_was_simulated() -> None:
    """Nobody knows what activations take."""
    plan = make_plan(blocks(), Config(zero=3, memory_budget=2**30), where(8, 2**30))
    assert _kept(plan) == ["layers.3"]


def test_no_copy_is_kept_where_not_even_one_fits() -> None:
    def forecast(plan: Plan) -> Plan:
        memory = {"gathered": 100 if _kept(plan) else 50}
        return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, memory=memory))

    plans = [make_plan(blocks(), Config(zero=3, memory_budget=b), where(8, b), forecast) for b in (60, 120)]
    assert [_kept(plan) for plan in plans] == [[], ["layers.3"]]
    assert any("no whole copy kept" in why for why in plans[0].why)


def test_the_only_group_is_gathered_again() -> None:
    plan = make_plan(Inventory("Net", (info("up.weight", 256, 256),)), Config(zero=3), where(8))
    assert not _kept(plan)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_the_most_that_fits_is_found_in_few_looks(of: int, guess: int, room: int) -> None:
    """Two where the guess is right."""
    looks: list[int] = []
    found = _most(of, guess, lambda count: looks.append(count) or count <= room)  # type: ignore[func-returns-value]
    assert found == min(of, room) and set(looks) <= set(range(1, of + 1))
    assert len(looks) <= (2 if guess == found else 12)


def _kept(plan: Plan) -> list[str]:
    return [g.name for g in plan.groups if g.degrees.optimizer > 1 and g.degrees.parameter == 1]


def test_a_budget_says_how_many_gathered_copies_are_kept() -> None:
    """The last used stays at stage 3, backward needing it first, unless not even that fits; the fewer the budget allows, the fewer."""
    free = make_plan(blocks(), Config(zero=3), where(8))
    strict = keeping_none(free)
    assert _kept(free) == ["layers.3"] and not _kept(strict)
    kept = []
    for budget in range(1, 2**23, 2**16):
        try:
            plan = make_plan(blocks(), Config(zero=3, memory_budget=budget), where(8, budget), _simulated)
        except BudgetError:
            assert not kept
            continue
        assert plan.predicted.peak_bytes <= budget
        kept.append(_kept(plan))
    assert kept[0] == ["layers.3"] and {len(names) for names in kept} >= {1, 2, 3, 5}
    assert all(set(fewer) <= set(more) for fewer, more in zip(kept, kept[1:]))
    assert {t.messages for t in plan.predicted.traffic if t.collective == "all_gather"} == {len(plan.groups) - 1}


def test_the_copies_of_a_block_are_those_of_its_groups() -> None:
    plan = keeping_none(make_plan(blocks(), Config(zero=3), where(8)))
    first, whole = next(g for g in plan.groups if g.name == "layers.1"), copies_of_blocks(plan, blocks())
    halves = [dataclasses.replace(first, name=f"layers.1/{i}", parameters=names) for i, names in ((1, first.parameters[:1]), (2, first.parameters[1:]))]
    parted = dataclasses.replace(plan, groups=tuple(h for g in plan.groups for h in (halves if g is first else [g])))
    assert halves[1].parameters and copies_of_blocks(parted, blocks()) == whole
    assert _kept(keeping_of(parted, {"layers.1"})) == ["layers.1/1", "layers.1/2"] and _kept(keeping_of(parted, {"layers.1/2"})) == ["layers.1/2"]


def test_a_compiled_model_has_the_plan_of_what_it_was_compiled_from() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), torch.zeros(4, 8)
    compiled = torch.compile(model, backend=autoshard.backend(Config(codegen="eager")))
    plans = [autoshard.plan(m, x, Config(zero=3, replicate_below=0, codegen="eager"), Cluster(1, 2, DEVICES["cpu"])) for m in (model, compiled)]
    assert plans[0] == plans[1] and plans[0].groups


@pytest.mark.parametrize("said", [({"zero": 3},), ("zero=3",), (torch.fx.symbolic_trace(nn.ReLU()), [])])
def test_a_backend_takes_a_config_alone(said: tuple[Any, ...]) -> None:
    """torch.compile(model, backend=autoshard.backend), not called, gives it a graph and its inputs."""
    with pytest.raises(ConfigError, match=rf"backend: {type(said[0]).__name__} is not legal; legal: backend=autoshard.backend\("):
        autoshard.backend(*said)


@pytest.mark.parametrize("ranks", [(0, 0), (1, 2), (-1,), (1, 0)])
def test_a_group_lies_on_ranks_that_are_there_and_on_each_once(ranks: tuple[int, ...]) -> None:
    group = ParameterGroup("layers.0", ("layers.0.up",), Degrees.of_stage(3, 2), ranks=ranks)
    with pytest.raises(PlanError, match="legal: 0 to 1, each once"):
        Plan(2, (("shard", 2),), (group,))


@pytest.mark.parametrize("axes", [(("foo", 2),), (("replicate", 2), ("replicate", 1))])
def test_axes_are_those_of_a_mesh(axes: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(PlanError, match=r"axes: \['.*\] are not legal; legal: replicate, shard, each once at most"):
        Plan(2, axes, ())
