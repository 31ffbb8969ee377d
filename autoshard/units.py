"""Amounts of memory, read and written."""

from __future__ import annotations

import re

from autoshard.errors import ConfigError

_SCALES = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}}
_SCALES |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}
_WRITTEN = (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024))
AMOUNTS = "bytes, '72GiB', '80GB', or a share such as 0.9"


def parse_bytes(text: str) -> int:
    """Bytes of "72GiB", "80GB", "1.5 GiB", "123456" or "1e9". ConfigError on anything else."""
    if (size := amount_of(text)) is None:
        raise ConfigError(f"memory_budget: {text!r} is no amount of memory; legal: {AMOUNTS}")
    return size


def amount_of(text: str) -> int | None:
    """Bytes of what `parse_bytes` reads, None of anything else."""
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _SCALES:
        return None
    return int(float(match[1]) * _SCALES[match[2].upper()])


def bytes_text(size: int) -> str:
    """"1.25 GiB", "3.00 MiB", "12 B"."""
    for unit, scale in _WRITTEN:
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


def enough_text(size: int) -> str:
    """As `bytes_text`, never less: "1.26 GiB" of a byte more than 1.25 GiB. Read as a budget it has room for all of size."""
    for unit, scale in _WRITTEN:
        if size >= scale:
            whole, hundredths = divmod(-(-size * 100 // scale), 100)
            return f"{whole}.{hundredths:02} {unit}"
    return f"{size} B"


def counted(number: int, one: str, many: str) -> str:
    """"1 process", "2 processes"."""
    return f"{number} {one if number == 1 else many}"
