"""The bench that compares predictions with measurements: rank 0 of many, and what it makes of several devices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autoshard.cost_model import accuracy as record
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.plan import Plan

BENCH = Path(__file__).parents[1] / "bench"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCH))  # its programs are found by name, as they find each other
    import accuracy
    import accuracy_page
    from compared import Case, Compared, Results

MLP = Case("mlp", 8, 8, 2, lone=True)


def test_rank_0_of_many_has_what_is_predicted(tmp_path: Path) -> None:
    predicted, _, plan = accuracy.predict(MLP, accuracy.cluster_of(MLP, {}))
    found = accuracy.measure(MLP, plan, tmp_path)
    assert plan.world == 8 and predicted.keys() == found.keys()
    assert (found["parameters"], found["optimizer"]) == (predicted["parameters"], predicted["optimizer"])
    assert found["gradients"] == pytest.approx(predicted["gradients"], abs=1e4)  # one that all have lies in what was padded
    assert found["held"] == pytest.approx(predicted["held"], abs=1e4)
    assert found["saved"] == pytest.approx(predicted["saved"], abs=1e3)
    assert found["peak"] == pytest.approx(predicted["peak"], rel=0.02)


def test_rank_0_is_alone_on_nodes_of_eight() -> None:
    cluster = accuracy.cluster_of(replace(MLP, world=64), {})
    assert (cluster.nodes, cluster.per_node, cluster.device) == (8, 8, DEVICES["cpu"])


def test_what_a_gpu_reserves_is_predicted() -> None:
    case = replace(MLP, device="h100")
    predicted, *_ = accuracy.predict(case, Cluster(1, 8, DEVICES["h100"]))
    assert predicted["reserved"] >= predicted["peak"] > 0 and "step" not in predicted
    assert "step" in accuracy.predict(Case("mlp", 8, device="h100"), Cluster(1, 1, DEVICES["h100"]))[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_says_what_is_allocated_and_reserved(tmp_path: Path) -> None:
    device = accuracy.device_called("cuda")
    for case in (replace(MLP, device=device.name), Case("mlp", 8, device=device.name)):
        predicted, _, plan = accuracy.predict(case, Cluster(1, case.world, device))
        found = accuracy.measure(case, plan, tmp_path)
        assert found.keys() == predicted.keys() | {"libraries"}
        assert found["parameters"] == predicted["parameters"] and found["reserved"] >= found["peak"] >= found["held"]


@pytest.mark.full
def test_cases_are_compiled_beside_each_other_and_one_that_fails_costs_its_row_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))  # which processes that predict have from here
    monkeypatch.setattr(accuracy, "_fitting", lambda predictions, _: iter([[case] for case in predictions]))
    plain = accuracy._program
    bad = replace(MLP, zero=1)
    monkeypatch.setattr(accuracy, "_program", lambda case, *rest: ["-c", "raise SystemExit('no room')"] if case == bad else plain(case, *rest))
    found = []
    with pytest.raises(RuntimeError, match="exit status 1\nno room"):
        for one in accuracy._beside_each_other([bad, MLP], {}, tmp_path, "today"):
            found.append(one)
    (one,) = found
    assert one.case == MLP and one.measured["parameters"] == one.predicted["parameters"] and one.plan


def test_cases_are_on_a_gpu_together_as_far_as_they_fit() -> None:
    cases = [replace(MLP, batch=n) for n in range(1, 5)]
    sizes = dict(zip(cases, (1e9, 30e9, 30e9, 90e9)))
    predictions = {case: ({"reserved": size}, {}, Plan(1, (("shard", 1),), ())) for case, size in sizes.items()}
    assert list(accuracy._fitting(predictions, 80 * 10**9)) == [cases[:3], cases[3:]]
    assert list(accuracy._fitting(predictions, 40 * 10**9)) == [cases[:2], cases[2:3], cases[3:]]


def test_what_was_measured_is_predicted_again_while_its_plan_is_the_same() -> None:
    case = replace(MLP, device="h100")
    cluster = Cluster(1, 1, replace(DEVICES["h100"], memory=10**10))
    predicted, _, plan = accuracy.predict(case, accuracy.cluster_of(case, {(1, 0): cluster}))
    row = Compared(case, {"peak": 1.0}, {"peak": 2.0}, "2026-01-01", plan=accuracy.digest(plan))
    now = accuracy.again(row, cluster)
    assert now is not None and now.predicted == predicted and now.measured == row.measured
    assert accuracy.again(replace(row, plan="another"), cluster) is None


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_each_device_has_its_cases(device: str) -> None:
    cases = accuracy.cases(False, device)
    assert len(set(cases)) == len(cases) and {c.device for c in cases} == {device}
    assert {c.world for c in cases if c.lone} == {8, 64} and not any(c.timed for c in cases if c.lone)
    assert 0 < len(accuracy.cases(True, device)) < len(cases)
    assert device == "cpu" or {c.world for c in cases if not c.lone} == {1}


def test_rank_0_can_be_asked_for_by_itself() -> None:
    chosen = [c for c in accuracy.cases(False) if accuracy.is_wanted(c, "mlp,rank0")]
    assert {c.model for c in chosen if not c.lone} == {"mlp"} and {c.model for c in chosen if c.lone} >= {"llama", "gpt2"}


def test_of_a_cpu_no_gpu_is_seen(tmp_path: Path) -> None:
    for kind, seen in (("cpu", ""), ("cuda", "0")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", "0")
            accuracy.launch(["-c", f"import os; assert os.environ['CUDA_VISIBLE_DEVICES'] == {seen!r}"], (1, 0), tmp_path, kind)


def _compared(case: Case, off: float) -> Compared:
    """Everything was off by so much of it."""
    names = {"held", "gradients", "saved", "peak", "parameters", "optimizer", *(["step"] if case.timed else [])}
    names |= {"reserved"} if case.device != "cpu" else {"probe", "memory probe"} if case.timed else set()
    predicted = dict.fromkeys(names, 1e8)
    measured = {name: 1e8 * (1 if "probe" in name else 1 + off) for name in names}
    return Compared(case, {**predicted, "share": 0.5}, {**measured, "libraries": 3e7}, "2026-01-01")


@pytest.mark.parametrize(("link", "slower"), [(1.0, 1.0), (1.1, 1.01), (1.5, 1.35)])
def test_a_step_is_no_shorter_than_what_a_slower_link_takes_for_all_that_it_sends(link: float, slower: float) -> None:
    probes = {"probe": 1.0, "memory probe": 1.0}
    row = Compared(Case("mlp", 32, 2, 3), {**probes, "link probe": 1.0, "share": 0.5, "waits": 0.1, "busy": 0.9}, {**probes, "link probe": link}, "")
    assert row.slower == pytest.approx(slower)


@pytest.fixture
def two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What was measured on a CPU and on a GPU, of which rows are off by 1 % and by 5 %."""
    monkeypatch.setattr(accuracy, "RESULTS", tmp_path)
    monkeypatch.setattr(accuracy, "PAGE", tmp_path / "accuracy.md")
    monkeypatch.setattr(accuracy, "RECORD", tmp_path / "record.json")
    for device, off in (("cpu", 0.01), ("h100", 0.05)):
        rows = [_compared(case, off) for case in (Case("mlp", 8, device=device), replace(MLP, device=device))]
        Results(f"a machine with {device}", rows).save(accuracy.file_of(device))
    return tmp_path


def test_each_device_has_a_table_and_bands_of_its_own(two_devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy.publish()
    lines = (two_devices / "accuracy.md").read_text().splitlines()
    tables = [[line for line in part if line.startswith("|")] for part in (lines[: lines.index("## h100")], lines[lines.index("## h100") :])]
    for table, columns in zip(tables, (16, 18)):
        assert len(table) == 4 and {line.count("|") for line in table} == {columns}
    assert " reserved MB | measured | error | libraries MB |" in tables[1][0] and "reserved" not in tables[0][0]
    assert tables[1][-1].endswith("| 100.00 | 105.00 | +5.0% | 30.00 | | | |")
    monkeypatch.setattr(record, "_FILE", two_devices / "record.json")
    record._record.cache_clear()
    try:
        assert record.memory_error(DEVICES["cpu"], "eager") == (0.01, 0.01)
        assert record.memory_error(DEVICES["h100"], "eager") == (0.05, 0.05)
        assert record.memory_error(DEVICES["a100"], "eager") is None
    finally:
        record._record.cache_clear()


def test_rows_stay_but_those_of_another_machine(two_devices: Path) -> None:
    file = accuracy.file_of("h100")
    kept = accuracy.earlier(file, "a machine with h100", [Case("mlp", 8, device="h100")])
    assert [row.case for row in kept] == [replace(MLP, device="h100")]
    assert accuracy.earlier(file, "another", []) == accuracy.earlier(two_devices / "none.json", "another", []) == []
    Results("another", kept).save(file)
    accuracy.publish()
    assert "a machine with cpu" in (two_devices / "accuracy.md").read_text()
    assert set(json.loads((two_devices / "record.json").read_text())) == {"cpu eager", "h100 eager"}


def test_the_published_page_is_that_of_the_published_rows() -> None:
    results = [Results.load(accuracy.file_of("cpu"))]
    results += [Results.load(file) for file in sorted(accuracy.RESULTS.glob("accuracy_*.json"))]
    assert accuracy_page.page(results) == accuracy.PAGE.read_text()
    assert accuracy.bands([row for found in results for row in found.rows]) == json.loads(accuracy.RECORD.read_text())
