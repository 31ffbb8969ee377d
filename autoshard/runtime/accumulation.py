"""Gradient accumulation without communication, what `autoshard.no_sync(model)` switches.

[Note: Held gradients]
Where the plan keeps whole gradients (stages 0 and 1), a backward inside `no_sync` adds them to side buffers,
the gradients of "holders": leaves of the parameter's full shape that take no memory themselves. `p.grad` stays
None. The first backward outside adds what is held before its one reduction, and the holder is cleared at the
moment that `p.grad` received it, so a backward that never comes loses nothing. Where gradients are sharded
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

    def add_holder(self, module: nn.Module, name: str, shape: torch.Size, like: Tensor) -> None:
        """Gives parameter `name` of `module` a place where whole gradients can wait."""
        nothing = torch.zeros((), dtype=like.dtype, device=like.device)
        holder = nothing.expand(shape).requires_grad_()
        module.__dict__.setdefault("_autoshard_holders", {})[name] = holder
        self.holders.append((module, name, holder))

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

    def _arrange_flush(self) -> None:
        waiting = [entry for entry in self.holders if entry[2].grad is not None]
        self.mode = "flush" if waiting else "sync"
        for module, name, holder in waiting:
            parameter = module._parameters[name]
            assert parameter is not None
            self._clear_when_delivered(parameter, holder)

    def _clear_when_delivered(self, parameter: nn.Parameter, holder: Tensor) -> None:
        def delivered(_: Tensor) -> None:
            handle.remove()
            if self.mode == "hold":
                return
            holder.grad = None
            if all(h.grad is None for _, _, h in self.holders):
                self.mode = "sync"

        handle = parameter.register_post_accumulate_grad_hook(delivered)
