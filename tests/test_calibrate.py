"""`autoshard calibrate`: where it writes and which device it measures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoshard.calibration.device import device_here
from autoshard.cli import main
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.errors import ConfigError


def test_a_calibration_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoshard.cli.calibrate", lambda: pytest.fail("was measured"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "ours.yaml"):
        assert main(["calibrate", "--out", str(out)]) == 2
        assert f"--out: {str(out)!r} cannot be written; legal: a file" in capsys.readouterr().err


def test_a_calibration_is_written_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, out = Cluster(1, 2, DEVICES["cpu"]), tmp_path / "new" / "ours.yaml"
    monkeypatch.setattr("autoshard.cli.calibrate", lambda: cluster)
    (tmp_path / "link").symlink_to(out)
    for link in (out, tmp_path / "link"):
        assert main(["calibrate", "--out", str(link)]) == 0
        assert Cluster.load(out) == cluster and list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize(("said", "index"), [(None, 0), ("1", 1), ("2", None)])
def test_each_process_measures_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch, said: str | None, index: int | None) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if said is not None:
        monkeypatch.setenv("LOCAL_RANK", said)
    if index is not None:
        assert device_here() == torch.device("cuda", index)
    else:
        with pytest.raises(ConfigError, match="LOCAL_RANK is 2, and this host has 2 GPUs; legal: one process a GPU"):
            device_here()
