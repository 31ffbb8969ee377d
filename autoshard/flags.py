"""Config as flags of the command line: each field that matters to a plan, under its own name."""

from __future__ import annotations

import argparse
import inspect
import re
from dataclasses import fields
from typing import Any

from autoshard.config import Config
from autoshard.errors import ConfigError

_ONLY_WHEN_RUNNING = ("verbose", "timeout", "arrival", "dump_dir")
_PREFIX = "config_"


def add(parser: argparse.ArgumentParser) -> None:
    """Gives the parser a flag for each field, with the field's own documentation."""
    group = parser.add_argument_group("the fields of Config")
    for name, text in _documented(Config).items():
        if name not in _ONLY_WHEN_RUNNING:
            flag = "--" + name.replace("_", "-")
            group.add_argument(flag, dest=_PREFIX + name, metavar="VALUE", help=text.replace("%", "%%"))


def config(arguments: argparse.Namespace) -> Config:
    """The Config that the flags ask for; ConfigError where one is not legal."""
    given = {
        field.name: _value(field.name, text)
        for field in fields(Config)
        if (text := getattr(arguments, _PREFIX + field.name, None)) is not None
    }
    return Config.from_options(given)


def _value(name: str, text: str) -> Any:
    """A flag's text as the field's value; Config checks whether it is legal."""
    if name == "zero":
        return int(text) if text.isdigit() else text
    if name == "fuse_optimizer" and text == "False":
        return False
    if name == "memory_budget":
        return _budget(text)
    if name == "mesh":
        return _mesh(text)
    if name == "disable_passes":
        return tuple(text.split(","))
    if name == "replicate_below" and text != "auto":
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{name}: {text!r} is not a number") from None
    return text


def _budget(text: str) -> float | str:
    """A share such as 0.9 or 1.0 as a float, an amount as its text."""
    try:
        share = float(text)
    except ValueError:
        return text
    return share if "." in text else text


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
