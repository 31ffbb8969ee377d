"""Which operations of one graph become one kernel ([Note: Fusion])."""

from __future__ import annotations

from collections.abc import Iterable

from autoshard import torch_internals
from autoshard.cost_model.generated import fusible, reduces, sums_columns
from autoshard.cost_model.program import Operation, Program
from autoshard.cost_model.work import op_name

_NEAR = 64  # how many operations apart Inductor still joins kernels that need not be one


class Kernels:
    """Of the operations at these positions. inner: the pieces that are never stored."""

    def __init__(self, program: Program, positions: list[int]) -> None:
        self.program, self.positions = program, positions
        self.maker = {p: i for i in positions for p in program.operations[i].makes}
        self.fusible = {i: fusible(program.operations[i]) for i in positions}
        backward = (o.node for o in map(program.operations.__getitem__, positions) if o.half == "backward")
        self.patient = not torch_internals.repeats_a_product(backward)
        self.readers: dict[int, list[int]] = {}
        for i in positions:
            for piece in program.operations[i].reads:
                self.readers.setdefault(piece, []).append(i)
        self.level = self._levels()
        self.inner = {p for p, i in self.maker.items() if self._is_inner(p, i)}
        self.kernel = self._connected()
        self.members: dict[int, list[int]] = {}
        for i, kernel in self.kernel.items():
            self.members.setdefault(kernel, []).append(i)
        self._side_by_side()
        self.inner |= {p for p, i in self.maker.items() if self._is_within(p, i)}

    def _levels(self) -> dict[int, int]:
        """How many library calls lie, one behind the other, before each operation."""
        level: dict[int, int] = {}
        for i in self.positions:
            before = [self.maker[p] for p in self.program.operations[i].reads if p in self.maker]
            level[i] = max((level[b] + (not (self.fusible[i] and self.fusible[b])) for b in before), default=0)
        for i in reversed(self._free()):
            readers = [r for p in self.program.operations[i].makes for r in self.readers.get(p, [])]
            level[i] = min((level[r] for r in readers), default=level[i])
        return level

    def _free(self) -> list[int]:
        """The operations that need nothing but seeds (they draw a dropout's numbers, or make a mask of them), and so can be of
        their reader's kernel, whatever that waits for."""
        free: dict[int, None] = {}
        for i in self.positions:
            reads = (p for p in self.program.operations[i].reads if not self._is_seeds(p))
            if self.fusible[i] and all(self.maker.get(p) in free for p in reads):
                free[i] = None
        return list(free)

    def _is_seeds(self, piece: int) -> bool:
        return self.program.pieces[piece].maker.startswith("inductor_seeds")

    def _is_inner(self, piece: int, maker: int) -> bool:
        """Whether all that read it can be of its maker's kernel."""
        alike = all(self.fusible[r] and self.level[r] == self.level[maker] for r in self.readers.get(piece, []))
        return alike and self._is_passing(piece, maker)

    def _is_within(self, piece: int, maker: int) -> bool:
        """Whether all that read it are of its maker's kernel."""
        alike = all(self.kernel[r] == self.kernel[maker] for r in self.readers.get(piece, []))
        return alike and self._is_passing(piece, maker)

    def _is_passing(self, piece: int, maker: int) -> bool:
        """Whether nobody but its readers needs it stored. What is put together of parts is written part by part."""
        operation, readers = self.program.operations[maker], self.readers.get(piece, [])
        stays = self.program.pieces[piece].last > max(readers, default=-1)
        return self.fusible[maker] and bool(readers) and not stays and op_name(operation.node) != "cat"

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
        """Kernels of one size that touch the same tensor become one, however small that is."""
        for piece, readers in self.readers.items():
            if self._is_seeds(piece):  # of which each reads one
                continue
            before: dict[int, list[int]] = {}  # by size
            touching = [self.maker[piece], *readers] if piece in self.maker else readers
            for kernel in dict.fromkeys(self.kernel[i] for i in touching):
                if size := self._size(kernel):
                    self._join(before.setdefault(size, []), kernel)

    def _join(self, before: list[int], kernel: int) -> None:
        """Joins a kernel with the last of those before it that it can be one with, or makes it one of these."""
        for at in reversed(range(len(before))):
            stays, goes = sorted((before[at], kernel))
            if self._can_be_one(stays, goes):
                self.members[stays] = sorted(self.members[stays] + self.members.pop(goes))
                self.kernel.update(dict.fromkeys(self.members[stays], stays))
                before[at] = stays
                return
        before.append(kernel)

    def _can_be_one(self, first: int, later: int) -> bool:
        near = later - first <= _NEAR
        return near and not self._turned(first, later) and self._pays(first, later) and not self._needs(later, first) and not self._needs(first, later)

    def _turned(self, first: int, later: int) -> bool:
        """Whether one sums up columns and the other goes through rows: one loop cannot do both. Seen: 2.11, 2.13, on CPUs."""
        return self._sums_columns(first) is not self._sums_columns(later)

    def _sums_columns(self, kernel: int) -> bool:
        return any(sums_columns(o) for o in self._operations(kernel))

    def _pays(self, first: int, later: int) -> bool:
        """Whether Inductor may join two kernels that share a tensor: in a backward that repeats matmuls or the like none that
        would wait for what only the other needs, and where one repeats what forward did, only if they read as much in common
        as the later writes, which is held from the first's place on (`torch_internals.inner_inductor`)."""
        if first in self._sources(later) or self.program.operations[first].half == "forward":
            return True
        if not self.patient and self._waits(first, later):
            return False
        if not (self._repeats(first) or self._repeats(later)):
            return True
        return self._bytes(self._touched(first) & self._touched(later)) >= self._bytes(self._made(later) - self.inner)

    def _waits(self, first: int, later: int) -> bool:
        """Whether one kernel of both would wait for something that only the later needs, which it may make for itself. Not for a sum
        of its own: Inductor joins that with what reads it when all that lies side by side is joined. Seen: 2.13, on CPUs."""
        makers = (self.maker[p] for o in self._operations(later) for p in o.reads if p in self.maker)
        others = (i for i in makers if self.kernel[i] != later or not reduces(self.program.operations[i]))
        return any(self.kernel[i] > self.members[first][-1] for i in others)

    def _repeats(self, kernel: int) -> bool:
        """Whether a kernel of backward computes something that forward did."""
        return any(o.half == "backward" and torch_internals.is_forward(o.node) for o in self._operations(kernel))

    def _size(self, kernel: int) -> int:
        """Bytes of the largest piece that it goes through; 0 of what is no kernel."""
        if not all(self.fusible[i] for i in self.members[kernel]):
            return 0
        return max(map(self._number, self._touched(kernel)))

    def _operations(self, kernel: int) -> list[Operation]:
        return [self.program.operations[i] for i in self.members[kernel]]

    def _made(self, kernel: int) -> set[int]:
        return {p for o in self._operations(kernel) for p in o.makes}

    def _touched(self, kernel: int) -> set[int]:
        return {p for o in self._operations(kernel) for p in (*o.reads, *o.makes)}

    def _number(self, piece: int) -> int:
        return self.program.open.number(self.program.pieces[piece].bytes)

    def _bytes(self, pieces: Iterable[int]) -> int:
        return sum(map(self._number, pieces))

    def _needs(self, kernel: int, other: int) -> bool:
        """Whether a kernel reads what a third makes of what comes of another."""
        seen = {kernel, *self._sources(kernel)} - {other}
        todo = [k for k in seen if k != kernel]
        while todo:
            found = set(self._sources(todo.pop())) - seen
            if other in found:
                return True
            seen |= found
            todo += [k for k in found if self.members[k][-1] > other]
        return False

    def in_order(self) -> Iterable[list[int]]:
        """Kernels as lists of positions: each at its first operation, or behind the kernels that it reads from."""
        done: set[int] = set()
        for first in sorted(self.members):
            yield from self._visit(first, done)

    def _visit(self, kernel: int, done: set[int]) -> Iterable[list[int]]:
        todo = [kernel]
        while todo:
            current = todo[-1]
            if current in done:
                todo.pop()
                continue
            waiting = [k for k in self._sources(current) if k not in done and k != current and k not in todo]
            if waiting:
                todo.extend(waiting)
                continue
            done.add(current)
            todo.pop()
            yield self.members[current]

    def _sources(self, kernel: int) -> list[int]:
        """The kernels that it reads from, itself among them."""
        return [self.kernel[self.maker[p]] for o in self._operations(kernel) for p in o.reads if p in self.maker]
