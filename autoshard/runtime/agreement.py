"""The first call's check that all processes came with the same thing, through the store, never a collective.

Every process leaves a statement; rank 0 reads all of them, makes the plan and leaves a verdict. A process
that disagrees or does not come is named by every other one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from autoshard import errors, torch_internals
from autoshard.errors import AutoshardError, DisagreementError
from autoshard.runtime.processes import World
from autoshard.runtime.waiting import missing, wait_until

Statement = dict[str, Any]


class Agreement:
    """One agreement; `topic` must be the same on all processes and new for each."""

    def __init__(self, world: World, topic: str, timeout: float, warn: Callable[[str], None]) -> None:
        self._store = torch_internals.job_store(f"autoshard/{topic}")
        self._world, self._timeout, self._warn = world, timeout, warn

    def reach(self, statement: Statement, decide: Callable[[list[Statement]], str]) -> str:
        """What rank 0 decided from all statements. Keys that start with "_" need not be equal.

        Raises DisagreementError on every process, naming rank and field; an error of `decide` is raised on
        all of them.
        """
        rank = self._world.rank
        self._put(str(rank), json.dumps(statement))
        if rank == 0:
            return self._lead(decide)
        verdict = json.loads(self._wait("verdict", [0]))
        if "error" in verdict:
            raise getattr(errors, verdict["kind"], AutoshardError)(verdict["error"])
        return str(verdict["plan"])

    def _lead(self, decide: Callable[[list[Statement]], str]) -> str:
        try:
            statements = self._collect()
            _compare(statements)
            plan = decide(statements)
        except Exception as error:
            self._put("verdict", json.dumps({"error": str(error), "kind": type(error).__name__}))
            raise
        self._put("verdict", json.dumps({"plan": plan}))
        return plan

    def _collect(self) -> list[Statement]:
        ranks = range(self._world.size)
        texts = {r: self._wait(str(r), list(ranks)) for r in ranks}
        return [json.loads(texts[r]) for r in ranks]

    def _put(self, key: str, text: str) -> None:
        self._store.set(key, zlib.compress(text.encode()))

    def _wait(self, key: str, ranks: list[int]) -> str:
        wait_until(
            lambda: bool(self._store.check([key])),
            self._timeout,
            lambda: self._warn(f"waiting for {missing(self._store, ranks, [0])} at the first call of this model"),
            lambda: DisagreementError(
                f"{missing(self._store, ranks, [0])} did not come to the first call of this model within "
                f"{self._timeout:g} s; every process must call it, with Config(timeout=...) long enough"
            ),
        )
        self._store.wait([key], timedelta(seconds=self._timeout))
        return zlib.decompress(self._store.get(key)).decode()


def _compare(statements: list[Statement]) -> None:
    first = statements[0]
    for rank, other in enumerate(statements):
        for field in [*first, *(k for k in other if k not in first)]:
            if not field.startswith("_") and first.get(field) != other.get(field):
                raise DisagreementError(
                    f"rank {rank} disagrees with rank 0 about {field}: "
                    f"{_at_difference(other.get(field), first.get(field))}"
                )


def _at_difference(theirs: Any, ours: Any) -> str:
    """What differs, down to the first entry of a list or dict that does."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in [*ours, *(k for k in theirs if k not in ours)]:
            if theirs.get(key) != ours.get(key):
                return f"{key}: {_at_difference(theirs.get(key), ours.get(key))}"
    if isinstance(theirs, list) and isinstance(ours, list):
        for a, b in zip(theirs, ours):
            if a != b:
                return _at_difference(a, b)
        return f"{len(theirs)} entries where rank 0 has {len(ours)}"
    return f"{theirs!r} where rank 0 has {ours!r}"
