"""A rehearsal's graphs beside those of a job with the same plan (rank 0 of 256, a fake process group)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import autoshard
from autoshard.capture import capture
from autoshard.config import Config
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.errors import UnsupportedError
from autoshard.ops import packing
from autoshard.passes import graphs
from autoshard.passes.choose_zero import Circumstances, make_plan
from autoshard.rehearsal import Known, Written, prepare, rehearse
from tests.rewriting import Blocks, plan_for, rewritten
from tests.small import in_full

pytestmark = pytest.mark.usefixtures("many_processes")


def _operations(gm: GraphModule) -> Counter[str]:
    """What is called and how large its result is, but for views: a DTensor brings some."""
    found: Counter[str] = Counter()
    ops = {run: op for op, run in packing.DIRECT.items()}
    for node in gm.graph.nodes:
        name, value = str(ops.get(node.target, node.target)), node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and "view" not in name and "detach" not in name:
            found[f"{name} {tuple(value.shape)}"] += 1
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, keys: dict[str, torch.Tensor], scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        y = nn.functional.dropout(self.linear(self.norm(x)), 0.1)
        return x + scale * y * keys["mask"], y


class Deep(nn.Module):
    """More blocks than have to be alike, the first and the last of which are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(11))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(x)
        for layer in self.layers:
            x, _ = layer(x, {"mask": mask})
        return x.square().mean()


class Breaks(Deep):
    """The graph ends behind the first block. Its forward is its own: Dynamo leaves code alone that broke in a loop."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, _ = layer(x, {"mask": torch.ones_like(x)})
            torch._dynamo.graph_break()
        return x.square().mean()


def test_a_forecast_is_of_the_passes_that_a_job_runs() -> None:
    two, x = Cluster(1, 2, DEVICES["cpu"]), torch.zeros(64, 512)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    plans = [autoshard.plan(model, x, Config(zero=3, codegen="eager", disable_passes=names), two) for names in ((), ("overlap",))]
    planned, without = (plan.predicted.seconds["waiting"] for plan in plans)
    assert planned < without


@pytest.mark.parametrize(("make", "said"), [(lambda: nn.Linear(4, 4), True), (Deep, False)])
def test_what_becomes_of_outputs_is_said_to_be_left_out(make: Callable[[], nn.Module], said: bool) -> None:
    plan = autoshard.plan(make(), torch.zeros(2, 4 if said else 8), Config(codegen="eager"))
    assert ("what a loop computes of outputs, or keeps of them" in plan.predicted.unknown) is said


class Holds(nn.Module):
    """Tensors that are neither parameters nor buffers, and something else."""

    def __init__(self, other: object = None) -> None:
        super().__init__()
        self.linear, self.mask, self.other = nn.Linear(8, 8), torch.ones(8), other
        self.tables = {"cos": [torch.ones(8), self.linear.weight.detach() * 2]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.mask * self.tables["cos"][0]).sum()


def test_tensors_beside_parameters_are_captured() -> None:
    captured = capture(Holds(), torch.zeros(2, 8))
    assert [n.op for n in captured.graph.graph.nodes].count("placeholder") == len(captured.inputs) == 5


def test_what_cannot_be_copied_is_named() -> None:
    with pytest.raises(UnsupportedError, match="Holds cannot be planned, since copy.deepcopy fails of it .TypeError: cannot pickle"):
        capture(Holds(threading.Lock()), torch.zeros(2, 8))


def test_sizes_are_those_of_the_example_whatever_was_traced_before() -> None:
    for batch in (4, 6, 9):
        first = next(iter(capture(Deep(), torch.randn(batch, 8)).graph.graph.nodes)).meta["example_value"]
        assert [type(length) for length in first.shape] == [int, int] and first.shape[0] == batch


def test_a_model_that_breaks_is_captured_up_to_there() -> None:
    assert len(capture(Breaks(), torch.randn(4, 8)).parameters) == 4


class Checkpointed(Blocks):
    """Whose forward is a region of its own."""

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, *args, use_reentrant=False)  # type: ignore[no-any-return]


def test_a_block_that_saves_something_else_is_not_traced_again() -> None:
    model = Deep()
    captured, plan, known = capture(model, torch.randn(4, 8)), plan_for(model, 3), Known()
    prepare(captured, plan, False, known=known)
    traced = {*known.joints}
    again = replace(plan, recompute=tuple((f"layers.{i}", "full") for i in (0, 1, 2, 3, 5)))
    found = prepare(captured, again, False, known=known).cut(again)
    assert {*known.joints} == traced and len(known.blocks) > len(traced)
    expected = rehearse(captured, again, inductor=False)
    assert found.backward is not None and expected.backward is not None
    for ours, theirs in ((found.forward, expected.forward), (found.backward, expected.backward)):
        assert _operations(ours) == _operations(theirs)
    assert [_block_operations(b) for b in found.blocks] == [_block_operations(b) for b in expected.blocks]


@pytest.mark.parametrize(("make", "traces"), [(Blocks, 1), (Deep, 2)])  # blocks of their own are told which copies backward gathers
@pytest.mark.parametrize("inductor", [False, in_full(True)])
def test_what_stages_and_numbers_of_processes_have_in_common_is_traced_once(make: type[nn.Module], traces: int, inductor: bool) -> None:
    model, known = make(), Known()
    captured = capture(model, torch.randn(4, 8))
    for world, zero in ((256, 0), (256, 2), (256, 3), (6, 3)):
        plan = plan_for(model, zero, world=world)
        found = prepare(captured, plan, inductor, known=known).cut(plan)
        expected = rehearse(captured, plan, inductor)
        assert found.backward is not None and expected.backward is not None
        assert _operations(found.forward) == _operations(expected.forward)
        assert _operations(found.backward) == _operations(expected.backward)
        assert (found.results, found.saved) == (expected.results, expected.saved)
    assert len(known.around) == traces


def _block_operations(block: Any) -> list[Counter[str]]:
    return [_operations(code.graph) for code in (block.forward, block.backward) if isinstance(code, Written)]


@pytest.mark.parametrize(
    ("zero", "low_rank", "make"),
    [
        (0, 0, Blocks), (1, 0, Blocks), in_full(2, 0, Blocks), (3, 0, Blocks), (0, 1, Blocks), in_full(0, 0, Checkpointed),
        in_full(1, 0, Checkpointed), in_full(2, 0, Checkpointed), (3, 0, Checkpointed), in_full(0, 1, Checkpointed),
    ],
)
def test_a_rehearsal_has_the_graphs_of_the_job(zero: int, low_rank: int, make: type[nn.Module]) -> None:
    inputs = torch.randn(4, 8)
    plan = replace(plan_for(make(), zero), low_rank=low_rank)
    rehearsed = rehearse(capture(make(), inputs), plan, inductor=False)
    job = rewritten(make(), inputs, plan)
    assert rehearsed.backward is not None
    assert _operations(rehearsed.forward) == _operations(job["forward"])
    assert _operations(rehearsed.backward) == _operations(job["backward"])


class Tied(nn.Module):
    """An embedding that is used first and last, blocks with large weights between, and norms that stay whole."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.norm = nn.LayerNorm(8)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x, _ = layer(x, {"mask": torch.ones_like(x)})
        return self.head(self.norm(x)).sum()


@pytest.mark.parametrize("tied", [False, True])
def test_backward_of_stage_3_gathers_each_block_just_before_it_is_used(tied: bool) -> None:
    """Else all are whole at once: a gather must not wait for one that is needed later, nor all for what has no gather."""
    captured = capture(Tied(tied), torch.zeros(4, 3, dtype=torch.long))
    plan = make_plan(captured.inventory, Config(zero=3, replicate_below=30), Circumstances(Cluster(1, 2, DEVICES["h100"]), None))
    backward = rehearse(captured, plan, inductor=False).backward
    assert backward is not None
    ahead = most = 0
    for node in backward.graph.nodes:
        ahead += graphs.is_call(node, *graphs.GATHERS)
        ahead -= graphs.is_call(node, torch.ops._c10d_functional.reduce_scatter_tensor.default)
        most = max(most, ahead)
        assert ahead <= 2, f"{node.name}: whole parameters of {ahead} groups at once"
    assert most
