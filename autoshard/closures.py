"""What the names that a function uses stand for, and what else it may reach."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

from torch import Tensor, nn


def reached_by(function: Any) -> Iterator[Any]:
    """What a function may use that it is not called with: what is named around it, or around functions that are named there, what a
    method is of, and holds, what parameters stand for by default, what a partial function was given, and what is so of what it wraps."""
    if isinstance(function, functools.partial):
        yield from (*_given(function), *reached_by(function.func))
    elif inspect.ismethod(function):
        yield from (function.__self__, *held_by(function.__self__), *reached_by(function.__func__))
    elif inspect.isfunction(function):
        if hasattr(function, "__wrapped__"):  # by torch.compile, too, where it is given an object that can be called
            yield from reached_by(function.__wrapped__)
        for value in _near(function):
            yield value
            yield from _one_further(value)
    else:
        yield from held_by(function)


def _one_further(value: Any) -> Iterable[Any]:
    """Of what a function names: no more, since functions may name each other."""
    if isinstance(value, functools.partial):
        return _given(value)
    if inspect.ismethod(value):
        return held_by(value.__self__)
    return _near(value) if inspect.isfunction(value) else ()


def _given(function: functools.partial[Any]) -> Iterable[Any]:
    return (*function.args, *function.keywords.values())


def _near(function: FunctionType) -> Iterable[Any]:
    return (*named_around(function).values(), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def held_by(value: Any) -> Iterable[Any]:
    """What an object that is no module has as its attributes."""
    return () if isinstance(value, nn.Module | Tensor | type) else getattr(value, "__dict__", {}).values()


def named_around(function: Callable[..., Any]) -> dict[str, Any]:
    """In its closure and its file, by name. Left out is what has no value yet: a variable that comes further down around it."""
    code, around = function.__code__, function.__globals__
    found = {name: around[name] for name in code.co_names if name in around}
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # empty
            continue
    return found
