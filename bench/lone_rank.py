"""A job of which only rank 0 is there: a fake process group, in which nothing is sent, and a store in which the others say what it says."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup  # noqa: F401 - registers the backend


class Echo(dist.Store):  # type: ignore[name-defined,misc]
    """What rank 0 sets, every rank of `size` has set: a key that ends with a rank is looked up as rank 0's, and what is added is added
    by all. The methods' names are those by which torch calls them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._said: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._said[_as_rank_0(key)] = value

    def get(self, key: str) -> bytes:
        return self._said[_as_rank_0(key)]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        return all(_as_rank_0(key) in self._said for key in keys)

    def add(self, key: str, value: int) -> int:
        found = int(self._said.get(key, b"0")) + value * self._size
        self._said[key] = str(found).encode()
        return found

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        return self._said.pop(_as_rank_0(key), None) is not None


def _as_rank_0(key: str) -> str:
    folder, _, name = key.rpartition("/")
    return f"{folder}/0" if name.isdigit() else key


_stores: list[Echo] = []  # or torch would keep only the half of one that is written in C++


def join(size: int) -> None:
    """Makes this process rank 0 of so many."""
    _stores.append(Echo(size))
    dist.init_process_group("fake", rank=0, world_size=size, store=_stores[-1])
