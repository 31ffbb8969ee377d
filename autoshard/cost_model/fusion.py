"""What Inductor makes of a program: pointwise operations and reductions become kernels whose inner values are never stored.

[Note: Fusion] Inductor's own scheduler is not run: it wants the device, and takes seconds. Its outcome is foreseen by what
bounds it. A value is stored if something reads it that is no part of its kernel: an operation that calls a library (a
matmul, an attention, a collective), a kernel that needs such a one's result first, the next graph, the user. A kernel
runs at its first operation, or as soon after as all that it reads is there. A result takes the place of an input of
the same size that is read there for the last time. What a kernel sums up and reads again it stores while it runs.
`torch_internals.inner_inductor` has Inductor do nothing that spares a moment and takes memory: keep what is dead until a
result of its size comes, compute for one block what is wanted for another, or, in a backward that repeats matmuls, let a
kernel wait for another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from autoshard.cost_model.generated import fusible, reduces
from autoshard.cost_model.grouping import Kernels
from autoshard.cost_model.inlining import inline
from autoshard.cost_model.program import ALL_REDUCE, IN_PLACE, Operation, Piece, Program
from autoshard.cost_model.work import op_name

_WRITES_INTO = frozenset(
    ["index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "index_add", "scatter", "scatter_add", "scatter_reduce"]
)


def fuse(program: Program, channels_last: bool) -> Program:
    """The program after fusion; each kernel stands in it as one operation, by the name of its last. channels_last: how convolutions'
    tensors lie."""
    program, gone = inline(program)
    out = Program(open=program.open)
    moved: dict[int, int] = {}  # where the operation at a position of the old program ended up
    inner = {p for i in gone for p in program.operations[i].makes}
    for code, several in itertools.groupby(range(len(program.operations)), lambda i: program.operations[i].code):
        positions = [i for i in several if i not in gone]
        for members, operation in _generated(program, positions, inner) if code is not None else _alone(program, positions):
            moved.update(dict.fromkeys(members, len(out.operations)))
            out.operations.append(operation)
    moved[len(program.operations)] = len(out.operations)
    moved |= _first_behind(gone, moved)
    out.pieces = [_moved(p, moved, i in inner) for i, p in enumerate(program.pieces)]
    _follow_readers(out, moved, program, gone)
    _in_place(out)
    if channels_last:
        _copy_to_channels_last(out)
    return out


Placed = Iterable[tuple[list[int], Operation]]  # operations and the positions of what they were made of


def _alone(program: Program, positions: Iterable[int]) -> Placed:
    return (([i], program.operations[i]) for i in positions)


def _generated(program: Program, positions: list[int], inner: set[int]) -> Placed:
    """The kernels of one graph, whose inner pieces are put into `inner`; not what one reduces, which it stores for itself."""
    kernels = Kernels(program, positions)
    inner |= {p for p in kernels.inner if not reduces(program.operations[kernels.maker[p]])}
    for members in kernels.in_order():
        yield members, _merged(program, [program.operations[i] for i in members], kernels.inner)


def _merged(program: Program, members: list[Operation], inner: set[int]) -> Operation:
    made = [p for o in members for p in o.makes]
    reads = tuple(dict.fromkeys(p for o in members for p in o.reads if p not in made))
    makes = tuple(p for p in made if p not in inner)
    read_bytes, made_bytes = (tuple(program.pieces[p].bytes for p in pieces) for pieces in (reads, makes))
    parts = tuple(dict.fromkeys(part for o in members for part in (o.parts or (o.node,))))
    masks = sum(program.pieces[p].bytes for o in members if _is_mask(o) for p in o.makes if p in makes)
    one = replace(members[-1], reads=reads, makes=makes, parts=parts, over=_over(members))
    return replace(one, read_bytes=read_bytes, made_bytes=made_bytes, masks=masks, views=0)


def _is_mask(operation: Operation) -> bool:
    value = operation.node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is torch.bool


def _over(members: list[Operation]) -> dict[int, tuple[int, ...]]:
    """Whose place each result of a kernel's members could take: that of what the member reads and nobody else in the kernel
    but those whose results it needs. What a sum is made of first, and then read again, takes a place and hands it on."""
    maker = {p: i for i, o in enumerate(members) for p in o.makes}
    readers: dict[int, set[int]] = {}
    before: list[set[int]] = []
    for i, operation in enumerate(members):
        direct = {maker[p] for p in operation.reads if p in maker}
        before.append({i}.union(direct, *(before[d] for d in direct)))
        for piece in operation.reads:
            readers.setdefault(piece, set()).add(i)
    over: dict[int, tuple[int, ...]] = {}
    for i, operation in enumerate(members):
        handed = [over[p] for p in operation.reads if p in over and any(reduces(members[r]) for r in readers[p])]
        places = (*(p for p in operation.reads if p not in maker), *itertools.chain(*handed))
        over |= {made: tuple(p for p in places if readers[p] <= before[i]) for made in operation.makes}
    return over


def _first_behind(gone: set[int], moved: dict[int, int]) -> dict[int, int]:
    """For each operation that is gone where the first of those behind it is now: what autograd makes there begins there."""
    found, first = {}, moved[max(moved)]
    for at in range(max(moved), -1, -1):
        first = min(first, moved.get(at, first))
        if at in gone:
            found[at] = first
    return found


def _moved(piece: Piece, moved: dict[int, int], inner: bool) -> Piece:
    made = moved[piece.made] if piece.made >= 0 else -1
    return replace(piece, made=made, last=max(made, 0), bytes=0 if inner else piece.bytes)


def _follow_readers(out: Program, moved: dict[int, int], before: Program, gone: set[int]) -> None:
    """A piece's last reader may stand elsewhere now. What outlived its readers (a result, a gradient, what a collective
    reads until its wait) still lives until then."""
    for at, operation in enumerate(out.operations):
        for piece in (*operation.reads, *operation.makes):
            out.pieces[piece].last = max(out.pieces[piece].last, at)
    touched = {p: i for i, o in enumerate(before.operations) if i not in gone for p in (*o.reads, *o.makes)}
    ends = moved | {_last_of_forward(before): _last_of_forward(out)}
    for piece, (old, new) in enumerate(zip(before.pieces, out.pieces)):
        if old.last > touched.get(piece, -1):
            new.last = max(new.last, ends[old.last])


def _last_of_forward(program: Program) -> int:
    return max((i for i, o in enumerate(program.operations) if o.half == "forward"), default=-1)


def _in_place(out: Program) -> None:
    """Gives a kernel's result the memory of an input that dies in it: the input's life ends one operation earlier."""
    for at, operation in enumerate(out.operations):
        dying = [p for p in operation.reads if _dies(out.pieces[p], at)]
        for made in operation.makes:
            over = _could_lie_over(operation, made)
            fitting = [p for p in dying if p in over and out.pieces[p].bytes == out.pieces[made].bytes]
            if fitting:
                dying.remove(fitting[0])
                out.pieces[fitting[0]].last = at - 1


def _could_lie_over(operation: Operation, made: int) -> Sequence[int]:
    """The inputs whose memory a result could take. An all-reduce is in place, or, in generated code, a kernel that copies, and then changes
    the copy; so is there what writes to some places of its first input."""
    generated = operation.code is not None
    if operation.name == IN_PLACE or (generated and (fusible(operation) or operation.name == ALL_REDUCE)):
        return operation.over.get(made, operation.reads)
    return operation.reads[:1] if generated and op_name(operation.node) in _WRITES_INTO else ()


def _copy_to_channels_last(out: Program) -> None:
    """Inductor lets convolutions work on channels-last tensors; what comes from outside is copied to that at the start,
    for all of them, backward's too."""
    readers: dict[int, list[int]] = {}
    for at, operation in enumerate(out.operations):
        if operation.code is not None and "convolution" in operation.name:
            for given in (p for p in operation.reads if out.pieces[p].made == -1):
                readers.setdefault(given, []).append(at)
    for given, reading in readers.items():
        out.add(out.pieces[given].bytes, "activations", 0, reading[-1], out.pieces[given].maker)


def _dies(piece: Piece, at: int) -> bool:
    return piece.last == at and 0 <= piece.made < at and not piece.seen
