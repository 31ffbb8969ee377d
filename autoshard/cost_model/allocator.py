"""What CUDA's caching allocator reserves for what a step allocates: more than that, since free memory lies in pieces.

[Note: Reserved] torch asks the driver for segments and never gives them back while nothing runs out. A request is rounded up
to 512 bytes and takes the smallest free block of its pool that holds it; of a larger one it splits its part off. Requests of
up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones have a segment of their own,
rounded up to 2 MiB. Freed blocks join their free neighbours. These are the rules of c10/cuda/CUDACachingAllocator.cpp as it
is where PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF say nothing, for one stream. Seen: torch 2.11, 2.13.

[Note: Expandable] With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True each pool is one segment, as long as the device's memory
and more, into which memory is mapped from its beginning on: pages of 2 MiB for small requests and of 20 MiB for others. What
no free block holds is appended, to the last block where that is free. So free memory at the end never is too short, and of
blocks that hold a request the last one is taken only where no other does. Any rest of 512 bytes is split off. Not compared
with measurements.
"""

from __future__ import annotations

import bisect
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.cost_model.program import Program

KIB, MIB = 1 << 10, 1 << 20
ROUND, SMALL, SMALL_SEGMENT, LARGE_SEGMENT, OWN_SEGMENT, ROUND_OWN = 512, MIB, 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB
_STEPS = 2  # what the first leaves reserved the second may not fit into
_LARGE_ADDRESSES = 1 << 60  # so that blocks of both pools are told by their addresses
SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the first that is set counts
EXPANDABLE = f"{SETTINGS[0]}=expandable_segments:True"


def settings() -> str:
    """What the environment says to torch's allocator; "": nothing."""
    return next((os.environ[name] for name in SETTINGS if name in os.environ), "")


def expands() -> bool:
    """Whether these settings have segments expand: of what is said several times the last counts."""
    return re.findall(r"\bexpandable_segments\s*:\s*(\w+)", settings())[-1:] == ["True"]


@dataclass
class Block:
    """Bytes of a segment, with their neighbours in it. address: where they begin, in segments one behind the other."""

    size: int
    small: bool
    address: int
    free: bool = False
    before: Block | None = field(default=None, repr=False)
    behind: Block | None = field(default=None, repr=False)

    @property
    def place(self) -> tuple[int, int]:
        """In the order in which free blocks are looked at."""
        return self.size, self.address


class CachingAllocator:
    """reserved: bytes of all segments. allocated: bytes of blocks that are in use."""

    def __init__(self) -> None:
        self.reserved = self.allocated = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, Block] = {}  # free ones, by address

    def allocate(self, size: int) -> Block:
        """A block of at least so many bytes."""
        size = max(-(-size // ROUND) * ROUND, ROUND)
        block = self._found(size, size <= SMALL) or self._segment(size)
        if self._is_split(block, block.size - size):
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        return block

    def release(self, block: Block) -> None:
        """Makes a block free, one with its free neighbours."""
        self.allocated -= block.size
        for other in (block.before, block.behind):
            if other is not None and other.free:
                self._take_out(other)
                self._join(block, other)
        self._put_in(block)

    def _found(self, size: int, small: bool) -> Block | None:
        """The smallest free block that holds it."""
        places = self._free[small]
        at = bisect.bisect_left(places, (size, -1))
        if at == len(places):
            return None
        block = self._blocks[places[self._better(places, at)][1]]
        self._take_out(block)
        return block

    def _better(self, places: Sequence[tuple[int, int]], at: int) -> int:
        """Which block is taken of this one, the smallest that does, and larger ones."""
        return at

    def _segment(self, size: int) -> Block:
        small = size <= SMALL
        shared = SMALL_SEGMENT if small else LARGE_SEGMENT
        length = shared if size < OWN_SEGMENT else -(-size // ROUND_OWN) * ROUND_OWN
        self.reserved += length
        return Block(length, small, self.reserved - length)

    def _is_split(self, block: Block, rest: int) -> bool:
        return rest >= ROUND and (block.small or rest > SMALL)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.small, block.address + size)
        rest.before, rest.behind, block.size = block, block.behind, size
        if block.behind is not None:
            block.behind.before = rest
        block.behind = rest
        self._put_in(rest)

    def _join(self, block: Block, other: Block) -> None:
        """`other` becomes a part of its neighbour `block`."""
        block.size += other.size
        if other is block.behind:
            block.behind = other.behind
            if other.behind is not None:
                other.behind.before = block
        else:
            block.before, block.address = other.before, other.address
            if other.before is not None:
                other.before.behind = block

    def _put_in(self, block: Block) -> None:
        block.free = True
        self._blocks[block.address] = block
        bisect.insort(self._free[block.small], block.place)

    def _take_out(self, block: Block) -> None:
        places = self._free[block.small]
        places.pop(bisect.bisect_left(places, block.place))
        del self._blocks[block.address]


class ExpandingAllocator(CachingAllocator):
    """The same where segments expand ([Note: Expandable])."""

    def __init__(self) -> None:
        super().__init__()
        self._last = {True: Block(0, True, 0), False: Block(0, False, _LARGE_ADDRESSES)}

    def _better(self, places: Sequence[tuple[int, int]], at: int) -> int:
        """The last block only where there is no other."""
        is_last = self._blocks[places[at][1]].behind is None
        return at + 1 if is_last and at + 1 < len(places) else at

    def _segment(self, size: int) -> Block:
        """The last block, or an empty one behind it, with the pages that it lacks."""
        last, page = self._last[size <= SMALL], SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT
        if last.free:
            self._take_out(last)
        elif last.size:
            last.behind = Block(0, last.small, last.address + last.size, before=last)
            last = self._last[last.small] = last.behind
        grown = -(-(size - last.size) // page) * page
        self.reserved += grown
        last.size += grown
        return last

    def _is_split(self, block: Block, rest: int) -> bool:
        return rest >= ROUND

    def _split(self, block: Block, size: int) -> None:
        super()._split(block, size)
        if self._last[block.small] is block:
            assert block.behind is not None  # the rest
            self._last[block.small] = block.behind

    def _join(self, block: Block, other: Block) -> None:
        super()._join(block, other)
        if self._last[block.small] is other:
            self._last[block.small] = block


def reserved(program: Program, sizes: Mapping[str, int] | None = None, *, expanding: bool = False) -> int:
    """Bytes that are reserved at most while steps of a program repeat, at these sizes; what is not given is as in the trace.
    expanding: where segments do ([Note: Expandable])."""
    open = program.open.at(sizes) if sizes else program.open
    bytes_of = [open.number(piece.bytes) for piece in program.pieces]
    allocator, end = ExpandingAllocator() if expanding else CachingAllocator(), len(program.operations)
    made: dict[int, list[int]] = defaultdict(list)
    gone: dict[int, list[int]] = defaultdict(list)
    for number, (piece, size) in enumerate(zip(program.pieces, bytes_of)):
        if size and piece.made < 0:
            allocator.allocate(size)  # what lies there before a step mostly stays
        elif size:
            made[piece.made].append(number)
            gone[min(max(piece.last, piece.made), end)].append(number)
    for _ in range(_STEPS):
        _run(allocator, end, bytes_of, made, gone)
    return allocator.reserved


def _run(
    allocator: CachingAllocator, end: int, sizes: Sequence[int], made: dict[int, list[int]], gone: dict[int, list[int]]
) -> None:
    blocks: dict[int, Block] = {}
    for at in range(end + 1):
        for number in made[at]:
            blocks[number] = allocator.allocate(sizes[number])
        for number in gone[at]:
            allocator.release(blocks.pop(number))
