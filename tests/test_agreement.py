"""Agreements of many processes, which are threads here: what is said, and what each of them asks of the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from autoshard.errors import AutoshardError
from autoshard.runtime import processes, waiting
from autoshard.runtime.waiting import named, wait_until


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


def test_at_its_end_each_process_asks_for_one_key() -> None:
    stores = connections(20)
    together(stores, lambda rank: processes._wait_for_everyone(stores[rank], 20))
    assert {len(keys) for store in stores for _, keys, _ in store.asked} == {1}
    assert [store.times("add") for store in stores] == [1] * 20
    assert sum(store.times("set") for store in stores) == 1


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
