"""Agreements of many processes, which are threads here: what is said, and what each of them asks of the store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from autoshard.errors import AutoshardError, DisagreementError, PeerLostError
from autoshard.runtime import processes, waiting
from autoshard.runtime.agreement import Agreement, Statement
from autoshard.runtime.presence import Patience
from autoshard.runtime.waiting import Answering, named, wait_until
from tests.small import what_is_said

MANY = {f"layers.{i}.weight": [[i, 16], "torch.float32", True] for i in range(5000)}


class Counting(dist.Store):
    """One process's connection to the store of all. asked: the name, the keys and the bytes of each request."""

    def __init__(self, shared: dist.HashStore) -> None:
        super().__init__()
        self.shared = shared
        self.asked: list[tuple[str, list[str], int]] = []

    def set(self, key: str, value: bytes) -> None:
        self.asked.append(("set", [key], len(value)))
        self.shared.set(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = [self.shared.get(key) for key in keys]
        self.asked.append(("get", keys, sum(map(len, found))))
        return found

    def add(self, key: str, value: int) -> int:
        self.asked.append(("add", [key], 8))
        return self.shared.add(key, value)

    def check(self, keys: list[str]) -> bool:
        self.asked.append(("check", keys, 0))
        return self.shared.check(keys)

    def deleteKey(self, key: str) -> bool:  # as torch calls it
        self.asked.append(("delete", [key], 0))
        return self.shared.delete_key(key)

    def names(self) -> set[str]:
        """Of all keys that were asked for, in the agreement."""
        return {key.removeprefix("autoshard/here/") for _, keys, _ in self.asked for key in keys}

    def bytes_of(self, request: str) -> int:
        """That went through all requests of this name."""
        return sum(size for name, _, size in self.asked if name == request)

    def times(self, request: str) -> int:
        """How many requests of this name there were."""
        return sum(name == request for name, _, _ in self.asked)


def agreement(store: Any, rank: int, size: int, timeout: float = 30.0, warn: Callable[[str], None] = print) -> Agreement:
    return Agreement(store, rank, size, "here", "the test", Patience(timeout, None, warn))


def together(stores: Sequence[Counting], run: Callable[[int], Any]) -> list[Any]:
    """What `run` gives of each process that comes, or raises."""

    def one(rank: int) -> Any:
        try:
            return run(rank)
        except AutoshardError as error:
            return error

    with ThreadPoolExecutor(len(stores)) as threads:
        return list(threads.map(one, range(len(stores))))


def connections(count: int) -> list[Counting]:
    shared = dist.HashStore()
    return [Counting(shared) for _ in range(count)]


def test_only_rank_0_looks_for_who_is_missing_and_all_name_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE", 1.5)
    warned: list[str] = []
    stores = connections(20)
    said = together(stores, lambda rank: agreement(stores[rank], rank, 40, 3.0, warned.append).reach({}, lambda _: ""))
    missing = f"{named(range(20, 40))} "
    assert all(isinstance(e, DisagreementError) and str(e).startswith(f"{missing}did not come to the test within 3 s") for e in said), said
    assert warned == [f"waiting for {missing}at the test"] * 20
    for rank, store in enumerate(stores[1:], 1):
        assert store.names() <= {str(rank), "verdict", "awaited", "heard", "autoshard/process/0"}
        assert sum("autoshard/here/awaited" in keys for _, keys, _ in store.asked) <= 4  # two texts


def test_once_all_came_rank_0_is_waited_for() -> None:
    stores = connections(3)

    def run(rank: int) -> str:
        if rank == 2:
            stores[0].shared.wait(["autoshard/here/awaited"], timedelta(seconds=20))
        here = agreement(stores[rank], rank, 3)
        return here.reach({}, lambda _: str(agreement(stores[1].shared, 1, 3)._awaited()))

    assert together(stores, run) == ["[0]"] * 3


def test_rank_0_is_told_digests_and_has_its_own_statement() -> None:
    """However many parameters there are, and in whatever order a process has them."""
    stores = connections(8)

    def decide(said: list[Statement]) -> str:
        assert said[0] == {"parameters": MANY, "_free": 0}
        return str([each["_free"] for each in said])

    def run(rank: int) -> str:
        parameters = dict(reversed(MANY.items())) if rank % 2 else MANY
        return agreement(stores[rank], rank, 8).reach({"parameters": parameters, "_free": rank}, decide)

    assert together(stores, run) == [str(list(range(8)))] * 8
    assert stores[0].bytes_of("get") < 8 * 200


def test_who_differs_is_named_with_values_and_alone_states_all_of_it() -> None:
    stores = connections(6)

    def run(rank: int) -> str:
        other = {"layers.7.weight": [[17, 16], "torch.float32", True]} if rank == 3 else {}
        return agreement(stores[rank], rank, 6).reach({"parameters": MANY | other}, lambda _: "")

    for error in together(stores, run):
        assert str(error) == "rank 3 disagrees with rank 0 about parameters: layers.7.weight: 17 where rank 0 has 7"
    assert [store.bytes_of("set") > 2000 for store in stores] == [rank == 3 for rank in range(6)]
    assert stores[0].bytes_of("get") < stores[3].bytes_of("set") + 6 * 400


def test_an_error_of_rank_0_is_raised_by_all() -> None:
    stores = connections(5)

    def decide(said: list[Statement]) -> str:
        raise DisagreementError("no")

    said = together(stores, lambda rank: agreement(stores[rank], rank, 5).reach({}, decide))
    assert [str(error) for error in said] == ["no"] * 5
    assert stores[0].names() == {*map(str, range(5)), "verdict", "awaited", "heard"}


def test_an_error_of_a_user_s_kind_is_named_by_all() -> None:
    stores = connections(3)

    def decide(said: list[Statement]) -> str:
        raise MemoryError("no room")

    first, *others = together(stores, lambda rank: what_is_said(agreement(stores[rank], rank, 3).reach, {}, decide))
    assert first == "MemoryError: no room"
    assert others == ["AutoshardError: rank 0 failed at the test: MemoryError: no room"] * 2


class Stopped(Counting):
    """Whose host answers no question."""

    asked_now, over = threading.Event(), threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked_now.set()
        return self.over.wait()


def test_a_store_that_gives_no_answer_is_named() -> None:
    store = Stopped(dist.HashStore())
    try:
        with pytest.raises(PeerLostError, match=r"hosts the job's store \(rank 0, most often\) gave no answer for 0.1 s: it is stopped"):
            agreement(store, 1, 2, timeout=0.1).reach({}, lambda _: "")
    finally:
        Stopped.over.set()


def test_a_question_that_nobody_waits_for_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the thread that could not ask it is not asked again."""
    monkeypatch.setattr(waiting, "_askers", {})
    for name in ("asked_now", "over"):
        monkeypatch.setattr(Stopped, name, threading.Event())
    stuck, store = Answering(Stopped(dist.HashStore()), 60), Counting(dist.HashStore())
    first, last = threading.Thread(target=stuck.check, args=(["a"],)), threading.Event()
    first.start()
    assert Stopped.asked_now.wait(60)
    (asked,) = waiting._askers.values()
    with pytest.raises(PeerLostError):
        Answering(store, 0.01).set("b", b"")
    asked.put(waiting._Question(last.set))
    Stopped.over.set()
    first.join()
    assert last.wait(10) and store.asked == []  # which come in this order
    Answering(store, 10).set("c", b"")
    assert store.asked == [("set", ["c"], 0)]


def test_each_process_takes_its_own_statement_out_of_the_store() -> None:
    stores = connections(12)
    together(stores, lambda rank: agreement(stores[rank], rank, 12).reach({}, lambda _: ""))
    agreement(stores[0], 0, 12).forget()
    assert stores[0].shared.num_keys() == 0
    assert [store.times("delete") for store in stores] == [3] + [1] * 11


def test_signs_of_many_are_read_at_once() -> None:
    (store,) = connections(1)
    for rank in range(1, 500):
        store.shared.set(f"autoshard/alive/{rank}", " 12.5 train.py:7 in load")
    others = list(range(1, 500))
    with pytest.raises(DisagreementError, match=r"15, 16 and 483 more did not come .* rank 16 is at train.py:7 in load\); every"):
        Patience(1.0, 60.0, print).wait(store, "the job", lambda: False, lambda: others, lambda: others)
    assert len(store.asked) <= 6  # two looks and a text


def test_at_its_end_each_process_asks_for_one_key() -> None:
    stores = connections(20)
    together(stores, lambda rank: processes._wait_for_everyone(stores[rank], 20))
    assert {len(keys) for store in stores for _, keys, _ in store.asked} == {1}
    assert [store.times("add") for store in stores] == [1] * 20
    assert sum(store.times("set") for store in stores) == 1


def test_a_copy_of_a_process_ends_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.time, "sleep", lambda _: pytest.fail("it waits"))
    processes._end(os.getpid() + 1)


def test_the_end_does_not_wait_for_ever() -> None:
    (store,) = connections(1)
    processes._wait_for_everyone(store, 2, seconds=0.1)
    assert store.times("set") == 0


class Clock:
    """Time that passes where someone sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("after", [0.0, 0.01, 0.3, 7.0, 60.0])
def test_who_waits_longer_looks_less_often_but_is_not_late(monkeypatch: pytest.MonkeyPatch, after: float) -> None:
    clock, looks = Clock(), []
    monkeypatch.setattr(waiting, "time", clock)
    wait_until(lambda: looks.append(clock.now) or clock.now >= after, 90.0, late=lambda: None, failed=TimeoutError)
    assert clock.now <= after + min(after / 8 + 0.0005, 0.25)
    assert len(looks) <= 70 + 4 * after


def test_of_very_many_some_are_named() -> None:
    assert (named([3]), named([3, 5])) == ("rank 3", "ranks 3, 5")
    assert named(range(20, 40)) == "ranks 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35 and 4 more"
