"""Recompute regions of several blocks: results, what waits for backward and what is gathered for it, and what is chosen."""

from __future__ import annotations

import operator
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from autoshard import Config
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.errors import BudgetError
from autoshard.ops.block import Block, Value, register
from autoshard.passes import graphs
from autoshard.passes.choose_recompute import least, peak_of
from autoshard.passes.choose_unshard import keeping_none
from autoshard.plan import Plan
from autoshard.planning import first_look
from autoshard.rehearsal import prepare, rehearse
from autoshard.report import plan_tables, rendered
from autoshard.savings import Savings
from autoshard.torch_internals import FakeTensorMode
from autoshard.units import bytes_text
from tests import models
from tests.cluster import Cluster as Processes
from tests.parity import Distance, Trainer, adamw, batches_of, measure, see_gradients, whole
from tests.peaks import above_held
from tests.recomputed import (
    Codegen,
    Deep,
    Noisy,
    Plain,
    Stack,
    forecaster_of,
    grown_by,
    inputs,
    planned,
    trained,
    with_policies,
)
from tests.small import TOLERANCE, backward_beside, compiled_pair, config, in_full, same


class Few(Stack):
    """Too few blocks to be graphs of their own, but for regions."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Plain() for _ in range(4))


class Residual(Few):
    """Whose sums stand between its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = 0.5 * x + layer(x)
        return self.head(x).log_softmax(-1).square().mean()


class Quiet(nn.Module):
    """A block without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Still(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Quiet() for _ in range(4))


REGIONS = ["through", "through", "full"]


@pytest.mark.parametrize(
    ("make", "policies"),
    [
        in_full(Few, REGIONS), (Deep, REGIONS), (Residual, REGIONS), in_full(Deep, ["through"]), in_full(Few, ["through"]),
        in_full(Deep, ["none", "through", "save addmm#0", "through", "selective"]),
    ],
)
def test_results_are_bitwise_those_without(make: type[nn.Module], policies: list[str]) -> None:
    """Dropout in what is called again draws the same numbers."""
    plan = planned(forecaster_of(make(), inputs()))
    plain, ours = (trained(make, inputs(), p, "eager") for p in (plan, with_policies(plan, make, policies)))
    assert same(plain, ours)


def test_what_stands_between_blocks_is_not_saved_either() -> None:
    """Of three blocks in a region only what enters it, beside what the head takes."""
    found = {}
    for make in (Few, Residual):
        forecaster = forecaster_of(make(), inputs())
        cut = rehearse(forecaster.captured, with_policies(planned(forecaster), make, [*REGIONS, "full"]), inductor=False)
        saved = cut.forward.graph.output_node().args[0][cut.results :]  # type: ignore[index]
        found[make] = sum(graphs.example(n).numel() >= inputs().numel() for n in saved)
    assert found[Residual] == found[Few]


def _in_regions(name: str, zero: int) -> Plan:
    """A job's own plan, but for these regions."""
    plan = first_look(models.DEEP[name].build(), config(zero, recompute="full"), Cluster(1, 2, DEVICES["cpu"]))
    return replace(plan, recompute=tuple((block, policy) for (block, _), policy in zip(plan.recompute, REGIONS)))


@pytest.mark.parametrize("zero", [3, *map(in_full, (0, 1, 2))])
def test_parity(two: Processes, zero: int) -> None:
    for distance in two.run(measure, "llama_deep", config("auto", plan=_in_regions("llama_deep", zero), replicate_below="auto")):
        assert distance.worst <= TOLERANCE, distance


def accumulated(name: str, plan: Plan) -> Distance:
    """Two microbatches a step, the first inside no_sync."""
    case, rank, world = models.DEEP[name], dist.get_rank(), dist.get_world_size()
    model, plain, compiled = compiled_pair(config("auto", plan=plan, replicate_below="auto"), case.build)
    distance, reference = Distance(), Trainer(plain, case, adamw)
    for first, second in zip(*[iter(batches_of(case, world, 4))] * 2):
        with autoshard.no_sync(compiled):
            (case.loss(compiled(**first[rank])) / 2).backward()
        (case.loss(compiled(**second[rank])) / 2).backward()
        reference.backward(first, 0.5)
        reference.backward(second, 0.5)
        see_gradients(distance, model, plain)
    return distance


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 3])
def test_parity_with_accumulation(two: Processes, zero: int) -> None:
    for distance in two.run(accumulated, "llama_deep", _in_regions("llama_deep", zero)):
        assert distance.worst <= TOLERANCE, distance


def batches_of_other_lengths(plan: Plan) -> float:
    """The largest difference from one process's gradients, of batches of another length on each process."""
    model, plain, compiled = compiled_pair(config("auto", plan=plan, replicate_below="auto"), Still)
    for lengths in ((3, 20), (20, 3), (9, 5)):
        backward_beside(compiled, plain, [inputs(n) for n in lengths])
    return max((whole(p.grad) - q.grad).abs().max().item() for p, q in zip(model.parameters(), plain.parameters()))  # type: ignore[arg-type, operator]


@pytest.mark.full
def test_batches_of_other_lengths(two: Processes) -> None:
    plan = autoshard.plan(Still(), inputs(), config(3, recompute="none"), Cluster(1, 2, DEVICES["cpu"]))
    assert max(two.run(batches_of_other_lengths, with_policies(plan, Still, REGIONS))) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("make", [Few, Deep])
def test_results_on_inductor(make: type[nn.Module]) -> None:
    plan = planned(forecaster_of(make(), inputs()))
    plain, ours = (trained(make, inputs(), p, "inductor") for p in (with_policies(plan, make, ["full"]), with_policies(plan, make, REGIONS)))
    for a, b in zip(plain, ours, strict=True):
        torch.testing.assert_close(a, b)


def test_backward_calls_the_blocks_of_a_region_again_and_gathers_one_at_a_time() -> None:
    """At stage 3; what is called again is named after its block."""
    captured = capture(Deep(), inputs())
    plan = autoshard.plan(Deep(), inputs(), config(3, recompute="none"), Cluster(1, 2, DEVICES["cpu"]))
    plan = replace(plan, ahead=1)  # whatever these links are worth
    backward = rehearse(captured, with_policies(keeping_none(plan), Deep, REGIONS), inductor=False).backward
    assert backward is not None
    called, gathered = list[str](), list[int]()
    for node in backward.graph.nodes:
        if graphs.gathers(node):
            gathered.append(len(called))
        if graphs.is_call(node, graphs.REPEAT_BLOCK) or "block_backward" in str(node.target):
            called.append(node.name.partition("_repeat")[0])
    again = [f"layers_{i}_again" for i in (6, 7, 3, 4, 0, 1)]
    assert [name for name in called if "again" in name] == again
    assert [called.index(name) for name in again] == [1, 2, 6, 7, 11, 12]
    assert gathered == [0, *range(15)]  # each while the one before it is used


def test_what_a_region_gathers_is_among_what_processes_compare() -> None:
    """Else one whose block could not be called again would wait in another's gather."""
    captured = capture(Deep(), inputs())
    plan = autoshard.plan(Deep(), inputs(), config(3, recompute="none"), Cluster(1, 2, DEVICES["cpu"]))
    prepared = prepare(captured, with_policies(keeping_none(plan), Deep, REGIONS), False)
    with captured.tracing.entered():
        halves = prepared.joint.copied().halves(prepared.compilation.part)
    assert halves.backward is not None
    gathered = Counter(name for op, names in graphs.collectives(halves.backward) if "unshard" in op for name in names)
    assert [gathered[f"layers.{i}.up.weight"] for i in range(9)] == [2, 2, 1] * 3


@pytest.mark.parametrize("zero", [in_full(0), 3])
def test_only_what_enters_a_region_waits_for_backward(zero: int) -> None:
    captured = capture(Deep(), inputs(64))
    plan = autoshard.plan(Deep(), inputs(64), config(zero, recompute="none"), Cluster(1, 2, DEVICES["cpu"]))
    saved = list[list[str | None]]()
    for policies in (["full"], REGIONS):
        forward = rehearse(captured, with_policies(plan, Deep, policies), inductor=False).forward
        made = [n for n in forward.graph.output_node().all_input_nodes if n.op == "call_function" and n.target is operator.getitem]
        saved.append([graphs.block_of(n.args[0], ()) for n in made if n.args[1] == 0 and n.meta["val"].shape == (64, 16, 32)])  # type: ignore[arg-type]
    assert saved == [[f"layers.{i}" for i in range(9)], ["layers.2", "layers.5", "layers.8"]]


ON_A_GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
def test_a_block_that_is_called_again_draws_what_it_drew(device: str) -> None:
    """And the generators go on from where they were; a trace knows how many bytes their states have."""
    x = torch.ones(4, device=device)
    made = Block((Value("input", 0),), (x, x), 1, lambda given: [given[0] * torch.rand_like(given[0]) * torch.rand(()).item(), given[0] + 1])
    key = register("drawing", made)
    state = torch.ops.autoshard.random_state([x], 0)
    first = torch.ops.autoshard.block([x], [], key, 0)
    after = torch.ops.autoshard.random_state([x], 0)
    assert same(torch.ops.autoshard.repeat_block([x], [], key, state), first[:1])
    assert torch.equal(after, torch.ops.autoshard.random_state([x], 0)) and not torch.equal(after, state)
    with FakeTensorMode() as mode:
        assert torch.ops.autoshard.random_state([mode.from_tensor(x)], 0).shape == state.shape


class Strange(Stack):
    """Blocks that draw numbers unseen."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Noisy(32, 32) for _ in range(3))


@pytest.mark.parametrize("make", [in_full(Stack), Strange])
def test_what_leaves_a_block_that_cannot_be_called_again_is_saved(make: type[nn.Module]) -> None:
    """It writes to a buffer, or has an operator that torch does not have."""
    plan = planned(forecaster_of(make(), inputs()))
    with pytest.warns(UserWarning, match=r"'layers.0' \(2 in all\) cannot be called again as a whole"):
        ours = trained(make, inputs(), with_policies(plan, make, REGIONS), "eager")
    assert same(ours, trained(make, inputs(), plan, "eager"))


def test_a_plan_s_file_has_regions() -> None:
    plan = with_policies(planned(forecaster_of(Few(), inputs())), Few, REGIONS)
    assert Plan.from_json(plan.to_json()) == plan and plan.through == {"layers.0", "layers.1", "layers.3"}
    assert "-, nor what leaves it" in rendered(plan_tables(plan))


class Tall(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Plain() for _ in range(16))


TALL = models.Case(Tall, lambda g: {"x": inputs(128)}, lambda loss: loss)


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
def test_a_region_takes_what_its_option_says(codegen: Codegen) -> None:
    """Beside what the same blocks take without: predictions of both are off by the same bytes."""
    forecaster = forecaster_of(Tall(), inputs(128), codegen)
    plan = planned(forecaster)
    blocks = forecaster.blocks(plan)
    across = forecaster._savings(plan).regions(blocks)
    full = tuple(next(o for o in b.options if o.policy == "full") for b in across)
    for spans in (2, 3, 6):
        regions = tuple(next(o for o in b.options if o.spans == spans) for b in across[spans:-1:spans])
        taken = (full[0], *regions, *full[1 + spans * len(regions) :])
        one, other = (forecaster._with(plan, across, choice).predicted for choice in (full, taken))
        assert other.peak_bytes - one.peak_bytes == pytest.approx(peak_of(taken) - peak_of(full), abs=0.01 * one.peak_bytes)
        assert sum(o.seconds for o in taken) - sum(o.seconds for o in full) == pytest.approx(other.step_seconds - one.step_seconds, rel=0.05)


@pytest.mark.full
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_below_what_inputs_of_blocks_take_regions_fit(codegen: Codegen) -> None:
    """And the peak is the measured one."""
    forecaster = forecaster_of(Tall(), inputs(128), codegen)
    plan = planned(forecaster)
    blocks = forecaster.blocks(plan)
    least_without = forecaster._with(plan, blocks, least(blocks)).predicted.peak_bytes
    lowest = forecaster.fit(plan, 0).predicted.peak_bytes
    assert lowest < 0.85 * least_without
    for budget in (lowest, (lowest + least_without) // 2):
        found = forecaster.fit(plan, budget)
        assert found.through and found.predicted.peak_bytes <= budget
        grown = grown_by(TALL, {"x": inputs(128)}, found, codegen)
        assert grown == pytest.approx(above_held(found.predicted), rel=0.01)


def test_regions_are_looked_at_where_nothing_fits_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is below the least that they make possible is an error that names it."""
    forecaster = forecaster_of(Tall(), inputs(128))
    plan = planned(forecaster)
    lowest = forecaster.fit(plan, 0)
    with pytest.raises(BudgetError, match=re.escape(f"with recomputation, a step takes {bytes_text(lowest.predicted.peak_bytes)}")):
        autoshard.plan(Tall(), inputs(128), Config(codegen="eager", memory_budget=lowest.predicted.peak_bytes - 10_000))
    monkeypatch.setattr(Savings, "regions", lambda *_: pytest.fail("regions were looked at"))
    assert not forecaster.fit(plan, plan.predicted.peak_bytes // 2).through
