"""One kernel for a graph of elementwise operations, reductions over its last dimensions, and views between them.

[Note: Numbers at places] Each result is followed back to what is given: what is at this place of it, of what is that made,
and at which places of those? Views only change the place. So any views, broadcasting, strides and concatenations become
expressions of indices, which sympy simplifies; values are computed as the graph says, since simplifying those would change
rounding and lose NaN. A value is computed once for each place at which it is used.

[Note: Rows] Where there are reductions, a program has a few rows, and all numbers that are reduced together. Rows too long
to be held in registers are gone through in blocks: once for reductions that do not need each other, then for those that need
these, and for the results. A softmax's sum needs its maximum, but is gathered beside it (arXiv 1805.02867): of the row's largest number
so far, each place of a block has the sum of exponentials less that, which is made smaller as that rises. So it goes through a row twice.

[Note: Columns] A sum over all rows has a number for each column. Each program goes through several tiles of rows, adds up what it
has of each column, and leaves that as a line of a tensor, whose lines torch adds up: a fixed order, and as few bytes as there are
programs. So what is summed so is a result, never read in the kernel, and its rows are held as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy import Expr, Integer
from torch import Tensor
from torch.fx import Graph, Node

from autoshard.kernels.multi_tensor import HALVES, TYPES
from autoshard.kernels.nodes import (
    adds_rows,
    cut_of,
    filled,
    first_of,
    is_plain,
    is_total,
    open_sizes,
    order_of,
    parts_of,
    reduced_dims,
    shape_of,
    size,
    summed,
    tensors_of,
)
from autoshard.kernels.places import Index, Shape, Unsupported, broadcast, reshaped, running
from autoshard.kernels.primitives import (
    BOOLEAN,
    CONSTANT,
    DRAWN,
    JOINS,
    POINTWISE,
    REDUCTIONS,
    SAME,
    VIEWS,
    literal,
    name_of,
)
from autoshard.kernels.statements import Statements

LONGEST = 8192  # numbers of a row that are held at once
_TYPES = {**TYPES, torch.bool: "tl.int1", torch.int64: "tl.int64", torch.int32: "tl.int32"}


@dataclass(frozen=True)
class Space:
    """What a kernel goes through. split: how many dimensions tell the row; all where nothing is reduced."""

    shape: Shape
    split: int

    @property
    def reduces(self) -> bool:
        """Whether the numbers of a row come together."""
        return self.split < len(self.shape)

    def is_row(self, shape: Shape) -> bool:
        """Whether a tensor of this shape has one number a row."""
        rows, rest = self.shape[: self.split], len(self.shape) - self.split
        return self.reduces and shape in (rows, rows + (Integer(1),) * rest)


class Writer:
    """Writes the kernel of a graph of primitives, whose output is a list of tensors. Raises Unsupported.

    strides: of each result, as it is to lie.
    """

    def __init__(self, graph: Graph, space: Space, strides: Sequence[Shape]) -> None:
        self.graph, self.space, self.strides = graph, space, strides
        self.given = list(graph.find_nodes(op="placeholder"))
        self.results: list[Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
        rows, self.row_index = running("x", space.shape[: space.split])
        columns, column_index = running("r", space.shape[space.split :])
        self.index: Index = self.row_index + column_index
        self.sizes = dict(zip(rows.symbols + columns.symbols, rows.sizes + columns.sizes))
        self.length = columns.count
        in_blocks = space.reduces and not (self.length.is_number and self.length <= LONGEST)
        self.out = Statements(rows, columns if space.reduces else None, in_blocks)
        self.beside = {n: largest for n in graph.nodes if in_blocks and (largest := _subtracted(n))}
        self.known: dict[Any, str] = {}
        self.where: tuple[tuple[str, Expr, Expr], ...] = ()  # what holds of the places that values are wanted of

    @property
    def totals(self) -> tuple[int, ...]:
        """The results that are sums over all rows, see [Note: Columns]."""
        return tuple(i for i, n in enumerate(self.results) if is_total(n))

    def write(self, name: str) -> str:
        """The kernel `name` as a module of Python."""
        for nodes in _levels(self.graph, self.beside):
            self._reduce(nodes)
        full = [i for i, n in enumerate(self.results) if shape_of(n) == self.space.shape and i not in self.totals]
        with self._blocks(needed=bool(full)):
            for i in full:
                self._store(i, self.index)
        for i in sorted({*range(len(self.results))} - {*full, *self.totals}):
            self._store(i, self._index_of_rows(self.results[i]))
        for i in self.totals:
            self._add_up(i)
        tensors = [*(f"in{i}" for i in range(len(self.given))), *(f"out{i}" for i in range(len(self.results)))]
        return self.out.text(name, tensors, [str(s) for s in open_sizes(self.graph)])

    def _index_of_rows(self, node: Node) -> Index:
        if not self.space.is_row(shape_of(node)):
            raise Unsupported(f"{node.target} gives {shape_of(node)} in a kernel over {self.space.shape}")
        return self.row_index + (Integer(0),) * (len(shape_of(node)) - self.space.split)

    @contextmanager
    def _blocks(self, needed: bool = True) -> Iterator[None]:
        """Around what is done for each block of a row, if there are blocks."""
        if not (self.out.in_blocks and needed):
            yield
            return
        outside, self.known = self.known, dict(self.known)
        with self.out.loop():
            yield
        self.known = outside

    # --- reductions

    def _reduce(self, nodes: Sequence[Node]) -> None:
        """Those that do not need each other, and sums of exponentials beside the maxima that they need."""
        for node in nodes:
            self._check_reduced(node)
        gathered = {node: self._gathered(node) for node in nodes} if self.out.in_blocks else {}
        with self._blocks():
            parts = {node: self._in_row(node) for node in nodes if node not in self.beside}
            for node, name in gathered.items():
                if node in parts:
                    self._gather(node, name, parts[node], {s: gathered[s] for s, m in self.beside.items() if m is node})
        for node, part in (gathered or parts).items():
            self._finish(node, part)

    def _gather(self, node: Node, name: str, part: str, beside: dict[Node, str]) -> None:
        """Adds a block to what is gathered. beside: sums of exponentials of what is less than this maximum, by what was gathered of
        them, which shrinks as that rises. What is at its least adds nothing, also where nothing else was seen."""
        reduction = REDUCTIONS[name_of(node.target)]
        largest = f"tl.reduce({part}, 1, {reduction.reducer}, keep_dims=True)" if beside else part
        value = f"{reduction.function}({name}, {largest})"
        if beside:
            value = self.out.assign(value)
        for total in beside.values():
            before = f"tl.where({name} == {value}, {total}, {total} * tl.exp({name} - {value}))"
            self.out.add(f'{total} = {before} + tl.where({part} == float("-inf"), 0, tl.exp({part} - {value}))')
        self.out.add(f"{name} = {value}")

    def _finish(self, node: Node, part: str) -> None:
        """A row's number, of what all its places have."""
        total = self.out.assign(f"tl.reduce({part}, 1, {REDUCTIONS[name_of(node.target)].reducer}, keep_dims=True)")
        if name_of(node.target) == "mean":
            total = self.out.assign(f"{total} / ({{0}})", self.length)
        self.known[node, self._index_of_rows(node), ()] = self._rounded(total, node)

    def _check_reduced(self, node: Node) -> None:
        shape, dims = shape_of(tensors_of(node)[0]), tuple(range(self.space.split, len(self.space.shape)))
        if shape != self.space.shape or reduced_dims(node) != dims or not node.meta["val"].is_floating_point():
            raise Unsupported(f"{node.target} of {shape} in rows of {self.space}")

    def _gathered(self, node: Node) -> str:
        """What is gathered over the blocks of a row: a number for each place in a block, or for the row where sums go by it."""
        neutral, columns = REDUCTIONS[name_of(node.target)].neutral, 1 if node in self.beside.values() else "COLUMNS"
        return self.out.assign(f"tl.full((ROWS, {columns}), {neutral}, {_type_of(node)})")

    def _in_row(self, node: Node) -> str:
        """The numbers that a reduction takes, neutral ones behind a row's end."""
        source = tensors_of(node)[0]
        value = self._cast(self._value(source, self.index), source, node)
        return self.out.assign(f"tl.where(rows_there & columns_there, {value}, {REDUCTIONS[name_of(node.target)].neutral})")

    def _add_up(self, position: int) -> None:
        node = summed(self.results[position])
        (source,) = tensors_of(node)
        if self.out.in_blocks or shape_of(source) != self.space.shape or reduced_dims(node) != tuple(range(self.space.split)):
            raise Unsupported(f"{node.target} of {shape_of(source)} over rows of {self.space}")
        self.out.add_up(f"out{position}", self._cast(self._value(source, self.index), source, node), _type_of(node))

    # --- values

    def _value(self, node: Any, index: Index) -> str:
        """The name of what is at this place of a node's tensor."""
        if not isinstance(node, Node):
            return literal(node)
        for key in ((node, index, ()), (node, index, self.where)):
            if key in self.known:
                return self.known[key]
        self.known[key] = self._made(node, index)
        return self.known[key]

    def _made(self, node: Node, index: Index) -> str:
        kind = name_of(node.target)
        if node.op == "placeholder":
            return self._load(node, index)
        if kind in VIEWS:
            return self._value(node.args[0], self._through(node, index))
        if kind in POINTWISE:
            return self._computed(node, index)
        if kind in SAME:
            (source,) = tensors_of(node)
            return self._rounded(self._cast(self._value(source, index), source, node), node)
        if kind in CONSTANT or kind == "iota":
            return self._constant(node, index)
        if kind == DRAWN:
            return self._kept(node, index)
        if kind in JOINS:
            return self._one_of(parts_of(node), node, index)
        raise Unsupported(str(node.target))

    def _load(self, node: Node, index: Index) -> str:
        value, name = node.meta["val"], f"in{self.given.index(node)}"
        if not isinstance(value, Tensor):
            return name
        offset = sympy.expand(sympy.Add(*(i * size(s) for i, s in zip(index, value.stride()))))
        tests: list[str] = []
        bounds: list[Expr] = []
        for op, place, bound in self.where:
            tests.append(f" & ({{{len(bounds) + 1}}} {op} {{{len(bounds) + 2}}})")
            bounds += [place, bound]
        wide = ".to(tl.float32)" if value.dtype in HALVES else ""
        return self.out.load(name, offset, bounds, "".join(tests), wide)

    def _through(self, node: Node, index: Index) -> Index:
        """Where in its input a view has what it has at this place."""
        kind, given = name_of(node.target), shape_of(node.args[0])
        if node.meta["val"].dtype is not node.args[0].meta["val"].dtype:  # type: ignore[union-attr]
            raise Unsupported("the same bits as another dtype")
        if kind in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"):
            return reshaped(index, shape_of(node), given, self.sizes)
        if kind == "expand":
            return broadcast(index, given)
        if kind in ("permute", "transpose", "t"):
            order = order_of(node)
            return tuple(index[order.index(d)] for d in range(len(given)))
        if kind in ("slice", "select"):
            dim, place, step, rest = cut_of(node)
            at = place + (index[dim] * step if kind == "slice" else 0)
            return (*index[:dim], at, *index[dim + rest :])
        return index  # alias, detach

    def _computed(self, node: Node, index: Index) -> str:
        kind, arguments = name_of(node.target), node.args
        if not is_plain(node):
            raise Unsupported(f"{node.target}{arguments} {node.kwargs}")
        held = _compared_in(arguments) if kind in BOOLEAN else node.meta["val"].dtype
        to = _wide(held)
        given = [_fitting(a, to) for a in (_rounded_numbers(arguments, held) if kind in BOOLEAN else arguments)]
        values = [self._value(a, broadcast(index, shape_of(a))) for a in given]
        if kind in BOOLEAN:
            values = [self._compared(value, a, held) for value, a in zip(values, given)]
        chosen = kind == "where"
        values = [v if chosen and i == 0 else _as(v, a, to) for i, (v, a) in enumerate(zip(values, arguments))]
        root = "tl.sqrt" if to is torch.float64 else "tl.sqrt_rn"  # tl.sqrt is approximate for float32
        return self.out.assign(POINTWISE[kind].replace("SQRT", root).format(*values))

    def _compared(self, value: str, source: Any, dtype: torch.dtype) -> str:
        """As torch compares halves with tensors of other types: in the half."""
        if not isinstance(source, Node) or dtype not in HALVES or source.meta["val"].dtype is dtype:
            return value
        return self.out.assign(f"{value}.to({_TYPES[dtype]}).to(tl.float32)")

    def _constant(self, node: Node, index: Index) -> str:
        if name_of(node.target) == "iota":
            place = size(node.kwargs["start"]) + size(node.kwargs["step"]) * index[0]
            return self.out.assign(f"tl.full({self._one}, 0, {_type_of(node)}) + {{0}}", sympy.expand(place))
        value = _in_half(filled(node), node.meta["val"].dtype)
        return self.out.assign(f"tl.full({self._one}, {literal(value)}, {_type_of(node)})")

    def _kept(self, node: Node, index: Index) -> str:
        seed, p = self._value(node.args[1], (Integer(0),)), literal(node.args[2])
        place: Expr = Integer(0)
        for i, n in zip(index, shape_of(node)):
            place = sympy.expand(place * n + i)
        return self.out.assign(f"uniform({seed}, tl.full({self._one}, 0, tl.int64) + {{0}}) >= {p}", place)

    @property
    def _one(self) -> str:
        return "(1, 1)" if self.space.reduces else "(1,)"

    def _one_of(self, parts: Sequence[tuple[Node, int, Expr, Expr]], node: Node, index: Index) -> str:
        """Of parts that lie from the first to before the second place of a dimension; 0 where there is none."""
        found = "False" if node.meta["val"].dtype is torch.bool else "0"
        for source, dim, first, last in parts:
            outside, at = self.where, index[dim]
            self.where = (*outside, (">=", at, first), ("<", at, last))
            value = self._value(source, (*index[:dim], sympy.expand(at - first), *index[dim + 1 :]))
            value = self._cast(value, source, node)
            self.where = outside
            condition = "({0} >= {1}) & ({0} < {2})"
            found = self.out.assign(f"tl.where({condition}, {value}, {found})", at, first, last)
        return found

    def _store(self, position: int, index: Index) -> None:
        value = self._value(self.results[position], index)
        offset = sympy.Add(*(i * s for i, s in zip(index, self.strides[position])))
        self.out.store(f"out{position}", sympy.expand(offset), value, len(index) > self.space.split and index == self.index)

    # --- types

    def _cast(self, value: str, source: Any, node: Node) -> str:
        return _as(value, source, _wide(node.meta["val"].dtype))

    def _rounded(self, value: str, node: Node) -> str:
        """To what a conversion leaves of it; other results keep the precision that they are computed in."""
        dtype = node.meta["val"].dtype
        return self.out.assign(f"{value}.to({_TYPES[dtype]}).to(tl.float32)") if dtype in HALVES else value


def _subtracted(node: Node) -> Node | None:
    """The numbers' maximum, of a sum of exponentials of numbers less that; None of anything else."""
    less: Any = first_of(first_of(node, "sum"), "exp")
    numbers = first_of(less, "sub")
    largest: Any = less.args[1] if numbers is not None else None
    if numbers is None or first_of(largest, "amax") is not numbers or reduced_dims(largest) != reduced_dims(node):
        return None
    return largest if largest.meta["val"].dtype is node.meta["val"].dtype else None


def _levels(graph: Graph, beside: Mapping[Node, Node]) -> list[list[Node]]:
    """Reductions that do not need each other, then those that need these, and so on. beside: what is reduced together with what it
    needs."""
    depth: dict[Node, int] = {}
    levels: dict[int, list[Node]] = {}
    for node in graph.nodes:
        depth[node] = max((depth[a] for a in node.all_input_nodes), default=0)
        if name_of(node.target) in REDUCTIONS and not adds_rows(node):
            depth[node] += node not in beside
            levels.setdefault(depth[node], []).append(node)
    return [levels[k] for k in sorted(levels)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What numbers of this dtype are computed in."""
    if dtype not in _TYPES:
        raise Unsupported(str(dtype))
    return torch.float32 if dtype in HALVES else dtype


def _type_of(node: Node) -> str:
    return _TYPES[_wide(node.meta["val"].dtype)]


def _compared_in(arguments: Sequence[Any]) -> torch.dtype:
    """What numbers are compared in."""
    values = [a.meta["val"] if isinstance(a, Node) else a for a in arguments]
    return torch.result_type(values[0], values[-1])


def _rounded_numbers(arguments: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
    """With numbers of Python as torch compares them: in the tensor's dtype, if that is a half."""
    return [a if isinstance(a, Node) else _in_half(a, dtype) for a in arguments]


def _in_half(number: Any, dtype: torch.dtype) -> Any:
    """A number as a half holds it; as it is where another dtype does."""
    return torch.tensor(number, dtype=dtype).item() if dtype in HALVES else number


def _fitting(argument: Any, dtype: torch.dtype) -> Any:
    """Unsupported of a whole number that is none of this dtype: torch takes what is left of it, Triton does not."""
    whole = type(argument) is int and not dtype.is_floating_point and dtype is not torch.bool
    if whole and not torch.iinfo(dtype).min <= argument <= torch.iinfo(dtype).max:
        raise Unsupported(f"{argument} in {dtype}")
    return argument


def _as(value: str, source: Any, dtype: torch.dtype) -> str:
    """A value as a number of this dtype. source: what it is the value of."""
    held = source.meta["val"] if isinstance(source, Node) else None
    if not isinstance(held, Tensor) or _wide(held.dtype) is dtype:
        return value
    return f"({value} != 0)" if dtype is torch.bool else f"{value}.to({_TYPES[dtype]})"


