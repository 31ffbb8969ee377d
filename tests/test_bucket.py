"""Buckets: which parameters and gradients travel together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autoshard.ops.layout import Layout
from autoshard.passes import bucket, registry
from autoshard.passes import graphs as passgraphs
from tests.rewriting import collectives, kind, plan_for, rewritten

pytestmark = pytest.mark.usefixtures("many_processes")


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
        done = [sum(kind(n) == "mm" for n in nodes[:i]) for i, n in enumerate(nodes) if passgraphs.reduces(n)]
        found.append(([n.split()[1] for n in collectives(gm)], done))
    assert found[0] == (["32896"] * 3, [4, 8, 11]), found[0]
    assert found[1] == (["16384", "16512"] * 3, [2, 4, 6, 8, 10, 11]), found[1]


def test_gradients_of_shared_rows_are_cut_where_the_plan_says_so() -> None:
    """Between nodes only rows are summed, of which some processes have fewer."""
    found = []
    for size in (0, 66_000):
        plan = replace(plan_for(Pairs(), 2), bucket=1000, shared_bucket=size)
        found.append(len(collectives(rewritten(Pairs(), torch.randn(4, 128), plan)["backward"])))
    assert found == [3, 6], found
    rows, whole = (str(replace(Layout.parse("size=8 mean=8"), group=group)) for group in ("shard", ""))
    most = [bucket._most(passgraphs.REDUCE_GRAD, layout, replace(plan, node=node)) for layout in (rows, whole) for node in (0, 4)]
    assert most == [66_000, 0, 1000, 1000] and bucket._most(passgraphs.UNSHARD, rows, plan) == 0


def test_reductions_are_waited_for_two_groups_later_however_they_are_cut() -> None:
    found = []
    for size in (0, 66_000):
        model = Pairs()
        gm = rewritten(model, torch.randn(4, 128), replace(plan_for(model, 0), bucket=size))["backward"]
        at = passgraphs.positions(gm.graph)
        starts = [n for n in gm.graph.nodes if passgraphs.reduces(n)]
        found.append([sum(at[start] < at[next(iter(first.users))] for start in starts) for first in starts])
    assert found == [[2, 3, 3], [4, 4, 6, 6, 6, 6]], found


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
