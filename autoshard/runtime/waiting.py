"""Waiting for other processes through the store: never in a collective, never for ever, never without a word."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

PATIENCE = 10.0  # seconds after which those who wait say for whom
_SHORTEST, _LONGEST = 0.0005, 0.02  # seconds between looks at the store


def wait_until(
    ready: Callable[[], bool],
    timeout: float,
    late: Callable[[], None],
    failed: Callable[[], Exception],
) -> None:
    """Returns when `ready`; calls `late` once after a while, raises `failed()` after `timeout` seconds."""
    start, pause, warned = time.monotonic(), _SHORTEST, False
    while not ready():
        waited = time.monotonic() - start
        if waited > timeout:
            raise failed()
        if waited > PATIENCE and not warned:
            warned = True
            late()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)


def missing(store: Any, ranks: Sequence[int], otherwise: Sequence[int] = ()) -> str:
    """ "rank 3" or "ranks 3, 5": those of whom the store has no key; `otherwise` if it has all."""
    absent = [r for r in ranks if not store.check([str(r)])] or list(otherwise)
    return ("rank " if len(absent) == 1 else "ranks ") + ", ".join(map(str, absent))
