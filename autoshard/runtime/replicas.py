"""Parameters that every process has whole, compared now and then.

[Note: Replicas] Such a parameter stays equal everywhere only as long as all processes step it with equal gradients. What
comes from outside of the graphs that reduce them (a loss that takes the embedding's weight by itself, a hook with a seed
of its own), or a checkpoint that one process alone loaded, lets them drift apart without a word. So before the steps
1, 2, 4, 8 and so on, which together cost next to nothing, all compare fingerprints through the store. Results of collectives are
the same bits everywhere; what a process computes from them may not be on another kind of processor, so only those of a kind are compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from autoshard.errors import DivergenceError
from autoshard.runtime.agreement import Statement
from autoshard.runtime.dtensors import local
from autoshard.runtime.fingerprint import fingerprints
from autoshard.runtime.meetings import Meetings


@dataclass(eq=False)
class Replicas:
    """Of one sharded model. kind: what arithmetic this process computes with."""

    meetings: Meetings
    kind: str
    _steps: int = field(default=0, init=False)

    def for_copy(self) -> Replicas:
        """Those of a copy of the model."""
        return Replicas(self.meetings.for_copy(), self.kind)

    def before_step(self, whole: Callable[[], Mapping[str, Tensor]]) -> None:
        """To be called before each step. whole: gives the parameters that are, by name. DivergenceError, on all processes,
        where one of them or its gradient differs."""
        self._steps += 1
        due = self._steps & (self._steps - 1) == 0
        if not due or not (parameters := whole()):
            return
        seen = _seen(parameters)
        statement = {"_kind": self.kind, "_seen": list(seen.values())}
        what = f"step {self._steps} of a sharded model"
        self.meetings.meet(what, statement, lambda said: self._compare(list(seen), said))

    def _compare(self, what: Sequence[str], statements: Sequence[Statement]) -> str:
        first: dict[str, tuple[int, list[int | None]]] = {}
        for rank, said in enumerate(statements):
            before, expected = first.setdefault(said["_kind"], (rank, said["_seen"]))
            for name, theirs, ours in zip(what, said["_seen"], expected, strict=True):
                if theirs != ours:
                    raise self._apart(name, rank, before)
        return ""

    def _apart(self, what: str, rank: int, before: int) -> DivergenceError:
        return DivergenceError(
            f"before step {self._steps}, {what} is not on rank {rank} what it is on rank {before}, and processes would "
            "silently drift apart. autoshard averages the gradients of what its compiled graphs compute: a loss that takes a "
            "parameter by itself must be computed in the compiled module, a hook that changes gradients must do so alike on "
            "all ranks, and values are loaded on all of them"
        )


def _seen(parameters: Mapping[str, Tensor]) -> dict[str, int | None]:
    """Checksums of all gradients, None where there is none, and of all parameters."""
    grads = {name: local(p.grad) for name, p in parameters.items() if p.grad is not None}
    marks = fingerprints([*grads.values(), *map(local, parameters.values())])
    checksums = [zlib.crc32(repr(mark).encode()) for mark in marks]
    of_grads = dict(zip(grads, checksums))
    found: dict[str, int | None] = {f"the gradient of {name!r}": of_grads.get(name) for name in parameters}
    return found | {f"parameter {name!r}": mark for name, mark in zip(parameters, checksums[len(grads) :])}
