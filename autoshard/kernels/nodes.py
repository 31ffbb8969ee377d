"""What the operations of an elementwise graph say: their sizes, what they sum, which part of what they are."""

from __future__ import annotations

import operator
import re
from typing import Any

import sympy
import torch
from sympy import Expr, Integer
from torch import SymInt, Tensor
from torch.fx import Graph, Node

from autoshard.kernels.places import Shape, Unsupported
from autoshard.kernels.primitives import BOOLEAN, POINTWISE, SAME, VIEWS, WITH_TOTALS, name_of

_OF_BITS = frozenset(["where", "mul", "bitwise_and", "bitwise_or"])  # that are right for a number of one bit too


def size(number: Any) -> Expr:
    """A size as an expression."""
    return number.node.expr if isinstance(number, SymInt) else Integer(int(number))


def shape_of(node: Any) -> Shape:
    """Of a node's tensor; a number has none."""
    value = node.meta["val"] if isinstance(node, Node) else None
    return tuple(map(size, value.shape)) if isinstance(value, Tensor) else ()


def open_sizes(graph: Graph) -> list[sympy.Symbol]:
    """The symbols in the sizes of a graph's tensors."""
    tensors = [n.meta["val"] for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    found = {s for t in tensors for n in (*t.shape, *t.stride()) for s in size(n).free_symbols}
    return sorted(found, key=str)


def is_plain(node: Node) -> bool:
    """Whether a pointwise call has as many arguments as its expression, tensors and numbers, and no options."""
    arguments = set(re.findall(r"{\d}", POINTWISE[name_of(node.target)]))
    if node.meta["val"].dtype is torch.bool and name_of(node.target) not in BOOLEAN | _OF_BITS:
        return False
    return not node.kwargs and len(node.args) == len(arguments) and all(isinstance(a, Node | int | float) for a in node.args)


def adds_rows(node: Node) -> bool:
    """Whether it is a sum over first dimensions but not over all."""
    if name_of(node.target) != "sum":
        return False
    dims = reduced_dims(node)
    return len(dims) < len(shape_of(node.args[0])) and dims == tuple(range(len(dims)))


def is_total(node: Any) -> bool:
    """Whether it is, or is but for its shape or dtype, a sum over rows, which is known when all of them were gone through."""
    if not isinstance(node, Node):
        return False
    if node.target is operator.getitem:
        made, item = node.args
        return bool(item) and name_of(made.target) in WITH_TOTALS  # type: ignore[union-attr]
    return is_total(node.args[0]) if name_of(node.target) in VIEWS | SAME else adds_rows(node)


def summed(node: Any) -> Node:
    """The sum that a total is, which is rounded once, to what it becomes in the end."""
    while not adds_rows(node):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def tensors_of(node: Node) -> list[Node]:
    """What it is given that is no number."""
    return [a for a in node.all_input_nodes if isinstance(a.meta["val"], Tensor)]


def reduced_dims(node: Node) -> tuple[int, ...]:
    """The dimensions that a reduction is over, in order."""
    count = len(shape_of(tensors_of(node)[0]))
    dims: Any = node.args[1] if len(node.args) > 1 else ()
    return tuple(sorted(d % count for d in dims)) if dims and count else tuple(range(count))


def first_of(node: Any, name: str) -> Any:
    """The first argument of an operation of this name; None of anything else."""
    return node.args[0] if isinstance(node, Node) and name_of(node.target) == name else None


def filled(node: Node) -> Any:
    """The number that a constant tensor is full of."""
    kind = name_of(node.target)
    known = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
    number = known[kind] if kind in known else node.args[0 if kind == "scalar_tensor" else -1]
    if not isinstance(number, int | float):
        raise Unsupported(f"{node.target} of {number}")
    dtype = node.meta["val"].dtype
    return bool(number) if dtype is torch.bool else number if dtype.is_floating_point else int(number)


def order_of(node: Node) -> list[int]:
    """Which dimension of its input each dimension of a transposed view is."""
    arguments: Any = node.args
    count = len(shape_of(arguments[0]))
    if name_of(node.target) == "permute":
        return [d % count for d in arguments[1]]
    order = list(range(count))
    a, b = (d % count for d in arguments[1:]) if arguments[1:] else (0, count - 1)
    order[a], order[b] = order[b], order[a]
    return order


def cut_of(node: Node) -> tuple[int, Expr, Expr, int]:
    """Of a slice or a select: (dimension, first place, step, how many dimensions of its result are that one)."""
    arguments: Any = node.args
    source, dim, *rest = arguments if len(arguments) > 1 else (*arguments, 0)
    given = shape_of(source)
    at = dim % len(given)
    place = _counted(rest[0] if rest else 0, given[at])
    if name_of(node.target) == "select":
        return at, place, Integer(0), 0
    return at, place, size(rest[2]) if len(rest) > 2 else Integer(1), 1


def _counted(place: Any, length: Expr) -> Expr:
    """From the front, and not beyond the end."""
    if isinstance(place, Node):
        raise Unsupported("a slice at a place that is computed")
    at = size(place or 0)
    at = at + length if at.is_negative else at
    for bound, beyond in ((Integer(0), at), (length, length - at)):
        if beyond.is_negative:
            return bound
        if not beyond.is_nonnegative:
            raise Unsupported(f"a slice from {place} of {length}, which may be shorter")
    return at


def parts_of(node: Node) -> list[tuple[Node, int, Expr, Expr]]:
    """What a concatenation is made of: (source, dimension, first place, the place behind its last)."""
    arguments: Any = node.args
    if name_of(node.target) == "cat":
        dim, first, parts = (arguments[1] if len(arguments) > 1 else 0) % len(shape_of(node)), Integer(0), []
        for source in (s for s in arguments[0] if len(shape_of(s)) == len(shape_of(node))):  # torch skips an empty one
            last = first + shape_of(source)[dim]
            parts.append((source, dim, first, last))
            first = last
        return parts
    source, _, dim, start, end, step = arguments
    if step != 1 or isinstance(end, Node):
        raise Unsupported(f"{node.target} in steps of {step} to {end}")
    length = shape_of(node)[dim]
    last = length if size(end) - length == 0 or (isinstance(end, int) and end > 1 << 60) else _counted(end, length)
    return [(source, dim % len(shape_of(node)), _counted(start, length), last)]
