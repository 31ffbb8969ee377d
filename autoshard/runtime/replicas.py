"""Parameters that every process has whole, and what optimizers step by, compared now and then.

[Note: Replicas] A parameter that is whole stays equal everywhere only as long as all processes step it with equal gradients. What
comes from outside of the graphs that reduce them (a loss that takes the embedding's weight by itself, a hook with a seed
of its own), or a checkpoint that one process alone loaded, lets them drift apart without a word. So does a rate of its own, from a
schedule that looks at its own loss, and of rows nothing shows it. So before the steps 1, 2, 4, 8 and so on, which together cost next
to nothing, all compare a digest of fingerprints, and what the optimizer steps by, through the store. Results of collectives are the
same bits everywhere; what a process computes from them may not be on another kind of processor, so only those of a kind are compared,
and rates but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from autoshard.errors import DivergenceError
from autoshard.runtime.agreement import Statement, digest
from autoshard.runtime.dtensors import local
from autoshard.runtime.fingerprint import checksums
from autoshard.runtime.meetings import Meetings

Options = dict[str, Any]  # numbers, words and lists of them, by what they are called


@dataclass(eq=False)
class Replicas:
    """Of one sharded model. kind: what arithmetic this process computes with."""

    meetings: Meetings
    kind: str
    _steps: int = field(default=0, init=False)

    def for_copy(self) -> Replicas:
        """Those of a copy of the model."""
        return Replicas(self.meetings.for_copy(), self.kind)

    def before_step(self, whole: Callable[[], Mapping[str, Tensor]], options: Callable[[], Options]) -> None:
        """To be called before each step. whole: gives the parameters that are, by name; options: what the optimizer steps by.
        DivergenceError, on all processes, where one of these or a gradient differs."""
        self._steps += 1
        if self._steps & (self._steps - 1) != 0:
            return
        seen, what = _seen(whole()), f"step {self._steps} of a sharded model"
        statement = {"_kind": self.kind, "_seen": digest(list(seen.values())), "_options": options()}
        apart = self.meetings.meet(what, statement, self._compare)
        if apart:
            self._refuse(what, seen, *map(int, apart.split()))

    def _compare(self, statements: Sequence[Statement]) -> str:
        """ "3 1", where rank 3 has seen something else than rank 1, the first of its kind; "" where all of a kind saw the same."""
        first: dict[str, tuple[int, str]] = {}
        for rank, said in enumerate(statements):
            self._compare_options(rank, said["_options"], statements[0]["_options"])
            before, expected = first.setdefault(said["_kind"], (rank, said["_seen"]))
            if said["_seen"] != expected:
                return f"{rank} {before}"
        return ""

    def _compare_options(self, rank: int, theirs: Options, ours: Options) -> None:
        for name in [*ours, *theirs]:
            if not _alike(theirs.get(name), ours.get(name)):
                theirs_is, ours_is = (repr(options[name]) if name in options else "not there" for options in (theirs, ours))
                raise DivergenceError(
                    f"before step {self._steps}, {name} is {theirs_is} on rank {rank} and {ours_is} on rank 0, and "
                    "processes would silently drift apart. All of them must step alike; a schedule that looks at a loss must look at "
                    "its mean over all processes"
                )

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


def _alike(one: Any, other: Any) -> bool:
    """But for rounding: a cosine is not the same in the last digit everywhere."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _seen(parameters: Mapping[str, Tensor]) -> dict[str, int | None]:
    """Checksums of all gradients, None where there is none, and of all parameters."""
    grads = {name: local(p.grad) for name, p in parameters.items() if p.grad is not None}
    marks = checksums([*grads.values(), *map(local, parameters.values())])
    of_grads = dict(zip(grads, marks))
    found: dict[str, int | None] = {f"the gradient of {name!r}": of_grads.get(name) for name in parameters}
    return found | {f"parameter {name!r}": mark for name, mark in zip(parameters, marks[len(grads) :])}
