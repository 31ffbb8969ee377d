"""The order in which a step starts its collectives: one on all processes, or refused before anything is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import Graph, GraphModule, Node

from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.ops.collectives import Collectives
from autoshard.ops.direct import EXCHANGE_DIRECT, GATHER_DIRECT
from autoshard.passes.graphs import started
from autoshard.planning import first_look
from tests.cluster import Cluster
from tests.parity import Distance, see_gradients
from tests.small import TOLERANCE, backward_beside, compiled_pair, config, in_full

_c10d = torch.ops._c10d_functional
NAMES = {1: "a", 2: "b", 3: "c", 4: "d"}


def _graph(kinds: str, group: str) -> GraphModule:
    """One that starts a gather (g), a reduction (r), an exchange (e) or a gather by sends (s) for each letter, the n-th of its kind for
    parameter n; or a collective of the model's own (m). group: the name of the processes."""
    calls: dict[str, tuple[Any, ...]] = {
        "g": (_c10d.all_gather_into_tensor.default, 2), "r": (_c10d.reduce_scatter_tensor.default, "sum", 2),
        "e": (EXCHANGE_DIRECT, 2), "s": (GATHER_DIRECT, 2), "m": (_c10d.all_reduce.default, "sum"),
    }  # fmt: skip
    graph = Graph()
    x = graph.placeholder("x")
    made: list[Node] = []
    for i, kind in enumerate(kinds):
        op, *args = calls[kind]
        made.append(graph.call_function(op, (x, *args, group)))
        if kind != "m":
            made[-1].meta.update(part_of="a bucket", serves=("ab"[kinds[:i].count(kind)],))
        made.append(graph.call_function(_c10d.wait_tensor.default, (made[-1],)))
    graph.output(tuple(made))
    return GraphModule({}, graph)


def _order(kinds: str, group: str = "0", parameters: tuple[str, ...] = ("a", "b"), given: tuple[int, ...] = (1, 2)) -> str:
    made = Collectives(parameters)
    made.note_order("backward", started(_graph(kinds, group)))
    return made.said(given, lambda: NAMES)[1]


def test_an_order_is_told_by_what_starts_for_which_parameters() -> None:
    orders = ["ggrr", "grgr", "grrg", "rgrg", "gsre", "gsrr", "g", ""]
    assert len({_order(kinds) for kinds in orders}) == len(orders)
    assert _order("grgr") == _order("grgr") == _order("mgrmmgr")
    assert _order("grgr") != _order("grgr", given=(2, 1))


def test_processes_may_have_other_names_for_their_group() -> None:
    assert _order("grgr", "0") == _order("grgr", "17")
    assert started(_graph("gr", "0")) == [
        ("_c10d_functional.all_gather_into_tensor 0", ("a",)),
        ("_c10d_functional.reduce_scatter_tensor 0", ("a",)),
    ]


def test_a_graph_that_serves_several_blocks_has_the_order_of_the_one_it_is_called_with() -> None:
    """For whichever it was compiled first."""
    other = Collectives(("c", "d"))
    other.note_order("backward", [(op, tuple({"a": "c", "b": "d"}[n] for n in of)) for op, of in started(_graph("grgr", "0"))])
    assert other.said((1, 2), lambda: NAMES)[1] == _order("grgr")
    assert other.said((3, 4), lambda: NAMES)[1] == _order("grgr", given=(3, 4)) != _order("grgr")


class Turning(nn.Module):
    """Blocks that are alike, which a call may go through the other way. Each process communicates the same for that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor, turned: bool = False) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in reversed(self.blocks) if turned else self.blocks:
            x = torch.tanh(block(x))
        return self.last(x).pow(2).mean()


def turn(direct: bool, codegen: str, turned: list[list[bool]]) -> Distance:
    """How far gradients are from one process's. direct: whether what travels goes by sends. turned: of each call, by rank."""
    plan = first_look(Turning(), config(3), Machines(1, dist.get_world_size(), DEVICES["cpu"]))
    plan = plan if direct else replace(plan, direct=False, direct_sums=False)
    options = config("auto", plan=plan, replicate_below="auto", codegen=codegen, timeout=4)
    model, plain, compiled = compiled_pair(options, Turning)
    distance, inputs = Distance(), torch.randn(len(turned), len(turned[0]), 4, 8, generator=torch.Generator().manual_seed(3))
    for batches, ways in zip(inputs, turned):
        compiled(batches[dist.get_rank()], ways[dist.get_rank()]).backward()
        for batch, way in zip(batches, ways):
            (plain(batch, way) / len(ways)).backward()
        see_gradients(distance, model, plain)
        model.zero_grad()
        plain.zero_grad()
    return distance


@pytest.mark.parametrize("direct", [True, in_full(False)])
def test_all_may_go_the_other_way(two: Cluster, direct: bool) -> None:
    for distance in two.run(turn, direct, "eager", [[False, False], [True, True], [False, False], [True, True]]):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.parametrize(("direct", "codegen"), [(True, "eager"), (False, "eager"), in_full(True, "inductor"), in_full(False, "inductor")])
def test_processes_that_go_other_ways_are_both_told(two: Cluster, direct: bool, codegen: str) -> None:
    """What they communicate is the same, each kind of it in one order too: but one gathers all before it reduces anything, and the
    other waits for reductions before it gathers the rest. Neither would go on, whatever carries it."""
    said = two.answers(turn, direct, codegen, [[False, False], [False, True]])
    for kind, (name, text, _) in said:
        assert (kind, name) == ("error", "DisagreementError"), said
        assert "about its call" in text and " in order " in text and "come in another order" in text


def longer_batches_on_one(codegen: str) -> tuple[Distance, int]:
    """Where a loop goes on as before, so that nobody meets; and how many graphs this process compiled."""
    model, plain, compiled = compiled_pair(config(3, codegen=codegen, timeout=4), Turning)
    distance = Distance()
    counters.clear()
    for step in range(14):
        lengths = (4, 1 if step == 12 else 4 + 3 * (step > 10))
        backward_beside(compiled, plain, [torch.randn(n, 8, generator=torch.Generator().manual_seed(step)) for n in lengths])
        see_gradients(distance, model, plain)
    return distance, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
def test_a_batch_of_another_length_on_one_process_is_not_refused(two: Cluster, codegen: str) -> None:
    found = two.run(longer_batches_on_one, codegen)
    assert max(distance.worst for distance, _ in found) <= TOLERANCE, found
    assert [graphs for _, graphs in found] == [1, 3]  # with that length open, and of one row
