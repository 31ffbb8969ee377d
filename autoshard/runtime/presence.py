"""Signs of life, by which those who wait at the first call tell a process that is slow from one that is not there.

[Note: Signs of life] From the making of a backend until its first call is over, a thread of each process writes every
second where the main thread stands: to the launcher's store and, once there is a process group, to that one's. Who gives
no sign for `Config.arrival` seconds is not waited for any longer; who does has until `Config.timeout`: it may be reading
data. So has who is seen to live, on the same machine: in one call of C that keeps Python's lock, as `json.loads` of a large file does,
no thread can give signs. The thread is no daemon, which the interpreter could end in the middle of C++, but ends with the main thread;
its last sign is one of nobody who lives.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autoshard import torch_internals
from autoshard.errors import DisagreementError
from autoshard.runtime import launched, living
from autoshard.runtime.waiting import SHOWN, Answer, Answering, asked_apart, missing, named, wait_until

Ranks = Callable[[], list[int]]
INTERVAL = 1.0  # seconds between signs
_LOOK = 0.1  # between looks at whether it is over: how much later a process may end for it
_CONNECT = 2.0  # seconds to reach a store that is there


class SignsOfLife:
    """This process's own, until `end` or until nobody holds it."""

    def __init__(self) -> None:
        _giver.begin()
        self.end = weakref.finalize(self, _giver.end)


class _Giver:
    """The thread, one for all backends of this process that had no first call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector of garbage may end one where another begins
        self._count, self._over = 0, threading.Event()
        self._over.set()

    def begin(self) -> None:
        with self._lock:
            self._count += 1
            if not self._over.is_set():
                return
            over = self._over = threading.Event()
        # Not in the lock, which the collector of garbage may want in the new thread, for which `start` waits.
        threading.Thread(target=_give, args=(over,), name="autoshard signs of life").start()

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._over.set()


_giver = _Giver()


@dataclass(frozen=True)
class Patience:
    """How long others are waited for. timeout: at most. arrival: those who give no sign of life; None where nobody
    does."""

    timeout: float
    arrival: float | None
    warn: Callable[[str], None]

    def wait(self, store: Any, what: str, ready: Callable[[], bool], absent: Ranks, watched: Ranks) -> None:
        """Until `ready`. DisagreementError, naming the ranks that are `absent`, if those do not come to `what`, or if a
        `watched` one gives no sign of life in the store."""
        watch = _Watch(store, self.arrival, self.timeout)

        def late() -> None:
            ranks = absent()
            self.warn(f"waiting for {named(ranks)} at {what}{watch.places(ranks)}")

        def failed() -> DisagreementError:
            ranks = absent()
            return DisagreementError(
                f"{named(ranks)} did not come to {what} within {self.timeout:g} s{watch.places(ranks)}; every process "
                "must, with Config(timeout=...) long enough; of one that ended its own log says why"
            )

        wait_until(ready, self.timeout, late, failed, lambda: watch.missed(watched(), what))

    def wait_for_store(self) -> Any:
        """The launcher's store. DisagreementError if nothing listens there: rank 0's thread would, or torchrun."""
        limit, line = min(self.timeout, self.arrival or self.timeout), _Line(lambda: True, lambda: launcher_store(host=hosts()))
        wait_until(
            lambda: line.store() is not None,
            limit,
            lambda: self.warn("waiting for rank 0 at the job"),
            lambda: _no_store(limit),
        )
        return line.store()


def _no_store(seconds: float) -> DisagreementError:
    """None was found for so long."""
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} (MASTER_ADDR, MASTER_PORT)"
    if hosts():
        return DisagreementError(f"for {seconds:g} s rank 0 could not listen at {place}: does another job, which took that port?")
    return DisagreementError(
        f"rank 0 did not come to the job: for {seconds:g} s nothing answered at {place}. If it only starts that late, Config(arrival=...) "
        "gives it longer"
    )


class _Watch:
    """Who of the others gives signs, and when the last one was new."""

    def __init__(self, store: Any, limit: float | None, timeout: float) -> None:
        self._signs, self._limit, self._start = Answering(_signs(store), timeout), limit, time.monotonic()
        self._heard: dict[int, tuple[str, float]] = {}
        self._processes = Answering(processes_of(store), timeout)
        self._marks: dict[int, str] | None = None
        self._lived = set[int]()  # a sign may be one of before a restart; what all said in their group is not

    def missed(self, ranks: Sequence[int], what: str) -> DisagreementError | None:
        """The error that names those who gave no sign for too long, or ended, as far as can be seen from here."""
        marks = self._marks_of(ranks)
        self._lived |= {r for r in ranks if self._limit is None or living.lives(marks.get(r, ""))}
        if ended := [r for r in ranks if r in self._lived and living.has_ended(marks.get(r, ""))]:
            own = "its" if len(ended) == 1 else "their"
            return DisagreementError(f"{named(ended)} did not come to {what}, and ended: {own} own log says why")
        if self._limit is None:
            return None
        now, never = time.monotonic(), ("", self._start)
        silent = [r for r in ranks if now - self._heard.get(r, never)[1] > self._limit and not living.lives(marks.get(r, ""))]
        if not silent:
            return None
        return DisagreementError(
            f"{named(silent)} did not come to {what}, and gave no sign of life for {self._limit:g} s{self.places(silent)}: "
            "look at its own log. If it only starts that late, Config(arrival=...) gives it longer"
        )

    def _marks_of(self, ranks: Sequence[int]) -> dict[int, str]:
        """Which processes they are: by their last signs, or, where nobody gives any, by what all said in their group, which is asked once."""
        if self._limit is not None:
            self._listen(ranks)
            return {r: sign.split(" ")[0] for r, (sign, _) in self._heard.items()}
        if self._marks is None:
            self._marks = {r: mark.decode() for r, mark in _found(self._processes, ranks)}
        return self._marks

    def places(self, ranks: Sequence[int]) -> str:
        """ " (rank 3 is at train.py:12 in load)": of those that are named and give signs."""
        if self._limit is None:
            return ""
        shown = ranks[:SHOWN]
        self._listen(shown)
        known = [f"rank {r} is at {self._heard[r][0].split(' ', 2)[2]}" for r in shown if r in self._heard]
        return f" ({', '.join(known)})" if known else ""

    def _listen(self, ranks: Sequence[int]) -> None:
        for rank, sign in _found(self._signs, ranks):
            if rank not in self._heard or self._heard[rank][0] != sign.decode():
                self._heard[rank] = sign.decode(), time.monotonic()


def _found(store: Any, ranks: Sequence[int]) -> list[tuple[int, bytes]]:
    """What these left in a store, under their numbers."""
    silent = set(missing(store, ranks))
    there = [r for r in ranks if r not in silent]
    return list(zip(there, store.multi_get([str(r) for r in there]))) if there else []


def say_who(store: Any, rank: int) -> None:
    """Which process this rank is, by which others on its machine see whether it has ended."""
    processes_of(store).set(str(rank), living.mark())


def hosts() -> bool:
    """Whether this process hosts the launcher's store: rank 0, unless torchrun does."""
    return os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def launcher_store(host: bool) -> Any | None:
    """A connection to the store that a launcher's variables name, for this attempt of its; None where there is none, or not yet."""
    address, port = os.environ.get("MASTER_ADDR", ""), launched.said("MASTER_PORT")
    if not address or not port or not (host or _listens(address, port)):
        return None
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            is_master=host,
            timeout=timedelta(seconds=_CONNECT),
            wait_for_workers=False,
            multi_tenant=True,  # the process group will share it
        )
        return of_this_attempt(store)
    except (dist.DistNetworkError, dist.DistStoreError):
        return None


def of_this_attempt(store: Any) -> Any:
    """What this attempt of a launcher keeps in a store: torchrun's may outlive a restart, and what an earlier attempt said would be read
    as if this one had."""
    return dist.PrefixStore(f"attempt{launched.attempt()}", store)  # type: ignore[attr-defined]


def job_store(prefix: str) -> Any:
    """The process group's store for this attempt, keys under `prefix`; the user may have made the group."""
    return of_this_attempt(torch_internals.job_store(prefix))


def _listens(address: str, port: int) -> bool:
    """Asked first, since torch's client complains in the log of each attempt."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT).close()
    except OSError:
        return False
    return True


def processes_of(store: Any) -> Any:
    """What processes said that they are, by rank."""
    return dist.PrefixStore("autoshard/process", store)  # type: ignore[attr-defined]


def _signs(store: Any) -> Any:
    """Those in a store, by rank."""
    return dist.PrefixStore("autoshard/alive", store)  # type: ignore[attr-defined]


def _give(over: threading.Event) -> None:
    """The thread."""
    main, written, mark = threading.main_thread(), 0.0, living.mark()
    lines = _Line(lambda: "RANK" in os.environ, _to_the_launcher), _Line(dist.is_initialized, _to_the_group)
    while not over.is_set() and main.is_alive():
        if time.monotonic() - written > INTERVAL:
            written = time.monotonic()
            for line in lines:
                _write(line.store(), f"{mark} {time.time()} {_where(main)}")
        time.sleep(_LOOK)  # not in the event, whose lock its end may want, which the collector of garbage calls in any thread
    for line in lines:
        _write(line.there, f" {time.time()} {_where(main)}")  # without the mark: it may live on, and never come


class _Line:
    """A connection to a store. Another thread makes it, for which nobody waits: where the host of a store is gone torch tries for as long
    as that store's timeout, and for ever where it is stopped."""

    def __init__(self, sensible: Callable[[], bool], make: Callable[[], Any | None]) -> None:
        self._sensible, self._make = sensible, make
        self._coming: queue.SimpleQueue[Answer] | None = None
        self.there: Any | None = None  # the store, once there is a connection

    def store(self) -> Any | None:
        """None where there is none yet. Raises what the making of it raised."""
        if self._coming is None and self.there is None and self._sensible():
            self._coming = asked_apart(self._make)
        if self._coming is not None:
            with contextlib.suppress(queue.Empty):
                (self.there, error), self._coming = self._coming.get(timeout=_LOOK), None
                if error is not None:
                    raise error
        return self.there


def _to_the_launcher() -> Any | None:
    return launcher_store(host=hosts() and not dist.is_initialized())


def _to_the_group() -> Any | None:
    """One of its own, since who waits in one keeps others out; the same where the store has no such thing."""
    try:
        store = job_store("")
    except ValueError:  # the group ended meanwhile
        return None
    try:
        return store.clone() if _is_there(store) else None
    except RuntimeError:
        return store


def _is_there(store: Any) -> bool:
    """Whether the host of a store answers: where it is gone torch would try on and on, and end in the middle of the process's own end,
    which it aborts."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return not isinstance(store, dist.TCPStore) or _listens(store.host, store.port)  # type: ignore[attr-defined]


def _write(store: Any | None, sign: str) -> None:
    rank = dist.get_rank() if dist.is_initialized() else launched.said("RANK") or 0
    try:
        if store is not None:
            _signs(store).set(str(rank), sign)
    except (dist.DistNetworkError, dist.DistStoreError):
        return  # its host is gone, which the main thread will say, where it matters


def _where(thread: threading.Thread) -> str:
    """The innermost line of a thread that is in a file, and not in an installed package."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    own = [f for f in stack if "site-packages" not in f.filename and not f.filename.startswith("<")]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else "an unknown place"
