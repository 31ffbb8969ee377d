"""Gradient accumulation without communication, what `autoshard.no_sync(model)` switches.

[Note: Held gradients]
Where the plan keeps whole gradients (stages 0 and 1), a backward inside `no_sync` adds them to side buffers,
the gradients of "holders": leaves of the parameter's full shape that take no memory themselves. `p.grad` stays
None. The first forward outside takes what is held into its graph, and its backward adds it before the one
reduction. A forward whose backward never comes drops it, as it would drop its own. Where gradients are sharded
(stages 2 and 3), every backward reduces, and `no_sync` changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

Mode = Literal["sync", "hold", "flush"]


@dataclass(eq=False)
class Accumulation:
    """Which gradients the next forward arranges for: reduced, held, or reduced with what was held."""

    mode: Mode = "sync"
    gathered: bool = False
    holders: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)

    def add_holder(self, module: nn.Module, name: str, parameter: nn.Parameter) -> Tensor:
        """A place where whole gradients of a parameter, `name` of `module`, can wait."""
        nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        holder = nothing.expand(parameter.shape).requires_grad_()
        self.holders.append((module, name, holder))
        return holder

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards of forwards inside do not communicate gradients that the plan keeps whole."""
        before, self.mode = self.mode, "hold"
        try:
            yield
        finally:
            self.mode = before
            if before != "hold":
                self._arrange_flush()

    def waiting(self) -> bool:
        """True if a gradient that was held has not been taken by a forward outside."""
        return any(holder.grad is not None for *_, holder in self.holders)

    def _arrange_flush(self) -> None:
        self.mode = "flush" if self.waiting() else "sync"

    def take(self, parameters: set[int]) -> None:
        """A graph was just called with what is held for these parameters (ids); it is that graph's from here on."""
        for module, name, holder in self.holders:
            parameter = module._parameters[name]
            if holder.grad is not None and parameter is not None and id(parameter) in parameters:
                holder.grad = None
        self._arrange_flush()
