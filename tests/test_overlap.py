"""Collectives beside compute: when they start, and when they are waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from autoshard.errors import PassError, PlanError
from autoshard.passes import graphs as passgraphs
from autoshard.passes import registry
from autoshard.passes.base import Context
from autoshard.passes.overlap import Overlap
from autoshard.plan import Plan
from tests.rewriting import Blocks, kind, plan_for, rewritten

pytestmark = pytest.mark.usefixtures("many_processes")


def test_gathers_start_one_bucket_ahead() -> None:
    model = Blocks()
    graphs = rewritten(model, torch.randn(4, 8), plan_for(model, 3))
    kinds = [kind(n) for n in graphs["forward"].graph.nodes]
    assert [k for k in kinds if k] == ["gather", "wait", "gather", "mm", "wait", "gather", "mm", "wait", "gather", "mm", "wait", "mm"]


@pytest.mark.parametrize(("by_plan", "by_pass", "behind"), [(2, "", 2), (1, "", 1), (3, "", 3), (2, "overlap{behind=1}", 1)])
def test_so_many_reductions_are_on_their_way_and_none_beside_when_one_is_packed(by_plan: int, by_pass: str, behind: int) -> None:
    model = Blocks()
    spec = registry.DEFAULT.replace("overlap", by_pass) if by_pass else registry.DEFAULT
    backward = rewritten(model, torch.randn(4, 8), replace(plan_for(model, 3), behind=by_plan), spec)["backward"]
    starts = passgraphs.calls(backward, *passgraphs.REDUCTIONS)
    waits = {next(iter(start.users)): start for start in starts}
    packs = [next(n for n in backward.graph.nodes if n.meta.get("part") == start.meta["part"]) for start in starts]
    on_their_way, most, beside = 0, 0, list[int]()
    for node in backward.graph.nodes:
        if node in packs:
            beside.append(on_their_way)
        on_their_way += (node in starts) - (node in waits)
        most = max(most, on_their_way)
    assert len(starts) == 4 and most == behind and on_their_way == 0
    assert not set(packs) & set(starts) and beside == [min(i, behind - 1) for i in range(4)]


@pytest.mark.parametrize(("zero", "more"), [(2, {"mesh": {"replicate": 32, "shard": 8}}), (0, {"compression": "bf16"})])
def test_sums_between_copies_are_on_their_way_while_backward_computes(zero: int, more: dict[str, Any]) -> None:
    """The second collective of a bucket, which takes what the first brought: all but the last one's."""
    model = Blocks()
    backward = rewritten(model, torch.randn(4, 8), plan_for(model, zero, **more))["backward"]
    at = passgraphs.positions(backward.graph)
    computed = [at[node] for node in backward.graph.nodes if kind(node) == "mm"]
    seconds = [node for node in backward.graph.nodes if passgraphs.reduces(node) and _waits_for_another(node)]
    beside = [sum(at[start] < one < at[next(iter(start.users))] for one in computed) for start in seconds]
    assert len(beside) >= 4 and all(beside[:2]), beside


def _waits_for_another(start: Node) -> bool:
    """Whether a collective takes what one of the same bucket brought."""
    return any(source.meta.get("part") == start.meta["part"] and passgraphs.reduces(source) for source in passgraphs.sources([start]))


class Experts(nn.Module):
    """Blocks of a matrix and of experts that are one parameter, fewer than processes: two buckets each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"line": nn.Linear(512, 512, bias=False), "experts": Stack()}) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["experts"](torch.relu(layer["line"](x)))  # type: ignore[index]
        return x.sum()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 512, 512))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight.mT).sum(0)


def test_gathers_of_a_group_that_has_two_start_together() -> None:
    """A whole block ahead, the larger one too, in backward as in forward; its gradients go in the order in which backward has them."""
    model = Experts()
    graphs = rewritten(model, torch.randn(4, 512), replace(plan_for(model, 3), ahead=1))
    found = {}
    for phase, gm in graphs.items():
        starts = [node for node in gm.graph.nodes if passgraphs.gathers(node)]
        found[phase] = [_short(node) for node in gm.graph.nodes if node in starts or any(source in starts for source in node.all_input_nodes)]
    assert found["forward"][:5] == ["+0.line", "+0.experts", "-0.line", "+1.line", "+1.experts"], found
    assert found["backward"] == ["+1.experts", "+1.line", "-1.experts", "+0.experts", "-1.line", "-0.experts"], found
    reduced = [_short(node) for node in graphs["backward"].graph.nodes if passgraphs.reduces(node)]
    assert reduced == [f"+{i}.{name}" for i in (2, 1, 0) for name in ("experts", "line")], reduced


def _short(node: Node) -> str:
    """Which parameter it is for, a start with a plus and a wait with a minus."""
    (name,) = node.meta["serves"]
    return ("-" if kind(node) == "wait" else "+") + name.removeprefix("layers.").removesuffix(".weight")


@pytest.mark.parametrize("spec", [registry.DEFAULT, registry.DEFAULT.replace("overlap", "overlap{ahead=3}")])
def test_gathers_start_as_far_ahead_as_the_plan_or_the_pass_says(spec: str) -> None:
    model = Blocks()
    plan = replace(plan_for(model, 3), ahead=1 if "ahead" in spec else 3)
    graphs = rewritten(model, torch.randn(4, 8), plan, spec)
    kinds = [k for k in map(kind, graphs["forward"].graph.nodes) if k]
    assert kinds[:6] == ["gather", "gather", "gather", "wait", "gather", "mm"]


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
    assert found == ["all_re", "wait_t"] + ["reduce"] * 4 + (["wait_t"] * 2 + ["reduce"] * 2) * 2 + ["wait_t"] * 4, found


def test_it_is_said_what_may_be_on_its_way() -> None:
    plan = replace(plan_for(Blocks(), 3), behind=1)
    assert Plan.from_json(plan.to_json()).behind == 1
    with pytest.raises(PlanError, match="behind: 0 is not legal"):
        replace(plan, behind=0)
    with pytest.raises(PassError, match=r"overlap\{behind=-1\} is not legal; legal: 0 or more"):
        Overlap(behind=-1)
