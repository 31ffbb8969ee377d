"""Calls that communicate, made alike by all processes or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autoshard
from autoshard.ops.collectives import Collectives
from autoshard.passes import graphs as passgraphs
from autoshard.runtime.lockstep import MOST, Call, Lockstep
from autoshard.runtime.meetings import Meetings
from autoshard.runtime.presence import Patience
from autoshard.runtime.processes import World
from autoshard.runtime.state import state_of
from tests.cluster import Cluster
from tests.parity import whole
from tests.small import backward_beside, compiled_pair, config, in_full, inputs_of, step_each, what_is_said

CALLS = [Call(training, collectives) for training in (True, False) for collectives in ("gather a", "gather b", "gather a\nreduce b")]


class Recording(Lockstep):
    """Counts the meetings, of which there are none."""

    def __init__(self) -> None:
        super().__init__(Meetings(World(0, 1, "cpu"), "", Patience(0.0, None, print)))
        self.met = 0

    def _meet(self, what: str) -> None:
        self.met += 1

    def go_on(self, calls: Sequence[Call]) -> int:
        """How often it meets in these calls."""
        before = self.met
        for call in calls:
            self.enter(call)
        return self.met - before


@given(st.lists(st.sampled_from(CALLS)), st.sampled_from(CALLS), st.sampled_from(CALLS))
def test_where_two_processes_part_one_meets(together: list[Call], one: Call, other: Call) -> None:
    a, b = Recording(), Recording()
    assert a.go_on(together) == b.go_on(together)
    met = a.go_on([one]), b.go_on([other])
    assert met[0] == met[1] if one == other else any(met)


TRAINING = [c for c in CALLS if c.training]


@given(st.lists(st.tuples(st.sampled_from(TRAINING), st.integers(1, 3 * MOST)), unique_by=lambda each: each[0]), st.integers(1, 5))
def test_a_loop_that_goes_on_as_before_meets_nobody(runs: list[tuple[Call, int]], times: int) -> None:
    process, loop = Recording(), [call for call, count in runs for _ in range(count)]
    process.go_on(loop * 3 + loop[:1] * MOST * (len(runs) == 1))
    assert not process.go_on(loop * times)


def test_blocks_that_are_called_again_in_backward_meet_nobody() -> None:
    one, two, three = TRAINING
    process = Recording()
    process.go_on([one, two, three, three, two, one] * 2)
    assert not process.go_on([one, two, three, three, two, one] * 3)


def test_each_turn_to_evaluation_and_back_meets() -> None:
    training, evaluation = CALLS[0], CALLS[-1]
    process = Recording()
    found = [process.go_on([training] * 20 + [evaluation] * 20) for _ in range(3)]
    assert found == [2 + 2 * MOST, 2 + MOST, 2]


def test_calls_are_described_by_what_they_communicate() -> None:
    calls = [*CALLS, Call(True, ""), replace(CALLS[0], skipped=True), replace(CALLS[0], stepped=False)]
    assert len({call.described() for call in calls}) == len(calls)
    assert CALLS[2].described().startswith("training, with collectives ") and CALLS[2].described().endswith(" of a to b")


def test_a_graph_that_serves_several_blocks_is_told_by_the_one_it_is_called_with() -> None:
    """In whatever order this process traced it, and for whichever block it compiled it first."""
    names = {1: "first.weight", 2: "first.bias", 3: "second.weight", 4: "second.bias"}
    one, other = Collectives(("first.weight", "first.bias")), Collectives(("second.bias", "second.weight"))
    one.note([("gather", ("first.weight",)), ("gather", ("first.bias",))], [("reduce", ("first.bias",)), ("reduce", ("first.weight",))])
    other.note([("gather", ("second.bias",)), ("gather", ("second.weight",))], [("reduce", ("second.weight",)), ("reduce", ("second.bias",))])
    second = one.said((3, 4), lambda: names)[0]
    assert second == other.said((4, 3), lambda: names)[0] and "second.bias" in second
    assert one.said((1, 2), lambda: names)[0] == other.said((2, 1), lambda: names)[0] != second


def test_a_parameter_whose_name_has_a_space_is_one() -> None:
    """That of an `nn.ParameterDict` may; or what waits for a reduction would not be taken by it."""
    graph = torch.fx.Graph()
    graph.output(graph.call_function(passgraphs.REDUCE_GRAD, (graph.placeholder("g"), [2], torch.float, "size=2 mean=2", "of.one task")))
    made = Collectives(("of.one task",))
    made.note([], passgraphs.collectives(torch.fx.GraphModule({}, graph)))
    assert made.reduced((7,)) == {7}


class Stack(nn.Module):
    """Blocks that are alike, of which a call may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, without: int | None = None) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i != without:
                x = torch.relu(block(x))
        return x.pow(2).mean()


def leave_out(zero: int, left_out: list[list[int]]) -> list[float]:
    """Differences from one process's gradients. left_out: of each call, by rank."""
    model, plain, compiled = compiled_pair(config(zero, timeout=4), Stack)
    inputs, found = inputs_of(1)[0], []
    for step in left_out:
        compiled(inputs[dist.get_rank()], step[dist.get_rank()]).backward()
        for rank, without in enumerate(step):
            (plain(inputs[rank], without) / len(step)).backward()
        for ours, p in zip(model.parameters(), plain.parameters()):
            assert (ours.grad is None) == (p.grad is None)
            if ours.grad is not None and p.grad is not None:
                found.append((whole(ours.grad) - p.grad).abs().max().item())
                ours.grad = p.grad = None
    return found


@pytest.mark.parametrize("zero", [in_full(0), 3])
def test_all_may_leave_out_the_same_block(two: Cluster, zero: int) -> None:
    for found in two.run(leave_out, zero, [[0, 0], [1, 1], [0, 0], [0, 0], [2, 2], [1, 1]]):
        assert len(found) == 6 * 4 and max(found) < 1e-6


@pytest.mark.parametrize("zero", [0, in_full(1), in_full(2), in_full(3)])
def test_processes_that_leave_out_other_blocks_are_told(two: Cluster, zero: int) -> None:
    """When all blocks are compiled and all ways known: collectives are as many and as large."""
    said = two.answers(leave_out, zero, [[0, 0], [1, 1], [0, 0], [1, 0]])
    assert [kind for kind, _ in said] == ["error", "error"]
    texts = [text for _, (name, text, _) in said if name == "DisagreementError"]
    assert texts and all("training, with collectives" in text and "blocks." in text for text in texts), said


def test_processes_that_come_to_other_calls_are_both_told(two: Cluster) -> None:
    for kind, (name, text, _) in two.answers(leave_out, 3, [[0, 0], [1, 1], [2, 0]]):
        assert (kind, name) == ("error", "DisagreementError")
        assert "about its call" in text and "Every process must call a sharded model alike" in text


class TwoHeads(nn.Module):
    """Heads that are alike, of which a loss takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, task: int) -> Tensor:
        one, other = self.one(x), self.other(x)
        return (other if task else one).pow(2).mean()


def take_heads(tasks: list[list[int]]) -> None:
    """The head that each process's loss takes of each call, by rank."""
    _, _, compiled = compiled_pair(config(3, timeout=4), TwoHeads)
    for each in tasks:
        compiled(inputs_of(1)[0, dist.get_rank()], each[dist.get_rank()]).backward()


def test_processes_whose_losses_take_other_heads_are_told(two: Cluster) -> None:
    """Each graph computes both."""
    two.run(take_heads, [[0, 0], [1, 1], [0, 0]])
    said = two.answers(take_heads, [[0, 0], [1, 1], [0, 0], [0, 1]])
    assert [kind for kind, _ in said] == ["error", "error"]
    assert "DisagreementError" in [name for _, (name, _, _) in said]


class Looking(nn.Module):
    """Rows of plain parameters, in blocks and before them."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.tables = nn.ParameterList(torch.randn(64, 8) for _ in range(2))
        self.layers, self.head = nn.ModuleList(Rows() for _ in range(blocks)), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.tables[0][ids]) * torch.sigmoid(self.tables[1][ids])
        for layer in self.layers:
            x = layer(x, ids)
        return self.head(x).pow(2).mean()


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.line = nn.Parameter(torch.randn(64, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + torch.tanh(self.line(x)) + torch.tanh(self.table[ids])


def batches_of_other_lengths(recompute: str, blocks: int, codegen: str) -> float:
    """The largest difference from one process's gradients, of batches of another length on each process, shorter and longer than
    the tables that are looked up in."""
    model, plain, compiled = compiled_pair(config(3, recompute=recompute, codegen=codegen), partial(Looking, blocks))
    for lengths in ((3, 200), (200, 3), (9, 5)):
        ids = [torch.randint(64, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
        backward_beside(compiled, plain, ids)
    return max((whole(p.grad) - q.grad).abs().max().item() for p, q in zip(model.parameters(), plain.parameters()))  # type: ignore[arg-type, operator]


@pytest.mark.parametrize(
    ("recompute", "blocks", "codegen"),
    [
        in_full("none", 2, "eager"), in_full("selective", 2, "eager"), in_full("full", 2, "eager"), in_full("auto", 2, "eager"),
        ("none", 8, "eager"), in_full("none", 2, "inductor"), in_full("none", 8, "inductor"),
    ],
)
def test_batches_of_other_lengths_have_the_same_gathered_again(two: Cluster, recompute: str, blocks: int, codegen: str) -> None:
    assert max(two.run(batches_of_other_lengths, recompute, blocks, codegen)) < 1e-6


def skip_backward(skipping: list[int]) -> None:
    """The second backward, as where a loss is not finite, by these ranks."""
    _, _, compiled = compiled_pair(config(3, timeout=4))
    for step in range(4):
        loss = compiled(inputs_of(1)[0, dist.get_rank()])
        if step != 1 or dist.get_rank() not in skipping:
            loss.backward()


def test_a_backward_that_one_process_skips_is_told(two: Cluster) -> None:
    two.run(skip_backward, [0, 1])
    said = two.answers(skip_backward, [1])
    assert [kind for kind, _ in said] == ["error", "error"]
    assert any(name == "DisagreementError" and "after a forward without backward" in text for _, (name, text, _) in said), said


def leave_out_a_step(after: int) -> None:
    """By rank 1, as where it looks at its own loss."""
    model, _, compiled = compiled_pair(config(3, timeout=4))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(after + 2):
        compiled(inputs_of(1)[0, dist.get_rank()]).backward()
        if step != after or dist.get_rank() == 0:
            step_each(optimizer)


@pytest.mark.parametrize("after", [2, in_full(20)])
def test_a_step_that_one_process_leaves_out_is_told(two: Cluster, after: int) -> None:
    """Where no call meets any more it is alone with that, and the other one loses it."""
    said = two.answers(leave_out_a_step, after)
    assert [kind for kind, _ in said] == ["error", "error"]
    names, texts = {name for _, (name, _, _) in said}, [text for _, (_, text, _) in said]
    assert names == {"DisagreementError"} | ({"PeerLostError"} if after > MOST else set()), said
    assert any("no step since the training call before" in text for text in texts), said


def save_behind_it() -> None:
    """What rank 0 has stepped and rank 1 has not."""
    model, _, compiled = compiled_pair(config(3))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(5):
        compiled(inputs_of(1)[0, dist.get_rank()]).backward()
        if step != 4 or dist.get_rank() == 0:
            step_each(optimizer)
    autoshard.state_dict(model)


def test_a_checkpoint_of_two_steps_is_refused(two: Cluster) -> None:
    for text in two.run(what_is_said, save_behind_it):
        assert "'autoshard.state_dict, no step since the training call before' where rank 0 has 'autoshard.state_dict'" in text, text


def steps(compiled: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for _ in range(2 * MOST):
        compiled(x).backward()
        step_each(optimizer)


def accumulation(compiled: Any, optimizer: torch.optim.Optimizer, x: Tensor, silent: bool = False) -> None:
    for _ in range(2 * MOST):
        with autoshard.no_sync(compiled) if silent else contextlib.nullcontext():
            compiled(x).backward()
    compiled(x).backward()
    step_each(optimizer)


def no_sync(compiled: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    accumulation(compiled, optimizer, x, True)


def evaluation(compiled: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    steps(compiled, optimizer, x)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)


def meetings(loop: Callable[..., None]) -> list[int]:
    """How many each of some rounds has of calls."""
    model, _, compiled = compiled_pair(config(1))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule, x, found = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), inputs_of(1)[0, dist.get_rank()], [0]
    for _ in range(4):
        loop(compiled, optimizer, x)
        schedule.step()
        state = state_of(model)
        assert state is not None and state.lockstep is not None
        found.append(state.lockstep._meetings._number)
    return [after - before for before, after in zip(found, found[1:])]


@pytest.mark.parametrize(("loop", "each"), [in_full(steps, 0), in_full(accumulation, 0), (no_sync, 0), (evaluation, 2)])
def test_a_loop_with_steps_meets_nobody(two: Cluster, loop: Callable[..., None], each: int) -> None:
    """Unless it turns to evaluation and back."""
    for found in two.run(meetings, loop):
        assert found[2:] == [each, each] and (loop is not steps or found == [MOST + 1, 0, 0, 0]), found
