"""A step as a list of operations on pieces of memory: what both simulators read.

[Note: Programs] The graphs of a step become one list: forward, backward, and the blocks that they call in the places of
the calls. A value is the piece of memory that it lies in: views, in-place results and waits lie in their input's. So
liveness is where a piece is made and where it is read for the last time, by whatever name.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autoshard import torch_internals
from autoshard.cost_model.sizes import Open, Size, bytes_of

Category = Literal[
    "parameters", "optimizer", "compression", "buffers", "inputs", "gathered", "gradients", "activations", "temporaries", "communication",
    "workspace",
]
Half = Literal["forward", "backward", "optimizer"]

_VIEWS = frozenset({"aten._unsafe_view.default", "aten.lift_fresh_copy.default"})
_OURS, _TORCH = Path(__file__).parent.parent, Path(str(torch.__file__)).parent
_NOT_THE_MODEL = (f"{_OURS}{os.sep}", f"{_TORCH}{os.sep}")
_LARGE_LOSSES = frozenset(f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"))
WAIT = "_c10d_functional.wait_tensor.default"
GATHER = "_c10d_functional.all_gather_into_tensor.default"
ASK_ROWS, LOOK_UP_ROWS, REDUCE_ROWS = (f"autoshard.{name}_rows.default" for name in ("ask", "look_up", "reduce"))
SPARSE = (LOOK_UP_ROWS, REDUCE_ROWS)  # which end with the collectives that they are
ALL_REDUCE = "_c10d_functional.all_reduce.default"
IN_PLACE = "_c10d_functional.all_reduce_.default"  # whose result is a piece of its own too, in the place of what it is given
REDUCE_SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
# What is carried out beside the computation until it is waited for: torch's collectives, and those of [Note: Direct] in ops/direct.py.
GATHER_DIRECT = "autoshard.gather_direct."
_COLLECTIVES = ("_c10d_functional.", GATHER_DIRECT, "autoshard.exchange_direct.", "autoshard.swap_direct.", ASK_ROWS)


@dataclass
class Piece:
    """One piece of memory.

    bytes: what an allocator is asked for. made, last: the first and the last operation at which it exists; made is -1 for
    what exists before the step, and last the program's length for what is left after it. maker: the operation's name.
    seen: the user's code may hold it too, so that nothing can take its place. flight: the transport has it while it
    carries out the collective that made it, and no longer; `made` and `last` are its issue and its wait, until a timeline says better.
    """

    bytes: Size
    category: Category
    made: int
    last: int
    maker: str = ""
    seen: bool = False
    flight: bool = False


@dataclass(frozen=True)
class Operation:
    """One operation: reads pieces, makes pieces. node: its call, with fake values. half: of which graph. code: the number
    of the graph that code is generated of with it in it; None where it runs by itself. call: the call of a block that it
    is a part of. parts: of a kernel that several were fused into, their calls; read_bytes, made_bytes: of its pieces, masks:
    of booleans among these. over: of each result the pieces whose place it could take. views: how many were made since the operation
    before, each a call where no code is generated."""

    node: Node
    half: Half
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    code: int | None = None
    call: Node | None = None
    parts: tuple[Node, ...] = ()
    read_bytes: tuple[Size, ...] = ()
    made_bytes: tuple[Size, ...] = ()
    masks: Size = 0
    over: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    views: int = 0

    @property
    def name(self) -> str:
        """What the operation calls."""
        return _text(self.node.target)

    @property
    def starts_collective(self) -> bool:
        """Whether it is a collective, not the wait for one."""
        return is_collective(self.node) and self.name != WAIT

    @property
    def costed_by(self) -> Hashable:
        """All that its work depends on."""
        return self.node, self.parts, self.read_bytes, self.made_bytes, self.masks

    @property
    def where(self) -> str:
        """"model.py:12", the model's line that it comes from; "" where autoshard put it."""
        trace = self.node.meta.get("stack_trace") or self.node.meta.get("fwd_stack_trace") or ""
        lines = re.findall(r'File "([^"]+)", line (\d+)', str(trace))
        models = [(file, line) for file, line in lines if not file.startswith(_NOT_THE_MODEL)]
        return f"{Path(models[-1][0]).name}:{models[-1][1]}" if models else ""


@functools.cache
def _text(target: Any) -> str:
    """torch writes an operator's name anew each time, and it is asked for a dozen times for each operation."""
    return str(target)


Value = Any  # the number of a piece, a list of values, or None for what is no tensor


@dataclass
class Program:
    """A step's operations in order, and its pieces. open: the sizes that these leave open."""

    operations: list[Operation] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    open: Open = field(default_factory=Open)

    def add(self, size: Size, category: Category, made: int, last: int, maker: str = "", seen: bool = False) -> int:
        """A new piece; its number."""
        self.pieces.append(Piece(size, category, made, last, maker, seen))
        return len(self.pieces) - 1

    def keep(self, value: Value, until: int) -> None:
        """A value's pieces live at least so long."""
        for piece in pieces_of(value):
            self.pieces[piece].last = max(self.pieces[piece].last, until)


@dataclass(frozen=True)
class Listing:
    """What a program is written from, of a graph or of a part of one: what it is given, what it calls in order, and what it gives."""

    inputs: Sequence[Node]
    calls: Sequence[Node]
    gives: Sequence[Any]

    @staticmethod
    def of(gm: GraphModule) -> Listing:
        """All of a graph."""
        gives: Any = gm.graph.output_node().args[0]
        return Listing(gm.graph.find_nodes(op="placeholder"), [n for n in gm.graph.nodes if n.op == "call_function"], gives)


Body = tuple[GraphModule, Sequence[Node]]


class Writer:
    """Writes graphs into a program, one after the other."""

    def __init__(self, body_of: Callable[[Node], Body | None], scatters: bool = True, open: Open | None = None) -> None:
        """body_of: the graph that a call of a block runs and the nodes that it takes; None of other calls.
        scatters: False of a transport that reduces a copy of the whole, as gloo does."""
        self.program, self.body_of, self.scatters = Program(open=open or Open()), body_of, scatters
        self._codes, self._code, self._caller = itertools.count(), cast("int | None", None), cast("Node | None", None)
        self._views = 0
        self._in_flight: dict[int, tuple[int, ...]] = {}  # by what a collective gives: what the transport holds meanwhile

    def write(self, listing: Listing, half: Half, inputs: Sequence[Value], compiled: bool) -> list[Value]:
        """Appends a graph's operations; `inputs` are the values of what it is given. Returns those of what it gives.
        compiled: code is generated of it as a whole."""
        around, self._code = self._code, next(self._codes) if compiled else None
        values: dict[Any, Value] = dict(zip(listing.inputs, inputs))
        for node in listing.calls:
            values[node] = self._call(node, half, values)
        self._code = around
        return [values.get(n) for n in listing.gives]

    def _call(self, node: Node, half: Half, values: dict[Any, Value]) -> Value:
        if node.target is operator.getitem:
            source, index = values[node.args[0]], node.args[1]
            return source[index] if isinstance(source, list) and isinstance(index, int) else source
        body = self.body_of(node)
        if body is not None:
            return self._block(node, half, body, values)
        reads = tuple(dict.fromkeys(pieces_of([values.get(a) for a in node.all_input_nodes])))
        alias = aliased(node)
        if alias == "view":
            self._views += 1
            return _shared(node, reads)
        value = self._operation(node, half, reads, writes=alias == "write")
        self._note_flight(node, reads, value)
        return value

    def _block(self, node: Node, half: Half, body: Body, values: Mapping[Any, Value]) -> list[Value]:
        """A call of a block. What it is given, a random state too, the caller holds until it is back."""
        self._caller = node
        results = self.write(Listing.of(body[0]), half, [values.get(n) for n in body[1]], compiled=True)
        self._caller = None
        self.program.keep([values.get(n) for n in node.all_input_nodes], len(self.program.operations) - 1)
        return results

    def _operation(self, node: Node, half: Half, reads: tuple[int, ...], writes: bool) -> Value:
        at = len(self.program.operations)
        self.program.keep(reads, at)
        value = _shared(node, reads) if writes else self._made(node, at)
        makes = () if writes else tuple(pieces_of(value))
        if writes or makes:
            views = 0 if is_collective(node) else self._views  # these are no kernels
            self._views -= views
            self.program.operations.append(Operation(node, half, reads, makes, self._code, self._caller, views=views))
        return value

    def _note_flight(self, node: Node, reads: tuple[int, ...], value: Value) -> None:
        """What a collective reads stays until somebody has waited; but of an all-reduce, which is in place, or for which generated code
        makes a copy and reduces in that (see `fusion`). gloo (2.13) reduces in a copy that stays instead (or
        besides: generated code holds what it gives to a collective), and gathers into a tensor of its own, which it copies
        from at the end. A direct gather sends from what it makes, so that only generated code holds what it was given."""
        at, name = len(self.program.operations) - 1, _text(node.target)
        if name == WAIT:
            self.program.keep(self._in_flight.pop(value, ()), at)
        elif is_collective(node):
            of_a_copy = name.startswith(GATHER_DIRECT) if self._code is None else name == ALL_REDUCE
            self._in_flight[value] = () if of_a_copy or name == IN_PLACE else reads
            for given in reads if name == IN_PLACE else ():
                self.program.pieces[given].last = at - 1
            source: Any = node.args[0]
            if name == REDUCE_SCATTER and not self.scatters:
                copied = self.program.add(bytes_of(source.meta["val"]), "communication", at, at, node.name)
                self._in_flight[value] = (copied,) if self._code is None else (*reads, copied)
            elif name == GATHER and not self.scatters:
                self.program.add(bytes_of(source.meta["val"]), "communication", at, at, node.name)  # a copy while it is issued
                copied = self.program.add(bytes_of(node.meta["val"]), "communication", at, at, node.name)
                self.program.pieces[copied].flight = True
                self._in_flight[value] = (*reads, copied)

    def _made(self, node: Node, at: int) -> Value:
        def made(value: Any) -> Value:
            if isinstance(value, (list, tuple)):  # within one, too: of an operation whose random state is saved
                return [made(item) for item in value]
            if not isinstance(value, Tensor):
                return None
            return self.program.add(bytes_held(node, value), category_of(node), at, at, node.name)

        return made(node.meta.get("val"))


def bytes_held(node: Node, value: Tensor) -> Size:
    """Bytes of a result's memory: some losses are written in full into what then is their mean, and go on being as large."""
    if _text(node.target) not in _LARGE_LOSSES or value.dim():
        return bytes_of(value)
    source: Any = node.args[0]
    return bytes_of(source.meta["val"])


def _shared(node: Node, reads: tuple[int, ...]) -> Value:
    """The value of a result that lies in the first piece read."""
    piece = reads[0] if reads else None
    example = node.meta.get("val")
    return [piece] * len(example) if isinstance(example, (list, tuple)) else piece


def aliased(node: Node) -> Literal["view", "write"] | None:
    """Whether the result is a view of the first input, or that input, written to; None for a piece of its own."""
    if _text(node.target) in _VIEWS:
        return "view"
    if _text(node.target) == IN_PLACE:
        return None
    if _text(node.target) == WAIT:
        return "write"
    returns = getattr(torch_internals.schema_of(node.target), "returns", None)
    if not returns or returns[0].alias_info is None:
        return None
    return "write" if returns[0].alias_info.is_write else "view"


def is_collective(node: Node) -> bool:
    """Whether a call starts a collective, or waits for one."""
    return _text(node.target).startswith(_COLLECTIVES)


def category_of(node: Node) -> Category:
    """What a piece is for, by the operation that makes it; what is saved or leaves the step is told apart later."""
    part = node.meta.get("part_of", "")
    if "unshard" in part:
        return "communication" if not _gathers(node) and _feeds_gather(node) else "gathered"
    if "reduce" in part or is_collective(node):
        return "communication"
    return "temporaries"


def _feeds_gather(node: Node) -> bool:
    return any(_gathers(u) or (_is_same(u) and _feeds_gather(u)) for u in node.users)


def _gathers(node: Node) -> bool:
    return "all_gather" in _text(node.target) or GATHER_DIRECT in _text(node.target)


def _is_same(node: Node) -> bool:
    """Whether a node gives what it is given, or one of several that it is given."""
    return aliased(node) is not None or node.target is operator.getitem


def pieces_of(value: Value) -> Iterator[int]:
    """The pieces that a value lies in."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, Iterable):
        for item in value:
            yield from pieces_of(item)
