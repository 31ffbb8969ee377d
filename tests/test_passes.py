"""The rewrites together, and the manager that runs them, on small graphs."""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.errors import PassError
from autoshard.passes import graphs as passgraphs
from autoshard.passes import registry
from autoshard.passes.base import Context
from autoshard.passes.dump import Dump
from autoshard.passes.expand_unshards import expand_unshards
from autoshard.passes.manager import PassManager
from autoshard.passes.name_parameters import NameParameters
from autoshard.torch_internals import FakeTensor
from tests.rewriting import WORLD, Blocks, Record, collectives, plan_for, rewritten, shard

pytestmark = pytest.mark.usefixtures("many_processes")
LOGICAL = "name_parameters,merge_unshards,sync_buffers,regather,bucket"  # without the lowering


def _calls(gm: GraphModule) -> list[str]:
    """What is called, of what stands for parameters by its name."""
    names = [passgraphs.callee(n).partition(".")[0] for n in gm.graph.nodes if n.op.startswith("call")]
    return [name if name in ("unshard_parameter", "to_local", "unshard") else "" for name in names]


@pytest.mark.parametrize(("zero", "rows"), [(0, []), (3, ["to_local"])])
def test_dynamo_follows_one_call_a_parameter(zero: int, rows: list[str]) -> None:
    model, seen = nn.Linear(8, 512), list[list[str]]()

    def backend(gm: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., tuple[Tensor]]:
        seen.append(_calls(gm))
        expand_unshards(gm)
        seen.append(_calls(gm))
        return lambda *_: (torch.zeros(4, 512),)

    shard(model, plan_for(model, zero))
    torch.compile(model, backend=backend)(torch.randn(4, 8))
    assert seen == [["unshard_parameter"] * 2 + [""], [*rows, "unshard"] * 2 + [""]]


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
    assert sorted(collectives(graphs["forward"])) == ["broadcast 2", "broadcast 32"]


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
        ("name_parameters,merge_unshards,bucket{mb=25}},lower", "'bucket{mb=25}}' is not legal; legal: a pass such as 'lower', or"),
        ("name_parameters,merge_unshards,lower}", "'name_parameters,merge_unshards,lower}' is not legal"),
        ("name_parameters,merge_unshards,bucket{mb=25", "'bucket{mb=25' is not legal"),
        ("name_parameters,merge_unshards,bucket{mb=-1}", "bucket{mb=-1.0} is not legal; legal: 0 or more"),
        ("name_parameters,lower,begin_in_parts{parts=0}", "begin_in_parts{parts=0} is not legal; legal: 1 or more"),
        ("name_parameters,merge_unshards,outline_blocks{least=0}", "outline_blocks{least=0} is not legal; legal: 1 or more"),
        ("nothing", "'nothing' is no pass; legal: begin_in_parts, bucket"),
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


def test_the_pass_that_contributing_md_adds_runs_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code, the pipeline of its job, and its test."""
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    written, job, test = map(textwrap.dedent, re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    (tmp_path / "count_gathers.py").write_text(written)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.PASSES, "count_gathers", importlib.import_module("count_gathers").CountGathers)
    (pipeline,) = re.findall("^passes = (.*)", job, re.MULTILINE)
    assert "count_gathers{key=all_gathers}" in registry.spec(registry.parse(eval(pipeline)))
    there: dict[str, Any] = dict(globals())
    exec(test, there)
    there["test_gathers_are_counted"]()


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False)])
def test_an_option_that_is_on_or_off_is_said_so(text: str, value: bool) -> None:
    """To Python every text is true."""
    assert registry._value("some", "on", text, bool) is value
    with pytest.raises(PassError, match=re.escape(f"passes: some{{on={text.title()}}} is not legal; legal: true, false")):
        registry._value("some", "on", text.title(), bool)
