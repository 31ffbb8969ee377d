"""What is kept between jobs, where there may be no place for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.cache import cache_folder, writable, write_at_once
from autoshard.cost_model.cluster import measured_here, preset
from autoshard.kernels import source


def _homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("folder", ["n" * 300, ""])
def test_a_cache_that_cannot_be_looked_into_is_as_none(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is too long fails as a folder does that this process may not look into. Where none is said there is no home."""
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    monkeypatch.setattr(Path, "home", staticmethod(_homeless))
    assert measured_here("cpu") == preset("cpu")
    assert source._file("some_kernel.py", "x = 1").read_text() == "x = 1"
    assert not writable(cache_folder() / "some.yaml") and not write_at_once(cache_folder() / "some.yaml", "")


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "folder" / "new" / "file"
    assert writable(file) and write_at_once(file, "text") and file.read_text() == "text"
    assert not writable(folder) and not write_at_once(folder, "text")
    assert not writable(file / "below") and not write_at_once(file / "below", "text")
    assert list(tmp_path.iterdir()) == [folder] and list(file.parent.iterdir()) == [file]
