"""Waiting for other processes through the store: never in a collective, never for ever, never without a word."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from autoshard.errors import PeerLostError

PATIENCE = 5.0  # seconds after which those who wait say for whom
_SHORTEST, _LONGEST = 0.0005, 0.02  # seconds between looks at the store
_ASK = 0.5  # between questions whether it is in vain


def wait_until(
    ready: Callable[[], bool],
    timeout: float,
    late: Callable[[], None],
    failed: Callable[[], Exception],
    lost: Callable[[], Exception | None] = lambda: None,
) -> None:
    """Returns when `ready`; calls `late` once after a while, raises `failed()` after `timeout` seconds, or before that
    what `lost` gives, which is asked now and then."""
    start, pause, warned, asked = time.monotonic(), _SHORTEST, False, 0.0
    while not ready():
        waited = time.monotonic() - start
        if waited > timeout:
            raise failed()
        if waited - asked > _ASK:
            asked = waited
            if (error := lost()) is not None:
                raise error
        if waited > PATIENCE and not warned:
            warned = True
            late()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)


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
    """ "rank 3" or "ranks 3, 5"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
