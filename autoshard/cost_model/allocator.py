"""What CUDA's caching allocator reserves for what a step allocates: more than that, since free memory lies in pieces.

[Note: Reserved] torch asks the driver for segments and never gives them back while nothing runs out. A request is rounded up
to 512 bytes and takes the smallest free block of its pool that holds it; of a larger one it splits its part off. Requests of
up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones have a segment of their own,
rounded up to 2 MiB. Freed blocks join their free neighbours. These are the rules of c10/cuda/CUDACachingAllocator.cpp as it
is without PYTORCH_CUDA_ALLOC_CONF, for one stream. Seen: torch 2.11, 2.13.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.cost_model.program import Program

KIB, MIB = 1 << 10, 1 << 20
ROUND, SMALL, SMALL_SEGMENT, LARGE_SEGMENT, OWN_SEGMENT, ROUND_OWN = 512, MIB, 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB
_STEPS = 2  # what the first leaves reserved the second may not fit into


@dataclass
class Block:
    """Bytes of a segment, with their neighbours in it."""

    size: int
    small: bool
    number: int
    free: bool = False
    before: Block | None = field(default=None, repr=False)
    behind: Block | None = field(default=None, repr=False)

    @property
    def place(self) -> tuple[int, int]:
        """In the order in which free blocks are looked at."""
        return self.size, self.number


class CachingAllocator:
    """reserved: bytes of all segments. allocated: bytes of blocks that are in use."""

    def __init__(self) -> None:
        self.reserved = self.allocated = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, Block] = {}  # free ones, by number
        self._count = 0

    def allocate(self, size: int) -> Block:
        """A block of at least so many bytes."""
        size = max(-(-size // ROUND) * ROUND, ROUND)
        block = self._found(size, size <= SMALL) or self._segment(size)
        rest = block.size - size
        if rest >= ROUND and (block.small or rest > SMALL):
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
        block = self._blocks[places[at][1]]
        self._take_out(block)
        return block

    def _segment(self, size: int) -> Block:
        small = size <= SMALL
        shared = SMALL_SEGMENT if small else LARGE_SEGMENT
        length = shared if size < OWN_SEGMENT else -(-size // ROUND_OWN) * ROUND_OWN
        self.reserved += length
        return self._new(length, small)

    def _new(self, size: int, small: bool) -> Block:
        self._count += 1
        return Block(size, small, self._count)

    def _split(self, block: Block, size: int) -> None:
        rest = self._new(block.size - size, block.small)
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
            block.before = other.before
            if other.before is not None:
                other.before.behind = block

    def _put_in(self, block: Block) -> None:
        block.free = True
        self._blocks[block.number] = block
        bisect.insort(self._free[block.small], block.place)

    def _take_out(self, block: Block) -> None:
        places = self._free[block.small]
        places.pop(bisect.bisect_left(places, block.place))
        del self._blocks[block.number]


def reserved(program: Program, sizes: Mapping[str, int] | None = None) -> int:
    """Bytes that are reserved at most while steps of a program repeat, at these sizes; what is not given is as in the trace."""
    open = program.open.at(sizes) if sizes else program.open
    bytes_of = [open.number(piece.bytes) for piece in program.pieces]
    allocator, end = CachingAllocator(), len(program.operations)
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
