"""What the benchmarks' reports say of figures that were measured."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.optim import AdamW

import autoshard
from tests.cluster import Cluster

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its programs are found by name, as they find each other."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


def _step(*flights: tuple[str, float, float]) -> dict[str, Any]:
    return {"seconds": 1.0, "flights": flights, "waits": [(0, 0.0, 0.2)]}


def test_sends_are_seen_from_issue_to_wait_and_take_no_link_from_each_other() -> None:
    timeline = importlib.import_module("timeline")
    step = _step(("recv", 0.1, 0.9), ("recv", 0.2, 0.4), ("all_reduce", 0.3, 0.5), ("recv", 0.3, 0.8), ("all_reduce", 0.4, 0.7))
    assert timeline._line(step).flights == ((0.1, 0.9), (0.2, 0.4), (0.3, 0.5), (0.3, 0.8), (0.5, 0.7))


def test_asking_for_sends_waits_where_it_takes_longer_than_mostly() -> None:
    worker = importlib.import_module("timeline_worker")
    mark = {"ph": "X", "name": worker.MARK, "cat": "user_annotation", "ts": 0, "dur": 1e6}
    asked = [("c10d::send", 0.1, 0.001), ("c10d::send", 0.2, 0.001), ("c10d::send", 0.3, 0.051), ("c10d::recv_", 0.4, 0.002)]
    waited = ("_c10d_functional::wait_tensor", 0.25, 0.01)
    events = [{"ph": "X", "name": name, "ts": start * 1e6, "dur": taken * 1e6} for name, start, taken in (*asked, waited)]
    (step,) = worker.steps_of({"traceEvents": [mark, *events]})
    assert [(name, round(start, 6), round(end, 6)) for name, start, end in step["waits"]] == [(waited[0], 0.25, 0.26), ("c10d::send", 0.301, 0.351)]


@pytest.mark.parametrize(("exposed", "said"), [(0.23, "+15.0% | holds"), (0.24, "+20.0% | does not hold"), (0.16, "-20.0% | does not hold")])
def test_a_timeline_says_what_was_seen_of_sends_and_whether_the_claim_holds(exposed: float, said: str) -> None:
    timeline = importlib.import_module("timeline")
    predicted = timeline.Line(1.0, ("gather_direct", "all_reduce"), ((0.0, 0.1), (0.2, 0.5)), ((0.0, 0.2),))
    executed = timeline._line(_step(("recv", 0.0, 0.3), ("all_reduce", 0.2, 0.5)))
    case = importlib.import_module("accuracy").Case("llama", 4, 2, 3, "eager")
    jobs = tuple(timeline.Job(executed, seconds, 1.0) for seconds in (0.5, exposed, 0.1))
    text = timeline.markdown([timeline.Compared(case, predicted, jobs)], "a machine")
    assert f"| {1e3 * exposed:.0f} | 100 to 500 | {said}" in text
    assert "| sends: issued to waited for |" in text
    assert "| 1 | gather_direct | 0 to 100 |  | 0 to 300 |" in text
    assert "| 2 | all_reduce | 200 to 500 | 200 to 500 |  |" in text


def test_the_published_text_is_that_of_the_published_figures() -> None:
    """And says what the bound is of, which does not know of gradients that travel as rows."""
    report = importlib.import_module("report")
    files = sorted(report.RESULTS.glob("step_time*.json"), key=lambda file: (len(file.stem), file.stem))
    found = {f"../bench/results/{file.stem}": report.Results.from_json(json.loads(file.read_text())) for file in files}
    text = report.markdown(found)
    assert report.TEXT.read_text() == text
    assert "x the bound of dense gradients" in text and "x its bound" not in text


@pytest.mark.parametrize(
    ("hosts", "cores", "has"),
    [(2, [0, 1], [[0], [1]]), (2, [3, 5, 6, 7, 9], [[3, 5], [6, 7, 9]]), (3, [4, 6], [[4], [6], [4]]), (1, [0, 1], [[0, 1]])],
)
def test_hosts_share_no_core_where_there_are_as_many(hosts: int, cores: list[int], has: list[list[int]]) -> None:
    netns = importlib.import_module("netns")
    assert [netns.cores_of(host, hosts, cores) for host in range(hosts)] == has


@pytest.mark.parametrize("own_cores", [True, False])
def test_processes_of_a_job_stay_on_their_hosts_cores(own_cores: bool, tmp_path: Path) -> None:
    """And what starts them goes where it went."""
    netns = importlib.import_module("netns")
    before = netns.all_cores()
    said = "import os, pathlib; pathlib.Path(os.environ['RANK']).write_text(repr(sorted(os.sched_getaffinity(0))))"
    command = ["env", "-C", str(tmp_path), sys.executable, "-c", said]
    assert netns.run_on_loopback(netns.Job(command, hosts=2, own_cores=own_cores, timeout=60)) == 0
    expected = [netns.cores_of(host, 2, before) if own_cores else before for host in range(2)]
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == list(map(repr, expected))
    assert netns.all_cores() == before


def steps_of_a_job() -> list[str]:
    """How both say that they stepped, a few steps after the one backward."""
    sys.path.insert(0, str(ROOT / "bench"))
    bench, said = importlib.import_module("optimizer"), []
    for make in (AdamW, autoshard.optim.AdamW):
        model, optimizer = bench.job([(6, 4), (3,)], make)
        for _ in range(3):
            optimizer.step()
        said += [line for line in str(autoshard.report(model)).splitlines() if "steps: " in line]
    return said


def test_steps_are_measured_as_a_job_takes_them(two: Cluster) -> None:
    assert two.run(steps_of_a_job) == [["AdamW steps: all parameters at once"] * 2] * 2
