"""What the first step says while it works: one line a phase, on rank 0, to stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console


@dataclass
class Phases:
    """Names and times the phases of the first step; prints them if `shown`."""

    shown: bool
    seconds: dict[str, float] = field(default_factory=dict)
    _console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False, soft_wrap=True))

    @contextmanager
    def phase(self, name: str, note: str = "") -> Iterator[None]:
        """Times a phase. The note may be filled in later through `say`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + taken
            self.say(f"{name:<10}[dim]{taken:6.2f} s[/dim]  {note}")

    def say(self, text: str) -> None:
        """A line on rank 0."""
        if self.shown:
            self._console.print(f"[bold cyan]autoshard[/] {text}")

    def warn(self, text: str) -> None:
        """A line on every rank: something is not as it should be."""
        self._console.print(f"[bold yellow]autoshard[/] {text}")
