"""One test for each private name of processes and what they send: a torch release that moves one fails here, by name."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autoshard import torch_internals
from autoshard.runtime import processes
from autoshard.runtime.presence import Patience
from tests.cluster import Cluster as Processes
from tests.launch import launch
from tests.small import compiled_pair, config, in_full, what_is_said


def _meet(key: str) -> bool:
    store = torch_internals.job_store(key)
    store.set(str(dist.get_rank()), "x")
    store.wait(["0", "1"])
    return not torch_internals.job_store("elsewhere").check(["0"])


def test_job_store_is_shared(two: Processes) -> None:
    assert two.run(_meet, "here") == [True, True]


@pytest.mark.full
def test_emit_artifact_reaches_the_structured_trace(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCH_TRACE", str(tmp_path))
    launch(1, "from autoshard.torch_internals import emit_artifact; emit_artifact('here', lambda: 'text 42')", fresh=True)
    assert any("text 42" in log.read_text() for log in tmp_path.iterdir())


def _many_at_once() -> str:
    turns = {"shard": torch_internals.gloo_in_turn()}
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",), backend_override=turns).get_group()
    whole, works = torch.ones(8), []
    for _ in range(200):
        works.append(dist.all_reduce(whole.clone(), group=group, async_op=True))
        rows = torch.empty(16)
        dist.all_gather_into_tensor(rows, whole, group=group)
        assert rows.sum() == 16
    for work in works:
        work.wait()
    return str(dist.get_backend(group))


def _sent_to_the_other() -> float:
    group = torch_internals.group_named(dist.new_group(backend=torch_internals.gloo_in_turn()).group_name)
    brought, other = torch.zeros(2), 1 - dist.get_rank()
    torch_internals.register_work(brought, group.recv([brought], other, 0))
    torch_internals.register_work(brought, group.send([torch.full((2,), float(dist.get_rank()))], other, 0))
    return float(torch.ops._c10d_functional.wait_tensor(brought).sum())


def test_wait_tensor_waits_for_work_that_was_registered(two: Processes) -> None:
    assert two.run(_sent_to_the_other) == [2.0, 0.0]


def test_gloo_in_turn_bears_collectives_that_run_at_once(two: Processes) -> None:
    """On the interface that torch's own gloo would take; without one worker thread some ten thousand rounds crash."""
    assert two.run(_many_at_once) == ["gloo_in_turn"] * 2


def _threads_of_a_new_group() -> int:
    before = set(Path("/proc/self/task").iterdir())
    dist.new_group(backend=torch_internals.gloo_in_turn())
    return len(set(Path("/proc/self/task").iterdir()) - before)


def test_gloo_in_turn_has_two_sets_of_connections(two: Processes) -> None:
    """Each served by a thread; the third one carries collectives out."""
    assert two.run(_threads_of_a_new_group) == [3, 3]


def _transports() -> tuple[list[str], str]:
    join = functools.partial(processes.join, torch.device("cuda"), Patience(5.0, None, print))
    return [torch_internals.transport_of(kind) for kind in ("cpu", "cuda")], what_is_said(join)


def test_what_carries_the_tensors_of_a_device_is_known(two: Processes) -> None:
    """gloo carries those of GPUs too, which no plan is made for."""
    for found, said in two.run(_transports):
        assert found == ["gloo", "gloo"] and said.startswith("UnsupportedError: process group: tensors on GPUs go by gloo"), said


def _groups(mesh: dict[str, int] | None, folder: Path) -> tuple[set[str], set[float]]:
    """The backends that a job's collectives go by, and their timeouts."""
    _, _, compiled = compiled_pair(config(3, mesh=mesh, dump_dir=folder))
    compiled(torch.ones(4, 8)).backward()
    graphs = (folder / f"rank{dist.get_rank()}").glob("*_lower_*_after.py")
    text = " ".join(graph.read_text() for graph in graphs)
    groups = [g for g in dist.distributed_c10d._world.pg_map if f"'{g.group_name}')" in text]
    backends: list[Any] = [g._get_backend(torch.device("cpu")) for g in groups]
    return {dist.get_backend(g) for g in groups}, {b.options._timeout.total_seconds() for b in backends}


@pytest.mark.parametrize("mesh", [None, in_full({"replicate": 2, "shard": 1})])
def test_a_job_s_collectives_go_in_turn(two: Processes, tmp_path: Path, mesh: dict[str, int] | None) -> None:
    """And by the config's timeout, whatever the group says that was there before."""
    assert two.run(_groups, mesh, tmp_path) == [({"gloo_in_turn"}, {60.0})] * 2


def test_what_meshes_that_are_gone_were_asked_is_not_answered_for_them() -> None:
    meshes = []
    for _ in range(2):
        dist.init_process_group("fake", rank=0, world_size=3)
        try:
            meshes.append(init_device_mesh("cpu", (3,)))
            rows = distribute_tensor(torch.zeros(7, 2), meshes[-1], [Shard(0)], src_data_rank=None)
            assert (rows + rows).device_mesh is meshes[-1]
        finally:
            dist.destroy_process_group()
        torch_internals.forget_meshes()


def test_rows_become_a_dtensor_like_another() -> None:
    dist.init_process_group("fake", rank=1, world_size=3)
    try:
        mesh = init_device_mesh("cpu", (3,))
        whole = distribute_tensor(torch.zeros(7, 2), mesh, [Shard(0)], src_data_rank=None)
        made = torch_internals.like_rows(whole)(torch.ones_like(whole.to_local()))
        assert isinstance(made, DTensor) and made.placements == whole.placements and made.device_mesh is mesh
        assert made.shape == (7, 2) and made.to_local().sum() == whole.to_local().numel()
    finally:
        dist.destroy_process_group()
