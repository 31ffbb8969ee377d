"""How far predictions were off, where they were compared with measurements: `make bench-accuracy` writes accuracy.json."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from autoshard.cost_model.hardware import Device

_FILE = Path(__file__).with_name("accuracy.json")


@functools.cache
def _record() -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = json.loads(_FILE.read_text()) if _FILE.exists() else {}
    return found


def memory_error(device: Device, codegen: str) -> tuple[float, float] | None:
    """(least, most) of measured / predicted - 1 over all recorded peaks; None where none was recorded."""
    return _interval(device, codegen, "memory")


def reserved_error(device: Device, codegen: str) -> tuple[float, float] | None:
    """The same of what CUDA's allocator reserved."""
    return _interval(device, codegen, "reserved")


def time_error(device: Device, codegen: str) -> tuple[float, float] | None:
    """The same of step times; None for a device whose kernels were not measured: those of all that were compared had been."""
    return _interval(device, codegen, "time") if "pointwise" in device.tables else None


def _interval(device: Device, codegen: str, what: str) -> tuple[float, float] | None:
    found = _record().get(f"{'cpu' if device.is_cpu else device.name} {codegen}", {}).get(what)
    return (found[0], found[1]) if found else None
