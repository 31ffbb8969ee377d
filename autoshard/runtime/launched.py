"""What a launcher says of this process in its environment, whether it joined the others or not."""

from __future__ import annotations

import os

from autoshard.errors import ConfigError


def said(name: str, least: int = 0) -> int | None:
    """The number that the launcher left under this name, if it did. ConfigError if it is none, or less than `least`."""
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"environment: {name} is {text!r}; legal: a number from {least} on, as torchrun sets it")
    return int(text)


def attempt() -> str:
    """Which attempt of torchrun's this is, where one agent has all processes: each agent counts by itself, so on several nodes no count
    is everyone's."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else "0"
