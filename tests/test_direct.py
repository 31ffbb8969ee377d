"""Gathers and exchanges by sends of each process to each: what they bring, and in which order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autoshard.errors import PlanError
from autoshard.ops.direct import EXCHANGE_DIRECT, GATHER_DIRECT, SUM_DIRECT, run_gather
from autoshard.runtime.processes import build_mesh
from tests.cluster import Cluster

_c10d = torch.ops._c10d_functional


def _group() -> tuple[str, int, int]:
    size = dist.get_world_size()
    return build_mesh("cpu", (("shard", size),)).get_group().group_name, size, dist.get_rank()


def _whole(number: int, rank: int, size: int, count: int) -> torch.Tensor:
    """What a process has in the collective of this number, other than all others."""
    return torch.arange(size * count, dtype=torch.float32) + 1000 * number + 100_000 * rank


def gathered() -> list[bool]:
    """Several at once of different lengths, waited for in another order, beside collectives of torch's own."""
    group, size, rank = _group()
    counts = [3, 1, 70_000, 0, 5]
    flying = [GATHER_DIRECT(_whole(i, rank, 1, n), size, group) for i, n in enumerate(counts)]
    summed = _c10d.all_reduce(torch.full((9,), float(rank)), "sum", group)
    expected = [torch.cat([_whole(i, r, 1, n) for r in range(size)]) for i, n in enumerate(counts)]
    same = [torch.equal(_c10d.wait_tensor(flying[i]), expected[i]) for i in (2, 0, 4, 1, 3)]
    return [*same, bool((_c10d.wait_tensor(summed) == sum(range(size))).all())]


def exchanged(dtype: torch.dtype) -> list[bool]:
    """The sum of each process's part, of several exchanges, in fp32; sums by the number of processes too."""
    group, size, rank = _group()
    wholes = [[_whole(i, r, size, n).to(dtype) for r in range(size)] for i, n in enumerate((4, 30_000))]
    sent = [of_ranks[rank] for of_ranks in wholes]
    brought = [_c10d.wait_tensor(EXCHANGE_DIRECT(flat, size, group)) for flat in sent]
    mine = [sum(flat.float().view(size, -1)[rank] for flat in of_ranks) for of_ranks in wholes]
    found = [SUM_DIRECT(brought, sent, size, over, torch.float32, group) for over in (1, size)]
    return [torch.equal(one, torch.cat(mine) / over) for one, over in zip(found, (1, size))]


def one_number() -> bool:
    group, size, rank = _group()
    sent = torch.full((1,), float(rank + 1)).expand(6 * size)
    brought = _c10d.wait_tensor(EXCHANGE_DIRECT(sent, size, group))
    return SUM_DIRECT([brought], [sent], size, 1, torch.float32, group).tolist() == [sum(range(1, size + 1))] * 6


def test_what_is_one_number_expanded_is_sent_as_all_of_them(two: Cluster) -> None:
    assert all(two.run(one_number))


def test_gathers_bring_what_all_have(two: Cluster) -> None:
    assert all(map(all, two.run(gathered)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_all_are_added_up(two: Cluster, dtype: torch.dtype) -> None:
    assert all(map(all, two.run(exchanged, dtype)))


@pytest.mark.full
def test_of_three_and_four(three: Cluster, four: Cluster) -> None:
    for processes in (three, four):
        assert all(map(all, processes.run(gathered))) and all(map(all, processes.run(exchanged, torch.float32)))


def test_it_is_for_tensors_that_gloo_carries() -> None:
    with pytest.raises(PlanError, match="direct: True is not legal where tensors are on 'meta'"):
        run_gather(torch.empty(4, device="meta"), 2, "nowhere")
