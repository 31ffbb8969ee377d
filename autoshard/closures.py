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
    method is of, and holds, what parameters stand for by default, and what a partial function was given."""
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values(), *reached_by(function.func))
    elif inspect.ismethod(function):
        yield from (function.__self__, *held_by(function.__self__), *reached_by(function.__func__))
    elif inspect.isfunction(function):
        for value in _near(function):
            yield value
            if isinstance(value, functools.partial) or _is_torch_s(function):
                yield from reached_by(value)
            elif inspect.ismethod(value):
                yield from held_by(value.__self__)
            elif inspect.isfunction(value):
                yield from _near(value)
    else:
        yield from held_by(function)


def _is_torch_s(function: FunctionType) -> bool:
    """As that which torch.compile puts around an object that is called."""
    return str(function.__globals__.get("__name__", "")).startswith("torch.")


def _near(function: FunctionType) -> Iterator[Any]:
    yield from (*named_around(function).values(), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


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
