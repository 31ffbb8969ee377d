"""Saved values that every process has alike, kept in parts: which are, what is gathered, and that numbers stay."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.errors import PlanError
from autoshard.first_call import refuse_parts_of_unlike, warned_of_rounding
from autoshard.forecast import Forecaster
from autoshard.ops.part import KEEP_PART, order_in_memory
from autoshard.passes import graphs
from autoshard.passes.choose_partition import fitting_in_parts
from autoshard.passes.choose_zero import Circumstances, make_plan
from autoshard.passes.partition_activations import Parted, parted
from autoshard.plan import Plan
from autoshard.planning import forecaster, forecaster_of
from tests.cluster import Cluster as Processes
from tests.parity import rank0_copy, whole
from tests.peaks import above_held, grown_in_a_step
from tests.small import backward_of_all, config, in_full, same, step_each, what_is_said

WIDTH, WIDE, LENGTH, BLOCKS = 64, 300, 9, 3


class Layer(nn.Module):
    """Its weight is made of two factors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(WIDTH, 5) / 3), nn.Parameter(torch.randn(5, WIDTH) / 3)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = torch.relu(x @ torch.tanh(self.up @ self.down))
        heads = x.view(*x.shape[:2], 2, -1).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias[None])
        return x + seen.transpose(1, 2).reshape(x.shape)


class Wide(nn.Module):
    """A weight of two factors."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(WIDTH, 3) / 3), nn.Parameter(torch.randn(3, WIDE) / 3)

    def forward(self) -> Tensor:
        return torch.tanh(self.left @ self.right)


class Factored(nn.Module):
    """Blocks between two wide weights, with a bias that depends on positions and lies otherwise than it is shaped."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.first, self.last = Wide(), Wide()
        self.places, self.layers = nn.Embedding(33, 2), nn.ModuleList(Layer() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        bias = torch.tanh(self.places((at[:, None] - at[None, :]).clamp(-16, 16) + 16).permute(2, 0, 1))
        first = self.first()
        x = torch.tanh(x @ first) @ first.t() / WIDE
        for layer in self.layers:
            x = layer(x, bias)
        return (x @ self.last()).square().mean()


WEIGHT, LARGE, ALL = WIDTH * WIDTH * 4, WIDTH * WIDE * 4, ("all",)


def batch(rank: int = 0, length: int = LENGTH) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(rank))


@functools.cache
def forecasts(world: int = 2, zero: int = 0, codegen: str = "eager", blocks: int = BLOCKS) -> Forecaster:
    return forecaster(Factored(blocks), (batch(),), config(zero, codegen=codegen), hosts(world), None)


def hosts(world: int) -> Cluster:
    return Cluster(world, 1, DEVICES["cpu"])


def planned(world: int = 2, zero: int = 0, codegen: str = "eager", blocks: int = BLOCKS, **options: Any) -> Plan:
    """As `autoshard.plan` makes it, of a model that is captured once."""
    foreseen, options = forecasts(world, zero, codegen, blocks), {"codegen": codegen, **options}
    where = Circumstances(hosts(world), options.get("memory_budget"))
    return make_plan(foreseen.captured.inventory, config(zero, **options), where, foreseen, foreseen.fit, foreseen.alike)


# Which values


def found_in(model: nn.Module, x: Tensor, dynamic: bool = False, world: int = 2) -> list[Parted]:
    """The saved values that are found to be alike."""
    options = config(0)
    foreseen = forecaster_of(capture(model, (x,), options.dtypes_on(world)[0], open=dynamic), options, hosts(world), None)
    return foreseen.alike(make_plan(foreseen.captured.inventory, options, Circumstances(hosts(world), None)))


def kept_by(model: nn.Module, x: Tensor, dynamic: bool = False) -> list[int]:
    """The bytes of each."""
    return [value.bytes for value in found_in(model, x, dynamic)]


class Scaled(nn.Module):
    """The saved factor of a product, made in several ways."""

    def __init__(self, way: str, number: float = 2.0) -> None:
        super().__init__()
        self.weight, self.way, self.number = nn.Parameter(torch.randn(8, 8)), way, number
        self.register_buffer("moving", torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        made = {
            "weights": lambda: self.weight @ self.weight,
            "drawn": lambda: nn.functional.dropout(self.weight @ self.weight, 0.5),
            "of a batch": lambda: self.weight @ x[:8],
            "of a buffer": lambda: self.weight @ self.moving,
            "itself": lambda: self.weight.t(),
            "a number": lambda: (self.weight * self.number) @ self.weight,
            "of a size": lambda: torch.tanh(self.weight @ torch.ones(8, len(x))) @ x,
        }[self.way]()
        return (torch.sin(x @ self.weight) @ made).square().mean()


@pytest.mark.parametrize(
    ("way", "count"), [("weights", 1), ("drawn", 0), ("of a batch", 0), ("of a buffer", 0), ("itself", 0), ("a number", 2)]
)
def test_what_is_made_of_parameters_and_constants_alone_is_alike(way: str, count: int) -> None:
    assert kept_by(Scaled(way), torch.randn(9, 8)).count(8 * 8 * 4) == count


def test_what_has_an_open_size_is_left_whole() -> None:
    assert 8 * 9 * 4 in kept_by(Scaled("of a size"), torch.randn(9, 8))
    assert kept_by(Scaled("of a size"), torch.randn(9, 8), dynamic=True) == []


def test_the_name_of_a_part_says_how_its_value_is_made() -> None:
    def names(model: nn.Module, x: Tensor) -> list[str]:
        return [value.name for value in found_in(model, x)]

    x = torch.randn(9, 8)
    assert names(Scaled("a number"), x) == names(Scaled("a number"), torch.randn(7, 8))
    assert names(Scaled("a number"), x) != names(Scaled("a number", 3.0), x)
    short, long = (set(names(Factored(1), batch(length=length))) for length in (LENGTH, 22))
    assert short & long == {name for name in short if name.startswith(f"tanh ({WIDTH}, ")} and short - long


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
def test_so_is_what_is_made_inside_of_blocks_that_are_graphs_of_their_own(codegen: str) -> None:
    foreseen, plan = forecasts(zero=3, codegen=codegen, blocks=8), planned(zero=3, codegen=codegen, blocks=8, recompute="none")
    names = [value.name for value in foreseen.alike(plan)]
    inside = [name for name in names if f"({WIDTH}, {WIDTH})" in name]
    assert foreseen._rehearsed(plan).blocks and len(set(inside)) == 8, names  # each of factors of its own


def test_dimensions_as_they_lie() -> None:
    value = torch.randn(2, 3, 4, 5)
    assert order_in_memory(value) == [0, 1, 2, 3]
    assert order_in_memory(value.permute(2, 0, 3, 1)) == [1, 3, 0, 2]
    assert order_in_memory(value.to(memory_format=torch.channels_last)) == [0, 2, 3, 1]
    assert order_in_memory(torch.tensor(1.0)) == []
    assert order_in_memory(value[:, :2]) is None and order_in_memory(torch.ones(3, 1).expand(3, 4)) is None


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40])
def test_parts_put_together_are_the_value(size: int) -> None:
    value = torch.randn(3, 2, 5).permute(2, 0, 1)
    parts = [KEEP_PART(value, order_in_memory(value), size, rank) for rank in range(size)]
    assert len({part.shape for part in parts}) == 1
    flat = torch.cat(parts)
    assert torch.equal(flat[: value.numel()].view(3, 2, 5).permute(2, 0, 1), value) and not flat[value.numel() :].any()


# The graphs


def test_each_part_is_gathered_beside_what_is_computed_before_its_use() -> None:
    cut = forecasts()._rehearsed(replace(planned(), partition_activations=ALL))
    assert cut.backward is not None
    gathers, at = [n for n in cut.backward.graph.nodes if graphs.gathers_part(n)], graphs.positions(cut.backward.graph)
    assert all(at[next(iter(start.users))] > at[start] + 3 for start in gathers[1:])
    outputs: Any = cut.forward.graph.output_node().args[0]
    sizes = sorted(graphs.example(outputs[i]).numel() for i in parted(cut.forward))
    assert sizes[-2 - BLOCKS :] == [WIDTH * WIDTH // 2] * BLOCKS + [WIDTH * WIDE // 2] * 2 and len(gathers) == len(sizes)


def test_one_process_keeps_nothing_in_parts() -> None:
    assert found_in(Factored(1), batch(), world=1) == []


# The choice


def test_as_few_are_kept_in_parts_as_fit() -> None:
    foreseen, usual = forecasts(), planned()
    names = [value.name for value in foreseen.alike(usual)]
    first = next(name for name in names if name.startswith(f"tanh ({WIDTH}, {WIDE})"))
    one, most = (foreseen(replace(usual, partition_activations=parts)).predicted.footprint for parts in ((first,), ALL))
    assert most < one == usual.predicted.footprint - LARGE // 2

    def chosen(budget: int | None) -> Plan:
        return planned(partition_activations=True, memory_budget=budget, recompute="none")

    found = {budget: chosen(budget) for budget in (None, usual.predicted.footprint, one, one - 1, most)}
    counts = [len(plan.partition_activations) for plan in found.values()]
    assert counts[:3] == [0, 0, 1] and 1 < counts[3] <= counts[4] <= len(names) and found[one].partition_activations == (first,)
    assert all(plan.predicted.footprint <= budget for budget, plan in found.items() if budget)
    assert any("1 saved value that all processes have alike kept in parts" in why for why in found[one].why), found[one].why
    assert Plan.from_json(found[most].to_json()) == found[most]
    with pytest.raises(autoshard.AutoshardError, match="short"):
        planned(memory_budget=one, recompute="none")


def test_it_stands_against_computing_again() -> None:
    """Which here takes less time; both together go lower than either."""
    foreseen, usual = forecasts(), planned()
    in_parts = replace(usual, partition_activations=ALL)
    again, parts, both = (p.predicted.footprint for p in (foreseen.fit(usual, 1), foreseen(in_parts), foreseen.fit(in_parts, 1)))
    assert both < min(again, parts)
    chosen = planned(partition_activations=True, memory_budget=usual.predicted.footprint - 1)
    assert chosen.recompute and not chosen.partition_activations
    options = config(0, partition_activations=True, memory_budget=both)
    chosen = autoshard.plan(Factored(), (batch(),), options, hosts(2))
    assert chosen.recompute and chosen.partition_activations and chosen.predicted.footprint <= both


@pytest.mark.parametrize(("again", "is_worth"), [(1.01, False), (1.03, True)])
def test_messages_have_to_spare_more_than_next_to_nothing(again: float, is_worth: bool) -> None:
    def foreseen(seconds: float, taken: int, parts: tuple[str, ...] = ()) -> Plan:
        usual = planned()
        return replace(usual, predicted=replace(usual.predicted, memory={"activations": taken}, seconds={"compute": seconds}), partition_activations=parts)

    fitted = fitting_in_parts(lambda plan, _: foreseen(again, 50), lambda _: [Parted("a", 8)], lambda plan: foreseen(1.0, 50, plan.partition_activations))
    assert bool(fitted(foreseen(0.9, 200), 100).partition_activations) is is_worth


def test_processes_that_round_differently_have_nothing_alike() -> None:
    plan = planned()
    assert warned_of_rounding(plan, ["avx2", "avx2"], True) == plan
    assert any("round differently" in why for why in warned_of_rounding(plan, ["avx2", "avx512"], True).why)
    assert not any("round" in why for why in warned_of_rounding(plan, ["avx2", "avx512"]).why)
    refuse_parts_of_unlike(replace(plan, partition_activations=ALL), ["avx2", "avx2"])
    with pytest.raises(PlanError, match="partition_activations on avx2, avx512, which round differently"):
        refuse_parts_of_unlike(replace(plan, partition_activations=ALL), ["avx512", "avx2"])
    with pytest.raises(PlanError, match="partition_activations: 'all' is not legal; legal: a list, each a text"):
        replace(plan, partition_activations="all")


# On processes


def trained(plan: Plan, codegen: str, steps: int, options: dict[str, Any]) -> tuple[list[Tensor], float]:
    """Losses, gradients and parameters; and how far gradients are from the mean of all processes'. What the plan says is kept in parts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # other parameters on each process: rank 0's must win
    model = Factored(options.get("blocks", BLOCKS))
    plain = rank0_copy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    compiled: Any = torch.compile(model, backend=autoshard.backend(config("auto", plan=plan, codegen=codegen, replicate_below="auto")))
    seen, far = list[Tensor](), 0.0
    for step in range(steps):
        if options.get("evaluates") and step == 1:
            with torch.no_grad():
                seen.append(compiled(batch(rank, options.get("other", LENGTH))))
        inputs = [batch(world * step + other) for other in range(world)]
        if options.get("waits"):
            with autoshard.no_sync(model):
                compiled(inputs[rank]).backward()
            backward_of_all(plain, inputs)
        loss = compiled(inputs[rank])
        loss.backward()
        backward_of_all(plain, inputs)
        own = [whole(p.grad) for p in model.parameters() if p.grad is not None]
        theirs = [p.grad for p in plain.parameters() if p.grad is not None]
        far = max(far, *(float((a - b).abs().max() / b.abs().max()) for a, b in zip(own, theirs, strict=True)))
        seen += [loss.detach(), *(g.clone() for g in own)]
        step_each(*optimizers)
    cuts = sum(run.changed.get(str(KEEP_PART), 0) for run in autoshard.report(model).passes)
    assert bool(cuts) is bool(plan.partition_activations), cuts
    return [*seen, *(whole(p.detach()).clone() for p in model.parameters())], far


OPTIONS: list[dict[str, Any]] = [{}, {"waits": True}, {"evaluates": True}, {"evaluates": True, "other": 17}]


@pytest.mark.parametrize(
    ("zero", "options"), [(3, OPTIONS[1]), *(in_full(zero, options) for zero in range(4) for options in OPTIONS)]
)
def test_numbers_are_those_without(two: Processes, zero: int, options: dict[str, Any]) -> None:
    plan = planned(zero=zero)
    plain = two.run(trained, plan, "eager", 3, options)
    for (ours, far), (theirs, _) in zip(two.run(trained, replace(plan, partition_activations=ALL), "eager", 3, options), plain):
        assert same(ours, theirs) and far < 1e-5


@pytest.mark.full
def test_numbers_of_blocks_that_are_compiled_alone(two: Processes) -> None:
    """Named, as the plan was made: generating code changes a block's graph."""
    plan = planned(codegen="inductor", blocks=8)
    names = tuple(value.name for value in forecasts(codegen="inductor", blocks=8).alike(plan))
    for _, far in two.run(trained, replace(plan, partition_activations=names), "inductor", 2, {"blocks": 8}):
        assert far < 1e-4
    assert len(names) > 8


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_numbers_of_blocks_that_are_graphs_of_their_own(two: Processes, recompute: str) -> None:
    plan, blocks = planned(zero=3, blocks=8, recompute=recompute), {"blocks": 8}
    plain = two.run(trained, plan, "eager", 2, blocks)
    for (ours, far), (theirs, _) in zip(two.run(trained, replace(plan, partition_activations=ALL), "eager", 2, blocks), plain):
        assert same(ours, theirs) and far < 1e-5


@pytest.mark.full
def test_numbers_on_three_processes_of_uneven_parts(three: Processes) -> None:
    plan = planned(3, zero=3)
    plain = three.run(trained, plan, "eager", 2, {})
    for (ours, _), (theirs, _) in zip(three.run(trained, replace(plan, partition_activations=ALL), "eager", 2, {}), plain):
        assert same(ours, theirs)


@pytest.mark.full
def test_numbers_on_inductor(two: Processes) -> None:
    plan = replace(planned(codegen="inductor"), partition_activations=ALL)
    assert forecasts(codegen="inductor").alike(plan)
    for _, far in two.run(trained, plan, "inductor", 2, {}):
        assert far < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_numbers_beside_recomputation(two: Processes, recompute: str) -> None:
    plan = planned(zero=3, recompute=recompute)
    plain = two.run(trained, plan, "eager", 2, {})
    for (ours, far), (theirs, _) in zip(two.run(trained, replace(plan, partition_activations=ALL), "eager", 2, {}), plain):
        assert same(ours, theirs) and far < 1e-5


def other_lengths(plan: Plan) -> str:
    """What is said where each process has a length of its own."""
    model = Factored()
    compiled: Any = torch.compile(model, backend=autoshard.backend(config("auto", plan=plan, replicate_below="auto")))
    return what_is_said(lambda: compiled(batch(length=LENGTH + dist.get_rank())).backward())


def test_a_value_of_another_size_is_refused_before_anything_runs(two: Processes) -> None:
    for said in two.run(other_lengths, replace(planned(), partition_activations=ALL)):
        assert said.startswith("DisagreementError") and "as many batches, in the same mode" in said, said
    weights = tuple(value.name for value in forecasts().alike(planned()) if value.bytes >= WEIGHT)
    for said in two.run(other_lengths, replace(planned(), partition_activations=weights)):
        assert said == "nothing", said


def other_counts(plan: Plan) -> str:
    """What is said where one process has a batch less inside of `no_sync`, whose backwards communicate nothing but parts."""
    model = Factored()
    compiled: Any = torch.compile(model, backend=autoshard.backend(config("auto", plan=plan, replicate_below="auto")))

    def step() -> None:
        with autoshard.no_sync(model):
            for _ in range(2 + dist.get_rank()):
                compiled(batch()).backward()
        compiled(batch()).backward()

    return what_is_said(step)


def test_a_backward_that_others_have_not_is_refused(two: Processes) -> None:
    for said in two.run(other_counts, replace(planned(), partition_activations=ALL)):
        assert said.startswith("DisagreementError"), said


def other_numbers(plan: Plan) -> str:
    """What is said where a number of Python's is another one on each process."""
    model = Scaled("a number", 2.0 + dist.get_rank())
    compiled: Any = torch.compile(model, backend=autoshard.backend(config("auto", plan=plan, replicate_below="auto")))
    return what_is_said(lambda: compiled(torch.randn(9, 8)).backward())


@pytest.mark.full
def test_a_value_that_is_made_otherwise_is_refused(two: Processes) -> None:
    plan = autoshard.plan(Scaled("a number"), torch.randn(9, 8), config(0), hosts(2))
    for said in two.run(other_numbers, replace(plan, partition_activations=ALL)):
        assert said.startswith("DisagreementError"), said


def test_names_that_a_graph_does_not_have_are_warned_of() -> None:
    foreseen, plan = forecasts(), planned()
    with pytest.warns(UserWarning, match=r"does not save 'tanh \(3, 3\) 0', .* legal here: .*tanh \(64, 64\)"):
        foreseen._rehearsed(replace(plan, partition_activations=("tanh (3, 3) 0",)))


def grown_by_plan(plan: Plan, codegen: str) -> int:
    model = Factored()
    compiled: Any = torch.compile(model, backend=autoshard.backend(config("auto", plan=plan, codegen=codegen, replicate_below="auto")))
    optimizer = torch.optim.AdamW(model.parameters())
    return grown_in_a_step(lambda: compiled(batch(dist.get_rank())), optimizer)


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
def test_measured_peaks_are_those_foreseen(two: Processes, codegen: str) -> None:
    foreseen, usual = forecasts(codegen=codegen), planned(codegen=codegen)
    peaks = []
    for parts in ((), ALL):
        plan = foreseen(replace(usual, partition_activations=parts))
        peaks.append(above_held(plan.predicted))
        for measured in two.run(grown_by_plan, plan, codegen):
            assert abs(measured - peaks[-1]) <= 0.03 * peaks[-1], (parts, measured, peaks)
    assert peaks[0] > peaks[1]


def gathered_alone(plan: Plan) -> bool:
    """What one process does of a whole model communicates nothing, or would hang."""
    model = Factored()
    compiled: Any = torch.compile(model, backend=autoshard.backend(config("auto", plan=plan, replicate_below="auto")))
    compiled(batch()).backward()
    with autoshard.gathered(model):
        if dist.get_rank() == 0:
            compiled(batch(5).requires_grad_()).backward()
    return True


def test_a_gathered_model_keeps_nothing_in_parts(two: Processes) -> None:
    assert two.run(gathered_alone, replace(planned(zero=3), partition_activations=ALL)) == [True, True]
