"""What is alive in this process: torch gives neither a compiled module's owner nor a list of the optimizers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")


def alive(cls: type[_T]) -> list[_T]:
    """Every instance of `cls` that Python's garbage collector tracks; by type(), since `isinstance` asks proxies. Types
    first: they are few, and the objects of a process that compiles a million; and by what they inherit, since abstract classes
    ask and remember all of their subclasses."""
    with thawed():
        objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if cls in kind.__mro__}
    return [found for found in objects if type(found) in kinds] if kinds else []


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
