"""What a first call finds out about processors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoshard.runtime import processor
from autoshard.runtime.processor import TIMES, processor_here


class _Seen(TorchFunctionMode):
    """What is computed: functions, dtypes and devices of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.results = list[tuple[str, torch.dtype, str]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.results.append((func.__name__, found.dtype, found.device.type))
        return found


def test_what_is_measured_is_not_what_a_loop_casts_to_nor_where_it_makes_tensors() -> None:
    processor._with_threads.cache_clear()
    seen = _Seen()
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"), seen:
        found = processor_here()
    matmuls = [(dtype, device) for name, dtype, device in seen.results if "matmul" in name]
    assert matmuls == [(torch.float32, "cpu")] * (TIMES + 1) + [(torch.bfloat16, "cpu")] * (TIMES + 1)
    assert {device for _, _, device in seen.results} == {"cpu"}
    assert all(math.isfinite(rate) and rate > 0 for rate in (*found.flops.values(), found.bandwidth))
    assert processor_here() is found  # once a process
