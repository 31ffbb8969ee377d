"""Calls that communicate, made alike by all processes or refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.cluster import Cluster
from tests.parity import whole
from tests.small import compiled_pair, config, in_full, inputs_of


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


@pytest.mark.parametrize("zero", [0, 3])
def test_all_may_leave_out_the_same_block(two: Cluster, zero: int) -> None:
    for found in two.run(leave_out, zero, [[0, 0], [1, 1], [0, 0], [0, 0], [2, 2], [1, 1]]):
        assert len(found) == 6 * 4 and max(found) < 1e-6


@pytest.mark.parametrize("zero", [0, in_full(1), in_full(2), in_full(3)])
def test_processes_that_leave_out_other_blocks_are_told(two: Cluster, zero: int) -> None:
    """When all blocks are compiled and all ways known: collectives are as many and as large."""
    said = two.answers(leave_out, zero, [[0, 0], [1, 1], [0, 0], [1, 0]])
    assert [kind for kind, _ in said] == ["error", "error"]
    assert any(name == "DisagreementError" and "rank 0 did not come to training with 4 parameters" in text for _, (name, text, _) in said), said


def test_processes_that_come_to_other_calls_are_both_told(two: Cluster) -> None:
    for kind, (name, text, _) in two.answers(leave_out, 3, [[0, 0], [1, 1], [2, 0]]):
        assert (kind, name) == ("error", "DisagreementError")
        assert "about its call" in text and "Every process must call a sharded model alike" in text
