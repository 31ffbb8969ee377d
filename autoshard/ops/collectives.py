"""What a compiled graph and its backward communicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(eq=False)
class Collectives:
    """Of one graph, in order, each with the names of its parameters: nothing of it depends on sizes."""

    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)

    def note(self, forward: Sequence[str], backward: Sequence[str] = ()) -> None:
        """To be called while the graph is compiled."""
        self.forward += forward
        self.backward += backward

    @cached_property
    def text(self) -> str:
        """All of them. To be read when the graph is compiled."""
        return "\n".join([*self.forward, "backward", *self.backward])
