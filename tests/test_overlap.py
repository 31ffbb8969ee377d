"""Collectives beside compute: when they start, and when they are waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from autoshard.passes import graphs as passgraphs
from autoshard.passes import registry
from autoshard.passes.base import Context
from autoshard.passes.overlap import Overlap
from tests.rewriting import Blocks, kind, plan_for, rewritten

pytestmark = pytest.mark.usefixtures("many_processes")


def test_gathers_start_one_bucket_ahead_and_two_reductions_are_on_their_way() -> None:
    model = Blocks()
    graphs = rewritten(model, torch.randn(4, 8), plan_for(model, 3))
    kinds = [kind(n) for n in graphs["forward"].graph.nodes]
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
    assert found == ["all_re", "wait_t"] + ["reduce"] * 6 + ["wait_t"] * 2 + ["reduce"] * 2 + ["wait_t"] * 6, found
