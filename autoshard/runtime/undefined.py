"""Gradients of results that a loop does not differentiate, which stay undefined."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from autoshard import torch_internals


def leaving_undefined(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, a compiled graph whose backward can do without gradients of some results."""
    known: type | None = None

    @functools.wraps(run)
    def called(*args: Any) -> Any:
        nonlocal known
        results = run(*args)
        known = torch_internals.leave_undefined(results, args, known)
        return results

    return called
