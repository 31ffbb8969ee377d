"""What is alive in this process: torch gives neither a compiled module's owner nor a list of the optimizers."""

from __future__ import annotations

import gc
from typing import TypeVar

_T = TypeVar("_T")


def alive(cls: type[_T]) -> list[_T]:
    """Every instance of `cls` that Python's garbage collector tracks; by type(), since `isinstance` asks proxies."""
    return [found for found in gc.get_objects() if issubclass(type(found), cls)]
