"""What the names that a function uses stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
