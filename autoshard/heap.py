"""What is alive in this process: torch gives neither a compiled module's owner nor a list of the optimizers."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import compress
from typing import Any, TypeVar

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

LOOKED_FOR = (nn.Module, Optimizer, GradScaler)  # and what inherits from them
_IMMORTAL = 1 << 29  # references, that nothing else has
_T = TypeVar("_T")
_census: list[weakref.ref[Any]] | None = None  # of all that are looked for, inside of `one_look`
_hidden: _Hidden | None = None  # since the first look


def alive(cls: type[_T]) -> list[_T]:
    """Every instance of `cls`, one of those looked for, that Python's garbage collector tracks; by type(), since `isinstance` asks proxies."""
    assert issubclass(cls, LOOKED_FOR), cls
    kinds = set(_kinds(cls))
    there = _found() if _census is None else _those(_census)
    return [found for found in there if type(found) in kinds]


@contextmanager
def one_look() -> Iterator[None]:
    """Inside, `alive` knows of what was alive at its beginning, and still is, by one look for all that it is asked."""
    global _census
    before, _census = _census, [weakref.ref(found) for found in _found()]
    try:
        yield
    finally:
        _census = before


def collect(found: Iterable[weakref.ref[Any]]) -> None:
    """gc.collect(), of what is frozen too where one of these, which `alive` found, may be. What else is frozen, though nobody's, keeps
    alive what it holds."""
    assert _hidden is not None
    frozen = set(map(id, _those(_hidden.found)))
    with thawed() if any(id(one) in frozen for one in _those(found)) else nullcontext():
        gc.collect()


class _Hidden:
    """What there was when all that is frozen was last looked through. It was made behind that, so it is hidden by the next
    gc.freeze() with what else was made since: until then there is no need to look there again."""

    def __init__(self, found: Iterable[Any]) -> None:
        self.found = [weakref.ref(one) for one in found]


def _found() -> list[Any]:
    """All that is looked for. There are a million objects in a process that compiles: they are gone through once, and by no code of
    Python's, those that are frozen once for all looks."""
    global _hidden
    if _hidden is not None:
        seen = {id(one): one for one in _among(gc.get_objects(), _Hidden)}
        if seen.pop(id(_hidden), None):
            return list(({id(one): one for one in _those(_hidden.found)} | seen).values())
    with thawed():
        everything = _among(gc.get_objects())
    _hidden = _Hidden(everything)
    return everything


def _among(objects: list[Any], *more: type) -> list[Any]:
    kinds = {kind for cls in (*LOOKED_FOR, *more) for kind in _kinds(cls)}
    return list(compress(objects, map(kinds.__contains__, map(type, objects))))


def _those(found: Iterable[weakref.ref[Any]]) -> Iterator[Any]:
    return (there for one in found if (there := one()) is not None)


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
