"""Config as flags of the command line: each field that matters to a plan, under its own name."""

from __future__ import annotations

import argparse
import inspect
import re
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from autoshard.config import Config
from autoshard.errors import ConfigError

_ONLY_WHEN_RUNNING = ("verbose", "timeout", "arrival", "dump_dir")
_PREFIX = "config_"
_HINTS = get_type_hints(Config)


def add(parser: argparse.ArgumentParser) -> None:
    """Gives the parser a flag for each field, with the field's own documentation."""
    group = parser.add_argument_group("the fields of Config")
    for name, text in _documented(Config).items():
        if name not in _ONLY_WHEN_RUNNING:
            flag = "--" + name.replace("_", "-")
            group.add_argument(flag, dest=_PREFIX + name, metavar="VALUE", help=text.replace("%", "%%"))


def config(arguments: argparse.Namespace) -> Config:
    """The Config that the flags ask for; ConfigError where one is not legal."""
    return Config.from_options({name: _value(name, getattr(arguments, _PREFIX + name)) for name in said(arguments)})


def said(arguments: argparse.Namespace) -> list[str]:
    """The fields that have a flag among the arguments."""
    return [field.name for field in fields(Config) if getattr(arguments, _PREFIX + field.name, None) is not None]


def _value(name: str, text: str) -> Any:
    """A flag's text as the field's value, by the types that the field may have; Config checks whether it is legal."""
    kinds = _kinds(_HINTS[name])
    if type(None) in kinds and text == "None":
        return None
    if name == "memory_budget":
        return _budget(text)
    if name == "mesh":
        return _mesh(text)
    if name == "disable_passes":
        return tuple(text.split(","))
    if bool in kinds and text in ("True", "False"):
        return text == "True"
    if int in kinds and re.fullmatch("-?[0-9]+", text):
        return int(text)
    return text


def _kinds(hint: Any) -> set[type]:
    """The types of the values that a field's type stands for: of "int | Literal['auto']" int and str."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {type(value) for value in parts}
    return {kind for part in parts for kind in _kinds(part)} if origin in (Union, UnionType) else {hint}


def _budget(text: str) -> float | str:
    """A share such as 0.9 or 1.0 as a float, an amount as its text."""
    try:
        share = float(text)
    except ValueError:
        return text
    return share if "." in text and (share <= 1 or "e" not in text.lower()) else text


def _mesh(text: str) -> dict[str, int]:
    try:
        axes = [(axis, int(size)) for axis, size in (part.split("=") for part in text.split(","))]
    except ValueError:
        raise ConfigError(f"mesh: {text!r} is not legal; legal: replicate=2,shard=4") from None
    if len(dict(axes)) < len(axes):
        raise ConfigError(f"mesh: {text!r} names an axis twice; legal: replicate=2,shard=4")
    return dict(axes)


def _documented(cls: type) -> dict[str, str]:
    """What the docstring of a dataclass says of each field, in lines such as "zero: the stage"."""
    lines = inspect.getdoc(cls) or ""
    found = dict(re.findall(r"^(\w+): (.*(?:\n +.*)*)", lines, flags=re.MULTILINE))
    return {field.name: " ".join(found.get(field.name, "").split()) for field in fields(cls)}
