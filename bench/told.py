"""Processes that get ready beside each other and measure one after the other: a GPU's benches wait for compilers most of the time."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

READY = "ready\n"
SECONDS = 900  # that each may take to get ready, and then to measure


class Told:
    """One. program: arguments of Python's, that calls `until_told`. errors: a file for what it says besides."""

    def __init__(self, program: Sequence[str], environment: Mapping[str, str], errors: Path) -> None:
        self._program, self._errors = program, errors
        with errors.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, *program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
            )

    def wait_until_ready(self) -> None:
        """RuntimeError, with what it said, if it ends instead."""
        assert self._process.stdout is not None
        late = threading.Timer(SECONDS, self._process.kill)
        late.start()
        try:
            if READY not in iter(self._process.stdout.readline, ""):
                self._fail()
        finally:
            late.cancel()

    def measure(self) -> str:
        """What it writes now that nothing else runs. RuntimeError if it fails."""
        try:
            said, _ = self._process.communicate("go\n", timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._fail()
        if self._process.returncode:
            self._fail()
        return said

    def stop(self) -> None:
        """Ends it if it has not ended."""
        self._process.kill()
        self._process.communicate()

    def _fail(self) -> NoReturn:
        raise RuntimeError(f"{' '.join(self._program)}: exit status {self._process.wait()}\n{self._errors.read_text()}")


def until_told() -> None:
    """Says that this process is ready, and waits."""
    print(READY, end="", flush=True)
    sys.stdin.readline()
