"""Gathers, exchanges and sums by sends of each process to each: what they bring, and in which order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoshard
from autoshard import torch_internals
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.errors import PlanError
from autoshard.ops.direct import (
    EXCHANGE_DIRECT,
    GATHER_DIRECT,
    SUM_DIRECT,
    SUM_SWAPPED,
    SWAP_DIRECT,
    run_exchange,
    run_gather,
    run_swap,
)
from autoshard.passes import graphs
from autoshard.plan import Plan
from autoshard.planning import first_look
from autoshard.rehearsal import rehearse
from autoshard.runtime.processes import build_mesh
from tests.cluster import Cluster
from tests.models import CASES
from tests.parity import measure
from tests.small import TOLERANCE, Sum, config, gradients_of_sum, in_full, same

_c10d = torch.ops._c10d_functional


def _group() -> tuple[str, int, int]:
    size = dist.get_world_size()
    return build_mesh("cpu", (("shard", size),)).get_group().group_name, size, dist.get_rank()


def _whole(number: int, rank: int, size: int, count: int) -> torch.Tensor:
    """What a process has in the collective of this number, other than all others."""
    return torch.arange(size * count, dtype=torch.float32) + 1000 * number + 100_000 * rank


@dataclass
class _Told:
    """A group whose sends and receives are noted as (from, to, tag)."""

    own: int
    sent: list[tuple[int, int, int]] = field(default_factory=list)
    received: list[tuple[int, int, int]] = field(default_factory=list)

    def rank(self) -> int:
        return self.own

    def send(self, _: object, to: int, tag: int) -> None:
        self.sent.append((self.own, to, tag))

    def recv(self, _: object, source: int, tag: int) -> None:
        self.received.append((source, self.own, tag))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_goes_up_and_what_goes_down_the_ranks_have_lanes_of_their_own(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """See [Note: Lanes]: gloo takes the connection whose number is what the tag leaves when it is divided by two."""
    told = [_Told(rank) for rank in range(size)]
    monkeypatch.setattr(torch_internals, "register_work", lambda *_: None)
    for group in told:
        monkeypatch.setattr(torch_internals, "group_named", lambda _, group=group: group)
        for run in (run_gather, run_exchange):
            run(torch.zeros(size), size, "")
        if size == 2:
            run_swap(torch.zeros(size), "")
    sent, received = ([message for group in told for message in getattr(group, way)] for way in ("sent", "received"))
    assert sorted(sent) == sorted(received)
    assert {tag % 2 for source, to, tag in sent if source < to} == {0} and {tag % 2 for source, to, tag in sent if source > to} == {1}


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


def swapped(dtype: torch.dtype) -> list[torch.Tensor]:
    """Sums of several swaps at once, by 1 and by 3, waited for in another order."""
    group, size, rank = _group()
    sent = [_whole(i, rank, size, n).to(dtype) / 3 for i, n in enumerate((3, 0, 70_000))]
    flying = [SWAP_DIRECT(flat, group) for flat in sent]
    brought = [_c10d.wait_tensor(flying[i]) for i in (2, 0, 1)]
    return [SUM_SWAPPED([theirs], [sent[i]], over, group) for i, theirs in zip((2, 0, 1), brought) for over in (1, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_two_have_is_added_up_by_both(two: Cluster, dtype: torch.dtype) -> None:
    sums = []
    for i, n in ((2, 70_000), (0, 3), (1, 0)):
        first, second = (_whole(i, rank, 2, n).to(dtype) / 3 for rank in range(2))
        sums += [(first + second) / over for over in (1, 3)]
    for found in two.run(swapped, dtype):
        assert same(found, sums)


def _summed(name: str, world: int, options: dict[str, Any]) -> Plan:
    """A plan that sums by sends."""
    case = CASES.get(name)
    model = case.build() if case else Sum()
    return replace(first_look(model, config(options.pop("zero", 0), **options), Machines(1, world, DEVICES["cpu"])), direct_sums=True)


SUMS = [({}, 2), in_full({}, 3), in_full({}, 4), in_full({"zero": 3, "mesh": {"replicate": 2, "shard": 2}}, 4)]


@pytest.mark.parametrize(("options", "cluster"), SUMS, indirect=["cluster"])
def test_sums_of_gradients_have_the_same_bits_on_all(cluster: Cluster, options: dict[str, Any]) -> None:
    """Those of a sum in the order of processes, divided behind it."""
    world, plan = cluster.world, _summed("Sum", cluster.world, dict(options))
    for found, own in cluster.run(gradients_of_sum, "auto", {"plan": plan, "replicate_below": "auto"}):
        mean = sum(own[1:], start=own[0]) / world
        if options:
            torch.testing.assert_close(found, mean)
        else:
            assert torch.equal(found, mean)


@pytest.mark.parametrize(
    ("name", "options", "cluster"),
    [
        ("attention", {}, 2),
        in_full("attention", {"codegen": "inductor"}, 2),
        in_full("odd", {}, 3),
        in_full("odd", {"codegen": "inductor"}, 3),
        in_full("odd", {"zero": 3, "mesh": {"replicate": 2, "shard": 2}}, 4),
        in_full("llama", {}, 4),
    ],
    indirect=["cluster"],
)
def test_steps_with_sums_by_sends(cluster: Cluster, name: str, options: dict[str, Any]) -> None:
    """As the unsharded model's, in buckets of a few gradients."""
    plan = replace(_summed(name, cluster.world, dict(options)), bucket=300)
    codegen = options.get("codegen", "eager")
    for distance in cluster.run(measure, name, config("auto", plan=plan, replicate_below="auto", codegen=codegen)):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.parametrize(("world", "each"), [(2, ["swap_direct"]), (3, ["exchange_direct", "gather_direct"])])
def test_a_step_has_the_sums_that_its_plan_says(world: int, each: list[str]) -> None:
    case, options = CASES["odd"], config("auto", plan=_summed("odd", world, {}), replicate_below="auto")
    plan = autoshard.plan(case.build(), case.batch(torch.Generator()), options, Machines(1, world, DEVICES["cpu"]))
    backward = rehearse(capture(case.build(), case.batch(torch.Generator())), plan, inductor=False).backward
    assert backward is not None
    made = Counter(node.target.overloadpacket.__name__ for node in backward.graph.nodes if graphs.reduces(node))
    assert set(made) == set(each) and made == {t.collective: t.messages for t in plan.predicted.traffic}


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
