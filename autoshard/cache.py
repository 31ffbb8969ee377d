"""Where autoshard keeps files of a user between jobs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """By the XDG convention: `autoshard` in $XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "autoshard"


def write_at_once(path: Path, text: str) -> bool:
    """A file of the cache, whole or not at all, since other processes of the job write the same. False if it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(temporary).replace(path)
    except OSError:
        return False
    return True
