"""Agreements of all processes, one after the other, about one thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autoshard.runtime.agreement import Agreement, Statement
from autoshard.runtime.presence import Patience
from autoshard.runtime.processes import World

Decide = Callable[[list[Statement]], str]


@dataclass(eq=False)
class Meetings:
    """Of which the store keeps the last one. topic: the same on all processes and new for each of these; of a copy's from the
    first one on. original: those of the model that was copied.
    """

    world: World
    topic: str
    patience: Patience
    original: Meetings | None = None
    _copies: int = field(default=0, init=False)
    _number: int = field(default=0, init=False)
    _last: Agreement | None = field(default=None, init=False)

    def of(self, what: str) -> Meetings:
        """Others, about a part of that."""
        return Meetings(self.world, f"{self.topic}.{what}", self.patience)

    def for_copy(self) -> Meetings:
        """Those of a copy of the model. It has its number when it first meets, which all processes do; any of them may make others, for
        itself, before."""
        return Meetings(self.world, "", self.patience, self.original or self)

    def _topic_of_copy(self) -> str:
        self._copies += 1
        return f"{self.topic}.copy{self._copies}"

    def meet(self, what: str, statement: Statement, decide: Decide = lambda _: "") -> str:
        """Comes to `what` with a statement; gives and raises as `Agreement.reach`."""
        if self.original is not None and not self.topic:
            self.topic = self.original._topic_of_copy()
        self._number += 1
        here = self.world.agreement(f"{self.topic}.{self._number}", what, self.patience)
        decided = here.reach(statement, decide)
        if self.world.rank == 0 and self._last is not None:  # all are beyond it
            self._last.forget()
        self._last = here
        return decided
