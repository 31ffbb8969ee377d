"""Agreements of many processes, which are threads here: what is said, and what each of them asks of the store."""

from __future__ import annotations

import pytest

from autoshard.runtime import waiting
from autoshard.runtime.waiting import named, wait_until


class Clock:
    """Time that passes where someone sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("after", [0.0, 0.01, 0.3, 7.0, 60.0])
def test_who_waits_longer_looks_less_often_but_is_not_late(monkeypatch: pytest.MonkeyPatch, after: float) -> None:
    clock, looks = Clock(), []
    monkeypatch.setattr(waiting, "time", clock)
    wait_until(lambda: looks.append(clock.now) or clock.now >= after, 90.0, late=lambda: None, failed=TimeoutError)
    assert clock.now <= after + min(after / 8 + 0.0005, 0.25)
    assert len(looks) <= 70 + 4 * after


def test_of_very_many_some_are_named() -> None:
    assert (named([3]), named([3, 5])) == ("rank 3", "ranks 3, 5")
    assert named(range(20, 40)) == "ranks 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35 and 4 more"
