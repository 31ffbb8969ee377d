from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from autoshard.ops import packing, wire
from autoshard.ops.layout import MUCH, Layout
from autoshard.plan import REDUCTIONS
from autoshard.torch_internals import FakeTensorMode
from tests.small import same

Shapes = tuple[tuple[int, ...], ...]

_DTYPES = st.sampled_from([None, torch.bfloat16, torch.float32])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    size = draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, size - 1), unique=True).map(tuple))
    replicas, reduction = draw(st.sampled_from(["", "7"])), draw(st.sampled_from(REDUCTIONS))
    compress = draw(st.sampled_from([None, torch.bfloat16, torch.float16]))
    made = Layout("0", size, owners, replicas, size, draw(_DTYPES), draw(_DTYPES), reduction, compress, draw(st.booleans()), draw(st.integers(0, 99)))
    turns = draw(st.integers(1, 3))
    made = replace(made, apart=draw(st.integers(0, 99)), turns=turns, message=0 if turns > 1 else made.message)
    return replace(made, direct_sums=draw(st.booleans()), dim=draw(st.integers(0, 2)))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple), st.integers(1, 300))
def test_a_parameter_is_cut_where_that_takes_little_padding(shape: tuple[int, ...], size: int) -> None:
    """Never along the rows of matrices, and along the first dimension unless processes have much more than their share of it."""
    layout = Layout("0", size, (), "", size).cutting(shape)
    of_each = [math.prod(replace(layout, dim=dim).with_chunk(shape)) for dim in range(max(1, len(shape) - 1))]
    assert layout.dim < len(of_each)
    if layout.dim:
        assert size * of_each[0] >= MUCH * math.prod(shape) and of_each[layout.dim] == min(of_each) < of_each[0]
    elif len(shape) > 2:
        assert of_each[0] * size < MUCH * math.prod(shape) or of_each[0] == min(of_each)


@pytest.mark.parametrize(("shape", "size", "dim"), [
    ((8, 28672, 4096), 8, 0), ((8, 28672, 4096), 64, 1), ((60, 2816, 2048), 64, 0), ((9, 64, 64), 8, 1), ((8, 4096), 64, 0), ((8,), 64, 0),
    ((64, 3, 7, 7), 128, 0), ((64, 256, 3, 3), 128, 1), ((1, 197, 768), 8, 1), ((1, 1, 768), 8, 0),
])
def test_what_has_few_rows_is_cut_along_another_dimension(shape: tuple[int, ...], size: int, dim: int) -> None:
    assert Layout("0", size, (), "", size).cutting(shape).dim == dim
    assert Layout("", 1, (), "0", size).cutting(shape).dim == 0, "it is whole"


@given(layouts())
def test_text_and_layout_are_inverse(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


def _rows(full: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Each process's rows, as DTensor cuts them; nothing where a process holds none."""
    chunks, nothing = list(full.chunk(len(layout.holders), layout.dim)), full.narrow(layout.dim, 0, 0)
    chunks += [nothing] * (len(layout.holders) - len(chunks))
    by_owner = dict(zip(layout.holders, chunks))
    return [by_owner.get(r, nothing) for r in range(layout.size)]


_shapes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=3).map(tuple)


_messages = st.integers(0, 40)  # bytes


def _plain(layout: Layout, message: int) -> Layout:
    """The same processes, and nothing that changes numbers."""
    return Layout("0", layout.size, layout.owners, "", layout.size, message=message, dim=layout.dim)


def _as_gathered(sent: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Of each message what all processes sent, one after the other."""
    return [torch.cat(parts) for parts in zip(*sent)]


@given(layouts(), _shapes, _messages)
def test_a_gather_gives_back_every_parameter(layout: Layout, shapes: Shapes, message: int) -> None:
    layout = _plain(layout, message)
    full = [torch.randn(s) for s in shapes]
    rows = [_rows(f, layout) for f in full]
    sent = [wire.pack_shards([r[rank] for r in rows], shapes, layout) for rank in range(layout.size)]
    for ours, theirs in zip(wire.unpack_full(_as_gathered(sent), shapes, layout), full, strict=True):
        assert torch.equal(ours, theirs)


@given(layouts(), _shapes, _messages, st.integers(0, 60))
def test_what_is_gathered_apart_is_used_where_it_arrives(
    layout: Layout, shapes: Shapes, message: int, least: int
) -> None:
    layout = replace(_plain(layout, message), apart=least)
    full = [torch.randn(s) for s in shapes]
    rows = [_rows(f, layout) for f in full]
    sent = [packing.pack_shards([r[rank] for r in rows], shapes, layout) for rank in range(layout.size)]
    gathered = _as_gathered(sent)
    found = packing.unpack_full(gathered, shapes, layout)
    assert same(found, full)
    alone = wire.apart(shapes, layout, torch.float32)
    assert [found[i].data_ptr() for i in alone] == [brought.data_ptr() for brought, _ in zip(gathered, alone)]


@given(layouts(), _shapes, _messages)
def test_a_reduction_gives_each_process_its_rows_of_the_mean(
    layout: Layout, shapes: Shapes, message: int
) -> None:
    layout = _plain(layout, message)
    grads = [[torch.randn(s) for s in shapes] for _ in range(layout.size)]
    sent = [[flat.chunk(layout.size) for flat in wire.pack_rows(g, layout)] for g in grads]
    mean = [torch.stack(gs).sum(0) / layout.size for gs in zip(*grads)]
    wanted = [_rows(m, layout) for m in mean]
    for rank in range(layout.size):
        shards = [tuple(w[rank].shape) for w in wanted]
        brought = _as_gathered([[rows[rank] for rows in one] for one in sent])
        flat = wire.sum_rows(brought, layout.size, torch.float32)
        got = wire.unpack_shards(flat, shards, shapes, torch.float32, layout)
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs[rank])


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3])
def test_gradients_are_divided_as_they_are_packed(size: int, own: torch.dtype) -> None:
    """In one pass, to the same bits as in two."""
    layout = Layout("0" if size > 1 else "", size, (), "7", 3)
    grads = [torch.randn(6, 5).to(own), torch.randn(3, 7).to(own)]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        (flat,) = wire.pack_rows(grads, layout)
    assert torch.equal(flat, torch.cat([g.view(size, -1) for g in grads], 1).div_(3).view(-1))
    assert {event.name for event in seen.events()}.isdisjoint({"aten::cat", "aten::div_"})


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5).map(tuple), st.integers(0, 12))
def test_messages_carry_all_elements_once_and_no_more_than_may_be(sizes: tuple[int, ...], most: int) -> None:
    pieces = wire.cut(sizes, most)
    carried = [(i, at) for piece in pieces for i, begin, end in piece for at in range(begin, end)]
    assert carried == [(i, at) for i, size in enumerate(sizes) for at in range(size)]
    lengths = [sum(wire.lengths(piece)) for piece in pieces]
    assert not most or max(lengths) <= most
    assert lengths[:-1] == [lengths[0]] * (len(lengths) - 1)


@given(layouts(), _shapes, _messages, st.sampled_from([torch.float32, torch.float16]))
def test_what_graphs_do_is_what_the_wire_says(
    layout: Layout, shapes: Shapes, message: int, own: torch.dtype
) -> None:
    """Operators or views: the same numbers, and what a trace is told of them."""
    layout = replace(layout, message=message if layout.turns == 1 else 0)
    full = [torch.randn(s).to(own) for s in shapes]
    rows = [torch.zeros(layout.with_chunk(s), dtype=own) for s in shapes]
    with FakeTensorMode(allow_non_fake_inputs=True):
        told = packing.pack_shards(rows, shapes, layout), packing.pack_grads(full, layout)
        told_sum = packing.sum_rows(told[1], layout.size, own)
        told_full = packing.unpack_full(_as_gathered([told[0]] * layout.size), shapes, layout)
    sent, reduced = packing.pack_shards(rows, shapes, layout), packing.pack_grads(full, layout)
    assert sum(t.numel() for t in sent) == sum(t.numel() for t in wire.pack_shards(rows, shapes, layout))
    assert same(reduced, wire.pack_rows(full, layout))
    gathered = _as_gathered([sent] * layout.size)
    whole = packing.unpack_full(gathered, shapes, layout)
    added = packing.sum_rows(reduced, layout.size, own)
    for real, fake in zip((*sent, *reduced, added, *whole), (*told[0], *told[1], told_sum, *told_full), strict=True):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


def _copies(function: Callable[..., Any], *args: Any) -> int:
    """Of tensors: a number that one is divided by is copied too."""
    with torch.profiler.profile(record_shapes=True) as profiler:
        function(*args)
    return sum(event.name == "aten::copy_" and event.input_shapes[0] != [] for event in profiler.events())


def test_an_uneven_parameter_that_travels_alone_is_not_copied_when_it_arrives() -> None:
    """A vocabulary that processes do not part evenly: it is a part of what comes, and its gradient is only padded."""
    layout, shapes = Layout("0", 4, (), "", 4), ((7, 3),)
    (full,) = (torch.randn(s) for s in shapes)
    sent = [packing.pack_shards([r], shapes, layout) for r in _rows(full, layout)]
    assert [row.data_ptr() == r.data_ptr() for (row,), r in zip(sent, _rows(full, layout))] == [True, True, True, False]
    gathered = _as_gathered(sent)
    (found,) = packing.unpack_full(gathered, shapes, layout)
    assert torch.equal(found, full) and found.data_ptr() == gathered[0].data_ptr()
    (reduced,) = packing.pack_grads([full], layout)
    assert torch.equal(reduced[: full.numel()], full.view(-1) / 4) and not reduced[full.numel() :].any() and len(reduced) == 4 * 2 * 3


def test_an_uneven_parameter_has_the_others_copied_no_more_often() -> None:
    """One copy of what lies as it travels, two of what does not, however many processes; on the way out none, as it is divided where it goes."""
    layout, shapes = Layout("0", 4, (), "", 4), ((8, 3), (7, 3), (4, 2))
    full = [torch.randn(s) for s in shapes]
    rows = [_rows(f, layout) for f in full]
    gathered = _as_gathered([wire.pack_shards([r[rank] for r in rows], shapes, layout) for rank in range(4)])
    assert same(wire.unpack_full(gathered, shapes, layout), full)
    assert _copies(wire.unpack_full, gathered, shapes, layout) == 1 + 2 + 1
    assert _copies(wire.pack_rows, full, layout) == _copies(packing.pack_grads, full, layout) == 0
