"""Generated source as a file that one can read, and what it defines."""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import os
import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from autoshard.cache import cache_folder, readable, write_at_once


@functools.cache
def load(name: str, text: str, interpret: bool = False) -> Any:
    """The Triton kernel `name` that `text` defines. Its file is in the cache, named by the text's hash, since Triton reads
    a kernel's source and debuggers show it.

    interpret: Triton runs it in Python, on the CPU; for tests.
    """
    import triton

    path = _file(f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py", text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpret
        spec.loader.exec_module(module)
    return getattr(module, name)


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """To be entered around a launch: Triton asks for the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _file(name: str, text: str) -> Path:
    """In the cache, or where that cannot be written to, in a folder of this process."""
    path = cache_folder() / "kernels" / name
    if readable(path) and path.read_text() == text or write_at_once(path, text):
        return path
    path = _folder_of(os.getpid()) / name
    path.write_text(text)
    return path


@functools.cache
def _folder_of(process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="autoshard_"))

    def remove() -> None:
        if os.getpid() == process:  # not where a copy of it ends
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
