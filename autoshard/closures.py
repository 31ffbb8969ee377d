"""What the names that a function uses stand for, and what else it may reach."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def reached_by(function: Any) -> Iterator[Any]:
    """What a function may use that it is not called with: what is named around it, what a method is of, and holds, and what a partial
    function was given."""
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values(), *reached_by(function.func))
    elif inspect.ismethod(function):
        of = function.__self__
        held = () if isinstance(of, nn.Module) else getattr(of, "__dict__", {}).values()
        yield from (of, *held, *reached_by(function.__func__))
    elif inspect.isfunction(function):
        for value in named_around(function).values():
            yield value
            if isinstance(value, functools.partial):  # around which torch.compile puts a function
                yield from reached_by(value)


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
