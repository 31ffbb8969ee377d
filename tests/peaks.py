"""Peaks of memory: by how much a step goes above what is there between steps, measured and predicted."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from autoshard.prediction import Prediction
from tests.small import step_each

HELD = ("parameters", "optimizer", "buffers", "inputs")  # between steps


def above_held(predicted: Prediction) -> int:
    """By how many bytes a step is predicted to go above what is there between steps."""
    return predicted.peak_bytes - sum(predicted.memory.get(category, 0) for category in HELD)


def grown_in_a_step(loss: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> int:
    """The same as measured, once two steps have made all that stays. Processes begin the measured one together."""

    def step() -> None:
        loss().backward()
        step_each(optimizer)

    for _ in range(2):
        step()
    if dist.is_initialized():
        dist.barrier()
    return grown(step)


def grown(step: Any) -> int:
    """The most bytes by which a step goes above where it started."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    found = [e for e in events if e.get("name") == "[memory]"]
    return max(itertools.accumulate(int(e["args"]["Bytes"]) for e in sorted(found, key=lambda e: float(e["ts"]))))
