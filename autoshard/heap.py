"""What is alive in this process: torch gives neither a compiled module's owner nor a list of the optimizers."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any, TypeVar

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

LOOKED_FOR = (nn.Module, Optimizer, GradScaler)  # and what inherits from them
_IMMORTAL = 1 << 29  # references, that nothing else has
_T = TypeVar("_T")
_census: list[weakref.ref[Any]] | None = None  # of all that are looked for, inside of `one_look`


def alive(cls: type[_T]) -> list[_T]:
    """Every instance of `cls` that Python's garbage collector tracks; by type(), since `isinstance` asks proxies."""
    kinds = set(_kinds(cls))
    assert _census is None or issubclass(cls, LOOKED_FOR), cls
    if _census is None:
        return _found(kinds)
    still: Iterator[Any] = (one() for one in _census)
    return [found for found in still if type(found) in kinds]


@contextmanager
def one_look() -> Iterator[None]:
    """Inside, `alive` knows of what was alive at its beginning, and still is, by one look for all that it is asked."""
    global _census
    before, _census = _census, [weakref.ref(found) for found in _found({kind for cls in LOOKED_FOR for kind in _kinds(cls)})]
    try:
        yield
    finally:
        _census = before


def _found(kinds: set[type]) -> list[Any]:
    """There are a million objects in a process that compiles: they are gone through once, and by no code of Python's."""
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
    count = gc.get_freeze_count()
    gc.unfreeze()
    frozen = _is_frozen(count, map(sys.getrefcount, gc.get_objects()) if count else ())
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def _is_frozen(count: int, references: Iterable[int]) -> bool:
    """Whether somebody froze what there is, where so many objects are frozen. From 3.12 on Python counts those that are immortal, though
    nobody froze anything; they have so many references. Freezing takes all of them, so there are more."""
    return count > sum(map(_IMMORTAL.__le__, references))
