"""A check that all processes came to the same point with the same thing, through the store, never a collective: to the
job, and to a model's first call.

Every process leaves a statement; rank 0 reads all of them, makes the plan and leaves a verdict. A process
that disagrees or does not come is named by every other one.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist

from autoshard import errors
from autoshard.errors import AutoshardError, DisagreementError
from autoshard.runtime.presence import Patience, Ranks
from autoshard.runtime.waiting import missing, naming_lost_store, wait_until

HEARD_SECONDS = 1.0  # which a process that hears of an error has to say so
Statement = dict[str, Any]


@dataclass(frozen=True)
class Agreement:
    """One agreement of `size` processes, of which this one is `rank`. topic: the same on all of them and new for each.
    what: they come to, in words."""

    store: Any
    rank: int
    size: int
    topic: str
    what: str
    patience: Patience

    def reach(self, statement: Statement, decide: Callable[[list[Statement]], str]) -> str:
        """What rank 0 decided from all statements. Keys that start with "_" need not be equal.

        Raises DisagreementError on every process, naming rank and field; an error of `decide` is raised on
        all of them.
        """
        with naming_lost_store(self.rank, self.what):
            self._put(str(self.rank), json.dumps(statement))
            return self._lead(decide) if self.rank == 0 else self._follow()

    def forget(self) -> None:
        """Takes out of the store what was said here, when no process will read it any more."""
        for name in (*map(str, range(self.size)), "verdict"):
            self._said.delete_key(name)

    def _follow(self) -> str:
        """Only rank 0 is watched, which watches the others: so a store of 1,000 processes has little to do."""
        self._wait(["verdict"], lambda: [0])
        verdict = self._get("verdict")
        if "error" in verdict:
            self._said.set(f"heard {self.rank}", "")
            raise getattr(errors, verdict["kind"], AutoshardError)(verdict["error"])
        return str(verdict["plan"])

    def _lead(self, decide: Callable[[list[Statement]], str]) -> str:
        try:
            statements = self._collect()
            _compare(statements)
            plan = decide(statements)
        except Exception as error:
            self._put("verdict", json.dumps({"error": str(error), "kind": type(error).__name__}))
            self._wait_until_heard()
            raise
        self._put("verdict", json.dumps({"plan": plan}))
        return plan

    def _wait_until_heard(self) -> None:
        """The process that hosts the store is about to end with an error, and would take the verdict with it."""
        others = [f"heard {rank}" for rank in range(1, self.size)]
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: bool(self._said.check(others)), HEARD_SECONDS, late=lambda: None, failed=TimeoutError)

    def _collect(self) -> list[Statement]:
        names = [str(rank) for rank in range(self.size)]
        self._wait(names, self._missing)
        return [json.loads(zlib.decompress(said)) for said in self._said.multi_get(names)]

    @cached_property
    def _said(self) -> Any:
        """What this agreement keeps in the store."""
        return dist.PrefixStore(f"autoshard/{self.topic}", self.store)  # type: ignore[attr-defined]

    def _missing(self) -> list[int]:
        """Those who left no statement; rank 0 if all did."""
        return missing(self._said, range(self.size)) or [0]

    def _wait(self, names: list[str], watched: Ranks) -> None:
        self.patience.wait(self.store, self.what, lambda: bool(self._said.check(names)), self._missing, watched)

    def _put(self, name: str, text: str) -> None:
        self._said.set(name, zlib.compress(text.encode()))

    def _get(self, name: str) -> Any:
        return json.loads(zlib.decompress(self._said.get(name)))


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
