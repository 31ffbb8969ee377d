"""Embeddings of which only the rows travel that are looked up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import autoshard
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.cost_model.step import rows_among
from autoshard.errors import PlanError
from autoshard.ops import sparse
from autoshard.ops.layout import Layout
from autoshard.passes import graphs
from autoshard.passes.choose_zero import Circumstances, predict
from autoshard.passes.sparse_rows import EMBEDDING_BACKWARD
from autoshard.plan import Plan
from autoshard.rehearsal import rehearse
from autoshard.torch_internals import KEEPS_OPERATORS
from tests.cluster import Cluster
from tests.parity import rank0_copy, whole
from tests.peaks import above_held, grown_in_a_step
from tests.small import compiled_pair, config, in_full

pytestmark = pytest.mark.skipif(not KEEPS_OPERATORS, reason="torch before 2.13 takes an embedding's gradient apart")
HOSTS = Machines(2, 1, DEVICES["cpu"])
Use = Literal["looked up", "and summed", "found by another"]


class Words(nn.Module):
    """Two embeddings, one with a row that gets no gradient, and one that is the head too."""

    def __init__(self, rows: int = 3000) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, 16, padding_idx=3)
        self.places = nn.Embedding(200, 16)
        self.tied = nn.Embedding(50, 16)

    def forward(self, tokens: Tensor, use: Use = "looked up") -> Tensor:
        if use == "found by another":
            tokens = (tokens + self.tied(tokens % 50).argmax(-1)) % 3000
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


def planned(zero: int = 0, **options: Any) -> Plan:
    return autoshard.plan(Words(), torch.zeros(2, 8, dtype=torch.long), config(zero, **options), HOSTS)


def tokens(rank: int, length: int) -> Tensor:
    return torch.randint(3000, (2, length), generator=torch.Generator().manual_seed(rank))


@dataclass(frozen=True)
class Seen:
    """How far gradients of the compiled model are from the mean of the processes' own, at most; how often rows travelled, and how often all
    of a parameter or a gradient did that might have gone by rows."""

    far: float
    by_rows: int
    whole: int


def seen(
    plan: Plan, codegen: str, lengths: list[int], uses: list[Use], waits: bool = False, build: Callable[[], nn.Module] = Words
) -> Seen:
    """Of a forward and a backward. waits: one backward before was inside `no_sync`."""
    torch.manual_seed(0)
    rank, model = dist.get_rank(), rank0_copy(build())
    plain = rank0_copy(model)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config("auto", plan=plan, codegen=codegen, replicate_below="auto")))
    compiled(tokens(9, 8))
    if waits:
        with autoshard.no_sync(model):
            compiled(tokens(rank, lengths[rank])).backward()
    with contextlib.ExitStack() as watched:
        calls = [watched.enter_context(mock.patch.object(sparse, n, wraps=getattr(sparse, n))) for n in ("swap_parts", "_unshard", "_reduce_grad")]
        compiled(tokens(rank, lengths[rank]), uses[rank]).backward()
    for other, (length, use) in enumerate(zip(lengths, uses)):
        scale = len(lengths)
        (plain(tokens(other, length), use) / scale).backward()
        if waits:
            (plain(tokens(other, length)) / scale).backward()
    pairs = [(whole(own.grad), plainly.grad) for own, plainly in zip(model.parameters(), plain.parameters()) if plainly.grad is not None]
    far = max(float((own - mean).abs().max() / mean.abs().max()) for own, mean in pairs)
    by_rows, *whole_calls = (call.call_count for call in calls)
    return Seen(far, by_rows, sum(whole_calls))


LOOKED_UP: list[Use] = ["looked up", "looked up"]
SEEN: list[tuple[list[int], list[Use], int]] = [
    ([8, 8], LOOKED_UP, 2),
    in_full([5, 31], LOOKED_UP, 2),
    ([5, 150], LOOKED_UP, 1),  # of which one embedding has not twice as many
    ([5, 8], ["looked up", "and summed"], 1),
]


def forced(zero: int = 0) -> Plan:
    """With the small embedding, too."""
    return replace(planned(zero), sparse=("words.weight", "places.weight"))


@pytest.mark.parametrize(("lengths", "uses", "embeddings"), SEEN)
@pytest.mark.parametrize(("zero", "codegen"), [(0, "eager"), (3, "eager"), in_full(1, "eager"), in_full(0, "inductor"), in_full(3, "inductor")])
def test_gradients_are_the_mean_whatever_travels(
    two: Cluster, zero: int, codegen: str, lengths: list[int], uses: list[Use], embeddings: int
) -> None:
    """Batches of other lengths, more rows than travel, and a process that uses an embedding otherwise. Of rows that are on one process
    each, parameters travel too."""
    each = 2 if zero else 1
    for found in two.run(seen, forced(zero), codegen, lengths, uses):
        assert found.far < 1e-5
        assert (found.by_rows, found.whole) == (each * embeddings, each * (2 - embeddings)), found


def test_a_process_that_has_to_gather_to_know_what_it_looks_up_takes_all(two: Cluster) -> None:
    """In the place where others ask for rows; where nothing is gathered it asks for rows."""
    for zero, by_rows, by_all in ((3, 2, 2), (0, 2, 0)):
        for found in two.run(seen, forced(zero), "eager", [8, 5], ["looked up", "found by another"]):
            assert found.far < 1e-5
            assert (found.by_rows, found.whole) == (by_rows, by_all), found


@pytest.mark.parametrize(("zero", "codegen"), [(0, "eager"), (3, "eager"), in_full(1, "eager"), in_full(0, "inductor")])
def test_what_waited_is_in_the_mean(two: Cluster, zero: int, codegen: str) -> None:
    """Of one embedding by rows and one that goes whole."""
    for found in two.run(seen, planned(zero), codegen, [8, 5], LOOKED_UP, True):
        assert found.far < 1e-5


DEEP: list[tuple[int, int, list[Use], int]] = [
    (0, 0, LOOKED_UP, 1),
    (3, 0, LOOKED_UP, 2),
    in_full(0, 0, ["looked up", "and summed"], 0),
    in_full(0, 8, LOOKED_UP, 9),
    in_full(3, 8, LOOKED_UP, 18),
]


@pytest.mark.parametrize(("zero", "tables", "uses", "by_rows"), DEEP)
def test_rows_travel_of_embeddings_around_blocks_that_are_graphs(two: Cluster, zero: int, tables: int, uses: list[Use], by_rows: int) -> None:
    """And of embeddings as many and as much alike as such blocks."""
    build = partial(Deep, tables)
    plan = autoshard.plan(build(), torch.zeros(2, 8, dtype=torch.long), config(zero), HOSTS)
    assert "words.weight" in plan.sparse
    plan = replace(plan, sparse=("words.weight", *(f"tables.{i}.weight" for i in range(tables))))
    for found in two.run(seen, plan, "eager", [8, 5], uses, False, build):
        assert found.far < 1e-5
        assert found.by_rows == by_rows, found


@pytest.mark.full
@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"mesh": {"replicate": 2, "shard": 2}}, {"zero": 3}, {"zero": 3, "precision": "bf16"}])
def test_on_four_processes(four: Cluster, options: dict[str, Any]) -> None:
    case = torch.zeros(2, 8, dtype=torch.long)
    plan = replace(autoshard.plan(Words(), case, config(**{"zero": 0} | options), Machines(4, 1, DEVICES["cpu"])), sparse=("words.weight",))
    by_rows, whole = (four.run(seen, p, "eager", [8, 5, 9, 1], [*LOOKED_UP, *LOOKED_UP]) for p in (plan, replace(plan, sparse=())))
    for found, other in zip(by_rows, whole):
        assert found.far <= max(other.far * 1.2, 1e-5), (found, other)  # in bf16 nothing is near to fp32
        assert found.by_rows and not other.by_rows


class Tied(nn.Module):
    """An embedding that is the head's weight."""

    def __init__(self, rows: int = 3000, count: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, 128, padding_idx=3)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(count))

    def forward(self, tokens: Tensor, use: Use = "looked up") -> Tensor:
        x = self.words.weight[:8].sin() if use == "and summed" else self.words(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.logsumexp(x @ self.words.weight.t(), -1).mean()


class Summed(Tied):
    """Which uses it otherwise before all else."""

    def forward(self, tokens: Tensor, use: Use = "looked up") -> Tensor:
        x = self.words.weight.square().mean() + self.words(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def planned_tied(zero: int = 0, count: int = 3) -> Plan:
    plan = autoshard.plan(Tied(count=count), torch.zeros(2, 8, dtype=torch.long), config(zero), HOSTS)
    assert plan.tied == ("words.weight",) and not plan.sparse
    return plan


TIED: list[tuple[list[int], list[Use], bool]] = [
    ([8, 5], LOOKED_UP, True),
    in_full([5, 2000], LOOKED_UP, False),  # more rows than travel
    ([8, 5], ["and summed", "and summed"], False),  # nothing is looked up
]


@pytest.mark.parametrize(("lengths", "uses", "by_rows"), TIED)
@pytest.mark.parametrize(("zero", "codegen"), [(0, "eager"), (3, "eager"), in_full(1, "eager"), in_full(0, "inductor"), in_full(3, "inductor")])
def test_of_a_tied_embedding_what_is_looked_up_goes_by_rows(
    two: Cluster, zero: int, codegen: str, lengths: list[int], uses: list[Use], by_rows: bool
) -> None:
    for found in two.run(seen, planned_tied(zero), codegen, lengths, uses, False, Tied):
        assert found.far < 1e-5
        assert found.by_rows == (by_rows and (2 if zero else 1)), found


@pytest.mark.parametrize("zero", [0, in_full(3)])
def test_a_tied_embedding_is_around_blocks_that_are_graphs(two: Cluster, zero: int) -> None:
    for found in two.run(seen, planned_tied(zero, 9), "eager", [8, 5], LOOKED_UP, False, partial(Tied, count=9)):
        assert found.far < 1e-5 and found.by_rows == (2 if zero else 1), found


@pytest.mark.parametrize("zero", [in_full(0), 3])
def test_what_waited_of_a_tied_embedding_is_in_the_mean(two: Cluster, zero: int) -> None:
    for found in two.run(seen, planned_tied(zero), "eager", [8, 5], LOOKED_UP, True, Tied):
        assert found.far < 1e-5


def test_all_processes_look_up_in_a_tied_embedding_or_none_does(two: Cluster) -> None:
    """Nobody waits for rows that another process does not send."""
    for zero in (0, 3):
        said = two.answers(seen, planned_tied(zero), "eager", [8, 8], ["looked up", "and summed"], False, Tied)
        for kind, (name, text, _) in said:
            assert (kind, name) == ("error", "DisagreementError"), said
            assert "in order" in text, said


def _serving(half: GraphModule, of: Callable[[Node], bool]) -> list[str]:
    """For which parameter each of these collectives is, and whether it brings rows or all of it."""
    starts = (n for n in half.graph.nodes if graphs.is_call(n, sparse.LOOK_UP_ROWS, sparse.REDUCE_ROWS) or of(n))
    return [f"{'rows' if graphs.is_call(n, *sparse.NAMES) else 'all'} of {' '.join(graphs.serves(n))}" for n in starts]


@pytest.mark.parametrize("zero", [0, 3])
def test_a_tied_embedding_is_gathered_last_and_reduced_first(zero: int) -> None:
    """All of it; its rows are looked up first, and reduced last."""
    made = rehearse(capture(Tied(), torch.zeros(2, 8, dtype=torch.long)), planned_tied(zero), inductor=False)
    assert made.backward is not None
    gathered, reduced = _serving(made.forward, graphs.gathers), _serving(made.backward, graphs.reduces)
    assert len(reduced) > 3 and (reduced[0], reduced[-1]) == ("all of words.weight", "rows of words.weight"), reduced
    assert len(gathered) > 3 and (gathered[0], gathered[-1]) == ("rows of words.weight", "all of words.weight") if zero else not gathered, gathered


def test_a_tied_embedding_goes_by_rows_where_these_are_few() -> None:
    plan = planned_tied()
    assert Plan.from_json(plan.to_json()) == plan and any("goes by rows" in why for why in plan.why)
    assert not autoshard.plan(Tied(), torch.zeros(16, 150, dtype=torch.long), config(0), HOSTS).tied
    early = autoshard.plan(Summed(), torch.zeros(2, 8, dtype=torch.long), config(0), HOSTS)
    assert not early.tied  # nothing would be reduced until the last gradient is there
    with pytest.raises(PlanError, match="tied: 'words.weight' is in sparse too"):
        replace(plan, sparse=plan.tied)
    with pytest.raises(PlanError, match="tied: 'no.weight' is not legal"):
        replace(plan, tied=("no.weight",))
    with pytest.raises(PlanError, match="tied: 'words.weight' beside compression"):
        replace(plan, compression="bf16")


def _apart(sharded: bool, padding: int) -> float:
    """How far what the three operators give is from what all of a table gives, at most, for tables that are cut unevenly, or of whose rows
    a process has none, and for batches with nothing in them."""
    size, rank = dist.get_world_size(), dist.get_rank()
    group, far = dist.group.WORLD.group_name, 0.0  # type: ignore[union-attr]
    layout = Layout(group if sharded else "", size if sharded else 1, (), "" if sharded else group, size, direct=True)
    for seed, rows in enumerate((1, 4, 7, 50)):
        draw = torch.Generator().manual_seed(seed)
        table = torch.randn(rows, 3, generator=draw)
        batches = [torch.randint(rows, (rows // 4 * other, 2), generator=draw) for other in range(size)]
        grads = [torch.randn(*batch.shape, 3, generator=draw) for batch in batches]
        own = table.split(layout.chunk_rows(rows))[rank] if sharded and rank * layout.chunk_rows(rows) < rows else table[: 0 if sharded else rows]
        told = torch.ops._c10d_functional.wait_tensor(sparse.run_ask_rows(batches[rank], own, rows, False, "table", size, group))
        if sharded:
            looked_up = sparse.run_look_up_rows(own, told, batches[rank], table.shape, str(layout), "table", group)
            far = max(far, float((looked_up - table[batches[rank]]).abs().sum()))
        args = own.shape, own.dtype, "table", told, rows, padding, str(layout), group
        reduced = sparse.run_reduce_rows(grads[rank], batches[rank], *args)
        mean = sum(EMBEDDING_BACKWARD(g, b, rows, padding, False) for g, b in zip(grads, batches)) / size
        want = (mean.split(layout.chunk_rows(rows)) + (mean[:0],) * size)[rank] if sharded else mean  # type: ignore[union-attr]
        assert reduced.shape == want.shape
        far = max(far, float((reduced - want).abs().sum()))
    return far


@pytest.mark.parametrize(("sharded", "padding"), [(True, 0), (False, -1)])
def test_rows_are_those_of_the_whole_table(three: Cluster, sharded: bool, padding: int) -> None:
    assert max(three.run(_apart, sharded, padding)) < 1e-5


def test_a_row_that_there_is_not_is_an_error() -> None:
    for index in (-1, 7):
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            sparse.run_ask_rows(torch.tensor([index]), torch.zeros(1), 7, False, "table", 1, "")


@given(st.floats(0, 100), st.integers(1, 200))
def test_a_batch_looks_up_no_more_rows_than_places_and_more_with_each(places: float, table: int) -> None:
    found = rows_among(places, table)
    assert found <= min(places if places >= 1 else 1, table) + 1e-9 and rows_among(places + 1, table) >= found


def test_only_what_is_looked_up_once_and_whole_everywhere() -> None:
    assert planned().sparse == ("words.weight",)  # the other one's message would take longer than it spares
    assert Plan.from_json(planned().to_json()) == planned() and any("looked up" in why for why in planned().why)
    assert not planned(compression="bf16").sparse
    long = autoshard.plan(Words(), torch.zeros(16, 150, dtype=torch.long), config(0), HOSTS)
    assert not long.sparse
    assert planned(2).sparse == planned(3).sparse == ("words.weight",)
    assert not planned(3, mesh={"replicate": 2, "shard": 1}).sharded and not replace(planned(3), sparse=()).sparse
    assert not autoshard.plan(Words(), torch.zeros(2, 8, dtype=torch.long), config(0), Machines(2, 8, DEVICES["h100"])).sparse
    with pytest.raises(PlanError, match="sparse: 'no.weight' is not legal"):
        replace(planned(), sparse=("no.weight",))
    with pytest.raises(PlanError, match="sparse: 'words.weight' is not legal; legal: parameters that all processes have whole"):
        replace(planned(3), direct=False)
    with pytest.raises(PlanError, match="sparse: 'words.weight' beside compression"):
        replace(planned(), compression="bf16")


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.randn(3000, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(input=tokens, weight=self.words).square().mean()


class Otherwise(ByName):
    """Of which no rows could travel, in one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.places = how, nn.Parameter(torch.randn(3000, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        words, scaled = (2 * self.words, False) if self.how == "made of it" else (self.words, self.how == "scaled")
        tokens = self.places[tokens].argmax(-1) if self.how == "found by another" else tokens
        return nn.functional.embedding(tokens, words, scale_grad_by_freq=scaled).square().mean()


@pytest.mark.parametrize("how", ["made of it", "scaled", "found by another"])
def test_a_plan_names_no_embedding_of_which_no_rows_could_travel(how: str) -> None:
    assert not autoshard.plan(Otherwise(how), torch.zeros(2, 8, dtype=torch.long), config(3), HOSTS).sparse


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
    found = (n for n in made.backward.graph.nodes if graphs.is_call(n, sparse.REDUCE_ROWS) or graphs.reduces(n))
    return [str(n.args[4]) if graphs.is_call(n, sparse.REDUCE_ROWS) else "sum" for n in found]


def test_the_rows_of_the_last_gradients_come_last() -> None:
    """Behind all reductions, that of small parameters too."""
    assert _reductions(Words(), forced()) == ["sum", "places.weight", "words.weight"]
    small = autoshard.plan(Normed(), torch.zeros(2, 8, dtype=torch.long), config(0, replicate_below="auto"), HOSTS)
    assert [g.name for g in small.groups] == ["words", "replicated"]
    assert _reductions(Normed(), small) == ["sum", "words.weight"]
    whole = rehearse(capture(Words(), torch.zeros(2, 8, dtype=torch.long)), replace(planned(), sparse=()), inductor=False)
    assert whole.backward is not None and not graphs.calls(whole.backward, sparse.REDUCE_ROWS)


def _order(zero: int) -> list[str]:
    """What a forward communicates, in order, and what its first operation is."""
    made = rehearse(capture(Words(), torch.zeros(2, 8, dtype=torch.long)), forced(zero), inductor=False)
    starts = [n for n in made.forward.graph.nodes if n.target in graphs.STARTS or graphs.is_call(n, *sparse.NAMES, graphs.WAIT)]
    return [f"{str(n.target).split('.')[1]} {graphs.serves(n)[0].split('.')[0] if graphs.serves(n) else ''}".strip() for n in starts]


def test_what_is_looked_up_comes_before_gathers() -> None:
    """All ask at once. Where parameters are whole, what was told is waited for at the end."""
    asked = ["ask_rows words", "ask_rows places"]
    assert _order(3)[:6] == [*asked, "wait_tensor", "look_up_rows words", "wait_tensor", "look_up_rows places"], _order(3)
    assert _order(0) == [*asked, "wait_tensor", "wait_tensor"]


@pytest.mark.parametrize("zero", [0, 1])
def test_what_travels_is_known_before_the_model_was_traced(zero: int) -> None:
    """As the forecast of its graphs has it."""
    captured, plan = capture(Words(), torch.zeros(2, 8, dtype=torch.long)), planned(zero)
    without = predict(plan, captured.inventory, config(zero), Circumstances(HOSTS, None))
    known, found = ({(t.collective, t.phase): (t.messages, t.bytes) for t in p.predicted.traffic} for p in (without, plan))
    assert known.keys() == found.keys()
    for kind, (messages, sent) in known.items():
        assert found[kind][0] == messages and found[kind][1] == pytest.approx(sent, rel=0.02, abs=100), kind


def _peak(plan: Plan) -> int:
    model, _, compiled = compiled_pair(config("auto", plan=plan, replicate_below="auto"), partial(Words, 30_000))
    optimizer = torch.optim.SGD(model.parameters())
    return grown_in_a_step(lambda: compiled(tokens(dist.get_rank(), 8)), optimizer)


@pytest.mark.parametrize("zero", [0, 3])
def test_the_peak_is_the_measured_one(two: Cluster, zero: int) -> None:
    settings = config(zero, optimizer="sgd")
    plan = autoshard.plan(Words(30_000), torch.zeros(2, 8, dtype=torch.long), settings, HOSTS, torch.optim.SGD)
    assert plan.sparse
    for found in two.run(_peak, plan):
        assert above_held(plan.predicted) == pytest.approx(found, rel=0.03), plan.predicted
