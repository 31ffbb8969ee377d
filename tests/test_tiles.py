"""Tiles of kernels: measured at work, once, and remembered between jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from autoshard.kernels import tuning


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@dataclass
class Device:
    """A device that works through what it is given when told to: launches by a tile take as long as it has rows. What is prepared for
    them takes as long as `prepared` of other work."""

    given: list[int]
    done: int = 0
    prepared: int = 0

    def now(self) -> Moment:
        return Moment(self, len(self.given))

    def launch(self, tile: tuning.Tile) -> Callable[[], None]:
        if self.prepared:
            self.given.append(self.prepared * tile["ROWS"])
        return lambda: self.given.append(tile["ROWS"])


@dataclass
class Moment:
    device: Device
    at: int

    def query(self) -> bool:
        return self.at <= self.device.done

    def elapsed_time(self, end: Moment) -> float:
        return float(sum(self.device.given[self.at : end.at]))


@pytest.fixture
def _new_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_known", {})
    monkeypatch.setattr(tuning, "_trials", {})
    monkeypatch.setattr(tuning, "LAUNCHES", 3)


@pytest.mark.usefixtures("_new_job")
@pytest.mark.parametrize(("rows", "chosen"), [((100, 99, 101), 100), ((100, 97, 96), 96)])
def test_the_first_tile_stays_unless_another_is_faster_by_more_than_chance(rows: tuple[int, ...], chosen: int) -> None:
    tiles, device = [{"ROWS": n} for n in rows], Device([], done=99)
    for _ in range(10):
        tuning.at_work("step", tiles, device.launch, device.now)
    assert device.given[-1] == chosen


@pytest.mark.usefixtures("_new_job")
def test_a_tile_is_found_at_work_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, device = [{"ROWS": n} for n in (4, 1, 2)], Device([])

    def launch(count: int) -> list[int]:
        for _ in range(count):
            tuning.at_work("step", tiles, device.launch, device.now)
        return device.given[-count:]

    assert launch(9) == [4, 1, 2] * 3
    assert launch(2) == [4, 1]  # the device has done nothing yet
    device.done = 11
    assert launch(3) == [2, 1, 1]  # known when the first of these has been launched
    monkeypatch.setattr(tuning, "_known", {})  # another job
    assert launch(2) == [1, 1]
    tuning.at_work("other step", tiles, device.launch, device.now)
    assert device.given[-1] == 4


@pytest.mark.usefixtures("_new_job")
def test_what_is_prepared_for_a_launch_is_not_measured() -> None:
    tiles, device = [{"ROWS": n} for n in (4, 1)], Device([], prepared=-3)  # by which fewer rows would take more
    for _ in range(6):
        tuning.at_work("step", tiles, device.launch, device.now)
    device.done = 99
    tuning.at_work("step", tiles, device.launch, device.now)
    assert tuning._known == {"step": {"ROWS": 1}}


@pytest.mark.usefixtures("_new_job")
def test_all_events_must_have_come() -> None:
    """The last launch may be on another stream, which is ahead."""
    tiles, streams = [{"ROWS": n} for n in (4, 1)], (Device([]), Device([], done=99))
    for i in range(6):
        stream = streams[i == 5]
        tuning.at_work("step", tiles, stream.launch, stream.now)
    assert not tuning._known
    streams[0].done = 5
    tuning.at_work("step", tiles, streams[0].launch, streams[0].now)
    assert tuning._known == {"step": {"ROWS": 1}}


@pytest.mark.usefixtures("_new_job")
def test_each_of_two_devices_of_a_kind_goes_by_all_tiles() -> None:
    tiles, devices = [{"ROWS": n} for n in (4, 1)], (Device([]), Device([]))
    for _ in range(6):
        for i, device in enumerate(devices):
            tuning.at_work("step", tiles, device.launch, device.now, i)
    assert [device.given for device in devices] == [[4, 1] * 3] * 2
    devices[1].done = 7
    for i, device in reversed(list(enumerate(devices))):
        tuning.at_work("step", tiles, device.launch, device.now, i)
    assert [device.given[6:] for device in devices] == [[1], [4]]  # what the second has found, the first goes by


@pytest.mark.usefixtures("_new_job")
@pytest.mark.parametrize("spoiled", ["", "{}", '{"key": "step", "tile": {"ROWS": 7}}'])
def test_a_spoiled_file_is_as_none(spoiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, device = [{"ROWS": n} for n in (4, 1)], Device([], done=99)
    for _ in range(6):
        tuning.at_work("step", tiles, device.launch, device.now)
    (file,) = (tmp_path / "autoshard" / "tiles").iterdir()
    file.write_text(spoiled)
    monkeypatch.setattr(tuning, "_known", {})
    for _ in range(6):
        tuning.at_work("step", tiles, device.launch, device.now)
    assert device.given == [4, 1] * 6 and '"ROWS": 1' in file.read_text()
