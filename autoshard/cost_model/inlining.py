"""Which pointwise values Inductor computes where they are read, again for each reader, instead of storing them.

[Note: Inlining] A value that only generated kernels of its own graph read is not stored but computed in each of them from
what it is made of, unless several read it and it is made of more than four stored tensors, of an expensive function, or by
long arithmetic; or it is made of more than a dozen tensors. So what it is made of lives until its last reader. Seen: torch
2.13, whose limits are these; 2.11 stores a little earlier.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch.fx import Node
from torch.utils._pytree import tree_leaves

from autoshard.cost_model.generated import fusible, reduces
from autoshard.cost_model.program import Operation, Program
from autoshard.cost_model.work import op_name

_SHARED_READS, _READS, _LENGTH = 4, 12, 50
_HEAVY = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})
_STORED = ("cat", "copy_", "slice_scatter", "select_scatter", "scatter", "inductor_random")


@dataclass(frozen=True)
class _Value:
    """What a reader has to do for a value: the stored pieces to read, the calls to repeat, each with its length."""

    reads: tuple[int, ...]
    calls: Mapping[Node, int]


def inline(program: Program) -> tuple[Program, set[int]]:
    """The program with inlined values in their readers, and the positions of the operations that are gone with them.
    Their pieces stay, by number, and nothing reads them."""
    readers: dict[int, list[int]] = {}
    for at, operation in enumerate(program.operations):
        for piece in operation.reads:
            readers.setdefault(piece, []).append(at)
    length_of = functools.cache(_length)  # a block that is called 48 times has the same nodes in each
    values: dict[int, _Value] = {}
    operations, gone = list(program.operations), set[int]()
    for at, operation in enumerate(program.operations):
        if operation.code is not None and fusible(operation):
            value = _value_of(operation, values, length_of)
            operations[at] = replace(operation, reads=value.reads, parts=tuple(value.calls) if len(value.calls) > 1 else ())
            if _is_inlined(program, operation, value, readers):
                values[operation.makes[0]] = value
                gone.add(at)
    return replace(program, operations=operations), gone


def _is_inlined(program: Program, operation: Operation, value: _Value, readers: dict[int, list[int]]) -> bool:
    if len(operation.makes) != 1 or reduces(operation) or op_name(operation.node) in _STORED:
        return False
    (made,) = operation.makes
    reading = readers.get(made, [])
    inside = bool(reading) and program.pieces[made].last <= reading[-1]
    generated = all(r.code == operation.code and fusible(r) for r in (program.operations[i] for i in reading))
    return inside and generated and not _is_stored(value, len(reading))


def _value_of(operation: Operation, values: dict[int, _Value], length_of: Callable[[Node], int]) -> _Value:
    known = [values.get(p, _Value((p,), {})) for p in operation.reads]
    reads = dict.fromkeys(p for v in known for p in v.reads)
    calls = {call: length for v in known for call, length in v.calls.items()}
    return _Value(tuple(reads), {**calls, operation.node: length_of(operation.node)})


def _is_stored(value: _Value, readers: int) -> bool:
    length = len(value.reads) + sum(value.calls.values())
    if readers > 1:
        heavy = any(op_name(c) in _HEAVY for c in value.calls)
        return heavy or length > _LENGTH or len(value.reads) > _SHARED_READS
    return length > _LENGTH or len(value.reads) > _READS


def _length(call: Node) -> int:
    """Itself and its constants."""
    return 1 + sum(isinstance(a, (int, float)) for a in tree_leaves((call.args, call.kwargs)))
