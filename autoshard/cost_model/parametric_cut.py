"""Which values of a block are best saved for its backward, if a second of computing them again is worth so many bytes: for all prices.

[Note: Parametric cut] In backward a value is there or not, and if it is, then saved, which takes its bytes, or computed again, which takes
its seconds and has all be there that it is made of. So each value is an edge of its bytes from "there" to "computed again", from where
one of its price leads to the sink, and others, which nothing cuts, to "there" of what it is made of; the source leads to "there" of what backward reads.
The cheapest choice is the minimum cut. With a price of nothing all is computed again, with a high one nothing that takes
time; between two choices lies another if it is cheaper than both at the price at which these cost the same. Those found so are all
corners of the lower convex hull of bytes and seconds. Sums are of integers, so a cut is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import networkx as nx


class Value(NamedTuple):
    """What an operation gives. bytes: that wait for backward where it is saved. nanoseconds: to compute it. made_of:
    by places among a block's values. read: by backward."""

    bytes: int
    nanoseconds: int
    made_of: tuple[int, ...]
    read: bool


@dataclass(frozen=True)
class Corner:
    """A choice: places of what is saved, its bytes, and the nanoseconds of what is computed again."""

    saved: frozenset[int]
    bytes: int
    nanoseconds: int


@lru_cache(maxsize=256)  # blocks are alike
def corners(values: tuple[Value, ...], gap: int, most: int) -> tuple[Corner, ...]:
    """Choices that are the cheapest at some price, from the fewest bytes to the most: those of the fewest bytes and of the least time,
    and then, where the most bytes lie between two, one between these. No more than `most`, and none between two that are less than `gap`
    bytes apart: else all there are."""
    fewest = _cheapest(values, _Price(byte=1 + sum(v.nanoseconds for v in values), nanosecond=1))
    fastest = _cheapest(values, _Price(byte=1, nanosecond=1 + sum(v.bytes for v in values)))
    found, gaps = [fewest, fastest], [(fewest, fastest)]
    while gaps and len(found) < most:
        widest = max(gaps, key=_width)
        gaps.remove(widest)
        if _width(widest) >= max(gap, 1) and (between := _between(values, *widest)):
            found.append(between)
            gaps += [(widest[0], between), (between, widest[1])]
    return tuple(sorted(dict.fromkeys(found), key=lambda corner: corner.bytes))


class _Price(NamedTuple):
    byte: int
    nanosecond: int

    def of(self, corner: Corner) -> int:
        return self.byte * corner.bytes + self.nanosecond * corner.nanoseconds


def _width(gap: tuple[Corner, Corner]) -> int:
    low, high = gap
    return high.bytes - low.bytes


def _between(values: Sequence[Value], low: Corner, high: Corner) -> Corner | None:
    """What is cheaper than both where these cost the same."""
    same = _Price(low.nanoseconds - high.nanoseconds, high.bytes - low.bytes)
    found = _cheapest(values, same)
    return found if same.of(found) < same.of(low) else None


def _cheapest(values: Sequence[Value], price: _Price) -> Corner:
    _, (there, _) = nx.minimum_cut(_network(values, price), "source", "sink")
    again = [i for i, _ in enumerate(values) if ("again", i) in there]
    saved = frozenset(i for i, v in enumerate(values) if ("there", i) in there and ("again", i) not in there)
    return Corner(saved, sum(values[i].bytes for i in saved), sum(values[i].nanoseconds for i in again))


def _network(values: Sequence[Value], price: _Price) -> nx.DiGraph:
    """An edge without a capacity is of no end of it."""
    network = nx.DiGraph()
    network.add_nodes_from(("source", "sink"))
    for i, value in enumerate(values):
        if value.read:
            network.add_edge("source", ("there", i))
        network.add_edge(("there", i), ("again", i), capacity=price.byte * value.bytes)
        network.add_edge(("again", i), "sink", capacity=price.nanosecond * value.nanoseconds)
        network.add_edges_from((("again", i), ("there", source)) for source in value.made_of)
    return network
