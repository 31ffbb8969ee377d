"""Parameters that every process has whole, compared now and then.

[Note: Replicas] Such a parameter stays equal everywhere only as long as all processes step it with equal gradients. What
comes from outside of the graphs that reduce them (a loss that takes the embedding's weight by itself, a hook with a seed
of its own), or a checkpoint that one process alone loaded, lets them drift apart without a word. So before the steps
1, 2, 4, 8 and so on, which together cost next to nothing, all compare fingerprints through the store. Results of collectives are
the same bits everywhere; what a process computes from them may not be on another kind of processor, so only those of a kind are compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from autoshard.errors import DivergenceError
from autoshard.runtime.agreement import Statement
from autoshard.runtime.dtensors import local
from autoshard.runtime.fingerprint import fingerprints
from autoshard.runtime.presence import Patience
from autoshard.runtime.processes import World

Seen = dict[str, int]


@dataclass(eq=False)
class Replicas:
    """Of one sharded model; `topic` must be the same on all processes and new for each model. kind: what arithmetic this
    process computes with."""

    world: World
    topic: str
    kind: str
    patience: Patience
    _steps: int = field(default=0, init=False)

    def for_copy(self, number: int) -> Replicas:
        """Those of the model's copy of this number."""
        return Replicas(self.world, f"{self.topic}.{number}", self.kind, self.patience)

    def before_step(self, parameters: Mapping[str, Tensor]) -> None:
        """To be called before each step. parameters: those that are whole, by name. DivergenceError, on all processes, where
        one of them or its gradient differs."""
        self._steps += 1
        if self._steps & (self._steps - 1):
            return
        here = self.world.agreement(f"{self.topic}.step{self._steps}", f"step {self._steps} of a sharded model", self.patience)
        here.reach({"_kind": self.kind, "_seen": _seen(parameters)}, self._compare)

    def _compare(self, statements: list[Statement]) -> str:
        first: dict[str, tuple[int, Seen]] = {}
        for rank, said in enumerate(statements):
            before, expected = first.setdefault(said["_kind"], (rank, said["_seen"]))
            for what in expected | said["_seen"]:
                if expected.get(what) != said["_seen"].get(what):
                    raise self._apart(what, rank, before)
        return ""

    def _apart(self, what: str, rank: int, before: int) -> DivergenceError:
        return DivergenceError(
            f"before step {self._steps}, {what} is not on rank {rank} what it is on rank {before}, and processes would "
            "silently drift apart. autoshard averages the gradients of what its compiled graphs compute: a loss that takes a "
            "parameter by itself must be computed in the compiled module, a hook that changes gradients must do so alike on "
            "all ranks, and values are loaded on all of them"
        )


def _seen(parameters: Mapping[str, Tensor]) -> Seen:
    """Of each parameter and each gradient, a checksum."""
    tensors = {f"the gradient of {name!r}": local(p.grad) for name, p in parameters.items() if p.grad is not None}
    tensors |= {f"parameter {name!r}": local(p) for name, p in parameters.items()}
    marks = fingerprints(list(tensors.values()))
    return {what: zlib.crc32(repr(mark).encode()) for what, mark in zip(tensors, marks)}
