"""The record of how far predictions were off."""

from __future__ import annotations

from pathlib import Path

import pytest
from setuptools.dist import Distribution

from autoshard.cost_model import accuracy


def test_the_record_is_installed_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which `pip install .` leaves out, as all that is no Python file, unless it is named; then no plan has a band."""
    monkeypatch.chdir(Path(__file__).parents[1])
    package = Distribution()
    package.parse_config_files()
    package.include_package_data = False  # of a manifest, which there is none of
    command = package.get_command_obj("build_py")
    command.ensure_finalized()
    installed = [Path(folder, name) for _, folder, _, names in command.data_files for name in names]
    assert accuracy._FILE.relative_to(Path.cwd()) in installed
