"""Adafactor's passes over memory: a few launches for many matrices, whatever their number.

[Note: Adafactor's passes] A step needs sums over rows, columns and all of a matrix before it can write. So gradients are gone
through three times: `look` takes the means over rows one step further and leaves sums over columns, a part for each tile;
`update` adds up the squares of the update; `update` again writes. Between them small launches add these parts up in
float64, always in the same order, and processes add up theirs. As with `multi_tensor`, tensors are not copied together: a table
has their addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from string import Template
from typing import Any

import torch
from torch import Tensor

from autoshard.kernels import source
from autoshard.kernels.multi_tensor import ALIGNED, TYPES, is_aligned, on_device

ROWS, COLUMNS = 16, 128  # of a tile, which is what a program has in registers at a time
WARPS = 8  # of a program
FIELDS = (
    "height",  # rows here, of one matrix of a stack
    "width",
    "count",  # of numbers here
    "tiles",  # of one matrix, one below the other
    "first",  # which of all tiles is its first
    "param",
    "grad",
    "state",
    "columns",
    "parts",  # where its tiles' sums over columns begin
    "own",  # its place among the matrices, where the square of its update goes
    "square",  # where what was found begins: the parameter's squares,
    "rows",  # the means over rows, a sum for each matrix,
    "sums",  # the squares over columns
    "stack",  # matrices
)


@dataclass(frozen=True)
class Numbers:
    """What a step of one matrix is taken with.

    weight: of what is new in means. eps: the least mean that is divided by. least: the least norm, by the root of the count, that a
    step is a share of; rate: this share. keep: what stays of the parameter. d: what an update's norm is clipped to. sign: -1 where
    the step goes up. whole: the whole matrix's rows. root: of the whole's count.
    """

    weight: float
    eps: float
    least: float
    rate: float
    keep: float
    d: float
    sign: float
    whole: float
    root: float


@dataclass(frozen=True)
class Matrix:
    """One parameter in a step, of which `param` and `grad` are this process's part, without gaps.

    state: the means over rows, and `columns` over columns; or without `columns`, of each number. across: whether columns are on
    several processes.
    """

    param: Tensor
    grad: Tensor
    state: Tensor
    columns: Tensor | None
    across: bool
    numbers: Numbers

    @property
    def shape(self) -> tuple[int, int, int]:
        """(matrices, rows, columns). What is not factored goes by `COLUMNS`, and its last row may end early."""
        if self.columns is None:
            return 1, -(-self.param.numel() // COLUMNS), COLUMNS
        *stack, height, width = self.param.shape
        return torch.Size(stack).numel(), height, width

    @property
    def tiles(self) -> int:
        """Of one of its matrices."""
        return -(-self.shape[1] // ROWS)

    @property
    def means(self) -> int:
        """How many sums its means need."""
        stack, _, width = self.shape
        return 0 if self.columns is None else stack * (1 + width)

    @property
    def aligned(self) -> bool:
        """Whether each row begins where 16 bytes do."""
        length = self.param.numel() if self.columns is None else self.shape[2]
        tensors = (self.param, self.grad, self.state if self.columns is None else self.columns)
        return is_aligned((length, *(t.data_ptr() for t in tensors)))

    @property
    def strips(self) -> int:
        """Of one of its matrices, beside each other, where it is factored."""
        return 0 if self.columns is None else -(-self.shape[2] // COLUMNS)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a launch has in common."""
        return self.columns is not None, self.aligned, self.param.dtype, self.grad.dtype, self.state.dtype


@dataclass(frozen=True)
class _Launch:
    """Of matrices of one kind. tiles, strips: for each program which matrix, of its stack, and which rows or columns."""

    types: tuple[torch.dtype, ...]
    flags: dict[str, bool]
    count: int
    table: Tensor
    numbers: Tensor
    tiles: Tensor
    strips: Tensor


class Passes:
    """One step of matrices that are on one device.

    scale: what gradients are divided by, one number. interpret: Triton runs the kernels in Python, on the CPU; for tests.
    """

    def __init__(self, matrices: Sequence[Matrix], scale: Tensor | None, interpret: bool = False) -> None:
        self._matrices, self._scale, self._interpret = matrices, scale, interpret
        self._device = matrices[0].param.device
        self._tiles = _begins([m.shape[0] * m.tiles for m in matrices])
        self._parts_at = _begins([m.shape[0] * m.tiles * m.shape[2] if m.means else 0 for m in matrices])
        self._shared = _begins([1 + m.means if m.across else 1 for m in matrices])
        self._alone = _begins([0 if m.across else m.means for m in matrices])
        precise = torch.float64 if any(torch.float64 in m.kind for m in matrices) else torch.float32
        self._parts = torch.empty(self._parts_at[-1], dtype=precise, device=self._device)
        self._found = torch.zeros(self._shared[-1] + self._alone[-1], dtype=torch.float64, device=self._device)
        self._squares = torch.empty(len(matrices), dtype=torch.float64, device=self._device)
        self._pieces = torch.empty(2 * self._tiles[-1], dtype=torch.float64, device=self._device)
        kinds = dict.fromkeys(m.kind for m in matrices)
        self._launches = [self._launch([i for i, m in enumerate(matrices) if m.kind == kind]) for kind in kinds]

    def sums(self) -> list[Tensor]:
        """Of each matrix what is a sum over processes, float64: its squares, and where columns are on several processes, its means
        over rows and squares over columns. The means over rows are taken one step further."""
        for launch in self._launches:
            self._run("look", launch, launch.tiles, self._parts, self._pieces)
            self._run("total", launch, launch.strips, self._parts, self._pieces, self._found)
            self._run("squares", launch, None, self._pieces, self._found, OWN=False)
        return [self._found[begin:end] for begin, end in zip(self._shared, self._shared[1:])]

    def advance(self, sums: Sequence[Tensor]) -> None:
        """Takes the means over columns one step further. sums: over processes."""
        self._found[: self._shared[-1]] = torch.cat(list(sums))
        for launch in self._launches:
            self._run("advance", launch, launch.strips, self._found)

    def squares(self) -> list[Tensor]:
        """[1] each, float64: of the update of what is here."""
        for launch in self._launches:
            self._run("update", launch, launch.tiles, self._found, self._squares, self._pieces, WRITE=False)
            self._run("squares", launch, None, self._pieces, self._squares, OWN=True)
        return list(self._squares.split(1))

    def write(self, squares: Sequence[Tensor]) -> None:
        """Steps the parameters. squares: over processes."""
        squares_of_all = torch.cat(list(squares))
        for launch in self._launches:
            self._run("update", launch, launch.tiles, self._found, squares_of_all, self._pieces, WRITE=True)

    def _launch(self, members: Sequence[int]) -> _Launch:
        matrices = [self._matrices[i] for i in members]
        factored, aligned, *types = matrices[0].kind
        flags = {"FACTORED": factored, "ALIGNED": aligned, "SCALED": self._scale is not None}
        table = self._sent([self._row(i) for i in members], torch.int64)
        numbers = self._sent([tuple(vars(m.numbers).values()) for m in matrices], torch.float64)
        stacks = [m.shape[0] for m in matrices]
        tiles, strips = (on_device(_places(stacks, each), self._device) for each in ([m.tiles for m in matrices], [m.strips for m in matrices]))
        return _Launch(tuple(types), flags, len(members), table, numbers, tiles, strips)

    def _row(self, i: int) -> tuple[int, ...]:
        """By `FIELDS`."""
        matrix, found = self._matrices[i], self._shared[i]
        stack, height, width = matrix.shape
        means = found + 1 if matrix.across else self._shared[-1] + self._alone[i]
        columns = 0 if matrix.columns is None else matrix.columns.data_ptr()
        addresses = (matrix.param.data_ptr(), matrix.grad.data_ptr(), matrix.state.data_ptr(), columns)
        sizes = (height, width, matrix.param.numel(), matrix.tiles, self._tiles[i])
        return (*sizes, *addresses, self._parts_at[i], i, found, means, means + stack, stack)

    def _sent(self, rows: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return on_device(torch.tensor(rows, dtype=dtype, device="cpu"), self._device)

    def _run(self, name: str, launch: _Launch, places: Tensor | None, *given: Tensor, **chosen: bool) -> None:
        count = launch.count if places is None else len(places)
        if not count:
            return
        kernel = source.load(name, text_of(launch.types), self._interpret)
        given_to_all = {**launch.flags, "ROWS": ROWS, "COLUMNS": COLUMNS, **chosen}
        flags = {flag: value for flag, value in given_to_all.items() if flag in kernel.arg_names}
        with source.launching_on(self._device):
            kernel[(count,)](launch.table, launch.numbers, self._scale, places, *given, **flags, num_warps=WARPS)


def _begins(counts: Sequence[int]) -> list[int]:
    """Where each begins, and where the last ends."""
    return list(accumulate(counts, initial=0))


def _places(stacks: Sequence[int], each: Sequence[int]) -> Tensor:
    """[programs, 3]: which matrix, which of its stack, and which part of that, where `stacks` have so many parts each."""
    counts, parts = torch.tensor(stacks, device="cpu") * torch.tensor(each, device="cpu"), torch.tensor(each, device="cpu")
    matrix = torch.repeat_interleave(counts)
    within = torch.arange(len(matrix), device="cpu") - (counts.cumsum(0) - counts)[matrix]
    return torch.stack([matrix, within // parts[matrix], within % parts[matrix]], 1)


@functools.cache
def text_of(types: tuple[torch.dtype, ...]) -> str:
    """The kernels, as a module of Python, for parameters, gradients and states of these dtypes."""
    places = {name: str(i) for i, name in enumerate(FIELDS)}
    places |= {name: str(i) for i, name in enumerate(Numbers.__annotations__)}
    named = dict(zip(("PARAM", "GRAD", "STATE"), (TYPES[dtype] for dtype in types)))
    compute = "tl.float64" if torch.float64 in types else "tl.float32"
    return _TEXT.substitute(places, **named, COMPUTE=compute, fields=len(FIELDS), aligned=ALIGNED, numbers=len(Numbers.__annotations__))


# Where the programs that go through tiles find what is theirs.
_TILE = '''    place = places + 3 * tl.program_id(0)
    matrix, batch, tile = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    row, numbers = table + matrix * $fields, numbers + matrix * $numbers
    height, width, count = tl.load(row + $height), tl.load(row + $width), tl.load(row + $count)
    param_at = tl.load(row + $param).to(tl.pointer_type($PARAM))
    grad_at = tl.load(row + $grad).to(tl.pointer_type($GRAD))
    state_at = tl.load(row + $state).to(tl.pointer_type($STATE))
    if ALIGNED:
        width, count = tl.multiple_of(width, $aligned), tl.multiple_of(count, $aligned)
        param_at, grad_at = tl.multiple_of(param_at, $aligned), tl.multiple_of(grad_at, $aligned)
        if not FACTORED:
            state_at = tl.multiple_of(state_at, $aligned)
    at = batch * tl.load(row + $tiles) + tile
    i = tile * ROWS + tl.arange(0, ROWS)
    begin = (batch * height + i) * width
'''

_TEXT = Template(f'''"""Adafactor's passes over memory, written by autoshard."""

import triton
import triton.language as tl


plus = tl.standard._sum_combine  # what tl.sum adds with, which Triton's interpreter knows and does at once


@triton.jit
def towards(mean, seen, weight):
    """torch's lerp, from the nearer end: of a large mean nothing stays in a small number that has all the weight."""
    return tl.where(weight < 0.5, mean + weight * (seen - mean), seen - (seen - mean) * (1 - weight))


@triton.jit
def look(table, numbers, scale, places, parts, pieces,
    FACTORED: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The squares of a tile of rows, and where it is factored their means and what comes to each column."""
{_TILE}    parts += tl.load(row + $parts) + at * width
    params = tl.full([ROWS], 0.0, $COMPUTE)
    grads = tl.full([ROWS], 0.0, $COMPUTE)
    if SCALED:
        unscale = 1.0 / tl.load(scale).to($COMPUTE)
    for start in range(0, width, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        k = begin[:, None] + j[None, :]
        there = (i < height)[:, None] & (j < width)[None, :] & (k < count)
        param = tl.load(param_at + k, mask=there, other=0.0).to($COMPUTE)
        params += tl.reduce(param * param, 1, plus)
        if FACTORED:
            grad = tl.load(grad_at + k, mask=there, other=0.0).to($COMPUTE)
            if SCALED:
                grad *= unscale
            grads += tl.reduce(grad * grad, 1, plus)
            tl.store(parts + j, tl.reduce(grad * grad, 0, plus), mask=j < width)
    piece = pieces + 2 * (tl.load(row + $first) + at)
    tl.store(piece, tl.reduce(params.to(tl.float64), 0, plus))
    if FACTORED:
        weight = tl.load(numbers + $weight).to($COMPUTE)
        state_at += batch * height + i
        mean = tl.load(state_at, mask=i < height, other=0.0).to($COMPUTE)
        mean = towards(mean, grads / width.to($COMPUTE), weight)
        tl.store(state_at, mean, mask=i < height)
        tl.store(piece + 1, tl.reduce(tl.where(i < height, mean, 0.0).to(tl.float64), 0, plus))


@triton.jit
def total(table, numbers, scale, places, parts, pieces, found, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """What all tiles of a matrix have found of a strip of columns, and of its means over rows."""
    place = places + 3 * tl.program_id(0)
    matrix, batch, strip = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    row = table + matrix * $fields
    width, tiles = tl.load(row + $width), tl.load(row + $tiles)
    j = strip * COLUMNS + tl.arange(0, COLUMNS)
    parts += tl.load(row + $parts) + batch * tiles * width
    pieces += 2 * (tl.load(row + $first) + batch * tiles) + 1
    columns = tl.full([COLUMNS], 0.0, tl.float64)
    for start in range(0, tiles, ROWS):
        tile = start + tl.arange(0, ROWS)
        there = (tile < tiles)[:, None] & (j < width)[None, :]
        seen = tl.load(parts + tile[:, None] * width + j[None, :], mask=there, other=0.0).to(tl.float64)
        columns += tl.reduce(seen, 0, plus)
    tl.store(found + tl.load(row + $sums) + batch * width + j, columns, mask=j < width)
    if strip == 0:
        rows = tl.full([COLUMNS], 0.0, tl.float64)
        for start in range(0, tiles, COLUMNS):
            tile = start + tl.arange(0, COLUMNS)
            rows += tl.load(pieces + 2 * tile, mask=tile < tiles, other=0.0)
        tl.store(found + tl.load(row + $rows) + batch, tl.reduce(rows, 0, plus))


@triton.jit
def squares(table, numbers, scale, places, pieces, found, COLUMNS: tl.constexpr, OWN: tl.constexpr):
    """What all tiles have found of one matrix's squares."""
    row = table + tl.program_id(0) * $fields
    count = tl.load(row + $tiles) * tl.load(row + $stack)
    pieces += 2 * tl.load(row + $first)
    seen = tl.full([COLUMNS], 0.0, tl.float64)
    for start in range(0, count, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        seen += tl.load(pieces + 2 * k, mask=k < count, other=0.0)
    at = tl.load(row + $own) if OWN else tl.load(row + $square)
    tl.store(found + at, tl.reduce(seen, 0, plus))


@triton.jit
def advance(table, numbers, scale, places, found, COLUMNS: tl.constexpr):
    """The means over a strip of columns, one step further."""
    place = places + 3 * tl.program_id(0)
    matrix, batch, strip = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    row, numbers = table + matrix * $fields, numbers + matrix * $numbers
    width = tl.load(row + $width)
    j = strip * COLUMNS + tl.arange(0, COLUMNS)
    columns_at = tl.load(row + $columns).to(tl.pointer_type($STATE)) + batch * width + j
    sums = tl.load(found + tl.load(row + $sums) + batch * width + j, mask=j < width, other=0.0)
    mean = tl.load(columns_at, mask=j < width, other=0.0).to($COMPUTE)
    seen = (sums / tl.load(numbers + $whole)).to($COMPUTE)
    tl.store(columns_at, towards(mean, seen, tl.load(numbers + $weight).to($COMPUTE)), mask=j < width)


@triton.jit
def update(table, numbers, scale, places, found, norms, pieces,
    FACTORED: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WRITE: tl.constexpr):
    """The update of a tile of rows: its squares, or a step by it. Where it is not factored, means go one step further first."""
{_TILE}    eps, weight = tl.load(numbers + $eps).to($COMPUTE), tl.load(numbers + $weight).to($COMPUTE)
    factor = tl.load(numbers + $sign).to($COMPUTE)
    if SCALED:
        factor /= tl.load(scale).to($COMPUTE)
    if FACTORED:
        columns_at = tl.load(row + $columns).to(tl.pointer_type($STATE))
        if ALIGNED:
            columns_at = tl.multiple_of(columns_at, $aligned)
        columns_at += batch * width
        rows = tl.load(state_at + batch * height + i, mask=i < height, other=0.0).to($COMPUTE)
        over = tl.load(found + tl.load(row + $rows) + batch) / tl.load(numbers + $whole)
        over = tl.maximum(over.to($COMPUTE), eps, propagate_nan=tl.PropagateNan.ALL)
    if WRITE:
        root = tl.load(numbers + $root)
        norm = tl.sqrt(tl.load(found + tl.load(row + $square))) / root
        size = tl.maximum(norm, tl.load(numbers + $least), propagate_nan=tl.PropagateNan.ALL) * tl.load(numbers + $rate)
        clip = tl.sqrt(tl.load(norms + tl.load(row + $own))) / (root * tl.load(numbers + $d))
        size = (size / tl.maximum(clip, 1.0, propagate_nan=tl.PropagateNan.ALL)).to($COMPUTE)
        keep = tl.load(numbers + $keep).to($COMPUTE)
    steps = tl.full([ROWS], 0.0, $COMPUTE)
    for start in range(0, width, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        k = begin[:, None] + j[None, :]
        there = (i < height)[:, None] & (j < width)[None, :] & (k < count)
        grad = tl.load(grad_at + k, mask=there, other=0.0).to($COMPUTE) * factor
        if FACTORED:
            columns = tl.load(columns_at + j, mask=j < width, other=0.0).to($COMPUTE)
            mean = rows[:, None] * columns[None, :] / over
        else:
            mean = tl.load(state_at + k, mask=there, other=0.0)
            if not WRITE:
                mean = mean.to($COMPUTE)
                mean = towards(mean, grad * grad, weight).to($STATE)
                tl.store(state_at + k, mean, mask=there)
            mean = mean.to($COMPUTE)
        step = grad / tl.sqrt(tl.maximum(mean, eps * eps, propagate_nan=tl.PropagateNan.ALL))
        if WRITE:
            param = tl.load(param_at + k, mask=there).to($COMPUTE)
            tl.store(param_at + k, param * keep - size * step, mask=there)
        else:
            steps += tl.reduce(tl.where(there, step * step, 0.0), 1, plus)
    if not WRITE:
        tl.store(pieces + 2 * (tl.load(row + $first) + at), tl.reduce(steps.to(tl.float64), 0, plus))
''')
