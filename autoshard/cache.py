"""Where autoshard keeps files of a user between jobs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """By the XDG convention: `autoshard` in $XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "autoshard"
