"""What Inductor makes of a program: pointwise operations and reductions become kernels whose inner values are never stored.

[Note: Fusion] Inductor's own scheduler is not run: it wants the device, and takes seconds. Its outcome is foreseen by what
bounds it. A value is stored if something reads it that is no part of its kernel: an operation that calls a library (a
matmul, an attention, a collective), a kernel that needs such a one's result first, the next graph, the user. A kernel
runs at its first operation, or as soon after as all that it reads is there. A result takes the place of an input of
the same size that is read there for the last time, or of one that died before (see [Note: Reuse]).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

from torch import Tag

from autoshard.cost_model import reuse
from autoshard.cost_model.inlining import inline
from autoshard.cost_model.program import Operation, Piece, Program
from autoshard.cost_model.sizes import Size
from autoshard.cost_model.work import kind_of

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


_NEAR = 64  # how many operations apart Inductor still joins kernels that need not be one


def fusible(operation: Operation) -> bool:
    """True of what Inductor generates code for, so that it can share a kernel with others."""
    name = operation.name
    tags = getattr(operation.node.target, "tags", ())
    return Tag.pointwise in tags or name in _REDUCTIONS or name in _MOVES or name.startswith("prims.")


def _reduces(operation: Operation) -> bool:
    return operation.name in _REDUCTIONS


def fuse(program: Program) -> Program:
    """The program after fusion; each kernel stands in it as one operation, by the name of its last."""
    program, gone = inline(program, fusible, _reduces)
    out = Program()
    moved: dict[int, int] = {}  # where the operation at a position of the old program ended up
    inner = {p for i in gone for p in program.operations[i].makes}
    for code, several in itertools.groupby(range(len(program.operations)), lambda i: program.operations[i].code):
        positions = [i for i in several if i not in gone]
        for members, operation in _generated(program, positions, inner) if code is not None else _alone(program, positions):
            moved.update(dict.fromkeys(members, len(out.operations)))
            out.operations.append(operation)
    moved |= dict.fromkeys(gone, 0)  # nothing of them is left
    moved[len(program.operations)] = len(out.operations)
    out.pieces = [_moved(p, moved, i in inner) for i, p in enumerate(program.pieces)]
    _follow_readers(out, moved, program, gone)
    counts = reuse.count(out)
    reuse.keep_for_reuse(out, counts, _in_place(out), _allocates)
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
    parts = tuple(dict.fromkeys(part for o in members for part in (o.parts or (o.node,))))
    return replace(members[-1], reads=reads, makes=makes, parts=parts, read_bytes=read_bytes, made_bytes=made_bytes)


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


def _in_place(out: Program) -> dict[int, int]:
    """Gives a kernel's result the memory of an input that dies in it: the input's life ends one operation earlier.
    Such results, and whose memory they have."""
    placed = {}
    for at, operation in enumerate(out.operations):
        if operation.code is None or not fusible(operation):
            continue
        dying = [p for p in operation.reads if _dies(out.pieces[p], at)]
        for made in operation.makes:
            fitting = [p for p in dying if out.pieces[p].bytes == out.pieces[made].bytes]
            if fitting:
                dying.remove(fitting[0])
                out.pieces[fitting[0]].last = at - 1
                placed[made] = fitting[0]
    return placed


def _allocates(operation: Operation) -> bool:
    """Kernels of its own and matmuls write to where generated code says; other calls of libraries allocate."""
    return fusible(operation) or kind_of(operation.node) == "matmul"


def _channels_last(out: Program) -> None:
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
        self.members: dict[int, list[int]] = {}
        for i, kernel in self.kernel.items():
            self.members.setdefault(kernel, []).append(i)
        self._side_by_side()

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

    def _side_by_side(self) -> None:
        """Pointwise kernels of one size that read a tensor of that size, and do not need each other, become one."""
        for piece, readers in self.readers.items():
            size, first = self.program.pieces[piece].bytes, cast("int | None", None)
            for kernel in dict.fromkeys(self.kernel[r] for r in readers):
                if self._size(kernel) == size:
                    first = self._joined(first, kernel)

    def _joined(self, first: int | None, kernel: int) -> int:
        """One kernel of both, if that can be; else the later one."""
        if first is None or abs(kernel - first) > _NEAR or self._needs(kernel, first) or self._needs(first, kernel):
            return kernel
        stays, goes = sorted((first, kernel))
        self.members[stays] = sorted(self.members[stays] + self.members.pop(goes))
        self.kernel.update(dict.fromkeys(self.members[stays], stays))
        return stays

    def _size(self, kernel: int) -> Size:
        """Bytes of each result of a pointwise kernel; 0 of others, and of one whose results differ."""
        members = [self.program.operations[i] for i in self.members[kernel]]
        if not all(fusible(o) and not _reduces(o) for o in members):
            return 0
        sizes = {self.program.pieces[p].bytes for o in members for p in o.makes if p not in self.inner}
        return sizes.pop() if len(sizes) == 1 else 0

    def _needs(self, kernel: int, other: int) -> bool:
        """Whether a kernel reads what comes of another."""
        todo, seen = [kernel], {kernel}
        while todo:
            found = set(self._sources(self.members[todo.pop()])) - seen
            if other in found:
                return True
            seen |= found
            todo += [k for k in found if self.members[k][-1] > other]
        return False

    def in_order(self) -> Iterable[list[int]]:
        """Kernels as lists of positions: each at its first operation, or behind the kernels that it reads from."""
        done: set[int] = set()
        for first in sorted(self.members):
            yield from self._visit(first, self.members, done)

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
