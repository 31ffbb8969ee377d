"""Parameters that every process has whole, compared now and then.

[Note: Replicas] Such a parameter stays equal everywhere only as long as all processes step it with equal gradients. What
comes from outside of the graphs that reduce them (a loss that takes the embedding's weight by itself, a hook with a seed
of its own), or a checkpoint that one process alone loaded, lets them drift apart without a word. So before the steps
1, 2, 4, 8 and so on, which together cost next to nothing, all compare a digest of fingerprints through the store. Results of
collectives are the same bits everywhere; what a process computes from them may not be on another kind of processor, so only those of a
kind are compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from autoshard.errors import DivergenceError
from autoshard.runtime.agreement import Statement, digest
from autoshard.runtime.dtensors import local
from autoshard.runtime.fingerprint import fingerprints
from autoshard.runtime.meetings import Meetings


@dataclass(eq=False)
class Replicas:
    """Of one sharded model. kind: what arithmetic this process computes with."""

    meetings: Meetings
    kind: str
    _steps: int = field(default=0, init=False)

    def for_copy(self, number: int) -> Replicas:
        """Those of the model's copy of this number."""
        return Replicas(self.meetings.of(f"copy{number}"), self.kind)

    def before_step(self, whole: Callable[[], Mapping[str, Tensor]]) -> None:
        """To be called before each step. whole: gives the parameters that are, by name. DivergenceError, on all processes,
        where one of them or its gradient differs."""
        self._steps += 1
        due = self._steps & (self._steps - 1) == 0
        if not due or not (parameters := whole()):
            return
        seen, what = _seen(parameters), f"step {self._steps} of a sharded model"
        apart = self.meetings.meet(what, {"_kind": self.kind, "_seen": digest(list(seen.values()))}, _apart)
        if apart:
            self._refuse(what, seen, *map(int, apart.split()))

    def _refuse(self, what: str, seen: Mapping[str, int | None], rank: int, before: int) -> None:
        """A second meeting, that ends with the error: only these two state all that they have seen."""

        def refuse(said: list[Statement]) -> str:
            pairs = zip(seen, said[rank]["_seen"], said[before]["_seen"], strict=True)
            raise self._error(next(name for name, theirs, ours in pairs if theirs != ours), rank, before)

        self.meetings.meet(what, {"_seen": list(seen.values())} if self.meetings.world.rank in (rank, before) else {}, refuse)

    def _error(self, what: str, rank: int, before: int) -> DivergenceError:
        return DivergenceError(
            f"before step {self._steps}, {what} is not on rank {rank} what it is on rank {before}, and processes would "
            "silently drift apart. autoshard averages the gradients of what its compiled graphs compute: a loss that takes a "
            "parameter by itself must be computed in the compiled module, a hook that changes gradients must do so alike on "
            "all ranks, and values are loaded on all of them"
        )


def _apart(statements: Sequence[Statement]) -> str:
    """ "3 1", where rank 3 has seen something else than rank 1, the first of its kind; "" where all of a kind saw the same."""
    first: dict[str, tuple[int, str]] = {}
    for rank, said in enumerate(statements):
        before, expected = first.setdefault(said["_kind"], (rank, said["_seen"]))
        if said["_seen"] != expected:
            return f"{rank} {before}"
    return ""


def _seen(parameters: Mapping[str, Tensor]) -> dict[str, int | None]:
    """Checksums of all gradients, None where there is none, and of all parameters."""
    grads = {name: local(p.grad) for name, p in parameters.items() if p.grad is not None}
    marks = fingerprints([*grads.values(), *map(local, parameters.values())])
    checksums = [zlib.crc32(repr(mark).encode()) for mark in marks]
    of_grads = dict(zip(grads, checksums))
    found: dict[str, int | None] = {f"the gradient of {name!r}": of_grads.get(name) for name in parameters}
    return found | {f"parameter {name!r}": mark for name, mark in zip(parameters, checksums[len(grads) :])}
