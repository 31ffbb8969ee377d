"""Waiting for other processes through the store: never in a collective, never for ever, never without a word.

[Note: Looks at the store] Who has waited longer looks less often, and so learns of it late by an eighth of what it waited, at most:
one thread serves the looks of 1,000 processes that wait for minutes. The store's own wait, which blocks, would end at once. But it keeps
the rest of the process out of this connection, which torch's threads may use too; and it must end now and then, to see whether others
still live, for which a TCPStore goes through all that wait: for each of 1,000, through 1,000.

[Note: Who asks] One thread asks for all; where it got no answer it is left alone, and another one takes its place. It is there from a
first question on, since at the end of an interpreter (Python 3.12 and later) none can be started, and processes wait for each other there.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.distributed as dist

from autoshard.errors import PeerLostError

PATIENCE = 5.0  # seconds after which those who wait say for whom
SHOWN = 16  # ranks that a text names; it counts the others
Answer: TypeAlias = "tuple[Any, BaseException | None]"  # what it is, or the error that there was
_SHORTEST, _LONGEST = 0.0005, 0.25  # seconds between looks at the store
_ASK = 0.5  # between questions whether it is in vain


def wait_until(
    ready: Callable[[], bool],
    timeout: float,
    late: Callable[[], None],
    failed: Callable[[], Exception],
    lost: Callable[[], Exception | None] = lambda: None,
) -> None:
    """Returns when `ready`; calls `late` once after a while, raises `failed()` after `timeout` seconds, or before that
    what `lost` gives, which is asked now and then. See [Note: Looks at the store]."""
    start, warned, asked = time.monotonic(), False, 0.0
    while not ready():
        waited = time.monotonic() - start
        if waited > timeout:
            raise failed()
        if waited - asked > _ASK:
            asked = waited
            if (error := lost()) is not None and not ready():  # which may have come, and ended, meanwhile
                raise error
        if waited > PATIENCE and not warned:
            warned = True
            late()
        time.sleep(min(max(waited / 8, _SHORTEST), _LONGEST))


@dataclass(frozen=True)
class Answering:
    """A store, whose answers are waited for so many seconds: a TCPStore waits for ever for a host that is stopped, or whose machine
    went without a word. PeerLostError then. See [Note: Who asks]."""

    store: Any
    seconds: float

    def __getattr__(self, name: str) -> Callable[..., Any]:
        ask = getattr(self.store, name)
        return lambda *given: self._answer(lambda: ask(*given))

    def _answer(self, ask: Callable[[], Any]) -> Any:
        asked, question = _asked(), _Question(ask)
        asked.put(question)
        try:
            found, error = question.answers.get(timeout=self.seconds)
        except queue.Empty:
            question.given_up = True
            if _askers.get(os.getpid()) is asked:
                _askers.pop(os.getpid(), None)  # another thread may have
            raise PeerLostError(
                f"the process that hosts the job's store (rank 0, most often) gave no answer for {self.seconds:g} s: it is stopped, or its "
                "machine is gone; look at its own log"
            ) from None
        if error is not None:
            raise error
        return found


@dataclass(eq=False)
class _Question:
    """given_up: nobody waits for the answer, so what was not asked by then is not."""

    ask: Callable[[], Any]
    answers: queue.SimpleQueue[Answer] = field(default_factory=queue.SimpleQueue)
    given_up: bool = False

    def answer(self) -> None:
        if self.given_up:
            return
        try:
            self.answers.put((self.ask(), None))
        except BaseException as error:  # raised where the answer is waited for
            self.answers.put((None, error))


_askers: dict[int, queue.SimpleQueue[_Question]] = {}  # by process, since a copy of one has no threads


def _asked() -> queue.SimpleQueue[_Question]:
    """What a thread of this process is to ask. See [Note: Who asks]."""
    if (there := _askers.get(os.getpid())) is not None:
        return there
    asked = queue.SimpleQueue[_Question]()

    def serve() -> None:
        while True:
            asked.get().answer()

    threading.Thread(target=serve, name="autoshard asks the store", daemon=True).start()
    return _askers.setdefault(os.getpid(), asked)


def asked_apart(ask: Callable[[], Any]) -> queue.SimpleQueue[Answer]:
    """Where the answer will be, once there is one: a thread of its own waits for it, for which the end of the process does not wait."""
    question = _Question(ask)
    threading.Thread(target=question.answer, name="autoshard asks apart", daemon=True).start()
    return question.answers


def missing(store: Any, ranks: Sequence[int]) -> list[int]:
    """Those of whom the store has no key: halves of them are asked for, since it tells only whether all are there."""
    if not ranks or store.check([str(r) for r in ranks]):
        return []
    middle = len(ranks) // 2
    return missing(store, ranks[:middle]) + missing(store, ranks[middle:]) if middle else list(ranks)


@contextmanager
def naming_lost_store(rank: int, what: str) -> Iterator[None]:
    """PeerLostError where the process that hosts the store is gone."""
    try:
        yield
    except dist.DistNetworkError as error:
        raise PeerLostError(
            f"rank {rank} came to {what} and lost the process that hosts the job's store (rank 0, most often); look at its "
            f"own log. ({error})"
        ) from error


def named(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 3, 5", or of very many "ranks 3, 5 and 90 more"."""
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:SHOWN])) + more
