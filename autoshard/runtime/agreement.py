"""A check that all processes came to the same point with the same thing, through the store, never a collective: to the
job, and to a model's first call.

Every process leaves a statement; rank 0 reads all of them, makes the plan and leaves a verdict. A process
that disagrees or does not come is named by every other one.

[Note: Many processes] One thread of one process serves the store of 1,000. So all ask for what rank 0 leaves, and only rank 0 for what
all others do. What must be equal is stated as a digest, since of a large model it is a megabyte, which rank 0 would read 1,000 times;
where digests differ, all come to a second agreement, in which the one that differs states the whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist

from autoshard import errors
from autoshard.errors import AutoshardError, DisagreementError
from autoshard.runtime.presence import Patience, Ranks
from autoshard.runtime.waiting import Answering, missing, naming_lost_store, wait_until

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
        """What rank 0 decided from all statements: its own, and of the others only what need not be equal, keys that start
        with "_"; the rest of theirs are digests.

        Raises DisagreementError on every process, naming rank and field; an error of `decide` is raised on
        all of them.
        """
        own = json.loads(json.dumps(statement))  # as others read it
        with naming_lost_store(self.rank, self.what):
            self._put(str(self.rank), json.dumps(_brief(own)))
            verdict = self._lead(own, decide) if self.rank == 0 else self._follow()
            self._said.delete_key(str(self.rank))  # rank 0 has read it
        return self._state_whole(own, *verdict["differs"]) if "differs" in verdict else str(verdict["plan"])

    def forget(self) -> None:
        """Takes out of the store what rank 0 said here, when no process will read it any more."""
        for name in ("verdict", "awaited"):
            self._said.delete_key(name)

    def _follow(self) -> dict[str, Any]:
        """Only rank 0 is watched, which watches the others. See [Note: Many processes]."""
        self._wait(["verdict"], self._awaited, lambda: [0])
        verdict: dict[str, Any] = self._get("verdict")
        if "error" in verdict:
            self._said.add("heard", 1)
            raise _error_of(verdict["kind"], verdict["error"], self.what)
        return verdict

    def _lead(self, own: Statement, decide: Callable[[list[Statement]], str]) -> dict[str, Any]:
        try:
            statements = self._collect()
            differs = _difference(statements)
            verdict: dict[str, Any] = {"differs": differs} if differs else {"plan": decide([own, *statements[1:]])}
        except Exception as error:
            self._put("verdict", json.dumps({"error": str(error), "kind": type(error).__name__}))
            self._wait_until_heard()
            raise
        self._put("verdict", json.dumps(verdict))
        return verdict

    def _state_whole(self, own: Statement, rank: int, field: str) -> str:
        """A second agreement, that ends with the error: this rank's `field` is not what rank 0's is."""

        def refuse(said: list[Statement]) -> str:
            theirs, ours = said[rank]["_whole"], own.get(field)
            raise DisagreementError(f"rank {rank} disagrees with rank 0 about {field}: {_at_difference(theirs, ours)}")

        statement = {"_whole": own.get(field)} if self.rank == rank else {}
        return replace(self, topic=f"{self.topic}.whole").reach(statement, refuse)

    def _wait_until_heard(self) -> None:
        """The process that hosts the store is about to end with an error, and would take the verdict with it."""
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: self._said.add("heard", 0) == self.size - 1, HEARD_SECONDS, late=lambda: None, failed=TimeoutError)

    def _collect(self) -> list[Statement]:
        names = [str(rank) for rank in range(self.size)]
        self._wait(names, self._missing, self._missing)
        self._put("awaited", "[0]")
        return [json.loads(zlib.decompress(said)) for said in self._said.multi_get(names)]

    @cached_property
    def _said(self) -> Any:
        """What this agreement keeps in the store."""
        return Answering(dist.PrefixStore(f"autoshard/{self.topic}", self.store), self.patience.timeout)  # type: ignore[attr-defined]

    def _missing(self) -> list[int]:
        """Those who left no statement; rank 0 if all did. It is left for the others, too."""
        ranks = missing(self._said, range(self.size)) or [0]
        self._put("awaited", json.dumps(ranks))
        return ranks

    def _awaited(self) -> list[int]:
        """Those for whom rank 0 waits; rank 0 itself before it says so, and once all came."""
        return self._get("awaited") if self._said.check(["awaited"]) else [0]

    def _wait(self, names: list[str], absent: Ranks, watched: Ranks) -> None:
        self.patience.wait(self.store, self.what, lambda: bool(self._said.check(names)), absent, watched)

    def _put(self, name: str, text: str) -> None:
        self._said.set(name, zlib.compress(text.encode()))

    def _get(self, name: str) -> Any:
        return json.loads(zlib.decompress(self._said.get(name)))


def _error_of(kind: str, said: str, what: str) -> Exception:
    """That of rank 0, as every other process raises it."""
    ours = getattr(errors, kind, None)
    return ours(said) if ours is not None else AutoshardError(f"rank 0 failed at {what}: {kind}: {said}")


def digest(value: Any) -> str:
    """Of what is the same as JSON, in whatever order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _brief(statement: Statement) -> Statement:
    return {field: value if field.startswith("_") else digest(value) for field, value in statement.items()}


def _difference(statements: list[Statement]) -> tuple[int, str] | None:
    """The first rank that differs from rank 0, and the field in which it does."""
    first = statements[0]
    for rank, other in enumerate(statements):
        for field in [*first, *(k for k in other if k not in first)]:
            if not field.startswith("_") and first.get(field) != other.get(field):
                return rank, field
    return None


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
