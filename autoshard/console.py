"""What the first step says while it works: one line a phase, on rank 0, to stderr. What a command says: one line, on a terminal."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.text import Text

_shown: ContextVar[Live | None] = ContextVar("shown", default=None)


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
        """A line on rank 0, in rich's markup."""
        if self.shown:
            self._console.print(f"[bold cyan]autoshard[/] {text}")

    def warn(self, text: str) -> None:
        """A line on every rank, in others' words as they are: something is not as it should be."""
        self._console.print(f"[bold yellow]autoshard[/] {escape(text)}")


@contextmanager
def saying_once() -> Iterator[None]:
    """Each warning of the inside is said once, however many graphs it is of: torch has Python forget which ones it gave."""
    said, show = set[str](), warnings.showwarning

    def show_new(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None) -> None:
        if str(message) not in said:
            said.add(str(message))
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_new
    try:
        yield
    finally:
        warnings.showwarning = show


@contextmanager
def live(console: Console) -> Iterator[None]:
    """While the inside goes on, what it is `doing` stands in the last line of a terminal. Nowhere else, and nothing of it stays."""
    if not console.file.isatty():
        yield
        return
    with Live(console=console, transient=True) as shown:
        before = _shown.set(shown)
        try:
            yield
        finally:
            _shown.reset(before)


def doing(text: str) -> None:
    """Says what is being done now, where something is `live`."""
    shown = _shown.get()
    if shown is not None:
        shown.update(Spinner("dots", Text(text, no_wrap=True, overflow="ellipsis")), refresh=True)
