"""One launch that takes an optimizer's step for many tensors.

[Note: The table] A kernel cannot be given a list of tensors, so it is given a table of addresses: a row a tensor, of its
length and where it, its gradient and its states begin. Programs go through chunks of tensors; a second table says which chunk
each has. Nothing is copied together, and the tensors lie where they are. Addresses in a table carry no alignment that the
compiler could know of, so tensors all of whose addresses and lengths are multiples of 16 go in a launch of their own, which
is told so and moves 16 bytes at once. Tables stay on the device while they are what they were (`Sent`): to make one of many chunks
takes longer than the step.

[Note: Once a tensor] What is computed once a tensor, in float64, such as a power of beta2, would be computed again by each program, and
a program that has no more numbers than its registers is the fastest. So a kernel that goes first leaves these numbers in a table.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from autoshard.kernels import source, tuning
from autoshard.kernels.printer import as_triton
from autoshard.kernels.rule import Formulas, Rule

Made = TypeVar("Made")
# CHUNK: numbers that one program goes through. BLOCK: that it has in registers at a time. The first where nothing is measured.
TILES: tuple[tuning.Tile, ...] = tuple(
    {"CHUNK": chunk, "BLOCK": block, "num_warps": warps}
    for chunk, block, warps in (
        (1 << 11, 2048, 8), (1 << 11, 2048, 4), (1 << 10, 1024, 4), (1 << 12, 4096, 8), (1 << 14, 1024, 4), (1 << 16, 1024, 4), (1 << 16, 2048, 8)
    )
)  # fmt: skip
TENSORS = 128  # that one program of the kernel that goes first has
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

    @property
    def once(self) -> tuple[str, ...]:
        """What is computed once a tensor, see [Note: Once a tensor]."""
        return tuple(name for name, _ in self.rule.scalars)

    @functools.cache  # noqa: B019  # there are few, and they are kept anyway
    def source(self) -> str:
        """Both kernels, as a module of Python."""
        head = ["@triton.jit", f"def {self.rule.name}_once(settings, steps, once, count):"]
        first = [*head, *_indented(1, self._scalars()), "", ""] if self.once else []
        return "\n".join([_HEAD, *first, *self._signature(), *_indented(1, self._prologue()), *_indented(2, self._body()), ""])

    def _scalars(self) -> Iterator[str]:
        """In float64, as torch computes them, since 1 - 0.999 has lost half its digits in float32."""
        read = symbols_of(self.rule.scalars)
        yield f"tensor = tl.program_id(0) * {TENSORS} + tl.arange(0, {TENSORS})"
        yield "there = tensor < count"
        yield from self._settings(read)
        if "step" in read:
            yield "step = tl.load(steps + tensor, mask=there, other=1).to(tl.float64)"
        for i, (name, formula) in enumerate(self.rule.scalars):
            yield f"{name} = {as_triton(formula, precise=True)}"
            yield f"tl.store(once + {len(self.once)} * tensor + {i}, {name}, mask=there)"

    def _settings(self, read: set[str]) -> Iterator[str]:
        return (f"{name} = tl.load(settings + {i})" for i, name in enumerate(self.rule.settings) if name in read)

    def _signature(self) -> list[str]:
        return [
            "@triton.jit",
            f"def {self.rule.name}(settings, once, scale, infinite, rows, chunks,",
            "    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):",
        ]

    def _prologue(self) -> Iterator[str]:
        """What is once a program, and the loop's head."""
        yield "place = chunks + 2 * tl.program_id(0)"
        yield "tensor, first = tl.load(place), tl.load(place + 1) * CHUNK"
        yield f"row = rows + tensor * {len(self.columns) + 1}"
        yield "count = tl.load(row)"
        if self.checked:
            yield "count = tl.where(tl.load(infinite) > 0, 0, count)"
        yield from self._addresses()
        yield from self._numbers(symbols_of(self.rule.formulas))
        yield "for start in range(0, CHUNK, BLOCK):"

    def _addresses(self) -> Iterator[str]:
        types = (*self.dtypes, *([self.copied] if self.copied else ()))
        for i, (name, dtype) in enumerate(zip(self.columns, types), 1):
            yield f"{name}_at = tl.load(row + {i}).to(tl.pointer_type({TYPES[dtype]}))"
        yield "if ALIGNED:"
        yield f"    count = tl.multiple_of(count, {ALIGNED})"
        yield from (f"    {name}_at = tl.multiple_of({name}_at, {ALIGNED})" for name in self.columns)

    def _numbers(self, read: set[str]) -> Iterator[str]:
        """The settings and scalars that formulas read."""
        yield from self._settings(read)
        if not self.precise:
            yield from (f"{name} = {name}.to(tl.float32)" for name in self.rule.settings if name in read)
        yield from (f"{name} = tl.load(once + tensor * {len(self.once)} + {i})" for i, name in enumerate(self.once) if name in read)
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


@dataclass(eq=False)
class Sent:
    """What is made of something, while that is as it was: tables on a device above all. of: by name, and what each was made of."""

    of: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    def get(self, name: Any, source: Any, make: Callable[[], Made]) -> Made:
        """What was made, or is now."""
        if name not in self.of or self.of[name][0] != source:
            self.of[name] = source, make()
        return self.of[name][1]  # type: ignore[no-any-return]


def launch(kernel: Kernel, settings: Mapping[str, float], tensors: Tensors, sent: Sent, interpret: bool = False) -> None:
    """Takes the step: everything that the rule writes is written in place. sent: of these tensors' step before."""
    device = tensors.columns["param"][0].device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None  # where a table may be used
    numbers = [settings[name] for name in kernel.rule.settings]
    given = sent.get("settings", (numbers, stream), lambda: on_device(torch.tensor(numbers, dtype=torch.float64, device="cpu"), device))
    rows = [_row(column) for column in zip(*(tensors.columns[name] for name in kernel.columns))]
    shape = (len(rows), len(kernel.columns) + 1)
    table = sent.get("rows", (rows, stream), lambda: on_device(torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(shape), device))
    once = _once(kernel, given, tensors.steps, len(rows), interpret)
    run = source.load(kernel.rule.name, kernel.source(), interpret)
    for aligned in (True, False):
        lengths = [row[0] if is_aligned(row) == aligned else 0 for row in rows]

        def by(tile: tuning.Tile, aligned: bool = aligned, lengths: list[int] = lengths) -> Callable[[], None]:
            places = sent.get(aligned, (lengths, tile["CHUNK"], stream), lambda: on_device(_chunks(lengths, tile["CHUNK"]), device))
            return lambda: run[(len(places),)](given, once, tensors.scale, tensors.infinite, table, places, **tile, ALIGNED=aligned)

        if any(lengths):
            _tuned(kernel, aligned, sum(lengths), by, device)


def _once(kernel: Kernel, settings: Tensor, steps: Tensor | None, count: int, interpret: bool) -> Tensor | None:
    """A row of numbers for each tensor, see [Note: Once a tensor]."""
    if not kernel.once or not count:
        return None
    precise = torch.float64 if kernel.precise else torch.float32
    out = torch.empty(count, len(kernel.once), dtype=precise, device=settings.device)
    source.load(f"{kernel.rule.name}_once", kernel.source(), interpret)[(-(-count // TENSORS),)](settings, steps, out, count)
    return out


def _tuned(kernel: Kernel, aligned: bool, count: int, by: tuning.Prepare, device: torch.device) -> None:
    """One launch."""
    if device.type == "cpu":
        by(TILES[0])()
    else:
        source_hash = hashlib.sha256(kernel.source().encode()).hexdigest()[:16]
        what = f"{kernel.rule.name} {source_hash} aligned {aligned} 2**{count.bit_length()} numbers"
        tuning.at_work(tuning.on_this_device(what), TILES, by, tuning.recorded, device.index)


def _chunks(lengths: Sequence[int], size: int) -> Tensor:
    """For each program, which tensor it goes through and which chunk of that."""
    counts = (torch.tensor(lengths, dtype=torch.int64, device="cpu") + size - 1) // size
    tensors = torch.arange(len(lengths), device="cpu").repeat_interleave(counts)
    before = counts.cumsum(0) - counts
    return torch.stack([tensors, torch.arange(len(tensors), device="cpu") - before[tensors]], 1)


def _row(column: tuple[Tensor, ...]) -> tuple[int, ...]:
    return (column[0].numel(), *(t.data_ptr() for t in column))


def is_aligned(row: tuple[int, ...]) -> bool:
    """Whether lengths and addresses are such that 16 bytes can be moved at once, see [Note: The table]."""
    return all(number % ALIGNED == 0 for number in row)


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """The same on the device. To a GPU without waiting for it."""
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)
