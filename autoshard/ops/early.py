"""`autoshard::gather_early`: the gathers that a forward starts with, begun when the optimizer had stepped.

[Note: Early gathers] Between a step and the next forward a loop reads its data and writes its log, and the link could do something.
So the optimizer's step sends the rows that the next forward will gather first. Anything may have written to them by then, in ways
that leave no trace (`p.data` has no version): so a forward packs its rows as ever and compares them, bit by bit, with what was sent.
Processes agree by one small all-reduce whether all of them found the same, and gather anew if not. A process that sent nothing when
it stepped does so now, before that all-reduce, which every forward has: so collectives are in one order on all of them, whoever stepped.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from autoshard.ops.define import define

_c10d = torch.ops._c10d_functional


_numbers = itertools.count()


@dataclass(frozen=True)
class Recipe:
    """How a graph begins: `pack` makes of rows what goes into its gathers over `size` processes, the group of this name. gather: by
    which op."""

    pack: GraphModule
    gather: Any
    size: int
    group: str

    def sent(self, flats: Sequence[Tensor]) -> Flight:
        """These on their way."""
        return Flight(self, list(flats), [self.gather(flat, self.size, self.group) for flat in flats])

    def all_agree(self, same: bool, device: torch.device) -> bool:
        """Whether it is true on all processes. A collective."""
        flag = torch.full((1,), int(same), dtype=torch.int32, device=device)
        return bool(_c10d.wait_tensor(_c10d.all_reduce(flag, "min", self.group)).item())


@dataclass(frozen=True)
class Flight:
    """What this process sent, and where all of it will arrive."""

    recipe: Recipe
    flats: list[Tensor]
    gathered: list[Tensor]

    def is_of(self, flats: Sequence[Tensor], recipe: Recipe) -> bool:
        """Whether it carries just these bits over these processes: a -0.0 is no 0.0, a NaN itself."""
        over = (self.recipe.size, self.recipe.group) == (recipe.size, recipe.group)
        alike = [(f.shape, f.dtype) for f in flats] == [(f.shape, f.dtype) for f in self.flats]
        return over and alike and all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(flats, self.flats))

    def land(self) -> None:
        """Waits for it."""
        for arrived in self.gathered:
            _c10d.wait_tensor(arrived)


@dataclass(eq=False)
class Early:
    """Those of one model. number: later models have larger ones. first: how the first forward since the last step began, and with
    which rows; stepped: none did since."""

    number: int = field(default_factory=lambda: next(_numbers))
    recipes: list[Recipe] = field(default_factory=list)
    first: tuple[Recipe, list[Tensor]] | None = None
    stepped: bool = True
    flight: Flight | None = None

    def __post_init__(self) -> None:
        _known[self.name] = self

    def __del__(self) -> None:
        self.land()  # torch keeps what nobody waits for

    @property
    def name(self) -> str:
        """What graphs call it."""
        return f"early{self.number}"

    def learn(self, recipe: Recipe) -> int:
        """What a graph calls this recipe."""
        self.recipes.append(recipe)
        return len(self.recipes) - 1

    def start(self) -> None:
        """Sends the rows that the next forward will ask for, as far as one has shown which. A collective of all processes, to be
        called when an optimizer stepped."""
        _land_at_exit()
        self.land()
        self.stepped = True
        if self.first is not None:
            recipe, rows = self.first
            with torch.no_grad():
                self.flight = recipe.sent(_apart_from(rows, recipe.pack(*rows)))

    def take(self, rows: Sequence[Tensor], recipe: Recipe) -> list[Tensor]:
        """Where these rows of all processes will be: to be waited for."""
        if self.stepped:
            self.first, self.stepped = (recipe, [row.detach() for row in rows]), False
        flats, flight, self.flight = recipe.pack(*rows), self.flight, None
        same = flight is None or flight.is_of(flats, recipe)
        flight = flight or recipe.sent(flats)
        if recipe.all_agree(same, flats[0].device):
            return flight.gathered
        flight.land()
        return recipe.sent(flats).gathered

    def land(self) -> None:
        """Nothing is on its way any more."""
        if self.flight is not None:
            self.flight.land()
        self.flight = None


def _apart_from(rows: Sequence[Tensor], flats: Sequence[Tensor]) -> list[Tensor]:
    """Copies where these lie in the rows' own memory, which may be written to: then nobody could see that."""
    own = {row.untyped_storage().data_ptr() for row in rows}
    return [flat.clone() if flat.untyped_storage().data_ptr() in own else flat for flat in flats]


_known: weakref.WeakValueDictionary[str, Early] = weakref.WeakValueDictionary()


@functools.cache
def _land_at_exit() -> None:
    """Once there are process groups, so before these go."""
    atexit.register(_land_all)


def _land_all() -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # others may never send
    for early in list(_known.values()):
        with contextlib.suppress(RuntimeError):  # a process that is gone does not send any more: that too is an end
            early.land()


def run_gather_early(rows: Sequence[Tensor], model: str, recipe: int) -> list[Tensor]:
    """`Early.take` of the model of this name."""
    early = _known[model]
    return early.take(rows, early.recipes[recipe])


def _fake(rows: Sequence[Tensor], model: str, recipe: int) -> list[Tensor]:
    made = _known[model].recipes[recipe]
    return [flat.new_empty(flat.shape[0] * made.size) for flat in made.pack(*rows)]


GATHER_EARLY: Any = define("gather_early", "(Tensor[] rows, str model, int recipe) -> Tensor[]", run_gather_early, _fake)
