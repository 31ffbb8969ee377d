"""What a job may still take: of the host, of a container, and what a model has of it already."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard import first_call
from autoshard.runtime import available_memory as here

CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of 8 GiB that can be had, most of which hold files."""
    (tmp_path / "meminfo").write_text("MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 8388608 kB\n")
    monkeypatch.setattr(here, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(here, "CGROUP", tmp_path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return tmp_path


def test_memory_that_holds_files_can_be_had(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert here.available_memory(CPU) == 8 << 30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert here.available_memory(CPU) == 2 << 30


@pytest.mark.parametrize(("most", "left"), [("max", 8 << 30), (str(6 << 30), 3 << 30), (str(64 << 30), 8 << 30), (str(1 << 30), 1 << 29)])
def test_a_container_has_less(machine: Path, most: str, left: int) -> None:
    used = 3584 << 20 if most == str(6 << 30) else 1 << 30
    (machine / "memory.max").write_text(most + "\n")
    (machine / "memory.current").write_text(f"{used}\n")
    (machine / "memory.stat").write_text(f"anon 7\ninactive_file {1 << 29}\n")
    assert here.available_memory(CPU) == left


def test_what_a_model_has_already_is_not_counted_twice() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    parameters, buffers = 4 * (64 + 8 + 16), 4 * 16 + 8
    assert first_call._held(model, [optimizer]) == parameters + buffers
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    steps = 4 * 4
    assert first_call._held(model, [optimizer]) == 3 * parameters + buffers + steps


def test_processes_of_a_host_share_what_is_free_there() -> None:
    """Where the launcher, which divides it, does not say how many they are."""
    said = [{"_host": host, "_free": free, "_held": 1} for host, free in (("a", 90), ("b", 50), ("a", 80))]
    assert first_call.least_free(said, shared=True) == 41 and first_call.least_free(said, shared=False) == 51
