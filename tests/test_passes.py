"""The rewrites on small graphs, in one process that stands for rank 0 of many (a fake process group)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.codegen import Compilation
from autoshard.console import Phases
from autoshard.errors import PassError
from autoshard.inventory import take_inventory
from autoshard.passes import bucket, registry
from autoshard.passes import graphs as passgraphs
from autoshard.passes.base import Context
from autoshard.passes.choose_zero import make_plan
from autoshard.passes.dump import Dump
from autoshard.passes.early_matmuls import EarlyMatmuls
from autoshard.passes.manager import PassManager
from autoshard.passes.name_parameters import NameParameters
from autoshard.passes.overlap import Overlap
from autoshard.plan import Plan
from autoshard.runtime.processes import World, build_mesh, name_of_everyone
from autoshard.runtime.shard import Sharder
from autoshard.runtime.state import ModelState
from autoshard.torch_internals import FakeTensor
from tests.test_plan import _where

WORLD = 256
LOGICAL = "name_parameters,merge_unshards,sync_buffers,regather,bucket"  # without the lowering


@pytest.fixture(autouse=True, scope="module")
def many_processes() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


class Blocks(nn.Module):
    """Three blocks; `order` is the order in which this graph uses them."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 512)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i in self.order:
            x = torch.relu(self.layers[i](x))
        return x.sum()


def plan_for(model: nn.Module, zero: int, **config: Any) -> Plan:
    inventory = take_inventory(model, model.parameters())
    options = autoshard.Config(zero=zero, replicate_below=0, **config)
    return make_plan(inventory, options, _where(WORLD))


@dataclass(frozen=True)
class Record:
    """A pass of the last stage that changes nothing and keeps what it saw."""

    seen: dict[str, GraphModule] = field(default_factory=dict, hash=False)

    name: ClassVar[str] = "record"
    stage: ClassVar[str] = "code"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        self.seen[context.phase] = gm
        return gm


def rewritten(model: nn.Module, inputs: Tensor, plan: Plan, spec: str = registry.DEFAULT) -> dict[str, GraphModule]:
    """The final graphs by phase."""
    torch.compiler.reset()
    sharder = Sharder(model, plan, build_mesh("cpu", plan.axes))
    for _ in sharder.shard():
        pass
    state = ModelState(model, plan, World(0, WORLD, "cpu"), "model")
    record = Record()

    def backend(gm: GraphModule, given: Any) -> Any:
        names = state.names()
        context = Context(
            plan,
            {i: names[id(x)] for i, x in enumerate(given) if id(x) in names},
            frozenset(i for i, x in enumerate(given) if id(x) in {id(b) for b in model.buffers()}),
            name_of_everyone(),
        )
        manager = PassManager((*registry.parse(spec), record), Dump(None))
        return Compilation(manager, context, False, Phases(False)).compile(gm, given)

    loss = torch.compile(model, backend=backend)(inputs)
    if loss.requires_grad:
        loss.backward()
    return record.seen


def collectives(gm: GraphModule) -> list[str]:
    """"gather 1024", "reduce 2048", ... with the elements that one process sends into it."""
    found = []
    for node in gm.graph.nodes:
        match = re.match(r"_c10d_functional\.(all_gather|reduce_scatter|all_to_all|all_reduce|broadcast)", str(node.target))
        if match:
            found.append(f"{match[1]} {node.args[0].meta['val'].numel()}")
    return found


def test_a_group_travels_in_one_message_each_way() -> None:
    model = Blocks()
    graphs = rewritten(model, torch.randn(4, 8), plan_for(model, 3))
    embed, layer = (512 * 8 + 512) // WORLD, (512 * 512 + 512) // WORLD
    assert collectives(graphs["forward"]) == [f"all_gather {embed}"] + [f"all_gather {layer}"] * 3
    assert_expected_inline(
        "\n".join(collectives(graphs["backward"])),
        """\
all_gather 1024
reduce_scatter 262656
all_gather 1024
reduce_scatter 262656
reduce_scatter 262656
reduce_scatter 4608""",
    )


@pytest.mark.parametrize(("zero", "forward", "backward"), [(0, 0, 4), (1, 4, 4), (2, 4, 4), (3, 4, 6)])
def test_stages_differ_in_degrees_only(zero: int, forward: int, backward: int) -> None:
    model = Blocks()
    graphs = rewritten(model, torch.randn(4, 8), plan_for(model, zero))
    assert len(collectives(graphs["forward"])) == forward
    assert len(collectives(graphs["backward"])) == backward


def test_the_order_is_the_plan_s_and_not_the_graph_s() -> None:
    model = Blocks((2, 0, 1))
    graphs = rewritten(model, torch.randn(4, 8), plan_for(model, 3), LOGICAL)
    there = ["embed", "layers.0", "layers.1", "layers.2"]
    assert _blocks(graphs["forward"], "unshard_bucket") == there
    assert _blocks(graphs["backward"], "reduce_bucket") == there[::-1]
    assert _blocks(graphs["backward"], "unshard_bucket") == ["layers.1", "layers.0"]  # layers.2 is kept


def _blocks(gm: GraphModule, op: str) -> list[str]:
    """The groups whose buckets stand in a graph, in order."""
    return [str(n.args[1]).split(" ")[0].rpartition(".")[0] for n in gm.graph.nodes if op in str(n.target)]


def test_a_parameter_used_twice_is_gathered_once_and_reduced_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(300, 64)
            self.head = nn.Linear(64, 300, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids)).sum()

    model = Tied()
    graphs = rewritten(model, torch.zeros(4, dtype=torch.long), plan_for(model, 2))
    assert len(collectives(graphs["forward"])) == 1 and len(collectives(graphs["backward"])) == 1


def test_what_is_computed_is_no_parameter_s_rows() -> None:
    """Though what it is computed of may be: or it would stand for that parameter."""
    graph = Graph()
    graph.output(graph.call_function(passgraphs.UNSHARD, (graph.call_function(torch.neg, (graph.placeholder("rows"),)), [2], "", "")))
    with pytest.raises(PassError, match="does not unshard a graph input"):
        NameParameters().run(GraphModule({}, graph), Context(plan_for(nn.Linear(2, 2), 0), {0: "weight"}))


def test_rows_come_from_dtensors_in_front_of_the_graph() -> None:
    inputs, ops, grads = [], [], []
    for left_out in ("", "take_rows,"):
        model = Blocks()
        model.embed.bias.requires_grad_(False)
        graphs = rewritten(model, torch.randn(4, 8), plan_for(model, 3), registry.DEFAULT.replace(left_out, ""))
        inputs.append([type(passgraphs.example(n)) for n in graphs["forward"].graph.find_nodes(op="placeholder")])
        counts = [passgraphs.op_counts(graphs[phase]) for phase in ("forward", "backward")]
        ops.append([{op: n for op, n in count.items() if op != "aten.view.default"} for count in counts])
        grads.append([p.grad for p in model.parameters()])
        for p in model.parameters():
            if p.requires_grad:
                assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements  # type: ignore[attr-defined]
                assert p.grad.shape == p.shape and p.grad.to_local().shape == p.to_local().shape  # type: ignore[attr-defined]
    assert set(inputs[0]) == {FakeTensor} and len(inputs[0]) == 9 and ops[0] == ops[1]
    assert [g is None for g in grads[0]] == [g is None for g in grads[1]] and grads[0][1] is None


def test_whole_parameters_are_traced_and_rows_are_what_comes_of_it() -> None:
    found = []
    for left_out in ("", "take_whole,"):
        model = Blocks((0, 1, 0))
        model.embed.bias.requires_grad_(False)
        graphs = rewritten(model, torch.randn(4, 8), plan_for(model, 3), registry.DEFAULT.replace(left_out, ""))
        with torch.no_grad():
            graphs |= rewritten(Blocks(), torch.randn(4, 8), plan_for(model, 3), registry.DEFAULT.replace(left_out, ""))
        found.append({phase: _in_short(gm) for phase, gm in graphs.items()})
    assert found[0] == found[1] and set(found[0]) == {"forward", "backward", "inference"}


def _in_short(gm: GraphModule) -> tuple[list[str], dict[str, int], list[str]]:
    """What goes in, what is done with it, and the collectives in order."""
    given = sorted(str(tuple(passgraphs.example(n).shape)) for n in gm.graph.find_nodes(op="placeholder"))
    return given, passgraphs.op_counts(gm), collectives(gm)


def test_a_matmul_does_not_wait_for_a_late_sum() -> None:
    """As the gradient of the head does for that of a tied embedding."""

    a, b = torch.randn(4, 4), torch.randn(4, 4)
    gm = make_fx(lambda a, b: (a @ b + torch.sin(a), torch.cos(a) + b @ a), tracing_mode="fake")(a, b)
    expected = gm(a, b)
    EarlyMatmuls().run(gm, Context(plan_for(nn.Linear(2, 2), 0)))
    first, second = gm.graph.output_node().args[0]  # type: ignore[union-attr, misc]
    assert first.target is torch.ops.aten.squeeze.dim and second.target is torch.ops.aten.add.Tensor
    assert all(torch.equal(x, y) for x, y in zip(expected, gm(a, b)))


def test_a_sum_of_early_matmuls_and_more_is_rewritten_step_by_step() -> None:
    """As the gradients of a table that every block takes a part of: a sum of sums."""
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    gm = make_fx(lambda a, b: a @ b + torch.sin(a) + b @ a + torch.cos(b), tracing_mode="fake")(a, b)
    first, last = [n for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default]
    first.append(last)  # both matmuls before what they are added to
    expected = gm(a, b)
    EarlyMatmuls().run(gm, Context(plan_for(nn.Linear(2, 2), 0)))
    gm.graph.lint()
    gm.recompile()
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.squeeze.dim)) == 2
    assert torch.equal(expected, gm(a, b))


class Looking(nn.Module):
    """Takes rows of a plain parameter by what comes in, and adds another to what it computes; backward needs what became of both."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.shift, self.line = nn.Parameter(torch.randn(512, 8)), nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + torch.tanh(torch.sigmoid(self.table[ids]).sin() * 2) + torch.sigmoid(self.line(x).sin() + self.shift).sin()


class Tables(nn.Module):
    def __init__(self, blocks: int = 3, checkpointed: bool = False) -> None:
        super().__init__()
        self.table, self.checkpointed = nn.Parameter(torch.randn(512, 8)), checkpointed
        self.layers, self.head = nn.ModuleList(Looking() for _ in range(blocks)), nn.Linear(8, 512)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.table[ids])
        for layer in self.layers:
            x = checkpoint(layer, x, ids, use_reentrant=False) if self.checkpointed else layer(x, ids)
        return self.head(x).square().mean()


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize(("blocks", "checkpointed"), [(3, False), (3, True), (8, False)])
def test_what_is_gathered_again_is_the_same_for_batches_of_all_sizes(blocks: int, checkpointed: bool, policy: str) -> None:
    found = []
    for tokens in (1, 10, 1000):
        model = Tables(blocks, checkpointed)
        plan = replace(plan_for(model, 3), recompute=tuple((f"layers.{i}", policy) for i in range(blocks)) * (policy != "none"))
        graphs = rewritten(model, torch.zeros(tokens, dtype=torch.long), plan)
        found.append([collectives(graphs[phase]) for phase in ("forward", "backward")])
    assert found[0] == found[1] == found[2]


class Pruned(nn.Module):
    """Weights times a mask, of which backward reads the mask alone, in float64; or weights as they are."""

    def __init__(self, blocks: int, masked: bool) -> None:
        super().__init__()
        self.layers, self.masked = nn.ModuleList(nn.Linear(64, 64) for _ in range(blocks)), masked
        for layer in self.layers:
            layer.register_buffer("mask", torch.ones(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weight = (layer.weight * layer.mask).to(torch.float64) if self.masked else layer.weight
            x = torch.nn.functional.linear(x.to(weight.dtype), weight, layer.bias.to(weight.dtype))
        return x.square().mean()


@pytest.mark.parametrize("blocks", [3, 8])
def test_of_masked_and_cast_weights_as_much_is_gathered_again_as_of_others(blocks: int) -> None:
    found = []
    for masked in (False, True):
        model = Pruned(blocks, masked)
        graphs = rewritten(model, torch.randn(4, 64), plan_for(model, 3))
        saved = [n.meta["val"] for n in graphs["forward"].graph.output_node().all_input_nodes if n.op != "placeholder"]
        found.append((collectives(graphs["backward"]), sum(isinstance(v, Tensor) and v.shape == (64, 64) for v in saved)))
    assert found[0] == found[1] and any("gather" in name for name in found[0][0])


class Smooth(nn.Module):
    """Blocks whose activations are more than their parameters."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("budget", [{"activation_memory_budget": 0.1}, {"aggressive_recomputation": True}], ids=str)
@pytest.mark.parametrize(("blocks", "zero"), [(3, 2), (8, 2), (8, 3)])
def test_to_spare_memory_torch_gathers_nothing_again_and_repeats_no_block(blocks: int, zero: int, budget: dict[str, Any]) -> None:
    """What it would repeat depends on the sizes of a batch; a block would draw other random numbers."""
    found = []
    for options in ({}, budget):
        model = Smooth(blocks)
        with torch._functorch.config.patch(options):
            graphs = rewritten(model, torch.randn(4096, 64), plan_for(model, zero))
        found.append(collectives(graphs["backward"]))
        assert not passgraphs.calls(graphs["backward"], passgraphs.BLOCK)
    assert found[0] == found[1]


class Regions(Blocks):
    """Blocks, each in an activation-checkpoint region that also uses one shared layer."""

    def _region(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.layers[0](layer(x)))  # backward needs what gelu was given

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers[1:]:
            x = checkpoint(self._region, layer, x, use_reentrant=False)
        return x.sum()


@pytest.mark.parametrize(("zero", "forward", "backward"), [(0, 0, 4), (2, 4, 4), (3, 4, 6)])
def test_a_region_recomputes_what_it_holds_and_the_plan_says_what_is_gathered(
    zero: int, forward: int, backward: int
) -> None:
    model = Regions()
    graphs = rewritten(model, torch.randn(4, 8), plan_for(model, zero))
    assert len(collectives(graphs["forward"])) == forward
    assert len(collectives(graphs["backward"])) == backward
    products = [sum(n.target is torch.ops.aten.addmm.default for n in gm.graph.nodes) for gm in graphs.values()]
    assert products == [5, 4]


def test_frozen_parameters_are_gathered_and_never_reduced() -> None:
    model = Blocks()
    model.layers.requires_grad_(False)
    graphs = rewritten(model, torch.randn(4, 8), plan_for(model, 3))
    reductions = [c for c in collectives(graphs["backward"]) if c.startswith("reduce")]
    assert len(reductions) == 1


def test_changed_buffers_take_one_message_a_dtype() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).sum()

    whole = Sum()
    graphs = rewritten(whole, torch.randn(4, 8), plan_for(whole, 0))
    assert collectives(graphs["forward"]) == ["broadcast 2", "broadcast 32"] or collectives(graphs["forward"]) == [
        "broadcast 32",
        "broadcast 2",
    ]


class Between(nn.Module):
    """Uses its weight before and after something that needs no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        with torch.no_grad():
            scale = x.abs().mean() + self.body.weight.mean()
        return self.body(x / scale).sum()


def test_what_is_used_on_both_sides_of_no_grad_has_one_gradient() -> None:
    """Or what is held of it would be added twice."""
    model = Between()
    graphs = rewritten(model, torch.randn(4, 512), plan_for(model, 3), LOGICAL)
    (reduced,) = passgraphs.calls(graphs["backward"], passgraphs.REDUCE_BUCKET, passgraphs.REDUCE_GRAD)
    assert reduced.target is passgraphs.REDUCE_GRAD or len(reduced.args[0]) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("mesh", [None, {"replicate": 2, "shard": WORLD // 2}])
def test_whole_gradients_are_summed_in_the_place_of_what_was_packed(mesh: dict[str, int] | None) -> None:
    """Which nothing else reads. What an earlier reduction brought is left as it is."""
    model = Blocks()
    graphs = rewritten(model, torch.randn(4, 8), plan_for(model, 2 if mesh else 0, mesh=mesh))
    sums = passgraphs.calls(graphs["backward"], *passgraphs.ALL_REDUCES)
    assert len(sums) == 4 and {node.target._schema.is_mutable for node in sums} == {mesh is None}  # type: ignore[union-attr]
    assert all(len(given.users) == 1 and given.op == "call_function" for node in sums for given in node.all_input_nodes)


def test_gathers_start_one_bucket_ahead_and_two_reductions_are_on_their_way() -> None:
    model = Blocks()
    graphs = rewritten(model, torch.randn(4, 8), plan_for(model, 3))
    kinds = [_kind(n) for n in graphs["forward"].graph.nodes]
    assert [k for k in kinds if k] == ["gather", "wait", "gather", "mm", "wait", "gather", "mm", "wait", "gather", "mm", "wait", "mm"]
    starts = passgraphs.calls(graphs["backward"], *passgraphs.REDUCTIONS)
    waits = {next(iter(start.users)): start for start in starts}
    on_their_way, most = 0, 0
    for node in graphs["backward"].graph.nodes:
        on_their_way += (node in starts) - (node in waits)
        most = max(most, on_their_way)
    assert len(starts) == 4 and most == 3 and on_their_way == 0


@pytest.mark.parametrize("spec", [registry.DEFAULT, registry.DEFAULT.replace("overlap", "overlap{ahead=3}")])
def test_gathers_start_as_far_ahead_as_the_plan_or_the_pass_says(spec: str) -> None:
    model = Blocks()
    plan = replace(plan_for(model, 3), ahead=1 if "ahead" in spec else 3)
    graphs = rewritten(model, torch.randn(4, 8), plan, spec)
    kinds = [k for k in map(_kind, graphs["forward"].graph.nodes) if k]
    assert kinds[:6] == ["gather", "gather", "gather", "wait", "gather", "mm"]


def _kind(node: torch.fx.Node) -> str:
    table = {"all_gather": "gather", "wait_tensor": "wait", "aten.addmm": "mm", "aten.mm": "mm", "reduce_sc": "reduce"}
    return next((kind for name, kind in table.items() if name in str(node.target)), "")


class Pairs(nn.Module):
    """Three blocks of two matrices of 64 kB, one of which has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128, bias=False)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def test_buckets_can_be_cut() -> None:
    """The two matrices of each block apart, with the bias beside one."""
    model = Pairs()
    spec = registry.DEFAULT.replace("bucket", "bucket{mb=0.067}")
    graphs = rewritten(model, torch.randn(4, 128), plan_for(model, 2), spec)
    assert len(collectives(graphs["forward"])) == len(collectives(graphs["backward"])) == 6


def test_gradients_are_reduced_as_soon_as_a_bucket_of_them_is_there() -> None:
    """The first with two products of backward done, not four; a bias goes with its matrix."""
    found = []
    for size in (0, 66_000):
        model = Pairs()
        gm = rewritten(model, torch.randn(4, 128), replace(plan_for(model, 0), bucket=size))["backward"]
        nodes = list(gm.graph.nodes)
        done = [sum(_kind(n) == "mm" for n in nodes[:i]) for i, n in enumerate(nodes) if passgraphs.reduces(n)]
        found.append(([n.split()[1] for n in collectives(gm)], done))
    assert found[0] == (["32896"] * 3, [4, 8, 11]), found[0]
    assert found[1] == (["16384", "16512"] * 3, [2, 4, 6, 8, 10, 11]), found[1]


def test_reductions_are_waited_for_two_groups_later_however_they_are_cut() -> None:
    found = []
    for size in (0, 66_000):
        model = Pairs()
        gm = rewritten(model, torch.randn(4, 128), replace(plan_for(model, 0), bucket=size))["backward"]
        at = passgraphs.positions(gm.graph)
        starts = [n for n in gm.graph.nodes if passgraphs.reduces(n)]
        found.append([sum(at[start] < at[next(iter(first.users))] for start in starts) for first in starts])
    assert found == [[3, 3, 3], [5, 5, 6, 6, 6, 6]], found


def test_every_process_cuts_buckets_alike() -> None:
    """By what is whole: of the last rows some processes have fewer."""
    whole, rows, ours = torch.empty(3, 100), [torch.empty(n, 100) for n in (2, 1)], []
    for own in rows:
        graph = torch.fx.Graph()
        given = [graph.placeholder(f"grad{i}") for i in range(4)]
        members = [graph.call_function(passgraphs.REDUCE_GRAD, (g, list(own.shape), own.dtype, "size=2 mean=2", "p")) for g in given]
        for node, value in [*((g, whole) for g in given), *((m, own) for m in members)]:
            node.meta["val"] = value
        ours.append([len(part) for part in bucket._cut(members, 3000)])
    assert ours[0] == ours[1] == [2, 2]


def test_without_lowering_the_logical_ops_stay() -> None:
    model = Blocks()
    graphs = rewritten(model, torch.randn(4, 8), plan_for(model, 3), LOGICAL)
    assert collectives(graphs["forward"]) == []
    assert sum("autoshard.unshard_bucket" in str(n.target) for n in graphs["forward"].graph.nodes) == 4


def test_rewriting_is_deterministic() -> None:
    texts = []
    for _ in range(2):
        model = Blocks()
        graphs = rewritten(model, torch.randn(4, 8), plan_for(model, 3))
        texts.append([g.code for g in graphs.values()])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("bucket,name_parameters", "bucket requires merged, names"),
        ("name_parameters,merge_unshards,bucket,regather", "works on the joint graph and cannot come after"),
        ("name_parameters,merge_unshards,bucket{gb=1}", "bucket has no option 'gb'; legal: mb"),
        ("name_parameters,merge_unshards,bucket{mb=much}", "bucket{mb=much} is not legal"),
        ("nothing", "'nothing' is no pass; legal: bucket"),
        ("overlap", "requires collectives; put lower before it"),
    ],
)
def test_an_illegal_pipeline_is_refused_before_anything_runs(spec: str, says: str) -> None:
    with pytest.raises(PassError, match=re.escape(says)):
        registry.parse(spec)


def test_a_pipeline_and_its_text_are_inverse() -> None:
    text = "name_parameters,merge_unshards,bucket{mb=25.0},lower,overlap{ahead=2}"
    assert registry.spec(registry.parse(text)) == text


def test_a_pass_that_leaves_a_bad_graph_is_named() -> None:
    @dataclass(frozen=True)
    class Careless(Record):
        name: ClassVar[str] = "careless"

        def run(self, gm: GraphModule, context: Context) -> GraphModule:
            for node in gm.graph.nodes:
                node.meta.pop("val", None)
            return gm

    model = Blocks()
    manager = PassManager((Careless(),), Dump(None))
    gm = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    with pytest.raises(PassError, match="careless left"):
        manager.run(("code",), gm, Context(plan_for(model, 3)))


def test_collectives_of_the_model_itself_stay_where_they_are() -> None:
    """Here all buckets depend on one; moving what follows from it would move them too."""
    ops, graph = torch.ops._c10d_functional, Graph()
    x = graph.placeholder("x")

    def called(op: Any, *args: Any, **meta: str) -> Node:
        node = graph.call_function(op, args)
        node.meta.update(meta)
        return node

    own = called(ops.wait_tensor.default, called(ops.all_reduce.default, x, "sum", "0"))
    parts = []
    for i in range(4):
        part = {"part_of": "autoshard.reduce_bucket.default", "part": f"bucket{i}", "group": f"bucket{i}"}
        flying = [called(ops.reduce_scatter_tensor.default, own, "sum", 2, "0", **part) for _ in range(2)]
        parts += [called(ops.wait_tensor.default, one, **part) for one in flying]
    graph.output(tuple(parts))
    gm = Overlap().run(GraphModule({}, graph), Context(plan_for(Blocks(), 3), phase="backward"))
    gm.graph.lint()
    found = [str(node.target).split(".")[1][:6] for node in gm.graph.nodes if node.op == "call_function"]
    begin, rest = ["all_re", "wait_t"], ["reduce", "reduce", "wait_t", "wait_t"]
    assert found == begin + ["reduce"] * 6 + ["wait_t"] * 2 + ["reduce"] * 2 + ["wait_t"] * 6, found
    assert sorted(found) == sorted(begin + 4 * rest)


def test_results_that_were_inlined_from_one_trace_stay_apart_in_the_next() -> None:
    """They have one fake tensor for all."""
    joint = make_fx(lambda x, y: torch.sub(torch.neg(x), torch.neg(y)), tracing_mode="fake")(torch.randn(3), torch.randn(3))
    first, second = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    ops = passgraphs.traced(first, torch.exp)
    for node in (first, second):
        passgraphs.inline(joint, node, ops)
    (difference,) = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.sub.Tensor)
    passgraphs.inline(joint, difference, passgraphs.traced(difference, lambda a, b: 2 * a - b))
    joint.recompile()
    x, y = torch.randn(3), torch.randn(3)
    assert torch.equal(joint(x, y), 2 * x.exp() - y.exp())
