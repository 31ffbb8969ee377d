"""What the names that a function uses stand for."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.closures import named_around

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
