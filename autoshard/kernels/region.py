"""A region of a graph as one operator: a kernel on GPUs, its own operations one by one anywhere else.

[Note: Regions as operators] Each is a `torch.library.triton_op`, named by its operations and a hash of what they are. So
regions that are alike are one, in all graphs; a graph that is run op by op launches its kernel, and Inductor may look into it.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sympy import Expr, Symbol
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from autoshard.kernels import source, tuning
from autoshard.kernels.elementwise import Space, Writer
from autoshard.kernels.nodes import open_sizes, shape_of, size
from autoshard.kernels.places import Shape, Unsupported, lies
from autoshard.kernels.primitives import decompositions, name_of
from autoshard.kernels.tuning import Tile

_FAR = 1 << 31  # bytes beyond which places are counted in 64 bits
_NUMBERS = 1024  # that a program goes through where nothing is reduced
_TILE = 2048  # that it has of rows, if one is not longer
_BLOCK = 8192  # of a row that is too long to be held
_LINES = 512  # that programs leave at most, where they add up rows
Wrap = Callable[[Any], Any]
Numbers = Mapping[Symbol, Any]  # of the sizes that a trace left open


def as_it_is(kernel: Any) -> Any:
    """Nothing is around it."""
    return kernel


@dataclass(frozen=True)
class Laid:
    """A tensor as it was traced."""

    shape: Shape
    strides: Shape
    dtype: torch.dtype

    @staticmethod
    def of(node: Node) -> Laid:
        """A node's."""
        value = node.meta["val"]
        return Laid(shape_of(node), tuple(map(size, value.stride())), value.dtype)

    def at(self, numbers: Numbers) -> Laid:
        """With its sizes as numbers."""
        return Laid(_at(self.shape, numbers), _at(self.strides, numbers), self.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """One that lies so."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def holds(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy that lies as it was traced."""
        if tensor.stride() == self.strides or lies(tensor, self.strides):
            return tensor
        return self.empty(tensor.device).copy_(tensor)


@dataclass(frozen=True)
class Sized:
    """A region at certain sizes."""

    given: tuple[Laid, ...]
    made: tuple[Laid, ...]
    rows: Any
    tile: Tile

    def programs(self, tile: Tile) -> Any:
        """How many go through all rows."""
        return -(-self.rows // (tile["ROWS"] * tile.get("STEPS", 1)))


@dataclass(frozen=True, eq=False)
class Region:
    """name: of its operator. graph: its operations as they were, which give a list. text: its kernel, as a module of
    Python. in_blocks: rows are not held as a whole. sizes: of each open size, the input and the dimension that it is. totals: the
    outputs that are sums over all rows, see [Note: Columns]."""

    name: str
    graph: GraphModule
    text: str
    space: Space
    in_blocks: bool
    inputs: tuple[Laid, ...]
    outputs: tuple[Laid, ...]
    sizes: tuple[tuple[Symbol, int, int], ...]
    totals: tuple[int, ...] = ()
    at_sizes: dict[Any, Sized] = field(default_factory=dict)  # what is below takes longer than a launch
    tried: dict[Any, tuple[str, list[Tile]]] = field(default_factory=dict)

    def run(self, tensors: Sequence[Tensor], wrap: Wrap = as_it_is) -> list[Tensor]:
        """Its results. wrap: around the kernel, where that is traced."""
        return self.launched(tensors, wrap) if tensors[0].device.type == "cuda" else list(self.graph(*tensors))

    def launched(self, tensors: Sequence[Tensor], wrap: Wrap = as_it_is, interpret: bool = False) -> list[Tensor]:
        """Its results, by its kernel. interpret: on the CPU, for tests."""
        sizes = tuple(tensors[i].shape[d] for _, i, d in self.sizes)
        wide = any(t.untyped_storage().nbytes() >= _FAR for t in tensors)
        traced = wrap is not as_it_is
        sized = self.sized(sizes, wide) if traced else self._known(sizes, wide)
        device = tensors[0].device
        given = [laid.holds(t) for laid, t in zip(sized.given, tensors)]
        made = [self._lines(sized, i, device) if i in self.totals else laid.empty(device) for i, laid in enumerate(sized.made)]
        kernel = wrap(source.load(self.name, self.text, interpret))

        def prepared(tile: Tile) -> Callable[[], None]:
            return functools.partial(kernel[(sized.programs(tile),)], *given, *made, *sizes, **tile)

        if any(t.numel() for t in made):
            with source.launching_on(device):
                if traced or interpret or self._stays():
                    prepared(sized.tile)()
                else:
                    tuning.at_work(*self._tiles((sizes, wide, device), sized), prepared, tuning.recorded, device.index)
        return [_added_up(t, laid) if i in self.totals else t for i, (t, laid) in enumerate(zip(made, sized.made))]

    def _lines(self, sized: Sized, output: int, device: torch.device) -> Tensor:
        """Where each program leaves what it has of a sum over rows."""
        laid = sized.made[output]
        precise = torch.float64 if laid.dtype is torch.float64 else torch.float32
        return torch.empty(sized.programs(sized.tile), math.prod(laid.shape), dtype=precise, device=device)

    def _stays(self) -> bool:
        """Whether its tile is not chosen by measuring: sums would round otherwise than on other processes, and nothing can
        be measured while a CUDA graph is captured."""
        return self.space.reduces or torch.cuda.is_current_stream_capturing()

    def _tiles(self, at: Any, sized: Sized) -> tuple[str, list[Tile]]:
        """What tiles like this one are remembered by, and these."""
        if at not in self.tried:
            key = tuning.on_this_device(f"{self.name} {sized.tile} 2**{sized.rows.bit_length()} rows")
            self.tried[at] = key, like(sized.tile)
        return self.tried[at]

    def _known(self, sizes: tuple[int, ...], wide: bool) -> Sized:
        if (sizes, wide) not in self.at_sizes:
            self.at_sizes[sizes, wide] = self.sized(sizes, wide)
        return self.at_sizes[sizes, wide]

    def sized(self, sizes: tuple[Any, ...], wide: bool) -> Sized:
        """Its tensors, how many rows there are, and what a program has of them unless it is tuned."""
        numbers = dict(zip((s for s, _, _ in self.sizes), sizes))
        shape = _at(self.space.shape, numbers)
        rows, columns = math.prod(shape[: self.space.split]), math.prod(shape[self.space.split :])
        given, made = (tuple(laid.at(numbers) for laid in of) for of in (self.inputs, self.outputs))
        wide = wide or rows * columns * 8 >= _FAR
        if not self.space.reduces:
            return Sized(given, made, rows, {"ROWS": _NUMBERS, "WIDE": wide, "num_warps": 4})
        held = _BLOCK if self.in_blocks else 1 << max(0, columns - 1).bit_length()
        each = max(1, _TILE // held)
        warps = min(16, max(4, each * held // 512))
        steps = {"STEPS": steps_of(rows, each)} if self.totals else {}
        return Sized(given, made, rows, {"ROWS": each, "COLUMNS": held, **steps, "WIDE": wide, "num_warps": warps})


def steps_of(rows: Any, each: int) -> int:
    """How many tiles of so many rows a program goes through where it adds them up: few kernels for many sizes, and one for those
    that are not known while it is traced."""
    return 1 << (-(-rows // (each * _LINES)) - 1).bit_length() if isinstance(rows, int) and rows else 8


def _added_up(lines: Tensor, laid: Laid) -> Tensor:
    """What all programs have found of a sum."""
    return laid.holds(lines.sum(0).view(laid.shape).to(laid.dtype))


def lines_of(rows: int, columns: int) -> int:
    """How many numbers programs leave of one sum over rows."""
    each = max(1, _TILE // (1 << max(0, columns - 1).bit_length()))
    return -(-rows // (each * steps_of(rows, each))) * columns


def like(tile: Tile) -> list[Tile]:
    """Tiles to choose among: with more or fewer rows and threads. Blocks of a row stay, and with them the order of sums
    within a thread."""
    rows, warps = tile["ROWS"], tile["num_warps"]
    pairs = [(rows, warps), (max(1, rows // 2), warps), (rows * 2, warps), (rows, min(32, warps * 2)), (rows, max(1, warps // 2))]
    return [{**tile, "ROWS": r, "num_warps": w} for r, w in dict.fromkeys(pairs)]


def _at(sizes: Shape, numbers: Numbers) -> tuple[Any, ...]:
    return tuple(int(n) if n.is_number else _number(n, numbers) for n in sizes)


def _number(of: Expr, numbers: Numbers) -> Any:
    """Sizes are sums of products, of numbers or, in a trace, of torch's symbols."""
    if of.is_Add or of.is_Mul:
        parts = [_number(part, numbers) for part in of.args]
        return sum(parts) if of.is_Add else math.prod(parts)
    if of.is_Pow:
        return _number(of.args[0], numbers) ** int(of.args[1])
    if of.func.__name__ in ("Max", "Min"):
        choose = torch.sym_max if of.func.__name__ == "Max" else torch.sym_min
        return functools.reduce(choose, (_number(part, numbers) for part in of.args))
    if of.func.__name__ == "FloorDiv":
        return _number(of.args[0], numbers) // _number(of.args[1], numbers)
    return numbers[of] if of in numbers else int(of)


_known: dict[str, Region] = {}
_operators: dict[str, Any] = {}
OPERATORS: dict[Any, Region] = {}


def region_of(graph: GraphModule, space: Space) -> Region:
    """The region that these operations are; Unsupported if they have no kernel. graph: with fake values, giving a list."""
    described = f"{space} {_described(graph)}"
    if described not in _known:
        label = "_".join(list(dict.fromkeys(_names(graph)))[:4])
        name = f"{label}_{hashlib.sha256(described.encode()).hexdigest()[:10]}"
        primitives = _primitives(graph)
        results: Any = graph.graph.output_node().args[0]
        outputs = tuple(map(Laid.of, results))  # whose dtypes and strides torch's decompositions do not always give
        writer = Writer(primitives.graph, space, [laid.strides for laid in outputs])
        text = writer.write(name)
        inputs = tuple(map(Laid.of, writer.given))
        sizes = tuple(_found(symbol, inputs) for symbol in open_sizes(primitives.graph))
        for node in graph.graph.nodes:
            node.meta.clear()  # the trace would live as long as the operator
        _known[described] = Region(name, graph, text, space, writer.out.in_blocks, inputs, outputs, sizes, writer.totals)
    return _known[described]


def _names(graph: GraphModule) -> Iterator[str]:
    for node in graph.graph.nodes:
        if (name := name_of(node.target)) and node.op == "call_function":
            yield name.strip("_")


def _described(graph: GraphModule) -> str:
    """All that the operations are but for their names."""
    numbers = {node: i for i, node in enumerate(graph.graph.nodes)}
    lines = []
    for node in numbers:
        given = map_arg((node.args, node.kwargs), lambda a: f"%{numbers[a]}")
        lines.append(f"{node.target if node.op == 'call_function' else node.op} {given} {_laid(node.meta.get('val'))}")
    return "\n".join(lines)


def _laid(value: Any) -> str:
    tensors = [v for v in tree_leaves(value) if isinstance(v, Tensor)]
    return " ".join(f"{tuple(t.shape)} {t.stride()} {t.dtype}" for t in tensors)


def _primitives(graph: GraphModule) -> GraphModule:
    """The operations that these are compositions of."""
    given = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    if not all(isinstance(value, Tensor) for value in given):
        raise Unsupported("numbers that are computed")
    with given[0].fake_mode:
        try:
            made = make_fx(lambda *tensors: list(graph(*tensors)), decomposition_table=decompositions())(*given)
        except Exception as error:  # some decompositions do not bear what the operation does, such as no numbers at all
            raise Unsupported(str(error)) from error
    made.graph.eliminate_dead_code()
    return made


def _found(symbol: Symbol, inputs: Sequence[Laid]) -> tuple[Symbol, int, int]:
    for i, laid in enumerate(inputs):
        if symbol in laid.shape:
            return symbol, i, laid.shape.index(symbol)
    raise Unsupported(f"the size {symbol}, which no input has")


def operator_of(region: Region) -> Any:
    """The operator of a region, which takes a list of tensors."""
    if region.name not in _operators:

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            return region.run(tensors, torch.library.wrap_triton)

        torch.library.triton_op(f"autoshard::{region.name}", run, mutates_args=())
        _operators[region.name] = getattr(torch.ops.autoshard, region.name).default
        OPERATORS[_operators[region.name]] = region
    return _operators[region.name]
