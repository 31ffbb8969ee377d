"""Where autoshard keeps files of a user between jobs."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from pathlib import Path


def cache_folder() -> Path:
    """By the XDG convention: `autoshard` in $XDG_CACHE_HOME, or in ~/.cache. A user without a home has a folder in which nothing
    is and nothing can be."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autoshard"
    except RuntimeError:
        return Path(os.devnull) / "autoshard"


def readable(path: Path) -> bool:
    """Whether a file is there for this process. `Path.exists` fails in a folder that it may not look into."""
    return os.access(path, os.R_OK)


def writable(path: Path) -> bool:
    """Whether `write_at_once` can write this file, whose folder is made. Not where a device is, since it would take its place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return path.is_file() or not path.exists()
    except OSError:
        return False


def write_at_once(path: Path, text: str) -> bool:
    """A file, whole or not at all, since other processes of the job write the same. False if it cannot be."""
    temporary = path.parent / f"{path.name}.{uuid.uuid4().hex}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    return True
