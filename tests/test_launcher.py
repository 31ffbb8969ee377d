"""What Triton builds its launcher with: where that is not there, no step goes by kernels, and nothing of it was touched."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import autoshard
from autoshard.errors import UnsupportedError
from autoshard.kernels import launcher
from autoshard.kernels.adafactor import Passes
from autoshard.runtime import factored, families, fused_step
from autoshard.torch_internals import FakeTensorMode

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Without a compiler, and with the headers of Python."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CPATH", str(tmp_path))
    (tmp_path / "Python.h").touch()
    launcher.lacking.cache_clear()
    yield
    launcher.lacking.cache_clear()


def installed(folder: Path, name: str) -> str:
    """A program of this name in a folder."""
    (folder / name).symlink_to(sys.executable)
    return str(folder / name)


def on_a_gpu(*shape: int) -> nn.Parameter:
    """One that has a gradient, without numbers."""
    with FakeTensorMode():
        parameter = nn.Parameter(torch.ones(shape, device="cuda"))
        parameter.grad = torch.ones_like(parameter)
    return parameter


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_a_compiler_is_looked_for_in_the_path(name: str, tmp_path: Path) -> None:
    assert launcher.lacking() == "a C compiler (CC, gcc or clang), with which Triton builds its launcher"
    installed(tmp_path, name)
    launcher.lacking.cache_clear()
    assert launcher.lacking() == ""


@pytest.mark.parametrize(("chosen", "there"), [("cc", True), ("no such file", False), ("", False)])
def test_cc_counts_alone_where_it_is_set(chosen: str, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "gcc")
    installed(tmp_path, "cc")
    monkeypatch.setenv("CC", chosen)
    assert (launcher.lacking() == "") == there


def test_headers_are_looked_for_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, "gcc")
    (tmp_path / "Python.h").unlink()
    monkeypatch.setattr(sysconfig, "get_paths", lambda _: {"include": str(tmp_path)})
    assert launcher.lacking() == "Python.h, with which Triton builds its launcher"


def test_a_step_that_cannot_be_launched_is_left_to_torch() -> None:
    parameter = on_a_gpu(4)
    optimizer = optim.AdamW([parameter])
    assert fused_step.take(optimizer, families.ADAM).startswith("on a GPU without a C compiler")
    assert not fused_step.take_over(autoshard.fuse(optimizer), closure=False) and not optimizer.state
    ours = autoshard.optim.AdamW([parameter])
    with pytest.raises(UnsupportedError, match="cannot step on a GPU without a C compiler .*; torch.optim's may"):
        ours.step()
    assert not ours.state


def test_adafactor_goes_by_torch_s_operations_then() -> None:
    parameter = on_a_gpu(18, 144)
    optimizer = optim.Adafactor([parameter])
    state: dict[str, Any] = {"step": torch.ones(())}
    with parameter.fake_mode:  # type: ignore[attr-defined]
        state |= {"row_var": torch.zeros(18, 1, device="cuda"), "col_var": torch.zeros(1, 144, device="cuda")}
        entry = factored.Factors(parameter, optimizer.param_groups[0], state, None)
        ((at, passes),) = factored.Together([entry], None, interpret=False)._passes
    assert entry.suits_kernels and at == [0] and not isinstance(passes, Passes)


def test_codegen_is_eager_then_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    backend = autoshard.backend(autoshard.Config(codegen="triton", verbose=False))
    assert backend._fuses([on_a_gpu(4)]) is None and backend.config.codegen == "triton"
    assert "without a C compiler" in " ".join("".join(capfd.readouterr()).split())
