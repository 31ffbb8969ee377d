"""Machines: their files, their devices, and what was measured of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from autoshard.calibration.kernels import kernels, one_by_one
from autoshard.calibration.messages import BEGIN_WHERE_ASKED, packs
from autoshard.calibration.processor import parameters
from autoshard.cost_model import accuracy
from autoshard.cost_model.cluster import (
    TABLES,
    Cluster,
    as_measured,
    cache_file,
    measured_by,
    measured_here,
    preset,
    with_processor,
    with_rate,
)
from autoshard.cost_model.collectives import Group, table_name
from autoshard.cost_model.hardware import DEVICES, Link, device_named_like, is_known
from autoshard.cost_model.kernels import seconds
from autoshard.cost_model.work import Work
from autoshard.errors import ClusterError


def test_a_cluster_survives_yaml() -> None:
    cluster = Cluster(2, 8, DEVICES["h100"])
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster
    short = "nodes: 2\nper_node: 8\ndevice: {preset: h100, name: ours, memory: 96e9, across: {bandwidth: 50e9}}"
    read = Cluster.from_yaml(short)
    written = Cluster.from_yaml("nodes: 1\nper_node: 2\ndevice: {preset: h100, memory: 1.5 GiB}")
    assert written.device.memory == 3 << 29
    assert read.device.name == "ours" and read.device.memory == 96e9 and read.device.across.latency == 10e-6
    for said, more in (("{}", {}), ("{fp64: 60e12, fp32: 50e12}", {"fp64": 60e12, "fp32": 50e12})):
        read = Cluster.from_yaml(f"device: {{preset: h100, flops: {said}}}")
        assert read.device.flops == {**DEVICES["h100"].flops, **more}


LINK = "{latency: 1e-6, bandwidth: 1e9}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes: [", "not YAML"),
        ("[" * 3000, "not YAML"),
        ("device: {preset: h100, memory: 2024-13-45}", "not YAML: month must be in 1..12"),
        ("device: {preset: h100, memory: !!bool abc}", "not YAML: 'abc'"),
        ("nodes: 2\ndevice: [h100\nper_node: 2", "not YAML: while parsing a flow sequence .* line 2, column 9"),
        ("- 1", "legal: a mapping"),
        ("device: h1000", "device: 'h1000' is not known; did you mean 'h100'. legal: .*'h100'"),
        ("nodes: 0\ndevice: h100", "nodes: 0 is not legal"),
        ("nods: 1\ndevice: h100", "'nods' is not known; legal: nodes, per_node, device"),
        ("device: {preset: h100, bandwidth: -1}", "bandwidth: -1 is not legal; legal: 1e+06 to 1e+15"),
        ("device: {preset: h100, bandwidth: 1e30}", "bandwidth: 1e+30 is not legal"),
        ("device: {preset: H100}", "device: 'H100' is not known; did you mean 'h100'"),
        ("device: {preset: h100, memory: 80}", "memory: 80 is not legal; legal: 1e.06 to 1e.14 bytes"),
        ("device: {preset: [h100]}", r"device: \['h100'\] is not known; "),
        ("device: {preset: h100, kind: tpu}", "kind: 'tpu' is not legal; legal: gpu, cpu"),
        ('device: {preset: cpu, inside: {scatters: "no"}}', "scatters: 'no' is not legal; legal: true, false"),
        ("device: {preset: cpu, tables: {view: 5}}", r"tables.view: 5 is not legal; legal: a list of \[size, seconds\]"),
        ("device: {preset: cpu, tables: {pointwise: [[-1, 1.0]]}}", "tables.pointwise: sizes .* above 0 and each above the last"),
        ("device: {preset: cpu, tables: {pointwise: [[1, 0]]}}", "tables.pointwise: 0.* is not legal"),
        ("device: {preset: h100, inside: {latency: soon}}", "latency: 'soon' is not legal"),
        ("device: {preset: h100, tables: {pointwise: [[2, 1.0], [1, 1.0]]}}", "each above the last"),
        ("device: {preset: h100, tables: {pointwise: [[2]]}}", "legal: \\[size, seconds\\]"),
        ("device: {name: x, memory: 0, flops: {}, bandwidth: 1e9, launch: 0, inside: *, across: *}".replace("*", LINK), "flops: {} is not legal"),
        (f"device: {{name: x, memory: 0, flops: {{fp32: 1e12}}, bandwidth: 1e9, launch: 0, inside: {{}}, across: {LINK}}}", "inside: latency is missing"),
        ("device: {preset: h100, across: {latency: -1}}", "across.latency: -1 is not legal"),
        ("device: {preset: h100, memory: 1e9, memory: 2e9}", "not YAML: 'memory' stands there twice"),
        ("device: {preset: h100, name: 5}", "name: 5 is not legal; legal: a text"),
        ("device: {preset: cpu, tables: {pontwise: [[1, 1.0]]}}", "tables: 'pontwise' is not known; legal: .*pointwise"),
        ("device: {preset: cpu, tables: {matmul.fp8: [[1, 1.0]]}}", "tables: 'matmul.fp8' is not known"),
        ("device: {preset: cpu, tables: {all_gather@0: [[1, 1.0]]}}", "tables: 'all_gather@0' is not known"),
        ("device: {preset: cpu, tables: {pointwise: [[1, 2.0], [2, 1.0]]}}", "1.0 after 2.0 is not legal; legal: seconds that do not fall"),
        ("device: {preset: cpu, tables: {pointwise: [[1, 1.0], [.nan, 1.0], [2, 1.0]]}}", "each above the last"),
        ("device: {preset: cpu, tables: {pointwise: [[1, true]]}}", "legal: \\[size, seconds\\]"),
        (f"device: {{preset: cpu, tables: {{pointwise: [[{10**400}, 1.0]]}}}}", "a number of 401 digits is not legal"),
        ("device: {preset: cpu, tables: {all_reduce@4/8: [[1, 1.0]]}}", "tables: 'all_reduce@4/8' is not known"),
        ("device: {preset: cpu, tables: {matmul.tf32: [[1, 1.0]]}}", "tables: 'matmul.tf32' is not known"),
        ("device: {name: x}", "memory is missing"),
        ("nodes: 1", "device is missing"),
    ],
)
def test_a_bad_cluster_file_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ClusterError, match=says.replace("+", "\\+")):
        Cluster.from_yaml(text)


def test_devices_are_known_by_what_drivers_call_them() -> None:
    gib = 2**30
    names = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H200": "h200",
        "NVIDIA B200": "b200",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "NVIDIA A100 80GB PCIe": "a100-pcie",
        "NVIDIA A100-PCIE-40GB": "a100-pcie",
        "NVIDIA L4": "l4",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "Tesla V100-SXM2-32GB": "v100",
        "Tesla V100-PCIE-16GB": "v100-pcie",
        "AMD Instinct MI300X": "mi300x",
    }
    assert {*names.values(), "cpu"} == set(DEVICES)
    for name, expected in names.items():
        assert device_named_like(name, 40 * gib) == replace(DEVICES[expected], memory=40 * gib), name
    for name in ("NVIDIA T4", "NVIDIA L40S", "NVIDIA RTX A1000", "NVIDIA GH200 480GB"):
        unknown = device_named_like(name, 16 * gib)
        assert unknown.name == name and unknown.memory == 16 * gib and not is_known(unknown)
    assert all(d.source for d in DEVICES.values())


def test_a_measured_rate_is_that_of_the_slowest_links_and_near_ones_are_the_same() -> None:
    cpu = DEVICES["cpu"]
    one, two = Cluster(1, 2, cpu), Cluster(2, 2, cpu)
    assert with_rate(one, 120e6).device.across == cpu.across and with_rate(two, 120e6).device.inside == cpu.inside
    assert with_rate(one, 120e6).device.inside.bandwidth == pytest.approx(120e6, rel=0.2)
    assert with_rate(two, 118e6) == with_rate(two, 123e6) != with_rate(two, 24e6)


def test_kernels_reach_what_a_processor_was_measured_to() -> None:
    cpu = Cluster(2, 1, DEVICES["cpu"])
    found = with_processor(cpu, {"fp32": 90e9}, 24e9)
    matmul, sum = Work("matmul", flops=9e9, read=8, written=4), Work("pointwise", flops=0, read=2e9, written=1e9)
    assert seconds(matmul, found.device) == pytest.approx(0.1, rel=0.2)
    assert seconds(sum, found.device) == pytest.approx(3e9 / 24e9, rel=0.2)
    assert found.device.flops["bf16"] == cpu.device.flops["bf16"] and found.device.across == cpu.device.across
    assert with_processor(cpu, {"fp32": 92e9}, 25e9) == found != with_processor(cpu, {"fp32": 30e9}, 24e9)


def test_a_calibration_that_counts_otherwise_is_refused() -> None:
    now = Cluster(1, 1, replace(DEVICES["cpu"], source=measured_by("2.13.0")))
    assert Cluster.from_yaml(now.to_yaml()) == now
    with pytest.raises(ClusterError, match="counts kernels in another way than this version; run autoshard calibrate again"):
        Cluster.from_yaml(now.to_yaml().replace(f"tables {TABLES},", "tables 1,"))
    with pytest.raises(ClusterError, match="run autoshard calibrate again"):
        Cluster.from_yaml("device: {preset: cpu, source: 'measured by autoshard calibrate, torch 2.13.0'}")


def test_the_file_of_a_bad_cluster_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    for data, says in ((b"nodes: 0\ndevice: h100", "nodes: 0 is not legal"), (b"\xff", "")):
        file.write_bytes(data)
        with pytest.raises(ClusterError, match=f"{re.escape(str(file))}: {says}"):
            Cluster.load(file)


def test_what_was_measured_here_comes_before_the_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measured_here("cpu") == preset("cpu")
    cache_file("cpu").parent.mkdir(parents=True)
    cache_file("cpu").write_text(Cluster.from_yaml("device: {preset: cpu, bandwidth: 5e9}").to_yaml())
    assert measured_here("cpu").bandwidth == 5e9


def test_a_processor_is_one_by_any_name() -> None:
    named, gpu = (Cluster.from_yaml(f"device: {{preset: {preset}, name: mine}}").device for preset in ("cpu", "h100"))
    assert named.is_cpu and not gpu.is_cpu
    whole = yaml.safe_load(Cluster(1, 1, DEVICES["cpu"]).to_yaml())
    whole["device"].pop("kind")  # as files from before there was one
    assert Cluster.from_yaml(yaml.safe_dump(whole)).device.is_cpu
    assert accuracy.memory_error(named, "eager") == accuracy.memory_error(DEVICES["cpu"], "eager")


def test_a_device_without_a_preset_has_nothing_of_one() -> None:
    text = f"device: {{name: x, memory: 16e9, flops: {{fp32: 1e12}}, bandwidth: 1e11, launch: 5e-6, inside: {LINK}, across: {LINK}}}"
    device = Cluster.from_yaml(text).device
    assert device.inside == device.across == Link(1e-6, 1e9, scatters=True)
    assert (device.message, device.source, device.kind, dict(device.tables)) == (0.0, "", "gpu", {})


def test_what_a_file_says_once_may_be_used_again() -> None:
    text = "device: {preset: h100, inside: &link {latency: 1e-6, bandwidth: 1e9}, across: {<<: *link, latency: 2e-6}}"
    device = Cluster.from_yaml(text).device
    assert (device.across.latency, device.across.bandwidth) == (2e-6, 1e9)


def test_all_that_calibrate_may_measure_may_stand_in_a_file() -> None:
    cpu, two = torch.device("cpu"), Group(2)
    rows = [*kernels(cpu), *packs(cpu), *parameters(2), *one_by_one()]
    names = [*dict.fromkeys(row.table for row in rows), "call", "call.generated", "all_reduce@16/2"]
    for name in ("all_gather", "reduce_scatter", "all_reduce", *BEGIN_WHERE_ASKED):
        names += [table_name(name, two), table_name(f"{name}.issue", two)]
    tables = dict.fromkeys(names, ((1.0, 1e-06), (2.0, 1e-06)))
    cluster = Cluster(1, 1, replace(DEVICES["cpu"], tables=tables))
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster


def test_what_was_measured_of_a_device_without_a_preset_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    unknown = device_named_like("NVIDIA T4", 16 * 2**30)
    assert as_measured(unknown) == unknown
    cache_file(unknown.name).parent.mkdir(parents=True)
    cache_file(unknown.name).write_text(Cluster(1, 1, replace(unknown, bandwidth=3e11)).to_yaml())
    assert as_measured(unknown) == replace(unknown, bandwidth=3e11)


def test_a_band_of_time_is_for_devices_whose_kernels_were_measured_and_code_that_was_compared() -> None:
    cpu = DEVICES["cpu"]
    measured = replace(cpu, tables={"pointwise": ((1.0, 1e-6),)})
    assert accuracy.time_error(measured, "eager") and not accuracy.time_error(cpu, "eager")
    assert not accuracy.time_error(replace(cpu, tables={"view": ((1.0, 1e-6),)}), "eager")
    assert not accuracy.memory_error(cpu, "triton") and accuracy.memory_error(cpu, "inductor")
