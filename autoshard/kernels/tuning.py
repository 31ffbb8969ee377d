"""Tiles of kernels, measured once on each kind of device and remembered between jobs.

Nothing is measured before a kernel is launched for the first time, and nothing on a machine that did so before: what was
found is a file in the user's cache, one for each kernel, device and order of size.

[Note: Measured at work] A kernel that writes in place, as an optimizer's step does, cannot be repeated to be measured; and what
repeats one waits for the device, beside which messages may be on their way, and takes memory that a plan knows nothing of. So
its first launches are the measurement: each goes by the next tile, between two events of the device that nobody waits for. It is
for kernels that give the same numbers by every tile. The first of its tiles is the one that a rule gives.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from autoshard.cache import cache_folder, write_at_once

Tile = dict[str, Any]  # by the names of a kernel's constants, and num_warps
Prepare = Callable[[Tile], Callable[[], None]]  # does what need not be measured; what it gives launches
LAUNCHES = 5  # of each tile; the first of them compiles
_LESS = 0.98  # of the first tile's time that another may take to be chosen: Python launches small kernels slower than they run
_known: dict[str, Tile] = {}


class Event(Protocol):
    """A moment on a device, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether it has come."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """How long after it another one came."""


@dataclass(eq=False)
class _Trial:
    """Launches by each tile in turn. between: the events around each."""

    tiles: Sequence[Tile]
    between: list[tuple[Event, Event]] = field(default_factory=list)

    def launch(self, prepare: Prepare, now: Callable[[], Event]) -> None:
        ready = prepare(self.tiles[len(self.between) % len(self.tiles)])
        begun = now()
        ready()
        self.between.append((begun, now()))

    def fastest(self) -> Tile | None:
        """None while that is not known: the device may be far behind."""
        count = len(self.tiles)
        timed = self.between[: count * LAUNCHES]  # of any streams, whose last event need not come last
        if len(timed) < count * LAUNCHES or not all(event.query() for events in timed for event in events):
            return None
        took = [begun.elapsed_time(ended) for begun, ended in timed]
        least = [min(took[i::count]) for i in range(count)]
        best = min(range(count), key=least.__getitem__)
        return self.tiles[best if least[best] <= _LESS * least[0] else 0]


_trials: dict[str, dict[int, _Trial]] = {}  # by key, on each device


def at_work(
    key: str, tiles: Sequence[Tile], prepare: Prepare, now: Callable[[], Event], device: int = 0
) -> None:
    """Launches once, by the tile that takes least or on the way to finding it, see [Note: Measured at work]. now: an event
    that the device comes to after all that it was given so far. device: its index; those of a kind share what one found."""
    if key not in _known and key not in _trials and not _remembered(key, tiles):
        _trials[key] = {}
    if key in _known:
        prepare(_known[key])()
        return
    trial = _trials[key].setdefault(device, _Trial(tiles))
    trial.launch(prepare, now)
    if tile := trial.fastest():
        _remember(key, tile)
        del _trials[key]


def on_this_device(what: str) -> str:
    """A key: `what`, on the GPU that is current, by the Triton that there is."""
    import triton

    return f"{what} {torch.cuda.get_device_name()} triton {triton.__version__}"


def recorded() -> Event:
    """An event on the current stream of a GPU."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _path(key: str) -> Path:
    return cache_folder() / "tiles" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _remembered(key: str, tiles: Sequence[Tile]) -> bool:
    """Whether an earlier job found one. A file that has none of these is as none."""
    try:
        found = json.loads(_path(key).read_text())
        known = found["key"] == key and found["tile"] in tiles
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if known:
        _known[key] = found["tile"]
    return known


def _remember(key: str, tile: Tile) -> None:
    _known[key] = tile
    write_at_once(_path(key), json.dumps({"key": key, "tile": tile}))
