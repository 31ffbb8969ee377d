"""Waiting for other processes through the store: never in a collective, never for ever, never without a word."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

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
    start, pause, warned = time.monotonic(), _SHORTEST, False
    asked = start
    while not ready():
        waited = time.monotonic() - start
        if waited > timeout:
            raise failed()
        if time.monotonic() - asked > _ASK:
            asked = time.monotonic()
            error = lost()
            if error is not None:
                raise error
        if waited > PATIENCE and not warned:
            warned = True
            late()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)


def missing(store: Any, ranks: Sequence[int]) -> list[int]:
    """Those of whom the store has no key."""
    return [r for r in ranks if not store.check([str(r)])]


def named(ranks: Sequence[int]) -> str:
    """ "rank 3" or "ranks 3, 5"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
