"""One launch that takes an optimizer's step for many tensors.

[Note: The table] A kernel cannot be given a list of tensors, so it is given a table of addresses: a row a tensor, of its
length and where it, its gradient and its states begin. Programs go through chunks of tensors; a second table says which chunk
each has. Nothing is copied together, and the tensors lie where they are. Addresses in a table carry no alignment that the
compiler could know of, so tensors all of whose addresses and lengths are multiples of 16 go in a launch of their own, which
is told so and moves 16 bytes at once.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoshard.kernels import source, tuning
from autoshard.kernels.printer import as_triton
from autoshard.kernels.rule import Formulas, Rule

# CHUNK: numbers that one program goes through. BLOCK: that it has in registers at a time. The first where nothing is measured.
TILES: tuple[tuning.Tile, ...] = tuple(
    {"CHUNK": chunk, "BLOCK": block, "num_warps": warps}
    for chunk, block, warps in ((1 << 14, 1024, 4), (1 << 14, 512, 4), (1 << 14, 2048, 8), (1 << 16, 1024, 4), (1 << 16, 2048, 8))
)
ALIGNED = 16  # bytes of an address, and numbers of a length
TYPES = {
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.float64: "tl.float64",
}
HALVES = (torch.bfloat16, torch.float16)  # which are computed with in float32


@dataclass(frozen=True)
class Kernel:
    """What a launch computes.

    dtypes: of `param`, `grad` and the rule's states, in this order. scaled: gradients are divided by a scale. checked:
    nothing is done where a flag says that a gradient is infinite. copied: the dtype of what `param` is the precise form of,
    read and written in the same pass: where it is not what `param` rounds to, somebody wrote it since, and it counts.
    """

    rule: Rule
    dtypes: tuple[torch.dtype, ...]
    scaled: bool = False
    checked: bool = False
    copied: torch.dtype | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Of the table of addresses, after the lengths."""
        return ("param", "grad", *self.rule.states, *(("copy",) if self.copied else ()))

    @property
    def precise(self) -> bool:
        """Whether it computes in float64."""
        return torch.float64 in self.dtypes

    @functools.cache  # noqa: B019  # there are few, and they are kept anyway
    def source(self) -> str:
        """The kernel, as a module of Python."""
        return "\n".join([_HEAD, *self._signature(), *_indented(1, self._prologue()), *_indented(2, self._body()), ""])

    def _signature(self) -> list[str]:
        return [
            "@triton.jit",
            f"def {self.rule.name}(settings, steps, scale, infinite, rows, chunks,",
            "    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):",
        ]

    def _prologue(self) -> Iterator[str]:
        """What is once a tensor, and the loop's head."""
        yield "place = chunks + 2 * tl.program_id(0)"
        yield "tensor, first = tl.load(place), tl.load(place + 1) * CHUNK"
        yield f"row = rows + tensor * {len(self.columns) + 1}"
        yield "count = tl.load(row)"
        if self.checked:
            yield "count = tl.where(tl.load(infinite) > 0, 0, count)"
        yield from self._addresses()
        yield from self._scalars()
        yield "for start in range(0, CHUNK, BLOCK):"

    def _addresses(self) -> Iterator[str]:
        types = (*self.dtypes, *([self.copied] if self.copied else ()))
        for i, (name, dtype) in enumerate(zip(self.columns, types), 1):
            yield f"{name}_at = tl.load(row + {i}).to(tl.pointer_type({TYPES[dtype]}))"
        yield "if ALIGNED:"
        yield f"    count = tl.multiple_of(count, {ALIGNED})"
        yield from (f"    {name}_at = tl.multiple_of({name}_at, {ALIGNED})" for name in self.columns)

    def _scalars(self) -> Iterator[str]:
        """In float64, as torch computes them, since 1 - 0.999 has lost half its digits in float32."""
        read, inside = symbols_of(self.rule.scalars + self.rule.formulas), symbols_of(self.rule.formulas)
        for i, name in enumerate(self.rule.settings):
            if name in read:
                yield f"{name} = tl.load(settings + {i})"
        if "step" in read:
            yield "step = tl.load(steps + tensor).to(tl.float64)"
        for name, formula in self.rule.scalars:
            yield f"{name} = {as_triton(formula, precise=True)}"
        if not self.precise:
            for name in (*self.rule.settings, *(name for name, _ in self.rule.scalars)):
                if name in inside:
                    yield f"{name} = {name}.to(tl.float32)"
        if self.scaled:
            yield "unscale = 1.0 / tl.load(scale)"

    def _body(self) -> Iterator[str]:
        compute = "tl.float64" if self.precise else "tl.float32"
        yield "i = first + start + tl.arange(0, BLOCK)"
        yield "there = i < count"
        read = symbols_of(self.rule.formulas)
        for name in ("param", "grad", *self.rule.states):
            if name in read:
                yield f"{name} = tl.load({name}_at + i, mask=there).to({compute})"
        if self.copied:
            yield f"copy = tl.load(copy_at + i, mask=there).to({compute})"
            yield f"param = tl.where(param.to({TYPES[self.copied]}).to({compute}) == copy, param, copy)"
        if self.scaled:
            yield "grad *= unscale"
        for name, formula in self.rule.formulas:
            yield f"{name} = {as_triton(formula, self.precise)}"
        yield from (f"tl.store({name}_at + i, {name}, mask=there)" for name in self.rule.written)
        if self.copied:
            yield "tl.store(copy_at + i, param, mask=there)"


_HEAD = '''"""Generated by autoshard from the formulas of an optimizer's step."""

import triton
import triton.language as tl

'''


def _indented(depth: int, lines: Any) -> Iterator[str]:
    return (" " * 4 * depth + line for line in lines)


def symbols_of(formulas: Formulas) -> set[str]:
    """All names that these formulas read."""
    return {str(s) for _, formula in formulas for s in formula.free_symbols}


@dataclass(frozen=True)
class Tensors:
    """What a launch works on: by column, tensors that lie without gaps, on one device and of one dtype a column.

    steps: float32, flat, one a tensor: the steps taken with this one, where the rule counts them. scale, infinite: one
    number each.
    """

    columns: Mapping[str, Sequence[Tensor]]
    steps: Tensor | None = None
    scale: Tensor | None = None
    infinite: Tensor | None = None


def launch(kernel: Kernel, settings: Mapping[str, float], tensors: Tensors, interpret: bool = False) -> None:
    """Takes the step: everything that the rule writes is written in place."""
    device = tensors.columns["param"][0].device
    run = source.load(kernel.rule.name, kernel.source(), interpret)
    numbers = torch.tensor([settings[name] for name in kernel.rule.settings], dtype=torch.float64, device="cpu")
    numbers = sent(numbers, device)
    rows = [_row(column) for column in zip(*(tensors.columns[name] for name in kernel.columns))]
    table = sent(torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(len(rows), len(kernel.columns) + 1), device)
    given = (numbers, tensors.steps, tensors.scale, tensors.infinite, table)
    for aligned in (True, False):
        lengths = torch.tensor([row[0] if is_aligned(row) == aligned else 0 for row in rows], dtype=torch.int64, device="cpu")

        def by(tile: tuning.Tile, aligned: bool = aligned, lengths: Tensor = lengths) -> None:
            places = sent(_chunks(lengths, tile["CHUNK"]), device)
            run[(len(places),)](*given, places, **tile, ALIGNED=aligned)

        if lengths.any():
            _tuned(kernel, aligned, int(lengths.sum()), by, device)


def _tuned(kernel: Kernel, aligned: bool, count: int, by: Callable[[tuning.Tile], None], device: torch.device) -> None:
    """One launch."""
    if device.type == "cpu":
        by(TILES[0])
    else:
        source_hash = hashlib.sha256(kernel.source().encode()).hexdigest()[:16]
        what = f"{kernel.rule.name} {source_hash} aligned {aligned} 2**{count.bit_length()} numbers"
        tuning.at_work(tuning.on_this_device(what), TILES, by, tuning.recorded, device.index)


def _chunks(lengths: Tensor, size: int) -> Tensor:
    """For each program, which tensor it goes through and which chunk of that."""
    counts = (lengths + size - 1) // size
    tensors = torch.arange(len(lengths), device="cpu").repeat_interleave(counts)
    before = counts.cumsum(0) - counts
    return torch.stack([tensors, torch.arange(len(tensors), device="cpu") - before[tensors]], 1)


def _row(column: tuple[Tensor, ...]) -> tuple[int, ...]:
    return (column[0].numel(), *(t.data_ptr() for t in column))


def is_aligned(row: tuple[int, ...]) -> bool:
    """Whether lengths and addresses are such that 16 bytes can be moved at once, see [Note: The table]."""
    return all(number % ALIGNED == 0 for number in row)


def sent(table: Tensor, device: torch.device) -> Tensor:
    """The same on the device. To a GPU without waiting for it."""
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)
