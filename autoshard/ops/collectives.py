"""What a compiled graph and its backward communicate."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Op = tuple[str, tuple[str, ...]]  # and the names of its parameters or buffers, as of the block that the graph was compiled for


@dataclass(eq=False)
class Collectives:
    """Of one graph, which may serve several blocks. parameters, buffers: the names of those that it takes, in order. started: its
    collectives as they are started, its backward's among them."""

    parameters: Sequence[str]
    buffers: Sequence[str] = ()
    forward: list[Op] = field(default_factory=list)
    backward: list[Op] = field(default_factory=list)
    started: list[Op] = field(default_factory=list)
    sends_buffers: bool = False  # whether one of them is for buffers
    _said: dict[tuple[Sequence[int], Sequence[str]], tuple[str, str]] = field(default_factory=dict)

    def note(self, forward: Sequence[Op], backward: Sequence[Op] = ()) -> None:
        """To be called while the graph is compiled."""
        self.forward += forward
        self.backward += backward
        self.sends_buffers |= not set(self.buffers).isdisjoint(name for _, of in forward for name in of)

    def note_order(self, phase: str, started: Sequence[Op]) -> None:
        """To be called when it is known in which order this half of the graph starts which."""
        self.started += [(f"{phase} {op}", of) for op, of in started]

    def said(self, given: tuple[int, ...], names: Callable[[], Mapping[int, str]], buffers: tuple[str, ...] = ()) -> tuple[str, str]:
        """All of them in a call with these parameters (ids, of these names) and buffers, sorted, and a code of the order in which such
        a call and its backward start them. Nothing in either depends on sizes."""
        if (given, buffers) not in self._said:
            known = names()
            own = {name: known.get(each, "?") for name, each in zip(self.parameters, given)} | dict(zip(self.buffers, buffers))
            noted = [[f"{op} {','.join(own.get(n, n) for n in of)}" for op, of in ops] for ops in (self._all(), self.started)]
            text, order = "\n".join(sorted(noted[0])), "\n".join(noted[1])
            self._said[given, buffers] = text, hashlib.sha256(order.encode()).hexdigest()[:8]
        return self._said[given, buffers]

    def reduced(self, given: tuple[int, ...]) -> set[int]:
        """Of these parameters those whose gradients the backward of a call with them brings together."""
        names = {name for op, of in self.backward if not op.startswith("autoshard.unshard") for name in of}
        return {each for name, each in zip(self.parameters, given) if name in names}

    def _all(self) -> list[Op]:
        return [(f"{half} {op}", of) for half, ops in (("forward", self.forward), ("backward", self.backward)) for op, of in ops]
