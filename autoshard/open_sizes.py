"""Which sizes of example inputs a trace leaves open: the batch, and the tokens of a sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from autoshard import torch_internals
from autoshard.cost_model.sizes import Open

BATCH, SEQUENCE = sympy.symbols("batch sequence", integer=True, positive=True)
_LEAST = 2  # a trace takes 1 for a number of its own, which broadcasts


@dataclass(frozen=True)
class Opened:
    """A dimension of an input, and what it stands for."""

    tensor: Tensor
    dimension: int
    symbol: sympy.Symbol


def leave_open(inputs: Any) -> tuple[Any, list[Opened]]:
    """The inputs, of any structure, with dimensions that a trace leaves open: the first of all tensors whose first is that
    of the first one (the batch), and the second of all that hold whole numbers (the sequence). What is 1 becomes 2."""
    tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.dim()]
    batch = next((t.shape[0] for t in tensors), None)
    sequence = next((t.shape[1] for t in tensors if _is_sequence(t)), None)
    found: list[Opened] = []

    def opened(tensor: Tensor) -> Tensor:
        marks = []
        if tensor.dim() and tensor.shape[0] == batch:
            marks.append((0, BATCH))
        if _is_sequence(tensor) and tensor.shape[1] == sequence:
            marks.append((1, SEQUENCE))
        shape = list(tensor.shape)
        for dimension, _ in marks:
            shape[dimension] = max(shape[dimension], _LEAST)
        made = tensor.new_empty(shape)
        found.extend(Opened(made, dimension, symbol) for dimension, symbol in marks)
        return made

    changed = tree_map_only(Tensor, opened, inputs)
    for each in found:
        torch_internals.leave_open(each.tensor, each.dimension)
    return changed, found


def _is_sequence(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and not (tensor.is_floating_point() or tensor.is_complex())


def what_stayed_open(opened: Sequence[Opened], inputs: Sequence[Any], places: Sequence[Node]) -> Open:
    """Of a graph with these inputs at these placeholders: sizes that the trace did not turn into numbers. Dimensions that
    stand for one thing become equal."""
    names: dict[sympy.Symbol, sympy.Symbol] = {}
    traced: dict[sympy.Symbol, int] = {}
    first: dict[sympy.Symbol, torch.SymInt] = {}
    for size, symbol in _sizes(opened, inputs, places):
        if bool(first.setdefault(symbol, size) == size) and isinstance(size.node.expr, sympy.Symbol):
            names[size.node.expr], traced[symbol] = symbol, int(size.node.hint)
    return Open(names, traced)


def _sizes(
    opened: Sequence[Opened], inputs: Sequence[Any], places: Sequence[Node]
) -> Iterator[tuple[torch.SymInt, sympy.Symbol]]:
    at = {id(value): place for value, place in zip(inputs, places)}
    for each in opened:
        if id(each.tensor) in at:
            size = at[id(each.tensor)].meta["example_value"].shape[each.dimension]
            if isinstance(size, torch.SymInt):
                yield size, each.symbol
