"""Memory that a process on CPUs has freed stays with it, for its next step.

[Note: Freed memory] glibc gives what is free at the end of its heap back to the system. What a step frees in backward the next
forward then has to fault in again, page by page: of a step that is run operation by operation 5 to 20 % of its time. So once a model
on CPUs has had its first call its process keeps what it frees, up to the most that it ever had at once. What was there before, such as
a whole model that is rows now, goes back first. Who sets glibc's own variables decides for himself.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from typing import Any

# From malloc.h. What is larger than LARGEST glibc maps apart, and gives back; it takes no larger figure.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_NEVER, _LARGEST = -1, 32 * 2**20
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """From now on; False where the C library is another one or the user's variables say what it does."""
    libc = _glibc()
    if libc is None or any(os.environ.get(name) for name in _VARIABLES):
        return False
    libc.malloc_trim(0)
    return bool(libc.mallopt(_MMAP_THRESHOLD, _LARGEST) and libc.mallopt(_TRIM_THRESHOLD, _NEVER))


@functools.cache
def _glibc() -> Any:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
