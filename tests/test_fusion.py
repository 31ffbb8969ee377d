"""Inductor's kernels, foreseen: what is joined, what is computed where it is read, and what is never stored."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from autoshard.cost_model import liveness
from autoshard.cost_model.fusion import fuse
from autoshard.cost_model.program import Operation, Program


def test_fusion_stays_within_compiled_graphs_and_keeps_what_a_collective_reads() -> None:
    graph, c10d = Graph(), torch.ops._c10d_functional
    relu, other = (graph.call_function(torch.ops.aten.relu.default, ()) for _ in range(2))
    started, wait = (graph.call_function(op, ()) for op in (c10d.all_reduce.default, c10d.wait_tensor.default))
    program = Program()
    sent, got, first, second, third = (program.add(8, "temporaries", i, i + 1) for i in (0, 1, 2, 3, 4))
    program.pieces[sent].last = program.pieces[got].last = 6  # the transport reads it until the wait
    program.operations = [
        Operation(relu, "forward", (), (sent,), code=0),
        Operation(started, "forward", (sent,), (got,), code=0),
        Operation(relu, "forward", (), (first,), code=0),
        Operation(other, "forward", (first,), (second,), code=0),
        Operation(relu, "forward", (second,), (third,), code=1),
        Operation(relu, "forward", (third,), (), code=None),
        Operation(wait, "forward", (got,), (), code=None),
    ]
    fused = fuse(program, channels_last=False)
    assert [len(o.parts) for o in fused.operations] == [1, 1, 2, 1, 0, 0]
    assert fused.pieces[first].bytes == 0 and fused.pieces[second].bytes == fused.pieces[third].bytes == 8
    assert fused.pieces[sent].last == 5


@pytest.mark.parametrize("over", [True, False])
def test_what_writes_into_its_first_input_lies_over_it(over: bool) -> None:
    """As an embedding's gradient does over zeros; not over another of its size."""
    graph, aten = Graph(), torch.ops.aten
    zeros, put = graph.call_function(aten.mm.default, ()), graph.call_function(aten._unsafe_masked_index_put_accumulate.default, ())
    program = Program()
    first, second, made = (program.add(8, "temporaries", i, i) for i in range(3))
    program.pieces[first].last = program.pieces[second].last = 2
    reads = (first, second) if over else (second, first)
    program.operations = [
        Operation(zeros, "forward", (), (first,), code=0),
        Operation(zeros, "forward", (), (second,), code=0),
        Operation(put, "forward", reads, (made,), code=0),
    ]
    fused = fuse(program, channels_last=False)
    assert (fused.pieces[first].last, fused.pieces[second].last) == ((1, 2) if over else (2, 1))


def test_cheap_values_are_computed_where_they_are_read() -> None:
    graph = Graph()
    aten = torch.ops.aten
    mm, relu, sigmoid = (graph.call_function(op, ()) for op in (aten.mm.default, aten.relu.default, aten.sigmoid.default))
    program = Program()
    product, cheap, heavy, *products = (program.add(8, "temporaries", i, i) for i in range(6))
    program.operations = [
        Operation(mm, "forward", (), (product,), code=0),
        Operation(relu, "forward", (product,), (cheap,), code=0),
        Operation(sigmoid, "forward", (product,), (heavy,), code=0),
        *(Operation(mm, "forward", (product, heavy), (p,), code=0) for p in products),
        *(Operation(graph.call_function(aten.add.Tensor, ()), "forward", (cheap, heavy, p), (), code=0) for p in products[:2]),
    ]
    for piece, last in ((product, 5), (cheap, 7), (heavy, 7), (products[0], 6), (products[1], 7), (products[2], 5)):
        program.pieces[piece].last = last
    fused = fuse(program, channels_last=False)
    assert [o.name for o in fused.operations].count("aten.relu.default") == 0
    assert fused.pieces[cheap].bytes == 0 and fused.pieces[heavy].bytes == 8
    readers = [o for o in fused.operations if relu in o.parts]
    assert readers and all(product in o.reads and heavy in o.reads for o in readers)


def test_a_kernel_takes_in_what_it_reads_of_another_unless_something_lies_between() -> None:
    graph = Graph()
    aten = torch.ops.aten
    mm, relu, sigmoid, add = (graph.call_function(op, ()) for op in (aten.mm.default, aten.relu.default, aten.sigmoid.default, aten.add.Tensor))
    for between in (False, True):
        program = Program()
        product, heavy, first, last, second, *out = (program.add(8, "temporaries", i, i + 1) for i in range(7))
        program.operations = [
            Operation(mm, "forward", (), (product,), code=0),
            Operation(sigmoid, "forward", (product,), (heavy,), code=0),
            Operation(relu, "forward", (product, heavy), (first,), code=0),
            Operation(mm, "forward", (first,) if between else (), (last,), code=0),
            Operation(add, "forward", (product, heavy, last), (second,), code=0),
            *(Operation(mm, "forward", (p,), (made,), code=0) for p, made in zip((first, second), out)),
        ]
        fused = fuse(program, channels_last=False)
        kernels = [[p.target for p in o.parts] for o in fused.operations if o.parts[1:]]
        together = [sigmoid.target, relu.target] if between else [sigmoid.target, relu.target, add.target]
        assert kernels == [together] and fused.pieces[heavy].bytes == (8 if between else 0)


def test_what_autograd_makes_for_an_inlined_operation_is_there_from_backward_on() -> None:
    graph = Graph()
    mm, relu = (graph.call_function(op, ()) for op in (torch.ops.aten.mm.default, torch.ops.aten.relu.default))
    program = Program()
    saved, tangent, cheap, made = (program.add(8, "temporaries", i, last) for i, last in ((0, 1), (1, 1), (1, 2), (2, 3)))
    program.operations = [
        Operation(mm, "forward", (), (saved,), code=0),
        Operation(relu, "backward", (tangent,), (cheap,), code=1),
        Operation(relu, "backward", (cheap,), (made,), code=1),
        Operation(mm, "backward", (made, saved), (), code=1),
    ]
    fused = fuse(program, channels_last=False)
    assert len(fused.operations) == 3 and fused.pieces[tangent].made == 1


@pytest.mark.parametrize(
    ("repeats", "shared", "waits", "joined"),
    [
        ("relu mm", 16, False, True),
        ("relu", 2, False, False),
        ("", 2, False, True),
        ("relu mm", 16, True, False),
        ("relu", 16, True, True),
        ("mm", 16, True, False),
        ("", 16, True, True),
    ],
)
def test_in_backward_only_what_pays_is_joined(repeats: str, shared: int, waits: bool, joined: bool) -> None:
    graph = Graph()
    mm, relu = (graph.call_function(op, ()) for op in (torch.ops.aten.mm.default, torch.ops.aten.relu.default))
    for node, name in ((mm, "mm"), (relu, "relu")):
        node.meta["partitioner_tag"] = "is_forward" if name in repeats.split() else "is_backward"
    program = Program()
    common, own, other = (program.add(size, "activations", 0, 3) for size in (shared, 16, 16))
    first, between, later = (program.add(size, "temporaries", at, at + 1) for at, size in ((1, 8), (2, 16), (3, 8)))
    program.operations = [
        Operation(mm, "forward", (), (common, own, other), code=0),
        Operation(relu, "backward", (common, own), (first,), code=1),
        Operation(mm, "backward", (first,) if not waits else (other,), (between,), code=1),
        Operation(relu, "backward", (common, between if waits else other), (later,), code=1),
        Operation(mm, "backward", (first, later), (), code=1),
    ]
    assert any(set(o.makes) == {first, later} for o in fuse(program, channels_last=False).operations) == joined


def test_what_writes_a_saved_tensor_is_joined_with_what_reads_it() -> None:
    graph = Graph()
    mm, relu = (graph.call_function(op, ()) for op in (torch.ops.aten.mm.default, torch.ops.aten.relu.default))
    program = Program()
    product, saved, made = (program.add(8, "activations", at, last) for at, last in ((0, 1), (1, 4), (2, 3)))
    program.operations = [
        Operation(mm, "forward", (), (product,), code=0),
        Operation(relu, "forward", (product,), (saved,), code=0),
        Operation(relu, "forward", (saved,), (made,), code=0),
        Operation(mm, "forward", (made,), (), code=0),
    ]
    fused = fuse(program, channels_last=False)
    assert [set(o.makes) for o in fused.operations] == [{product}, {saved, made}, set()]
    assert [fused.pieces[p].bytes for p in (saved, made)] == [8, 8]


def test_what_a_kernel_sums_up_is_stored_while_it_runs_and_hands_its_place_on() -> None:
    graph = Graph()
    ops = (torch.ops.aten.mm.default, torch.ops.aten.exp.default, torch.ops.aten.sum.dim_IntList, torch.ops.aten.div.Tensor)
    mm, exp, total, div = (graph.call_function(op, ()) for op in ops)
    program = Program()
    given, heavy, summed, made = (program.add(size, "temporaries", at, at + 1) for at, size in enumerate((8, 8, 2, 8)))
    program.operations = [
        Operation(mm, "forward", (), (given,), code=0),
        Operation(exp, "forward", (given,), (heavy,), code=0),
        Operation(total, "forward", (heavy,), (summed,), code=0),
        Operation(div, "forward", (heavy, summed), (made,), code=0),
        Operation(mm, "forward", (made,), (), code=0),
    ]
    program.pieces[heavy].last = 3
    fused = fuse(program, channels_last=False)
    assert [fused.pieces[p].bytes for p in (given, heavy, summed, made)] == [8, 0, 2, 8]
    assert [int(b) for b in liveness.simulate(fused).at().sum(1)][:3] == [8, 10, 8]  # the product's place is the quotient's


def test_numbers_of_a_dropout_are_drawn_in_the_kernel_that_reads_them() -> None:
    graph = Graph()
    targets = (torch.ops.aten.mm.default, torch.ops.prims.inductor_seeds.default, torch.ops.prims.inductor_random.default)
    mm, seeds, draw, add = (graph.call_function(op, ()) for op in (*targets, torch.ops.aten.add.Tensor))
    program = Program()
    seed = program.add(16, "temporaries", 0, 5, "inductor_seeds_default")
    numbers, product, summed = zip(*([program.add(8, "temporaries", at, at) for at in range(3)] for _ in range(2)))
    program.operations = [
        Operation(seeds, "forward", (), (seed,), code=0),
        Operation(draw, "forward", (seed,), (numbers[0],), code=0),
        Operation(draw, "forward", (seed,), (numbers[1],), code=0),
        *(Operation(mm, "forward", (), (p,), code=0) for p in product),
        *(Operation(add, "forward", (n, p), (s,), code=0) for n, p, s in zip(numbers, product, summed)),
        Operation(mm, "forward", summed, (), code=0),
    ]
    fused = fuse(program, channels_last=False)
    assert [fused.pieces[p].bytes for p in numbers] == [0, 0]


@pytest.mark.parametrize(("dims", "joined"), [((0,), False), ((1,), True), ((0, 1), True)])
def test_a_sum_of_columns_stays_where_it_is(dims: tuple[int, ...], joined: bool) -> None:
    """It is a kernel of its own, which other operations may stand in front of; what it reads waits for it."""
    graph, aten = Graph(), torch.ops.aten
    mm, relu = (graph.call_function(op, ()) for op in (aten.mm.default, aten.relu.default))
    relu.meta["val"] = torch.empty(4, 8, device="meta")
    total = graph.call_function(aten.sum.dim_IntList, (relu, list(dims)))
    program = Program()
    made, product, out = (program.add(size, "temporaries", at, last) for size, at, last in ((128, 0, 2), (64, 1, 3), (32, 2, 3)))
    program.operations = [
        Operation(relu, "backward", (), (made,), code=0),
        Operation(mm, "backward", (made,), (product,), code=0),
        Operation(total, "backward", (made,), (out,), code=0),
        Operation(mm, "backward", (product, out), (), code=0),
    ]
    fused = fuse(program, channels_last=False)
    assert [len(o.parts) for o in fused.operations] == ([2, 1, 1] if joined else [1, 1, 1, 1])
    assert fused.pieces[made].last == (1 if joined else 2)


def test_kernels_are_joined_beyond_one_that_neither_can_be_joined_with() -> None:
    graph, aten = Graph(), torch.ops.aten
    mm, relu = (graph.call_function(op, ()) for op in (aten.mm.default, aten.relu.default))
    relu.meta["val"] = torch.empty(4, 8, device="meta")
    columns = graph.call_function(aten.sum.dim_IntList, (relu, [0]))
    program = Program()
    saved, first, summed, later = (program.add(size, "temporaries", at, 4) for at, size in enumerate((128, 128, 32, 128)))
    program.operations = [
        Operation(mm, "forward", (), (saved,), code=0),
        Operation(relu, "forward", (saved,), (first,), code=0),
        Operation(columns, "forward", (saved,), (summed,), code=0),
        Operation(relu, "forward", (saved,), (later,), code=0),
        Operation(mm, "forward", (first, summed, later), (), code=0),
    ]
    fused = fuse(program, channels_last=False)
    assert [set(o.makes) for o in fused.operations] == [{saved}, {first, later}, {summed}, set()]


@pytest.mark.parametrize(("inner", "joined"), [("sum", True), ("sigmoid", False)])
def test_where_no_kernel_waits_for_another_it_may_for_the_sums_of_the_other(inner: str, joined: bool) -> None:
    """A norm that is computed again is joined with its gradient."""
    graph, aten = Graph(), torch.ops.aten
    mm, relu, sigmoid = (graph.call_function(op, ()) for op in (aten.mm.default, aten.relu.default, aten.sigmoid.default))
    mm.meta["partitioner_tag"] = "is_forward"
    relu.meta["val"] = torch.empty(4, 8, device="meta")
    rows = graph.call_function(aten.sum.dim_IntList, (relu, [1]))
    program = Program()
    saved, other = (program.add(128, "activations", 0, 5) for _ in range(2))
    first, within, *later = (program.add(size, "temporaries", at, 5) for at, size in enumerate((128, 16, 128, 128), 1))
    program.pieces[within].last = 4
    program.operations = [
        Operation(mm, "forward", (), (saved, other), code=0),
        Operation(relu, "backward", (saved,), (first,), code=1),
        Operation(rows if inner == "sum" else sigmoid, "backward", (other,), (within,), code=1),
        *(Operation(relu, "backward", (saved, within), (piece,), code=1) for piece in later),
        Operation(mm, "backward", (first, *later), (), code=1),
    ]
    fused = fuse(program, channels_last=False)
    assert any({first, *later} <= set(o.makes) for o in fused.operations) == joined
    assert (fused.pieces[within].bytes == 0) == (inner == "sigmoid")
