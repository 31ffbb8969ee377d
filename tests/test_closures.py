"""What the names that a function uses stand for, and what else it reaches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from autoshard.closures import named_around, reached_by

GLOBAL = "global"


def _made(early: bool) -> Callable[[], tuple[str, ...]]:
    inner = "around"

    def function() -> tuple[str, ...]:
        return (GLOBAL, inner, later, str(len(inner)))

    if early:
        return function
    later = "later"
    return function


def test_what_has_no_value_yet_is_left_out() -> None:
    assert named_around(_made(early=False)) == {"GLOBAL": "global", "inner": "around", "later": "later"}
    assert named_around(_made(early=True)) == {"GLOBAL": "global", "inner": "around"}


def ping() -> tuple[Any, ...]:
    return pong, BOUND


def pong(of: str = "by default") -> Any:
    return ping, of


BOUND = functools.partial(ping, "bound")


def test_functions_may_name_each_other() -> None:
    found = list(reached_by(ping))
    assert all(found.count(one) >= 1 for one in (pong, BOUND, ping, "by default", "bound"))
