"""Time by a GPU's own clock."""

from __future__ import annotations

from collections.abc import Callable

import torch


def seconds_of(step: Callable[[], object]) -> float:
    """Of a step, on a GPU that has nothing else to do: with what it waits for the processor."""
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begun.record()
    step()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3
