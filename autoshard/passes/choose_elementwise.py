"""Decision: which elementwise operations of a graph become one kernel.

[Note: Elementwise regions] An operation joins the regions that it reads, if they go through the same numbers, or if what they
compute is read nowhere else and can be computed where it is needed; and regions beside it that read the same. The whole region then runs where its last operation
stands, so nothing outside may have read of it before: what joins comes after, and a region that was read from is complete.
No other operation moves, so the planned order of collectives stays.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

from sympy import sympify
from torch import SymInt, Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from autoshard import torch_internals
from autoshard.cost_model.hardware import Device
from autoshard.cost_model.kernels import seconds
from autoshard.cost_model.work import Work
from autoshard.kernels.elementwise import LONGEST, Space
from autoshard.kernels.nodes import adds_rows, is_plain, is_total, reduced_dims, shape_of
from autoshard.kernels.primitives import (
    ALIKE,
    COMPOSITE,
    CONSTANT,
    DRAWN,
    JOINS,
    POINTWISE,
    REDUCTIONS,
    SAME,
    VIEWS,
    WITH_TOTALS,
    name_of,
)
from autoshard.kernels.region import lines_of
from autoshard.passes import graphs

_OF_LAST_DIMENSION = frozenset(["_softmax", "_log_softmax", "_safe_softmax", "_softmax_backward_data", "_log_softmax_backward_data"])
_OF_ROWS = frozenset(["native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm_backward"])
_KINDS = frozenset(POINTWISE) | SAME | CONSTANT | JOINS | COMPOSITE | {DRAWN}
_PROGRAMS = 100  # that together keep a GPU's memory busy
_PER_PROGRAM = 2048  # numbers
_LARGEST = 64  # nodes of a region, whose kernel is written by recursion and compiled as a whole
_PARTS = 16  # of a concatenation, each of which every program tests and reads
_NEAR, _MOST = 16, 10  # nodes between regions that are joined since they read the same, and tensors that they read


@dataclass
class Region:
    """Operations for one kernel, in graph order. space: what it goes through."""

    space: Space
    nodes: list[Node] = field(default_factory=list)

    @property
    def last(self) -> Node:
        """Behind which it can run; items of what it gives may be taken anywhere."""
        return next(n for n in reversed(self.nodes) if n.target is not operator.getitem)

    def given(self) -> list[Node]:
        """What it reads."""
        inside = set(self.nodes)
        return [a for a in dict.fromkeys(a for n in self.nodes for a in n.all_input_nodes) if a not in inside]

    def kept_views(self) -> list[Node]:
        """Views of its results that others read: these stay in the graph."""
        inside, kept = set(self.nodes), set[Node]()
        for node in reversed(self.nodes):
            if name_of(node.target) in VIEWS and any(u in kept or u not in inside for u in node.users):
                kept.add(node)
        return [n for n in self.nodes if n in kept]

    def results(self) -> list[Node]:
        """What of it others read, or views that stay."""
        inside = set(self.nodes) - set(self.kept_views())
        made = (n for n in self.nodes if name_of(n.target) not in VIEWS and isinstance(n.meta["val"], Tensor))
        return [n for n in made if any(u not in inside for u in n.users)]


def fuses(codegen: str, device: Device) -> Device | None:
    """The device that kernels are chosen for, if they are at all."""
    return device if codegen == "triton" and not device.is_cpu else None


def choose(graph: Graph, device: Device) -> list[Region]:
    """The regions that take less time on this device as one kernel each."""
    grouping = _Grouping(graphs.positions(graph))
    for node in graph.nodes:
        grouping.see(node)
    return [region for region in grouping.regions() if _gains(region, device)]


@dataclass
class _Grouping:
    """Regions as they grow, node by node in graph order. of: the region of each node that is in one; open: of those that may
    grow still."""

    at: dict[Node, int]
    of: dict[Node, Region] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)

    def regions(self) -> list[Region]:
        """All of them, their nodes in graph order."""
        found = list({id(region): region for region in self.of.values()}.values())
        for region in found:
            region.nodes.sort(key=self.at.__getitem__)
        return found

    def see(self, node: Node) -> None:
        """The next node."""
        if _writes(node):
            self.open.clear()  # what was to be read before it must not be read after it
        if node.target is operator.getitem and node.args[0] in self.of:
            self._put([node], self.of[node.args[0]])  # type: ignore[index]
        elif name_of(node.target) in VIEWS or (name_of(node.target) in SAME and is_total(node)):
            self._see_view(node)
        elif (space := _space(node)) is not None:
            region = Region(space, [node])
            for read in dict.fromkeys(node.all_input_nodes):
                if read in self.of and self.of[read] is not region:
                    self._join(self.of[read], region, node)
            for beside in self._beside(region, node):
                self._join(beside, region, node)
            self._put(region.nodes, region)
            self.open.add(id(region))

    def _put(self, nodes: list[Node], region: Region) -> None:
        region.nodes += [n for n in nodes if n not in region.nodes]
        self.of.update(dict.fromkeys(nodes, region))

    def _see_view(self, node: Node) -> None:
        """A view of what is in a region is in it too, and so is a total of another dtype; not what has a total in another order, or a part
        of it, since a total's numbers are written as they are found."""
        region = self.of.get(node.args[0])  # type: ignore[arg-type]
        if is_total(node.args[0]) and name_of(node.target) not in ALIKE | SAME:
            return
        if region is not None and id(region) in self.open and _reads_tensors(node) and self._may_move(region.nodes, node):
            self._put([node], region)

    def _beside(self, region: Region, node: Node) -> list[Region]:
        """Regions just before it that read the same large tensor, which needs to be read only once."""
        large = (a for a in region.given() if shape_of(a) == region.space.shape)
        found = {id(r): r for a in large for u in a.users if (r := self.of.get(u)) and self.at[node] - self.at[u] <= _NEAR}
        alike = (r for r in found.values() if r is not region and r.space.shape == region.space.shape)
        return [r for r in alike if len(r.given()) + len(region.given()) <= _MOST]

    def _join(self, earlier: Region, region: Region, node: Node) -> None:
        """Makes them one, if they can be."""
        if id(earlier) not in self.open or not self._may_move(earlier.nodes, node):
            return
        inside = {*earlier.nodes, *region.nodes, node}
        if len(inside) > _LARGEST:
            return
        if any(is_total(a) and a in inside for n in inside if not is_total(n) for a in n.all_input_nodes):
            return  # a total is not known before the kernel's end
        space = _common(earlier.space, region.space)
        if space is None and not earlier.space.reduces and all(u in inside for n in earlier.nodes for u in n.users):
            space = region.space
        if space is not None:
            region.space = space
            self._put(earlier.nodes, region)

    def _may_move(self, nodes: list[Node], to: Node) -> bool:
        """Whether nobody else reads these before that node."""
        inside = set(nodes)
        return all(u in inside or self.at[u] >= self.at[to] for n in nodes for u in n.users)


def _common(a: Space, b: Space) -> Space | None:
    """What both go through, if that is one."""
    if a.shape == b.shape and (a.split == b.split or not a.reduces or not b.reduces):
        return a if a.reduces else b
    for rows, other in ((a, b), (b, a)):
        if rows.is_row(other.shape) and not other.reduces:
            return rows
    return None


def _space(node: Node) -> Space | None:
    """What one operation goes through; None if it has no kernel."""
    name = name_of(node.target)
    if not _reads_tensors(node) or name not in _KINDS | REDUCTIONS.keys():
        return None
    if name in POINTWISE and not is_plain(node):
        return None
    if name == "cat" and len(node.all_input_nodes) > _PARTS:
        return None
    if name in _OF_ROWS:
        return _space_of_a_norm(node, name)
    if name in ("sum", "mean", "amax", "amin", "var_mean", "var"):
        return _space_of_rows(node)
    shape = shape_of(node)
    if not shape and name in _OF_LAST_DIMENSION:
        return None
    split = len(shape) - (name in _OF_LAST_DIMENSION)
    if name in _OF_LAST_DIMENSION and _last(node) != split:
        return None
    return Space(shape, split)


def _space_of_a_norm(node: Node, name: str) -> Space | None:
    arguments: Any = node.args[1:] if name in WITH_TOTALS else node.args
    shape = shape_of(arguments[0])
    space = Space(shape, len(shape) - len(arguments[1]))
    totals = name in WITH_TOTALS and any(arguments[-1][1:])
    return space if _is_held(space) or not totals else None


def _space_of_rows(node: Node) -> Space | None:
    source: Any = node.args[0]
    shape = shape_of(source)
    if not shape or not source.meta["val"].is_floating_point():
        return None
    dims = reduced_dims(node)
    if adds_rows(node):
        space = Space(shape, len(dims))
        return space if _is_held(space) else None
    split = len(shape) - len(dims)
    return Space(shape, split) if dims == tuple(range(split, len(shape))) else None


def _is_held(space: Space) -> bool:
    """Whether rows are held as a whole, as they must be to be added up, see [Note: Columns]."""
    columns = math.prod(space.shape[space.split :])
    return bool(sympify(columns).is_number and columns <= LONGEST)


def _last(node: Node) -> int:
    """The dimension that a softmax or its gradient is along."""
    dim: Any = node.args[2 if "backward" in name_of(node.target) else 1]
    return dim % len(shape_of(node))  # type: ignore[no-any-return]


def _reads_tensors(node: Node) -> bool:
    """Whether a call takes and gives tensors alone, all on one device."""
    if node.op != "call_function" or "val" not in node.meta:
        return False
    values = [v for n in (node, *node.all_input_nodes) for v in tree_leaves(n.meta.get("val")) if v is not None]
    return all(isinstance(v, Tensor) for v in values) and len({v.device for v in values}) == 1


def _writes(node: Node) -> bool:
    schema = torch_internals.schema_of(node.target)
    return node.op == "call_function" and (schema is None or schema.is_mutable) and node.target is not operator.getitem


# --- what it is worth


def _gains(region: Region, device: Device) -> bool:
    alone = [n for n in region.nodes if name_of(n.target) not in VIEWS | CONSTANT and n.target is not operator.getitem]
    if len(alone) < 2 or not region.given():
        return False
    apart = sum(_seconds(_bytes([n, *n.all_input_nodes]), device) for n in alone)
    apart += sum(_seconds(_bytes(n.all_input_nodes), device) for n in alone if name_of(n.target) in WITH_TOTALS)  # torch reads them again
    lines, totals = _lines(region), [r for r in region.results() if is_total(r)]
    together = _bytes([*region.given(), *region.results()]) + len(totals) * lines
    return apart > _seconds(together * _idle(region), device) + len(totals) * _seconds(lines, device)


def _seconds(moved: float, device: Device) -> float:
    return float(seconds(Work("pointwise", 0, int(moved), 0), device, fused=True))


def _bytes(nodes: list[Node]) -> int:
    tensors = [t for n in nodes for t in tree_leaves(n.meta["val"]) if isinstance(t, Tensor)]
    return sum(math.prod(map(_hint, t.shape)) * t.element_size() for t in tensors)


def _hint(size: Any) -> int:
    """What an open size was in the trace."""
    return int(size.node.hint) if isinstance(size, SymInt) else int(size)


def _lines(region: Region) -> int:
    """Bytes that programs leave of a sum over rows."""
    return 4 * lines_of(*_numbers(region)) if region.space.reduces else 0


def _numbers(region: Region) -> tuple[int, int]:
    """(rows, columns) that a region goes through, as they were in the trace."""
    reads = (a for n in region.nodes for a in n.all_input_nodes)
    numbers = next([*map(_hint, a.meta["val"].shape)] for a in reads if shape_of(a) == region.space.shape)
    return math.prod(numbers[: region.space.split]), math.prod(numbers[region.space.split :])


def _idle(region: Region) -> float:
    """How many times as long memory takes since few rows are worked on at once."""
    if not region.space.reduces:
        return 1.0
    rows, columns = _numbers(region)
    return max(1.0, _PROGRAMS / max(1, rows // max(1, _PER_PROGRAM // max(1, columns))))
