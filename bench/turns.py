"""Processes that take turns: each does its part when it is told to, and waits until it is told again.

So what is compared can be in processes of its own, as its users have it, and still be measured side by side.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Player:
    """A process that plays by turns. command: what it runs, where `told` and `answer` are the other half of this."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.command = command
        self.process = subprocess.Popen(command, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def play(self) -> dict[str, Any]:
        """One turn, and what it says of it."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self.answered()

    def answered(self) -> dict[str, Any]:
        """The next thing that it says, however long that takes; RuntimeError if it ended instead."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"{' '.join(self.command)} ended with status {self.process.wait()}")

    def end(self) -> None:
        """No more turns: it may say something yet."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def told() -> Iterator[int]:
    """In the process itself: the number of each turn, when it comes."""
    yield from (number for number, _ in enumerate(sys.stdin))


def answer(**values: Any) -> None:
    """What the other half waits for."""
    print(json.dumps(values), flush=True)
