"""Decision: what each block saves for its backward, so that no moment of a step takes more than the budget, in the least
time.

[Note: Prefix sums] Of earlier blocks a moment in a block knows only how much they saved: its forward and its backward lie
above the same sum. So of the choices up to a block only bytes and seconds matter, and one that is worse in both than
another can be dropped. What is left at the end is exact, as long as no more than MOST are left on the way. An option of several
blocks, a region, goes on from what could be chosen up to the first of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.plan import THROUGH

CLOSE = 1 / 128  # of an aim
SPARE = 1 / 4096  # of a budget, and of a step's time
MOST = 20_000  # choices that are followed from block to block; of more, evenly many


@dataclass(frozen=True)
class Option:
    """One policy of one block. saved: bytes that wait for its backward. peak: the most bytes that exist at once in its
    forward or its backward, beside what earlier blocks saved; its own are among them. seconds: of both. keeps: gathered copies of its
    parameters are among what waits. spans: how many blocks it is of, a region that ends with this one: then all but this one are of the
    policy "through", and the bytes and seconds are those of all. own: of the peak, what is not between its forward and its backward."""

    policy: str
    saved: int
    peak: int
    seconds: float
    keeps: bool = False
    spans: int = 1
    own: int = 0


@dataclass(frozen=True)
class Block:
    """A block, in the order of forward."""

    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Aim:
    """What choices are made for so that a simulated peak ends below a budget: the budget, or less where the sum of blocks' bytes is
    not all that there is. missed, met: the lowest aim so far whose peak was above the budget, and the highest whose was not.
    misses: how many were above in a row."""

    at: int
    missed: int | None = None
    met: int | None = None
    misses: int = 0

    def after(self, over: int) -> Aim:
        """The next one, where this one's peak was by so many bytes above the budget: lower, by twice as much each time, until one is
        met; and then between that and what missed."""
        missed, met = (self.at, self.met) if over > 0 else (self.missed, self.at)
        if met is None:
            return replace(self, at=self.at - (over << self.misses), missed=missed, misses=self.misses + 1)
        return replace(self, at=self.at if missed is None else (met + missed) // 2, missed=missed, met=met)

    @property
    def settled(self) -> bool:
        """Whether nothing better is to be had from another."""
        return self.met is not None and (self.missed is None or self.missed - self.met <= max(1, CLOSE * self.met))


@dataclass(frozen=True)
class _Front:
    """What up to a block can be chosen, each with more saved and less cost than the one before it. came: from which
    choice of the front that its option goes on from. took: by which option of the block."""

    saved: NDArray[np.int64]
    cost: NDArray[np.float64]
    came: NDArray[np.int64]
    took: NDArray[np.int64]


Cost = Callable[[_Front, Option], NDArray[np.float64]]
_START = _Front(np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64))


def choose(blocks: Sequence[Block], budget: int) -> tuple[Option, ...] | None:
    """An option for each block, or for several of them, of the least seconds; None if none fits."""

    def cost(front: _Front, option: Option) -> NDArray[np.float64]:
        return np.where(front.saved + option.peak <= budget, front.cost + option.seconds, np.inf)

    return _best(blocks, cost)


def choose_with_spare(blocks: Sequence[Block], budget: int) -> tuple[Option, ...] | None:
    """The same with a little of the budget left, if that takes next to no time: what several blocks take together is not quite the sum
    of what each takes, and a simulation that ends a little above a budget is one more to come."""
    exact, spared = (choose(blocks, at) for at in (budget, int(budget * (1 - SPARE))))
    if exact is None or spared is None:
        return exact
    return spared if sum(o.seconds for o in spared) <= (1 + SPARE) * sum(o.seconds for o in exact) else exact


def least(blocks: Sequence[Block]) -> tuple[Option, ...]:
    """An option for each block, or for several of them, of the lowest peak; of those, of the fewest bytes saved."""

    def cost(front: _Front, option: Option) -> NDArray[np.float64]:
        return np.maximum(front.cost, (front.saved + option.peak).astype(np.float64))

    found = _best(blocks, cost)
    assert found is not None
    return found


def shifted(blocks: Sequence[Block], taken: Sequence[Option]) -> Iterator[tuple[Option, ...]]:
    """Choices in which of two neighbours that differ one is as the other. None where some are of several blocks."""
    if any(option.spans > 1 for option in taken):
        return
    for i, (one, following) in enumerate(itertools.pairwise(taken)):
        if (one.policy, one.keeps) != (following.policy, following.keeps):
            for at, like in ((i, following), (i + 1, one)):
                alike = (o for o in blocks[at].options if (o.policy, o.keeps, o.spans) == (like.policy, like.keeps, 1))
                yield from ((*taken[:at], option, *taken[at + 1 :]) for option in alike)


def peak_of(taken: Iterable[Option]) -> int:
    """The most bytes at once, with an option of each block."""
    before, peak = 0, 0
    for option in taken:
        before, peak = before + option.saved, max(peak, before + option.peak)
    return peak


def placed(blocks: Sequence[Block], taken: Iterable[Option]) -> Iterator[tuple[Option, Sequence[Block]]]:
    """Each option, with the blocks that it is of."""
    at = 0
    for option in taken:
        at += option.spans
        yield option, blocks[at - option.spans : at]


def policies_of(blocks: Sequence[Block], taken: Iterable[Option]) -> Iterator[tuple[str, str]]:
    """(block, policy) of each that has one."""
    for option, (*through, last) in placed(blocks, taken):
        yield from ((block.name, THROUGH) for block in through)
        if option.policy != "none":
            yield last.name, option.policy


def _best(blocks: Sequence[Block], cost: Cost) -> tuple[Option, ...] | None:
    fronts = [_START]
    for at, block in enumerate(blocks, 1):
        fronts.append(_extended([fronts[at - o.spans] for o in block.options], block.options, cost))
    if not len(fronts[-1].cost):
        return None
    at, which, taken = len(blocks), len(fronts[-1].cost) - 1, []
    while at:
        front, block = fronts[at], blocks[at - 1]
        taken.append(block.options[front.took[which]])
        at, which = at - taken[-1].spans, int(front.came[which])
    return tuple(reversed(taken))


def _extended(fronts: Sequence[_Front], options: Sequence[Option], cost: Cost) -> _Front:
    """What can be chosen with one of these options, each of which goes on from its front."""
    saved = np.concatenate([front.saved + o.saved for front, o in zip(fronts, options)])
    costs = np.concatenate([cost(front, o) for front, o in zip(fronts, options)])
    order = np.argsort(saved, kind="stable")  # options' fronts are in order already, which it merges
    before = np.minimum.accumulate(np.concatenate([[np.inf], costs[order][:-1]]))
    kept = order[costs[order] < before]
    kept = kept[np.append(np.diff(saved[kept]) > 0, True)[: len(kept)]]  # of as many bytes the last costs the least
    kept = kept[np.linspace(0, len(kept) - 1, min(len(kept), MOST)).astype(np.int64)] if len(kept) else kept
    starts = np.cumsum([0, *(len(front.saved) for front in fronts)])
    took = np.searchsorted(starts, kept, side="right") - 1
    return _Front(saved[kept], costs[kept], kept - starts[took], took)
