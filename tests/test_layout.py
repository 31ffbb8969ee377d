from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.ops import packing, wire
from autoshard.ops.layout import Layout
from autoshard.plan import REDUCTIONS
from autoshard.torch_internals import FakeTensorMode

_DTYPES = st.sampled_from([None, torch.bfloat16, torch.float32])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    size = draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, size - 1), unique=True).map(tuple))
    replicas, reduction = draw(st.sampled_from(["", "7"])), draw(st.sampled_from(REDUCTIONS))
    return Layout("0", size, owners, replicas, size, draw(_DTYPES), draw(_DTYPES), reduction)


@given(layouts())
def test_text_and_layout_are_inverse(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


def _rows(full: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Each process's rows, as DTensor cuts them; nothing where a process holds none."""
    chunks = list(full.chunk(len(layout.holders)))
    chunks += [full[:0]] * (len(layout.holders) - len(chunks))
    by_owner = dict(zip(layout.holders, chunks))
    return [by_owner.get(r, full[:0]) for r in range(layout.size)]


_shapes = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=3).map(tuple)


@given(layouts(), _shapes)
def test_a_gather_gives_back_every_parameter(layout: Layout, shapes: tuple[tuple[int, int], ...]) -> None:
    layout = Layout("0", layout.size, layout.owners, "", layout.size)
    full = [torch.randn(s) for s in shapes]
    rows = [_rows(f, layout) for f in full]
    sent = [wire.pack_shards([r[rank] for r in rows], shapes, layout) for rank in range(layout.size)]
    for ours, theirs in zip(wire.unpack_full(torch.cat(sent), shapes, layout), full):
        assert torch.equal(ours, theirs)


@given(layouts(), _shapes)
def test_a_reduction_gives_each_process_its_rows_of_the_mean(
    layout: Layout, shapes: tuple[tuple[int, int], ...]
) -> None:
    layout = Layout("0", layout.size, layout.owners, "", layout.size)
    grads = [[torch.randn(s) for s in shapes] for _ in range(layout.size)]
    sent = [wire.pack_grads(g, layout).chunk(layout.size) for g in grads]
    mean = [torch.stack(gs).sum(0) / layout.size for gs in zip(*grads)]
    wanted = [_rows(m, layout) for m in mean]
    for rank in range(layout.size):
        shards = [tuple(w[rank].shape) for w in wanted]
        brought = torch.cat([rows[rank] for rows in sent])
        flat = wire.sum_rows(brought, layout.size, torch.float32)
        got = wire.unpack_shards(flat, shards, shapes, torch.float32, layout)
        for ours, theirs in zip(got, wanted):
            torch.testing.assert_close(ours, theirs[rank])


@given(layouts(), _shapes, st.sampled_from([torch.float32, torch.float16]))
def test_what_graphs_do_is_what_the_wire_says(layout: Layout, shapes: tuple[tuple[int, int], ...], own: torch.dtype) -> None:
    """Operators or views: the same numbers, and what a trace is told of them."""
    full = [torch.randn(s).to(own) for s in shapes]
    rows = [_rows(f, layout)[0] for f in full]
    with FakeTensorMode(allow_non_fake_inputs=True):
        told = packing.pack_shards(rows, shapes, layout), packing.pack_grads(full, layout)
        told_sum = packing.sum_rows(told[1], layout.size, own)
        told_full = packing.unpack_full(torch.cat([told[0]] * layout.size), shapes, layout)
    sent, reduced = packing.pack_shards(rows, shapes, layout), packing.pack_grads(full, layout)
    assert torch.equal(sent, wire.pack_shards(rows, shapes, layout)) and torch.equal(reduced, wire.pack_grads(full, layout))
    gathered = torch.cat([sent] * layout.size)
    whole, by_wire = (f(gathered, shapes, layout) for f in (packing.unpack_full, wire.unpack_full))
    assert all(map(torch.equal, whole, by_wire))
    added = packing.sum_rows(reduced, layout.size, own)
    for real, fake in zip((sent, reduced, added, *whole), (*told, told_sum, *told_full)):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
