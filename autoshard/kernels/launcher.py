"""What Triton needs to launch a kernel on a GPU: at the first launch it compiles its launcher, which is in C."""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path


@functools.cache
def lacking() -> str:
    """What is not on this machine of it, in words; "" where all is. What Triton would look for is looked for where it looks."""
    if find_spec("triton") is None:
        return "Triton"
    from triton import knobs

    if knobs.build.impl:  # somebody's own way to compile
        return ""
    if not _compiler():
        return "a C compiler (CC, gcc or clang), with which Triton builds its launcher"
    if not any((Path(folder) / "Python.h").is_file() for folder in _headers(knobs.build.backend_dirs)):
        return "Python.h, with which Triton builds its launcher"
    return ""


def _compiler() -> bool:
    """CC counts alone where it is set: a file, without options."""
    chosen = os.environ.get("CC")
    return any(map(shutil.which, ("gcc", "clang") if chosen is None else (chosen,)))


def _headers(more: set[str]) -> Iterator[str]:
    """Folders: the one that Triton names to the compiler, its own besides, and what compilers read of the environment."""
    scheme = sysconfig.get_default_scheme()
    yield sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]  # Debian's own scheme, of no headers
    yield from more
    for name in ("CPATH", "C_INCLUDE_PATH"):
        yield from filter(None, os.environ.get(name, "").split(os.pathsep))
