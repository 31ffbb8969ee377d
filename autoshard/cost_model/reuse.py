"""Which dead buffers Inductor keeps for results to come.

[Note: Reuse] Before it writes a graph's code, Inductor looks at each allocation whether a buffer of the same size died
before. If so that one is kept until then instead of freed, as long as the graph's highest moment, by Inductor's own
count, stays as high as it is. That is a count of what forward saved alone: the sizes of a graph's own buffers it learns only
where it reorders for the peak, which we keep it from. So in backward memory that is free by liveness is held, as much as was
saved; in forward only from one kernel to the next. Seen: torch 2.11, 2.13.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_model.generated import allocated
from autoshard.cost_model.program import Program

_OUTSIDE = ("parameters", "compression", "buffers", "inputs", "optimizer")


Counts = dict[range, NDArray[np.int64]]  # by where a graph that code is generated of lies: bytes at each of its operations


def count(program: Program) -> Counts:
    """Inductor's count. Made before `keep_for_reuse`."""
    runs = itertools.groupby(range(len(program.operations)), lambda i: program.operations[i].code)
    found = [list(positions) for code, positions in runs if code is not None]
    return {graph: _bytes_at(program, graph) for graph in (range(f[0], f[-1] + 1) for f in found)}


def _bytes_at(program: Program, positions: range) -> NDArray[np.int64]:
    change = np.zeros(len(positions) + 1, dtype=np.int64)
    read = {piece for at in positions for piece in program.operations[at].reads}
    for piece in (program.pieces[i] for i in read):
        if piece.category not in _OUTSIDE and program.operations[piece.made].half != program.operations[positions.start].half:
            change[0] += program.open.number(piece.bytes)
            change[min(piece.last + 1, positions.stop) - positions.start] -= program.open.number(piece.bytes)
    return change.cumsum()[:-1]


def keep_for_reuse(program: Program, counts: Counts, placed: dict[int, int]) -> None:
    """Lets dead pieces live until a result takes their memory. placed: results that lie in an input's memory already,
    with that input."""
    for graph, count in counts.items():
        _keep(program, graph, count, placed)


def _keep(program: Program, positions: range, count: NDArray[np.int64], placed: dict[int, int]) -> None:
    free: dict[int, list[int]] = {}  # by size: pieces that died, the latest last
    highest, handed_on = int(count.max(initial=0)), set(placed.values())
    for at in positions:
        operation = program.operations[at]
        if allocated(operation):
            for piece in operation.makes:
                if piece not in placed:
                    _take(program, piece, free, count, highest, positions.start)
        for piece in dict.fromkeys((*operation.reads, *operation.makes)):
            found = program.pieces[piece]
            if found.last == at and found.made >= positions.start and piece not in handed_on:
                free.setdefault(program.open.number(found.bytes), []).append(piece)


def _take(
    program: Program, piece: int, free: dict[int, list[int]], count: NDArray[np.int64], highest: int, start: int
) -> None:
    """Gives a result the memory of the latest dead piece of its size, if it may be kept until then."""
    made = program.pieces[piece]
    size = program.open.number(made.bytes)
    candidates = free.get(size, [])
    if not candidates or not size:
        return
    dead = program.pieces[candidates[-1]]
    between = slice(dead.last + 1 - start, made.made - start)
    if count[between].max(initial=0) + size <= highest or dead.last + 1 == made.made:
        count[between] += size
        dead.last = made.made - 1
        candidates.pop()
