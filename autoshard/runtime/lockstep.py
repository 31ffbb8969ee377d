"""Calls of a sharded model in lockstep: where they communicate, every process must make the same ones.

[Note: Lockstep] Collectives pair by their order alone. Where rank 0 evaluates by itself, or leaves another block out than
rank 1 does (layer drop with a seed for each process, a branch on inputs), what pairs does not belong together, and the
job hangs or, worse, does not. So each process foresees which call follows a call: the one that did the last time. A call that
was not foreseen, and each turn from training to evaluation and back, waits at the store until all have come to the same one.
What is foreseen is learned there alone, so all processes foresee the same: where two of them part, one at least does what
was not foreseen, and is told. A loop that goes on as before never waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from autoshard.errors import DisagreementError
from autoshard.runtime.agreement import Agreement
from autoshard.runtime.presence import Patience
from autoshard.runtime.processes import World
from autoshard.units import counted


@dataclass(frozen=True)
class Call:
    """What one call of a compiled graph communicates. holds: whether it keeps its gradients to itself. parameters: ids, in
    the order in which the graph takes them."""

    training: bool
    holds: bool
    parameters: tuple[int, ...]

    def described(self, names: dict[int, str]) -> str:
        """The same text on all processes that make the same call."""
        given = [names.get(each, "?") for each in self.parameters]
        mode = "training" if self.training else "evaluation"
        ends = given[0] if len(given) == 1 else f"{given[0]} to {given[-1]}"
        order = hashlib.sha256("\n".join(given).encode()).hexdigest()[:8]
        return f"{mode}{' inside no_sync' * self.holds} with {counted(len(given), 'parameter', 'parameters')} ({ends}; order {order})"


class Lockstep:
    """Of one sharded model; `topic` must be the same on all processes and new for each model."""

    def __init__(self, world: World, topic: str, patience: Patience) -> None:
        self._world, self._topic, self._patience = world, topic, patience
        self._last: Call | None = None
        self._follows: dict[Call | None, Call] = {}
        self._met: Agreement | None = None
        self._turns = 0

    def enter(self, call: Call, names: Callable[[], dict[int, str]]) -> None:
        """To be called before each call that communicates. names: of parameters, by id. DisagreementError if some process
        does not come, or comes to another call."""
        before, self._last = self._last, call
        foreseen = before is not None and before.training == call.training and self._follows.get(before) == call
        if not foreseen:
            self._meet(call.described(names()))
            self._follows[before] = call

    def for_copy(self, number: int) -> Lockstep:
        """That of the model's copy of this number."""
        return Lockstep(self._world, f"{self._topic}.{number}", self._patience)

    def _meet(self, what: str) -> None:
        self._turns += 1
        here = self._world.agreement(f"{self._topic}.turn{self._turns}", f"{what}, of a sharded model", self._patience)
        try:
            here.reach({"its call": what}, lambda _: "")
        except DisagreementError as error:
            raise DisagreementError(
                f"{error}. Every process must call a sharded model alike: as many batches, in the same mode, through the same "
                "blocks. What one process does alone goes inside `with autoshard.gathered(model)`, which all enter; layers "
                "that are left out, at random or by a branch, must be the same on all (one seed for that choice)"
            ) from error
        if self._world.rank == 0 and self._met is not None:  # all are beyond it
            self._met.forget()
        self._met = here
