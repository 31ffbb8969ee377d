"""What is alive in this process: torch gives neither a compiled module's owner nor a list of the optimizers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress
from typing import TypeVar

_T = TypeVar("_T")


def alive(cls: type[_T]) -> list[_T]:
    """Every instance of `cls` that Python's garbage collector tracks; by type(), since `isinstance` asks proxies. There are a
    million objects in a process that compiles: they are gone through once, and by no code of Python's."""
    kinds = set(_kinds(cls))
    with thawed():
        objects = gc.get_objects()
    return list(compress(objects, map(kinds.__contains__, map(type, objects))))


def _kinds(cls: type) -> Iterator[type]:
    """`cls` and what inherits from it, not what an abstract class takes for a subclass."""
    yield cls
    inheriting: list[type] = type.__subclasses__(cls)
    for kind in inheriting:
        yield from _kinds(kind)


@contextmanager
def thawed() -> Iterator[None]:
    """Inside, the collector knows of what gc.freeze() hid from it too. Behind it all is frozen again, where something was."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()
