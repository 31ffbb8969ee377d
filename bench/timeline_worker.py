"""One process of bench/timeline.py: timeline_worker.py CASE-AS-JSON PLAN OUT. Rank 0 writes what each process measured: steps that
nobody watched, and what torch's profiler saw of others."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).parent))

import accuracy_worker  # noqa: E402
import worker  # noqa: E402
import zoo  # noqa: E402
from compared import Case  # noqa: E402

WARM_UP, ROUNDS, PROFILED = 4, 15, 9
MARK = "one step"
ASKING = ("c10d::send", "c10d::recv_")
Event = tuple[str, float, float]  # name, start and end in seconds from the start of the step


def steps_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each profiled step: its seconds, and its collectives and waits as events. Where each process sends to each, a collective
    is a "recv", which the profiler sees until it was waited for."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    marks = sorted((e for e in events if e["name"] == MARK and e.get("cat") == "user_annotation"), key=_start)
    return [_step(mark, events) for mark in marks]


def _start(event: dict[str, Any]) -> float:
    return float(event["ts"])


def _step(mark: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    begin, end = _start(mark), _start(mark) + mark["dur"]
    inside = sorted((e for e in events if begin <= _start(e) < end), key=_start)
    flights = [_event(e, begin) for e in inside if e["name"].startswith("gloo:") and e["name"] != "gloo:send"]
    waits = [_event(e, begin) for e in inside if e["name"] == "_c10d_functional::wait_tensor"]
    return {"seconds": mark["dur"] / 1e6, "flights": flights, "waits": sorted([*waits, *_held_up(inside, begin)], key=lambda event: event[1])}


def _held_up(inside: list[dict[str, Any]], begin: float) -> Iterable[Event]:
    """Asking for sends, where that takes longer than mostly: it waits for the thread that serves those before. bench/timeline.py leaves out
    what is next to nothing."""
    for name in ASKING:
        asked = [_event(e, begin) for e in inside if e["name"] == name]
        usual = statistics.median(end - start for _, start, end in asked) if asked else 0.0
        yield from ((name, start + usual, end) for name, start, end in asked if end - start > usual)


def _event(event: dict[str, Any], begin: float) -> Event:
    start = (_start(event) - begin) / 1e6
    return event["name"].removeprefix("gloo:"), start, start + event["dur"] / 1e6


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Seconds of one step, from the moment that all ranks are ready, by the clock and of this thread on a processor."""
    dist.barrier()
    start, computed = time.perf_counter(), time.thread_time()
    step()
    return time.perf_counter() - start, time.thread_time() - computed


def medians(steps: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Of both."""
    seconds, computed = zip(*steps)
    return statistics.median(seconds), statistics.median(computed)


def profiled(step: Callable[[], object]) -> tuple[list[dict[str, Any]], float]:
    """What the profiler saw of some steps, and the seconds that one of them took this thread on a processor."""

    def marked() -> None:
        with record_function(MARK):
            step()

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        _, computed = medians(timed(marked) for _ in range(PROFILED))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return steps_of(json.loads(path.read_text())), computed


def measure(step: Callable[[], object]) -> dict[str, Any]:
    """Of this process. plain: seconds of a step that nobody watches; watching: what the profiler takes of this thread in one."""
    for _ in range(WARM_UP):
        step()
    plain, computed = medians(timed(step) for _ in range(ROUNDS))
    steps, watched = profiled(step)
    return {"plain": plain, "watching": watched - computed, "steps": steps}


def main() -> None:
    """Measures, and writes what all found."""
    case = Case(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    made = accuracy_worker.contender(case, sys.argv[2])
    batch: Any = zoo.MODELS[case.model][1](case.batch, torch.Generator().manual_seed(dist.get_rank()))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, measure(lambda: made.step(batch)))
    if dist.get_rank() == 0:
        Path(sys.argv[3]).write_text(json.dumps(ranks))
    dist.barrier()
    time.sleep(worker.EXIT_SECONDS)


if __name__ == "__main__":
    main()
