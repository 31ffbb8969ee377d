"""Tiles of kernels, measured once on each kind of device and remembered between jobs.

Nothing is measured before a kernel is launched for the first time, and nothing on a machine that did so before: what was
found is a file in the user's cache, one for each kernel, device and order of size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autoshard.cache import cache_folder, write_at_once

Tile = dict[str, Any]  # by the names of a kernel's constants, and num_warps
_known: dict[str, Tile] = {}


def best(key: str, tiles: Sequence[Tile], seconds: Callable[[Tile], float]) -> Tile:
    """The tile that takes least. key: all that this depends on. seconds: measures one."""
    if key not in _known:
        path = cache_folder() / "tiles" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        _known[key] = _remembered(path, key, tiles) or _measured(path, key, tiles, seconds)
    return _known[key]


def _remembered(path: Path, key: str, tiles: Sequence[Tile]) -> Tile | None:
    """A file that is not one of these is as none."""
    try:
        found = json.loads(path.read_text())
        return found["tile"] if found["key"] == key and found["tile"] in tiles else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _measured(path: Path, key: str, tiles: Sequence[Tile], seconds: Callable[[Tile], float]) -> Tile:
    tile = min(tiles, key=seconds)
    write_at_once(path, json.dumps({"key": key, "tile": tile}))
    return tile
