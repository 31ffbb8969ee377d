"""Regions of several blocks of which only what enters is saved, as options of a choice. See [Note: Regions] in
passes/repeat_blocks.py.

What a region takes follows from what its blocks take where what leaves each is saved. In its backward no moment is higher, since what
is computed again lies where it would have been saved. Before that, and behind the region, less waits; and the time is more by a forward
of each block but the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.passes.choose_recompute import Block, Option, peak_of

LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32)  # blocks of a region; at most half of those that follow each other


@dataclass(frozen=True)
class Again:
    """What calling a block again is about. leaving: bytes of its results. seconds: of its forward."""

    leaving: int
    seconds: float


def with_regions(blocks: Sequence[Block], again: Mapping[str, Again]) -> list[Block]:
    """The blocks, in the order of forward, each with the regions too that could end with it. again: of those that can be called again."""
    found = []
    for run in _runs(blocks, again):
        for at, block in enumerate(run, 1):
            lengths = (n for n in LENGTHS if n <= at and 2 * n <= len(run))
            regions = (_region(run[at - n : at], again) for n in lengths)
            found.append(replace(block, options=(*block.options, *regions)))
    return found


def _runs(blocks: Sequence[Block], again: Mapping[str, Again]) -> Iterator[list[Block]]:
    """Blocks of one list, one after the other, that can be called again; or that cannot."""

    def kind(block: Block) -> tuple[str, bool]:
        return block.name.rpartition(".")[0], block.name in again and any(o.policy == "full" for o in block.options)

    for (_, can), run in itertools.groupby(blocks, kind):
        members = list(run)
        yield from [members] if can else ([block] for block in members)


def _region(blocks: Sequence[Block], again: Mapping[str, Again]) -> Option:
    """All of these as one region."""
    full = [next(o for o in block.options if o.policy == "full" and not o.keeps) for block in blocks]
    through = [again[block.name] for block in blocks[:-1]]
    *inner, last = full
    before = sum(max(o.saved - a.leaving, 0) for o, a in zip(inner, through))  # that waits for the region's backward
    peak = max(peak_of([*inner, replace(last, peak=last.own)]), before + last.peak)
    seconds = sum(o.seconds for o in full) + sum(a.seconds for a in through)
    return Option("full", before + last.saved, peak, seconds, spans=len(blocks))
