"""Peaks of memory, as measured."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def grown(step: Any) -> int:
    """The most bytes by which a step goes above where it started."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    found = [e for e in events if e.get("name") == "[memory]"]
    return max(itertools.accumulate(int(e["args"]["Bytes"]) for e in sorted(found, key=lambda e: float(e["ts"]))))
