"""Gradient accumulation without communication, what `autoshard.no_sync(model)` switches.

What a backward inside leaves is told in [Note: Held gradients]. A forward outside whose backward never comes drops
what it took, as it would drop its own. Where gradients are sharded (stages 2 and 3), every backward reduces, and
`no_sync` changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from autoshard import torch_internals
from autoshard.runtime.holder import Holder

Mode = Literal["sync", "hold", "flush"]


@dataclass(eq=False)
class Accumulation:
    """Which gradients the next forward arranges for: reduced, held, or reduced with what was held.

    gathered: parameters are whole, traces see them as they are. outside: the threads in which a forward runs outside of any graph, which
    must not ask for parameters. classes: of the modules that ask for all this.
    """

    mode: Mode = "sync"
    gathered: bool = False
    outside: frozenset[int] = frozenset()
    holders: list[Holder] = field(default_factory=list)
    classes: dict[Any, type] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module) -> Accumulation:
        """The one of this model, compiled or not; `no_sync` may come before the first call."""
        original = torch_internals.original_of(model)
        return original.__dict__.setdefault("_autoshard_accumulation", Accumulation())  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Accumulation:
        return Accumulation()  # of a copied model: nothing waits in it

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards of forwards inside do not communicate gradients that the plan keeps whole."""
        before, self.mode = self.mode, "hold"
        for holder in self.holders:
            holder.follow()
        try:
            yield
        finally:
            self.mode = before
            if before != "hold":
                self._arrange_flush()

    @contextmanager
    def as_gathered(self) -> Iterator[None]:
        """Inside parameters are whole."""
        self.gathered = True
        try:
            yield
        finally:
            self.gathered = False

    def waiting(self) -> list[nn.Parameter]:
        """Those whose gradients were held and have not been taken by a forward outside."""
        return [holder.parameter for holder in self.holders if holder.waiting]  # all are asked, since each may have been discarded

    def has_held(self) -> None:
        """A gradient was held just now: of a forward inside `no_sync`, whose backward may come behind it."""
        if self.mode == "sync":
            self.mode = "flush"

    def _arrange_flush(self) -> None:
        self.mode = "flush" if self.waiting() else "sync"

    def take(self, parameters: set[int]) -> None:
        """A graph was just called that will reduce what is held for these parameters (ids); it is that graph's from here on."""
        for holder in self.holders:
            if id(holder.parameter) in parameters:
                holder.take()
        self._arrange_flush()
