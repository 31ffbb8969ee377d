"""Rows that are packed where a gather sends them from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.ops import packing, wire
from autoshard.ops.direct import run_gather
from autoshard.ops.layout import Layout
from autoshard.passes import graphs, registry
from autoshard.plan import Plan
from autoshard.planning import first_look, forecaster
from autoshard.rehearsal import prepare
from tests.cluster import Cluster
from tests.small import Net, config

HOSTS = Machines(2, 1, DEVICES["cpu"])


def _plan(**options: Any) -> Plan:
    return first_look(Net(), config(3, **options), HOSTS)


def _counts(spec: str, plan: Plan) -> list[tuple[int, int]]:
    """Of forward and of backward: how many gathers pack, and how many packs are by themselves."""
    made = prepare(capture(Net(), torch.zeros(4, 8)), plan, inductor=False, passes=registry.parse(spec)).cut(plan)
    halves = [made.forward, made.backward]
    return [(len(graphs.calls(gm, packing.GATHER_PACKED)), len(graphs.calls(gm, packing.PACK_SHARDS))) for gm in halves if gm is not None]


def test_what_is_gathered_is_packed_in_its_place() -> None:
    without = registry.DEFAULT.replace("pack_in_place,", "")
    apart, joined = _counts(without, _plan()), _counts(registry.DEFAULT, _plan())
    assert any(packs for _, packs in apart) and not any(gathers for gathers, _ in apart)
    assert joined == [(packs, 0) for _, packs in apart]


def test_as_many_bytes_travel() -> None:
    """By the forecast, of rows that are cast on the way too."""
    for precision in (None, "bf16"):
        seen = []
        for disabled in ((), ("pack_in_place",)):
            settings = config(3, precision=precision, disable_passes=disabled)
            forecast = forecaster(Net(), torch.zeros(4, 8), settings, HOSTS, None)
            seen.append([(t.collective, t.phase, t.messages, t.bytes) for t in forecast(first_look(Net(), settings, HOSTS)).predicted.traffic])
        assert seen[0] == seen[1]


def _same(rows: list[int], dtype: torch.dtype) -> bool:
    """Whether a gather that packs brings what one of packed rows does, of parameters with so many rows."""
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    layout = Layout(group, size, (), "", size, compute=dtype, direct=True)
    full = tuple((n, 3) for n in rows)
    shards = [torch.randn(min(max(n - rank * layout.chunk_rows(n), 0), layout.chunk_rows(n)), 3) for n in rows]
    (flat,) = wire.pack_shards(shards, full, layout)
    brought = run_gather(flat, size, group)
    packed = packing.run_gather_packed(shards, *wire.flat_shapes(full), str(layout), size, group)
    both = [torch.ops._c10d_functional.wait_tensor(one) for one in (brought, packed)]
    return torch.equal(*both) and both[0].dtype == dtype


@pytest.mark.parametrize(("rows", "dtype"), [([4, 7, 1], torch.float32), ([4, 7, 1], torch.bfloat16), ([0], torch.float32)])
def test_it_brings_the_same(three: Cluster, rows: list[int], dtype: torch.dtype) -> None:
    assert all(three.run(_same, rows, dtype))
