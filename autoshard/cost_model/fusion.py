"""What Inductor makes of a program: pointwise operations and reductions become kernels whose inner values are never stored.

[Note: Fusion] Inductor's own scheduler is not run: it wants the device, and takes seconds. Its outcome is foreseen by what
bounds it. A value is stored if something reads it that is no part of its kernel: an operation that calls a library (a
matmul, an attention, a collective), a kernel that needs such a one's result first, the next graph, the user. A kernel
runs at its first operation, or as soon after as all that it reads is there. A result takes the place of an input of
the same size that is read there for the last time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from torch import Tag

from autoshard.cost_model.program import Operation, Piece, Program

_REDUCTIONS = frozenset(
    f"aten.{name}"
    for name in (
        "sum.dim_IntList", "sum.default", "mean.dim", "mean.default", "amax.default", "amin.default", "var_mean.correction",
        "any.dim", "any.default", "var.correction", "prod.dim_int", "argmax.default", "argmin.default"
    )
)
_MOVES = frozenset(
    f"aten.{name}"
    for name in (
        "clone.default", "copy.default", "copy_.default", "cat.default", "embedding.default", "gather.default", "index.Tensor",
        "full.default", "full_like.default", "arange.default", "iota.default", "constant_pad_nd.default", "index_select.default",
        "slice_scatter.default", "select_scatter.default", "zeros.default", "scalar_tensor.default", "empty.memory_format",
        "scatter.value", "new_zeros.default", "ones.default", "where.self"
    )
) | {"prims.iota.default", "prims.convert_element_type.default", "prims.inductor_random.default"}


def fusible(operation: Operation) -> bool:
    """True of what Inductor generates code for, so that it can share a kernel with others."""
    name = operation.name
    tags = getattr(operation.node.target, "tags", ())
    return Tag.pointwise in tags or name in _REDUCTIONS or name in _MOVES or name.startswith("prims.")


def fuse(program: Program) -> Program:
    """The program after fusion; each kernel stands in it as one operation, by the name of its last."""
    out = Program()
    moved: dict[int, int] = {}  # where the operation at a position of the old program ended up
    inner: set[int] = set()
    for code, positions in itertools.groupby(range(len(program.operations)), lambda i: program.operations[i].code):
        for members, operation in _generated(program, list(positions), inner) if code is not None else _alone(program, positions):
            moved.update(dict.fromkeys(members, len(out.operations)))
            out.operations.append(operation)
    length = len(program.operations)
    moved[length] = len(out.operations)
    out.pieces = [_moved(p, moved, i in inner) for i, p in enumerate(program.pieces)]
    _follow_readers(out, moved, program)
    _in_place(out)
    _channels_last(out)
    return out


Placed = Iterable[tuple[list[int], Operation]]  # operations and the positions of what they were made of


def _alone(program: Program, positions: Iterable[int]) -> Placed:
    return (([i], program.operations[i]) for i in positions)


def _generated(program: Program, positions: list[int], inner: set[int]) -> Placed:
    """The kernels of one graph, whose inner pieces are put into `inner`."""
    kernels = _Kernels(program, positions)
    inner |= kernels.inner
    for members in kernels.in_order():
        yield members, _merged(program, [program.operations[i] for i in members], kernels.inner)


def _merged(program: Program, members: list[Operation], inner: set[int]) -> Operation:
    made = [p for o in members for p in o.makes]
    reads = tuple(dict.fromkeys(p for o in members for p in o.reads if p not in made))
    makes = tuple(p for p in made if p not in inner)
    read_bytes, made_bytes = (tuple(program.pieces[p].bytes for p in pieces) for pieces in (reads, makes))
    parts = tuple(o.node for o in members)
    return replace(members[-1], reads=reads, makes=makes, parts=parts, read_bytes=read_bytes, made_bytes=made_bytes)


def _moved(piece: Piece, moved: dict[int, int], inner: bool) -> Piece:
    made = moved[piece.made] if piece.made >= 0 else -1
    return replace(piece, made=made, last=max(made, 0), bytes=0 if inner else piece.bytes)


def _follow_readers(out: Program, moved: dict[int, int], before: Program) -> None:
    """A piece's last reader may stand elsewhere now. What outlived its readers (a result, a gradient, what a collective
    reads until its wait) still lives until then."""
    for at, operation in enumerate(out.operations):
        for piece in (*operation.reads, *operation.makes):
            out.pieces[piece].last = max(out.pieces[piece].last, at)
    touched = {p: i for i, o in enumerate(before.operations) for p in (*o.reads, *o.makes)}
    ends = moved | {_last_of_forward(before): _last_of_forward(out)}
    for piece, (old, new) in enumerate(zip(before.pieces, out.pieces)):
        if old.last > touched.get(piece, -1):
            new.last = max(new.last, ends[old.last])


def _last_of_forward(program: Program) -> int:
    return max((i for i, o in enumerate(program.operations) if o.half == "forward"), default=-1)


def _in_place(out: Program) -> None:
    """Gives a kernel's result the memory of an input that dies in it: the input's life ends one operation earlier."""
    for at, operation in enumerate(out.operations):
        if operation.code is None or not fusible(operation):
            continue
        dying = [p for p in operation.reads if _dies(out.pieces[p], at)]
        for made in operation.makes:
            fitting = [p for p in dying if out.pieces[p].bytes == out.pieces[made].bytes]
            if fitting:
                dying.remove(fitting[0])
                out.pieces[fitting[0]].last = at - 1


def _channels_last(out: Program) -> None:
    """Inductor lets convolutions work on channels-last tensors; what comes from outside is copied to that for all of
    them, backward's too."""
    readers: dict[int, list[int]] = {}
    for at, operation in enumerate(out.operations):
        if operation.code is not None and "convolution" in operation.name:
            for given in (p for p in operation.reads if out.pieces[p].category == "inputs"):
                readers.setdefault(given, []).append(at)
    for given, reading in readers.items():
        out.add(out.pieces[given].bytes, "activations", reading[0], reading[-1], out.pieces[given].maker)


def _dies(piece: Piece, at: int) -> bool:
    return piece.last == at and 0 <= piece.made < at and not piece.seen


class _Kernels:
    """Which operations of one graph become one kernel. inner: the pieces that are never stored."""

    def __init__(self, program: Program, positions: list[int]) -> None:
        self.program, self.positions = program, positions
        self.maker = {p: i for i in positions for p in program.operations[i].makes}
        self.fusible = {i: fusible(program.operations[i]) for i in positions}
        self.level = self._levels()
        self.readers: dict[int, list[int]] = {}
        for i in positions:
            for piece in program.operations[i].reads:
                self.readers.setdefault(piece, []).append(i)
        self.inner = {p for p, i in self.maker.items() if self._is_inner(p, i)}
        self.kernel = self._connected()

    def _levels(self) -> dict[int, int]:
        """How many library calls lie, one behind the other, before each operation."""
        level: dict[int, int] = {}
        for i in self.positions:
            before = [self.maker[p] for p in self.program.operations[i].reads if p in self.maker]
            level[i] = max((level[b] + (not (self.fusible[i] and self.fusible[b])) for b in before), default=0)
        return level

    def _is_inner(self, piece: int, maker: int) -> bool:
        readers = self.readers.get(piece, [])
        stays = self.program.pieces[piece].last > max(readers, default=-1)
        alike = all(self.fusible[r] and self.level[r] == self.level[maker] for r in readers)
        return self.fusible[maker] and bool(readers) and alike and not stays

    def _connected(self) -> dict[int, int]:
        """Each operation's kernel: operations that hand an inner piece to each other share one, named by the first."""
        parent = {i: i for i in self.positions}

        def root(i: int) -> int:
            while parent[i] != i:
                i = parent[i]
            return i

        for piece in self.inner:
            for reader in self.readers[piece]:
                a, b = sorted((root(self.maker[piece]), root(reader)))
                parent[b] = a
        return {i: root(i) for i in self.positions}

    def in_order(self) -> Iterable[list[int]]:
        """Kernels as lists of positions: each at its first operation, or behind the kernels that it reads from."""
        members: dict[int, list[int]] = {}
        for i in self.positions:
            members.setdefault(self.kernel[i], []).append(i)
        done: set[int] = set()
        for first in members:
            yield from self._visit(first, members, done)

    def _visit(self, kernel: int, members: dict[int, list[int]], done: set[int]) -> Iterable[list[int]]:
        todo = [kernel]
        while todo:
            current = todo[-1]
            if current in done:
                todo.pop()
                continue
            waiting = [k for k in self._sources(members[current]) if k not in done and k != current and k not in todo]
            if waiting:
                todo.extend(waiting)
                continue
            done.add(current)
            todo.pop()
            yield members[current]

    def _sources(self, positions: list[int]) -> list[int]:
        reads = [p for i in positions for p in self.program.operations[i].reads]
        return [self.kernel[self.maker[p]] for p in reads if p in self.maker]
