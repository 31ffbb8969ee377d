"""One trace for all sizes: what it says of a batch and a sequence, beside a trace that has them."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autoshard
from autoshard import Config
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.cost_model.optimizer import NAMED
from autoshard.cost_model.sizes import evaluator
from autoshard.cost_model.timeline import Sharing
from autoshard.errors import ClusterError, PlanError, SweepError
from autoshard.forecast import Forecaster
from autoshard.plan import Plan
from autoshard.planning import as_they_will_step, first_look
from autoshard.rehearsal import prepare
from autoshard.report import rendered
from autoshard.sweep_report import sweep_tables
from tests.models import ConvNet, gpt2, llama
from tests.small import in_full

TWO = Cluster(1, 2, DEVICES["cpu"])
STEPPED = as_they_will_step(NAMED["adamw"], Config(), TWO)
POINTS = [(1, 12), (2, 7), (5, 12), (3, 31)]


class Small(nn.Module):
    """A language model of one attention, with a numbered block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(67, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 96), nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU())])
        self.head = nn.Linear(64, 67)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.layers[0](self.embedding(input_ids)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return nn.functional.cross_entropy(self.head(self.layers[1](mixed)).flatten(0, 1), labels.flatten())


def _tokens(batch: int, sequence: int) -> dict[str, Tensor]:
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def _images(batch: int, _: int) -> Tensor:
    return torch.zeros(batch, 3, 8, 8)


MODELS = {"small": (Small, _tokens), "llama": (llama, _tokens), "gpt2": (gpt2, _tokens), "conv": (ConvNet, _images)}


class Deep(nn.Module):
    """Blocks enough to be graphs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(10))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x) + x
        return x.square().mean()


class Fours(nn.Linear):
    """Takes sequences of a multiple of four."""

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[1] % 4:
            ids = ids[:, 1:]
        return super().forward(ids[..., None].float()).sum()


@functools.cache
def _swept(name: str, codegen: Any) -> autoshard.Sweep:
    build, inputs = MODELS[name]
    torch.compiler.reset()
    return autoshard.sweep(build(), inputs(4, 16), Config(codegen=codegen, recompute="none", replicate_below=0), TWO)


def _traced(name: str, plan: Plan, codegen: Any, batch: int, sequence: int) -> Plan:
    build, inputs = MODELS[name]
    torch.compiler.reset()
    captured = capture(build(), inputs(batch, sequence))
    return Forecaster(captured, STEPPED, TWO, codegen)(plan)


@pytest.mark.parametrize(
    ("name", "codegen", "off"),
    [
        ("conv", "eager", 0.0),
        pytest.param("small", "eager", 0.0, marks=pytest.mark.full),
        pytest.param("llama", "eager", 0.0, marks=pytest.mark.full),
        pytest.param("gpt2", "eager", 0.0, marks=pytest.mark.full),
        pytest.param("gpt2", "inductor", 0.02, marks=pytest.mark.full),
    ],
)
def test_one_trace_answers_every_size(name: str, codegen: str, off: float) -> None:
    """By each stage."""
    sweep = _swept(name, codegen)
    for (batch, sequence), way in zip(POINTS if codegen == "eager" else POINTS[:2], itertools.cycle(sweep.ways)):
        sizes = {"batch": batch, "sequence": sequence} if len(sweep.open.traced) > 1 else {"batch": batch}
        swept = replace(sweep, ways=(way,)).at(**sizes)
        traced = _traced(name, way.plan, codegen, batch, sequence).predicted
        assert float(swept.peak) == pytest.approx(traced.peak_bytes, rel=off, abs=0)
        assert float(swept.seconds) == pytest.approx(traced.step_seconds, rel=0.02)


@pytest.mark.parametrize("call", [1e-12, 1.0])
def test_at_the_traced_sizes_it_is_the_plan_s_own_simulation(call: float) -> None:
    captured = capture(Small(), _tokens(4, 16), open=True)
    tables = {"view": ((1, 1e-5),), "sharded": ((1, 1e-4),), "gather_direct.issue@2": ((1e3, 1e-4), (1e6, 1e-2)), "pack_cast": ((1e3, 1e-4), (1e6, 1e-3)), "call": ((1, call),)}
    shared = replace(TWO, device=replace(TWO.device, interference=0.3, drag=0.4, skew=0.1, wake=1e-4, tables=tables))
    forecaster = Forecaster(captured, STEPPED, shared, "eager")
    for way in _swept("small", "eager").ways:
        curve, schedule = forecaster.costs(way.plan)
        predicted = forecaster(way.plan).predicted
        here: Any = {"batch": np.array([4.0]), "sequence": np.array([16.0])}
        assert curve.peaks(here).tolist() == [predicted.peak_bytes]
        assert schedule.seconds(here)[0] == pytest.approx(predicted.step_seconds, rel=1e-9)


GROWING = st.lists(st.integers(2, 4096).map(float), min_size=2, max_size=16).map(sorted).map(np.array)


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
@settings(max_examples=10)
@given(sizes=GROWING, other=st.integers(2, 4096).map(float))
def test_a_step_of_more_never_takes_less(codegen: str, sizes: Any, other: float) -> None:
    """Whole steps of each stage, in bytes and in seconds, by batch and by sequence."""
    fixed, sweep = np.full(len(sizes), other), _swept("small", codegen)
    for way, at in itertools.product(sweep.ways, ({"batch": sizes, "sequence": fixed}, {"batch": fixed, "sequence": sizes})):
        found = replace(sweep, ways=(way,)).at(**at)
        assert (np.diff(found.peak) >= 0).all() and (np.diff(found.seconds) >= -1e-12).all()


class Batched(nn.Linear):
    """A product of each sample's own matrices."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(super().forward(x), x).sum()


def test_a_batch_of_products_takes_the_plan_s_own_time() -> None:
    measured = replace(TWO, device=replace(TWO.device, tables={"matmul.fp32": ((1e3, 1e-5), (1e9, 1e-2))}))
    torch.compiler.reset()
    forecaster = Forecaster(capture(Batched(16, 16), torch.zeros(4, 16, 16), open=True), STEPPED, measured, "eager")
    plan = autoshard.plan(Batched(16, 16), torch.zeros(4, 16, 16), Config(zero=0), measured, STEPPED)
    _, schedule = forecaster.costs(plan)
    few, many = schedule.seconds({"batch": np.array([4.0, 4000.0])})
    assert few == pytest.approx(forecaster(plan).predicted.step_seconds, rel=1e-9) and many > 2 * few


@given(st.floats(0, 9), st.floats(0, 9), st.floats(0, 9), st.floats(0, 0.9), st.floats(0, 0.9))
def test_two_kernels_beside_a_collective_take_what_one_of_their_length_does(
    first: float, second: float, busy: float, interference: float, drag: float
) -> None:
    sharing = Sharing(interference, drag)

    def after(taken: float, now: float, link: float) -> tuple[float, float]:
        busy = link - now
        return now + float(sharing.slowed(taken, busy)), float(sharing.delayed(link, now, sharing.both(taken, busy)))

    assert after(second, *after(first, 0.0, busy)) == pytest.approx(after(first + second, 0.0, busy))


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    torch.compiler.reset()
    sweep = autoshard.sweep(Small(), _tokens(2, 16), Config(memory_budget="3MiB", codegen="eager"), TWO)
    assert {bool(way.plan.recompute) for way in sweep.ways} == {True, False}
    for sequence in (16, 24):
        most = sweep.largest(sequence=sequence)
        assert most > 1
        fits = sweep.at(batch=[1, most, most + 1], sequence=sequence).fits
        assert fits.tolist() == [True, True, False]
    assert sweep.largest(sequence=24) < sweep.largest(sequence=16)
    text = rendered(sweep_tables(sweep))
    assert f"The largest batch that fits into 3.00 MiB: {sweep.largest()} at sequence 16." in text
    assert "Measured peaks were " in text and "steps" not in text  # on a device whose tables were not measured
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("budget", ["40MiB", "100MiB"])
def test_on_gpus_what_the_allocator_reserves_has_to_fit(budget: str) -> None:
    config, cluster = Config(memory_budget=budget, codegen="eager", zero=1, recompute="none"), Cluster(1, 2, DEVICES["h100"])
    sweep = autoshard.sweep(Small(), _tokens(2, 16), config, cluster)
    most = sweep.largest()
    fitting = autoshard.plan(Small(), _tokens(most, 16), config, cluster).predicted
    more = most + 1 + most // 20
    assert fitting.footprint <= sweep.budget and sweep.at(batch=[most, more]).fits.tolist() == [True, False]
    assert sweep.at(batch=more).peak <= sweep.budget
    with pytest.raises(PlanError, match="MiB a process is"):
        autoshard.plan(Small(), _tokens(more, 16), config, cluster)
    assert "What CUDA's allocator reserves, which is more than the peak, has to fit." in rendered(sweep_tables(sweep), 200)


class Cut(nn.Module):
    """Whose sizes torch computes by way of a float, and with bits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(67, 32), nn.Linear(32, 67)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        kept = int(input_ids.shape[1] * 0.75) & ~1
        return self.head(self.embedding(input_ids[:, :kept])).pow(2).mean()


def test_sizes_by_way_of_a_float_are_computed() -> None:
    config = Config(codegen="eager", recompute="none", zero=0)
    torch.compiler.reset()
    sweep = autoshard.sweep(Cut(), _tokens(4, 16), config, TWO)
    torch.compiler.reset()
    plan = autoshard.plan(Cut(), _tokens(8, 32), config, TWO)
    assert int(sweep.at(batch=8, sequence=32).peak) == plan.predicted.peak_bytes


def test_a_size_that_no_sweep_knows_is_named() -> None:
    size = sympy.Function("NeverHeardOf")(sympy.Symbol("batch"))
    with pytest.raises(SweepError, match="a size of this model is NeverHeardOf of another, which no sweep knows; legal: a plan of each size"):
        evaluator([size])({"batch": np.arange(1.0, 4.0)})


def test_where_all_batches_that_are_looked_at_fit_more_may() -> None:
    sweep = replace(_swept("small", "eager"), budget=1 << 50)
    assert "fits into 1048576.00 GiB: 65536 or more at sequence 16." in rendered(sweep_tables(sweep, [4]))


def test_a_policy_of_many_results_fits_into_its_column() -> None:
    sweep = _swept("small", "eager")
    saved = "save " + " ".join(f"addmm#{i}" for i in range(12))
    for policies, said in (((("layers.1", saved),), "save 12"), ((("layers.0", "full"), ("layers.1", saved)), "by block")):
        ways = tuple(replace(way, plan=replace(way.plan, recompute=policies)) for way in sweep.ways)
        lines = rendered(sweep_tables(replace(sweep, ways=ways), [4])).splitlines()
        (row,) = (line for line in lines if line.split()[:1] == ["4"])
        assert said in row and "…" not in row


@pytest.mark.parametrize(("optimizer", "possible"), [(torch.optim.SGD, True), (torch.optim.AdamW, False)])
def test_a_stage_is_left_out_only_if_the_optimizer_at_hand_does_not_fit(optimizer: Any, possible: bool) -> None:
    """4 MiB of parameters at stage 0, as many gradients, and twice so much state or none."""
    torch.compiler.reset()
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    sweep = autoshard.sweep(model, torch.zeros(4, 512), Config(memory_budget="12MiB", codegen="eager", recompute="none"), TWO, optimizer)
    assert (0 in {max(g.degrees.stage for g in way.plan.groups) for way in sweep.ways}) is possible


def test_a_convolution_is_traced_for_any_batch() -> None:
    """Not only for those that some library of a CPU's takes."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 14 * 14, 4))
    sweep = autoshard.sweep(model, torch.zeros(2, 3, 16, 16), Config(memory_budget="1GiB", codegen="eager"), TWO)
    assert sweep.largest() > 15 and sweep.valid(batch=[15, 16, 64]).all()


def test_where_nothing_fits_it_shows_what_takes_the_least() -> None:
    """Not rows that each node has all of."""
    torch.compiler.reset()
    nodes = Cluster(2, 2, DEVICES["h100"])
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    sweep = autoshard.sweep(model, torch.zeros(4, 512), Config(memory_budget="1MiB", codegen="eager", recompute="none"), nodes)
    assert [(way.plan.stage, way.plan.axes, way.plan.behind) for way in sweep.ways] == [(3, (("shard", 4),), behind) for behind in (2, 1)]


def test_it_chooses_the_fastest_that_fits() -> None:
    sweep = _swept("small", "eager")
    swept = sweep.at(batch=np.arange(1, 9), sequence=16)
    every = np.stack([way.schedule.seconds({"batch": np.arange(1.0, 9), "sequence": np.full(8, 16.0)}) for way in sweep.ways])
    assert swept.fits.all() and (swept.seconds == every.min(0)).all()
    assert {way.plan.groups[0].degrees.stage for way in sweep.ways} == {0, 1, 2, 3}


@pytest.mark.full
def test_a_pinned_plan_is_the_only_way_and_forecast_as_it_was_made() -> None:
    torch.compiler.reset()
    batch = _tokens(4, 16)
    made = autoshard.plan(Small(), batch, Config(zero=3, precision="bf16", optimizer="sgd", codegen="eager", replicate_below=0), TWO)
    pinned = Config(plan=made, optimizer="sgd", codegen="eager")
    assert autoshard.plan(Small(), batch, pinned, TWO).predicted == made.predicted
    sweep = autoshard.sweep(Small(), batch, pinned, TWO)
    assert [way.plan for way in sweep.ways] == [made]
    assert int(sweep.at(batch=4, sequence=16).peak) == made.predicted.peak_bytes
    with pytest.raises(PlanError, match="made for 2 processes; the job has 1"):
        autoshard.sweep(Small(), batch, pinned)


@pytest.mark.parametrize("make", [autoshard.plan, autoshard.sweep])
def test_the_cluster_is_the_config_s_unless_one_is_given(make: Any, tmp_path: Path) -> None:
    torch.compiler.reset()
    model, x = Fours(1, 1), torch.zeros(2, 8, dtype=torch.long)
    assert make(model, x, Config(cluster=TWO, codegen="eager")).world == 2
    assert make(model, x, Config(cluster=TWO, codegen="eager"), Cluster(1, 3, DEVICES["cpu"])).world == 3
    with pytest.raises(ClusterError, match="cluster: 'nowhere.yaml' cannot be read"):
        Cluster.load("nowhere.yaml")
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes: 0")
    with pytest.raises(ClusterError, match="cluster.yaml"):
        make(model, x, Config(cluster=file))


def test_sizes_that_cannot_be_are_named() -> None:
    with pytest.raises(SweepError, match="sequence: this model's trace has it as a number; open are: batch, processes"):
        _swept("conv", "eager").at(sequence=3)
    with pytest.raises(SweepError, match="batch: 0 is not legal; legal: whole numbers, 1 or more"):
        _swept("conv", "eager").at(batch=[1, 0])
    for size, said in ((1.5, "1.5"), (math.inf, "inf"), (math.nan, "nan")):
        with pytest.raises(SweepError, match=f"batch: {said} is not legal; legal: whole numbers"):
            _swept("conv", "eager").at(batch=[1, size])
    with pytest.raises(SweepError, match="memory_budget: without one every batch fits"):
        _swept("conv", "eager").largest()
    torch.compiler.reset()
    with pytest.raises(SweepError, match="its trace has every size as a number"):
        autoshard.sweep(nn.Linear(8, 2), torch.zeros(8))


def test_what_the_trace_took_for_granted_is_held_to() -> None:
    torch.compiler.reset()
    sweep = autoshard.sweep(Fours(1, 1), torch.zeros(2, 8, dtype=torch.long), Config(codegen="eager"))
    assert sweep.at(sequence=[4, 12]).fits.all()
    with pytest.raises(SweepError, match="the trace holds for .*sequence.* only"):
        sweep.at(sequence=[4, 6])


def test_batches_for_which_the_trace_does_not_hold_are_left_out() -> None:
    class Pairs(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.shape[0] % 2 == 0 else x[1:]).sum()

    torch.compiler.reset()
    sweep = autoshard.sweep(Pairs(64, 64), torch.zeros(4, 64), Config(codegen="eager", memory_budget="200KiB"), TWO)
    most = sweep.largest()
    assert most > 2 and most % 2 == 0 and sweep.valid(batch=[most, most + 1]).tolist() == [True, False]
    rows = [line.split()[0] for line in rendered(sweep_tables(sweep)).splitlines() if line[:5].strip().isdigit()]
    assert "1" not in rows and str(most) in rows


def test_a_batch_that_the_trace_alone_limits_is_not_called_the_largest_for_which_memory_is_there() -> None:
    class Few(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.shape[0] < 16 else x[:16]).sum()

    torch.compiler.reset()
    sweep = autoshard.sweep(Few(64, 64), torch.zeros(4, 64), Config(codegen="eager", memory_budget="1GiB"), TWO)
    assert "The largest batch that fits into 1.00 GiB: 15 (the trace holds for no larger one)." in rendered(sweep_tables(sweep), 200)


def test_blocks_stay_graphs_of_their_own_when_all_of_them_is_recomputed() -> None:
    torch.compiler.reset()
    model, ids = Deep(), torch.zeros(2, 6, dtype=torch.long)
    captured = capture(model, ids, open=True)
    plan = first_look(model, Config(zero=3, replicate_below=0), TWO)
    for policies in ((), tuple((f"layers.{i}", "full") for i in range(10))):
        assert prepare(captured, replace(plan, recompute=policies), inductor=False).kinds


def _on(*worlds: int) -> list[Cluster]:
    return [Cluster(1, world, DEVICES["cpu"]) for world in worlds]


@pytest.mark.parametrize("worlds", [(1, 8), in_full((1, 2, 8))])
def test_one_trace_answers_every_number_of_processes(worlds: tuple[int, ...]) -> None:
    """Memory, time and the largest batch of each are those of a sweep on that many alone."""
    config, clusters = Config(codegen="eager", replicate_below=0, memory_budget="1MiB", precision="bf16"), _on(*worlds)
    torch.compiler.reset()
    together = autoshard.sweep(Small(), _tokens(4, 16), config, clusters)
    assert together.worlds == worlds and together.world == 1
    every = together.at(batch=[[3], [70]], sequence=20, processes=list(worlds))
    for i, cluster in enumerate(clusters):
        torch.compiler.reset()
        alone = autoshard.sweep(Small(), _tokens(4, 16), config, cluster)
        found = alone.at(batch=[3, 70], sequence=20)
        assert [together.ways[way].plan for way in every.way[:, i]] == [alone.ways[way].plan for way in found.way]
        for name in ("peak", "seconds", "fits"):
            assert (getattr(every, name)[:, i] == getattr(found, name)).all()
        assert together.largest(sequence=20, processes=cluster.world) == alone.largest(sequence=20)
    assert every.fits[0].any() and not every.fits[1].all()
    assert "- on 1: precision: one process trains in the dtypes of its model" in rendered(sweep_tables(together), 200)


def test_what_any_of_the_traces_took_for_granted_is_held_to() -> None:
    """One process computes in fp32 here, several in bf16."""

    class Halves(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return (y if y.dtype == torch.bfloat16 or y.shape[0] % 2 == 0 else y[1:]).float().sum()

    torch.compiler.reset()
    sweep = autoshard.sweep(Halves(16, 16), torch.zeros(4, 16), Config(codegen="eager", precision="bf16"), _on(1, 2))
    assert sweep.valid(batch=[6, 7]).tolist() == [True, False]
    torch.compiler.reset()
    assert autoshard.sweep(Halves(16, 16), torch.zeros(4, 16), Config(codegen="eager", precision="bf16"), TWO).valid(batch=[6, 7]).all()


def test_numbers_of_processes_have_a_table_each() -> None:
    torch.compiler.reset()
    sweep = autoshard.sweep(Small(), _tokens(2, 16), Config(memory_budget="3MiB", codegen="eager", recompute="none"), _on(2, 4))
    text = rendered(sweep_tables(sweep))
    assert text.index("traced at") < text.index("2 processes, the batch is") < text.index("4 processes, the batch is")
    most = [sweep.largest(processes=world) for world in (2, 4)]
    for world, batch in zip((2, 4), most):
        assert f"The largest batch that fits into 3.00 MiB on {world} processes: {batch} at sequence 16." in text
    assert max(map(len, text.splitlines())) <= 80


def test_processes_that_were_not_asked_for_are_refused() -> None:
    with pytest.raises(SweepError, match="processes: 3 is not legal; legal: 2, as the sweep was made for"):
        _swept("conv", "eager").at(processes=[2, 3])
    with pytest.raises(SweepError, match="cluster: 1 x 2 and 1 x 2 are all 2 processes; legal: one of each number of them"):
        autoshard.sweep(Small(), _tokens(2, 16), None, _on(4, 2, 8, 2))
    with pytest.raises(SweepError, match=r"cluster: \[\] is not legal; legal: one or more"):
        autoshard.sweep(Small(), _tokens(2, 16), None, [])
    with pytest.raises(SweepError, match="h100 beside cpu is not legal; legal: the same device in all of them"):
        autoshard.sweep(Small(), _tokens(2, 16), None, [TWO, Cluster(1, 4, DEVICES["h100"])])


def test_what_a_sweep_leaves_out_is_said() -> None:
    strange = replace(DEVICES["l4"], name="some GPU", source="")
    found = autoshard.sweep(Small(), _tokens(2, 12), Config(codegen="eager", recompute="none"), Cluster(1, 2, strange))
    assert "Not modelled: some GPU itself (speeds and links are an L4's)." in rendered(sweep_tables(found, [4]))
