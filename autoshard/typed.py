"""Typed: parts of a plan hold what their annotations say, made in Python or read from JSON that people edit."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from autoshard.errors import PlanError, nearest

_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true, false", NoneType: "null"}


def check_types(value: Any, what: str) -> None:
    """PlanError names the first field of a dataclass that holds what it may not. what: it is called in that."""
    for name, hint in _hints(value.__class__).items():
        if not _fits(found := getattr(value, name), hint):
            raise PlanError(f"{what}: {name}: {found!r} is not legal; legal: {_said(hint)}")


def from_data(cls: type, data: Any, what: str) -> Any:
    """One of a dataclass from what `asdict` and JSON made of one: lists are tuples. PlanError names what is no field, which would be
    lost, and a field that is not there."""
    if not isinstance(data, dict):
        raise PlanError(f"{what}: {data!r} is not legal; legal: {{...}} of {', '.join(_hints(cls))}")
    for key in data:
        if key not in _hints(cls):
            raise PlanError(f"{what}: {key!r} is not known; {nearest(key, tuple(_hints(cls)))}")
    for field in fields(cls):
        if field.name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise PlanError(f"{what}: {field.name!r} is missing; legal: all of {', '.join(_hints(cls))}")
    return cls(**{key: _from(_hints(cls)[key], value, f"{what}: {key}") for key, value in data.items()})


def _from(hint: Any, value: Any, what: str) -> Any:
    """What does not fit is left as it is, for the class to refuse."""
    if is_dataclass(hint):
        return from_data(hint, value, what)  # type: ignore[arg-type]
    if isinstance(value, list):
        inner = [hint for hint in _options(hint) if get_origin(hint) is tuple]
        return tuple(_from(get_args(inner[0])[0] if inner else None, each, what) for each in value)
    return value


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    if len(options := _options(hint)) > 1:
        return any(_fits(value, option) for option in options)
    kind, inner = get_origin(hint), get_args(hint)
    if kind is not None and not isinstance(value, kind):
        return False
    if kind is tuple:
        kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    if kind is dict:
        return all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if isinstance(value, bool):  # an int to Python
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _said(hint: Any) -> str:
    inner = get_args(hint)
    if get_origin(hint) is tuple:
        return f"a list, each {_said(inner[0])}" if inner[1:] == (...,) else f"[{', '.join(map(_said, inner))}]"
    if get_origin(hint) is dict:
        return f"{{{_said(inner[0])}: {_said(inner[1])}, ...}}"
    if len(options := _options(hint)) > 1:
        return ", or ".join(map(_said, options))
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))
