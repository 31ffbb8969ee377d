"""Training and evaluation in lockstep: where calls of a model communicate, every process must make them.

[Note: Evaluation on some processes] When rank 0 alone evaluates a sharded model, its gathers meet those of the
others' next training step, and what follows hangs or, worse, does not. So the very first call, the first one without
gradients after one with, and the other way round, wait at the store until all processes have come to the same point.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from autoshard import torch_internals
from autoshard.errors import DisagreementError
from autoshard.runtime.processes import World
from autoshard.runtime.waiting import missing, named, naming_lost_store, wait_until


class Lockstep:
    """One for each sharded model; `topic` must be the same on all processes and new for each model."""

    def __init__(self, world: World, topic: str, timeout: float, warn: Callable[[str], None]) -> None:
        self._world, self._topic, self._timeout, self._warn = world, topic, timeout, warn
        self._training: bool | None = None
        self._turns, self._copies = itertools.count(), itertools.count()

    def enter(self, training: bool) -> None:
        """To be called before each call that communicates. DisagreementError if some process does not come."""
        before, self._training = self._training, training
        if before is not training:
            self._meet("training" if training else "evaluation")

    def for_copy(self) -> Lockstep:
        """That of a copy of the model."""
        return Lockstep(self._world, f"{self._topic}.{next(self._copies)}", self._timeout, self._warn)

    def _meet(self, what: str) -> None:
        store = torch_internals.job_store(f"autoshard/{self._topic}/turn{next(self._turns)}")
        store.set(str(self._world.rank), what)
        with naming_lost_store(self._world.rank, what):
            self._wait(store, what)
            self._compare(store, what)

    def _wait(self, store: Any, what: str) -> None:
        ranks = range(self._world.size)
        wait_until(
            lambda: bool(store.check([str(r) for r in ranks])),
            self._timeout,
            lambda: self._warn(f"rank {self._world.rank} waits for {named(missing(store, ranks))} to come to {what}"),
            lambda: self._apart(what, f"{named(missing(store, ranks))} did not within {self._timeout:g} s"),
        )

    def _compare(self, store: Any, what: str) -> None:
        answers = store.multi_get([str(rank) for rank in range(self._world.size)])
        for rank, answer in enumerate(answers):
            if answer.decode() != what:
                raise self._apart(what, f"rank {rank} came to {answer.decode()}")

    def _apart(self, what: str, but: str) -> DisagreementError:
        return DisagreementError(
            f"rank {self._world.rank} came to {what} of a sharded model, and {but}. Every process must call it, with as "
            "many batches; what one process does alone goes inside `with autoshard.gathered(model)`, which all enter"
        )
