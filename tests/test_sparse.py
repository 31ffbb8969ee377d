"""Gradients of embeddings that travel as the rows that were looked up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.errors import PlanError
from autoshard.ops.sparse import pays
from autoshard.passes import graphs
from autoshard.plan import Plan
from autoshard.rehearsal import rehearse
from autoshard.torch_internals import KEEPS_OPERATORS
from tests.cluster import Cluster
from tests.parity import rank0_copy
from tests.peaks import above_held, grown_in_a_step
from tests.small import compiled_pair, config, in_full

pytestmark = pytest.mark.skipif(not KEEPS_OPERATORS, reason="torch before 2.13 takes an embedding's gradient apart")
HOSTS = Machines(2, 1, DEVICES["cpu"])
Use = Literal["looked up", "and summed"]


class Words(nn.Module):
    """Two embeddings, one with a row that gets no gradient, and one that is the head too."""

    def __init__(self, rows: int = 3000) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, 16, padding_idx=3)
        self.places = nn.Embedding(200, 16)
        self.tied = nn.Embedding(50, 16)

    def forward(self, tokens: Tensor, use: Use = "looked up") -> Tensor:
        x = torch.tanh(self.words(tokens) + self.places(torch.arange(tokens.shape[1])) + self.tied(tokens % 50))
        found = torch.logsumexp(x @ self.tied.weight.t(), -1).mean()
        return found + self.words.weight.square().sum() if use == "and summed" else found


class Deep(Words):
    """Whose embeddings are around blocks that are a graph of their own, or of which there are as many as of blocks that are."""

    def __init__(self, tables: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(8 - tables))
        self.tables = nn.ModuleList(nn.Embedding(3000, 16) for _ in range(tables))

    def forward(self, tokens: Tensor, use: Use = "looked up") -> Tensor:
        x = self.words(tokens)
        for table in self.tables:
            x = x + table(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean() + (self.words.weight.square().sum() if use == "and summed" else 0)


def planned(**options: Any) -> Plan:
    return autoshard.plan(Words(), torch.zeros(2, 8, dtype=torch.long), config(0, **options), HOSTS)


def tokens(rank: int, length: int) -> Tensor:
    return torch.randint(3000, (2, length), generator=torch.Generator().manual_seed(rank))


def distance(
    plan: Plan, codegen: str, lengths: list[int], uses: list[Use], waits: bool = False, build: Callable[[], nn.Module] = Words
) -> tuple[float, list[str]]:
    """How far gradients of the compiled model are from the mean of the processes' own, at most, and which collectives were called
    in its backward. waits: one backward before communicates nothing."""
    rank, model = dist.get_rank(), rank0_copy(build())
    plain = rank0_copy(model)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config("auto", plan=plan, codegen=codegen, replicate_below="auto")))
    compiled(tokens(9, 8))
    if waits:
        with autoshard.no_sync(model):
            compiled(tokens(rank, lengths[rank])).backward()
    loss = compiled(tokens(rank, lengths[rank]), uses[rank])
    with torch.profiler.profile() as profiler:
        loss.backward()
    for other, (length, use) in enumerate(zip(lengths, uses)):
        scale = len(lengths)
        (plain(tokens(other, length), use) / scale).backward()
        if waits:
            (plain(tokens(other, length)) / scale).backward()
    pairs = zip(model.parameters(), plain.parameters())
    far = max(float((own.grad - whole.grad).abs().max() / whole.grad.abs().max()) for own, whole in pairs if whole.grad is not None)
    return far, [e.name for e in profiler.events() if e.name.startswith("_c10d_functional::all")]


LOOKED_UP: list[Use] = ["looked up", "looked up"]
SEEN: list[tuple[list[int], list[Use], int]] = [
    ([8, 8], LOOKED_UP, 4),
    in_full([5, 31], LOOKED_UP, 4),
    ([5, 150], LOOKED_UP, 3),  # together more places than there are
    ([5, 8], ["looked up", "and summed"], 3),
]


def forced() -> Plan:
    """With the small embedding, too."""
    return replace(planned(), sparse=("words.weight", "places.weight"))


@pytest.mark.parametrize(("lengths", "uses", "gathers"), SEEN)
@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
def test_gradients_are_the_mean_whatever_travels(two: Cluster, codegen: str, lengths: list[int], uses: list[Use], gathers: int) -> None:
    """Batches of other lengths, more rows than the embedding has, and a process that uses it otherwise. Gathers are of counts,
    and of rows where these travel."""
    for far, called in two.run(distance, forced(), codegen, lengths, uses):
        assert far < 1e-5
        assert sum("all_gather" in name for name in called) == gathers, called


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
def test_what_waited_is_in_the_mean(two: Cluster, codegen: str) -> None:
    """Of one embedding by rows and one that goes whole."""
    for far, _ in two.run(distance, planned(), codegen, [8, 5], LOOKED_UP, True):
        assert far < 1e-5


DEEP: list[tuple[int, list[Use], int]] = [(0, LOOKED_UP, 2), (0, ["looked up", "and summed"], 1), (8, LOOKED_UP, 18)]


@pytest.mark.parametrize(("tables", "uses", "gathers"), [DEEP[0], *(in_full(*case) for case in DEEP[1:])])
def test_rows_travel_of_embeddings_around_blocks_that_are_graphs(two: Cluster, tables: int, uses: list[Use], gathers: int) -> None:
    """And of embeddings as many and as much alike as such blocks."""
    build = partial(Deep, tables)
    plan = autoshard.plan(build(), torch.zeros(2, 8, dtype=torch.long), config(0), HOSTS)
    assert "words.weight" in plan.sparse
    plan = replace(plan, sparse=("words.weight", *(f"tables.{i}.weight" for i in range(tables))))
    for far, called in two.run(distance, plan, "eager", [8, 5], uses, False, build):
        assert far < 1e-5
        assert sum("all_gather" in name for name in called) == gathers, called


@pytest.mark.full
@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"mesh": {"replicate": 2, "shard": 2}}])
def test_on_four_processes(four: Cluster, options: dict[str, Any]) -> None:
    case = torch.zeros(2, 8, dtype=torch.long)
    plan = replace(autoshard.plan(Words(), case, config(0, **options), Machines(4, 1, DEVICES["cpu"])), sparse=("words.weight",))
    by_rows, whole = (four.run(distance, p, "eager", [8, 5, 9, 1], [*LOOKED_UP, *LOOKED_UP]) for p in (plan, replace(plan, sparse=())))
    for (far, _), (as_far, _) in zip(by_rows, whole):
        assert far <= max(as_far * 1.2, 1e-5), (far, as_far)  # in bf16 nothing is near to fp32


@given(st.lists(st.integers(-1, 50), min_size=1, max_size=8), st.integers(1, 200))
def test_rows_travel_where_they_are_few_and_all_have_them(counts: list[int], table: int) -> None:
    if pays(counts, table):
        assert min(counts) >= 0 and len(counts) * max(counts) <= table


def test_only_what_is_looked_up_once_and_whole_everywhere() -> None:
    assert planned().sparse == ("words.weight",)  # the other one's message would take longer than it spares
    assert Plan.from_json(planned().to_json()) == planned() and any("looked up" in why for why in planned().why)
    assert not planned(compression="bf16").sparse
    long = autoshard.plan(Words(), torch.zeros(16, 150, dtype=torch.long), config(0), HOSTS)
    assert not long.sparse
    assert not autoshard.plan(Words(), torch.zeros(2, 8, dtype=torch.long), config(2), HOSTS).sparse
    assert not autoshard.plan(Words(), torch.zeros(2, 8, dtype=torch.long), config(0), Machines(2, 8, DEVICES["h100"])).sparse
    with pytest.raises(PlanError, match="sparse: 'no.weight' is not legal"):
        replace(planned(), sparse=("no.weight",))
    with pytest.raises(PlanError, match="sparse: 'words.weight' beside compression"):
        replace(planned(), compression="bf16")


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.randn(3000, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(input=tokens, weight=self.words).square().mean()


def test_what_is_looked_up_may_be_given_by_name() -> None:
    assert autoshard.plan(ByName(), torch.zeros(2, 8, dtype=torch.long), config(0), HOSTS).sparse == ("words",)


class Normed(Words):
    """Whose small parameters are first used behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor, use: Use = "looked up") -> Tensor:
        return (self.norm(self.words(tokens)) @ self.tied.weight.t()).square().mean()


def _reductions(model: nn.Module, plan: Plan) -> list[str]:
    made = rehearse(capture(model, torch.zeros(2, 8, dtype=torch.long)), plan, inductor=False)
    assert made.backward is not None
    found = (n for n in made.backward.graph.nodes if graphs.is_call(n, graphs.REDUCE_SPARSE) or graphs.reduces(n))
    return [str(n.args[4]) if graphs.is_call(n, graphs.REDUCE_SPARSE) else "sum" for n in found]


def test_the_rows_of_the_last_gradients_come_last() -> None:
    """Behind all reductions, that of small parameters too."""
    assert _reductions(Words(), forced()) == ["sum", "places.weight", "words.weight"]
    small = autoshard.plan(Normed(), torch.zeros(2, 8, dtype=torch.long), config(0, replicate_below="auto"), HOSTS)
    assert [g.name for g in small.groups] == ["words", "replicated"]
    assert _reductions(Normed(), small) == ["sum", "words.weight"]
    whole = rehearse(capture(Words(), torch.zeros(2, 8, dtype=torch.long)), replace(planned(), sparse=()), inductor=False)
    assert whole.backward is not None and not graphs.calls(whole.backward, graphs.REDUCE_SPARSE)


def _peak(plan: Plan) -> int:
    model, _, compiled = compiled_pair(config("auto", plan=plan, replicate_below="auto"), partial(Words, 30_000))
    optimizer = torch.optim.SGD(model.parameters())
    return grown_in_a_step(lambda: compiled(tokens(dist.get_rank(), 8)), optimizer)


def test_the_peak_is_the_measured_one(two: Cluster) -> None:
    settings = config(0, optimizer="sgd")
    plan = autoshard.plan(Words(30_000), torch.zeros(2, 8, dtype=torch.long), settings, HOSTS, torch.optim.SGD)
    assert plan.sparse
    for found in two.run(_peak, plan):
        assert above_held(plan.predicted) == pytest.approx(found, rel=0.03), plan.predicted
