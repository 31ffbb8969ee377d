"""What a compiled graph and its backward communicate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Op = tuple[str, tuple[str, ...]]  # and the names of its parameters, as of the block that the graph was compiled for


@dataclass(eq=False)
class Collectives:
    """Of one graph, which may serve several blocks. parameters: the names of those that it takes, in order."""

    parameters: Sequence[str]
    forward: list[Op] = field(default_factory=list)
    backward: list[Op] = field(default_factory=list)
    _texts: dict[tuple[int, ...], str] = field(default_factory=dict)

    def note(self, forward: Sequence[Op], backward: Sequence[Op] = ()) -> None:
        """To be called while the graph is compiled."""
        self.forward += forward
        self.backward += backward

    def text(self, given: tuple[int, ...], names: Callable[[], Mapping[int, str]]) -> str:
        """All of them in a call with these parameters (ids), of these names: nothing in it depends on sizes, or on the order
        of this process's own graph, from which that of the collectives does not follow."""
        if given not in self._texts:
            known = names()
            own = {name: known.get(each, "?") for name, each in zip(self.parameters, given)}
            lines = [f"{half} {op} {','.join(own.get(n, n) for n in of)}" for half, op, of in self._all()]
            self._texts[given] = "\n".join(sorted(lines))
        return self._texts[given]

    def reduced(self, given: tuple[int, ...]) -> set[int]:
        """Of these parameters those whose gradients the backward of a call with them brings together."""
        names = {name for op, of in self.backward if not op.startswith("autoshard.unshard") for name in of}
        return {each for name, each in zip(self.parameters, given) if name in names}

    def _all(self) -> list[tuple[str, str, tuple[str, ...]]]:
        return [("forward", *each) for each in self.forward] + [("backward", *each) for each in self.backward]
