"""Which pointwise values Inductor computes where they are read, again for each reader, instead of storing them.

[Note: Inlining] A value that only generated kernels of its own graph read is not stored but computed in each of them from
what it is made of, unless several read it and it is made of more than four stored tensors, of an expensive function, or by
long arithmetic; or it is made of more than a dozen tensors. So what it is made of lives until its last reader. Seen: torch
2.13, whose limits are these; 2.11 stores a little earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.fx import Node
from torch.utils._pytree import tree_leaves

from autoshard.cost_model.program import Operation, Program
from autoshard.cost_model.work import op_name

_SHARED_READS, _READS, _LENGTH = 4, 12, 50
_HEAVY = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})
_STORED = ("cat", "copy_", "slice_scatter", "select_scatter", "scatter", "inductor_random")


@dataclass(frozen=True)
class _Value:
    """What a reader has to do for a value: the stored pieces to read, the calls to repeat."""

    reads: tuple[int, ...]
    calls: tuple[Node, ...]


def inline(program: Program, fusible: Callable[[Operation], bool], reduces: Callable[[Operation], bool]) -> tuple[Program, set[int]]:
    """The program with inlined values in their readers, and the positions of the operations that are gone with them.
    Their pieces stay, by number, and nothing reads them."""
    readers: dict[int, list[int]] = {}
    for at, operation in enumerate(program.operations):
        for piece in operation.reads:
            readers.setdefault(piece, []).append(at)
    values: dict[int, _Value] = {}
    operations, gone = list(program.operations), set[int]()
    for at, operation in enumerate(program.operations):
        if operation.code is None or not fusible(operation):
            continue
        value = _value_of(operation, values)
        operations[at] = replace(operation, reads=value.reads, parts=value.calls if value.calls[1:] else ())
        if reduces(operation) or not _pointwise(operation):
            continue
        (made,) = operation.makes
        reading = [program.operations[r] for r in readers.get(made, [])]
        inside = bool(reading) and program.pieces[made].last <= readers[made][-1]
        if inside and all(r.code == operation.code and fusible(r) for r in reading) and not _stored(value, len(reading)):
            values[made] = value
            gone.add(at)
    return replace(program, operations=operations), gone


def _pointwise(operation: Operation) -> bool:
    return len(operation.makes) == 1 and op_name(operation.node) not in _STORED


def _value_of(operation: Operation, values: dict[int, _Value]) -> _Value:
    known = [values.get(p, _Value((p,), ())) for p in operation.reads]
    reads = dict.fromkeys(p for v in known for p in v.reads)
    calls = dict.fromkeys(c for v in known for c in v.calls)
    return _Value(tuple(reads), (*calls, operation.node))


def _stored(value: _Value, readers: int) -> bool:
    length = len(value.reads) + sum(1 + _constants(c) for c in value.calls)
    if readers > 1:
        heavy = any(op_name(c) in _HEAVY for c in value.calls)
        return heavy or length > _LENGTH or len(value.reads) > _SHARED_READS
    return length > _LENGTH or len(value.reads) > _READS


def _constants(call: Node) -> int:
    return sum(isinstance(a, (int, float)) for a in tree_leaves((call.args, call.kwargs)))
