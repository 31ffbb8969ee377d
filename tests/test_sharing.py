"""How compute and collectives get on beside each other, as `autoshard calibrate` finds it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from autoshard.calibration.messages import ASKED, BETWEEN, _asking
from autoshard.calibration.sharing import IN_A_ROW, _beside, _Flight
from autoshard.cost_model.timeline import MOST, Sharing

MATMUL, GATHER, ASKING = 0.001, 0.5, 0.125  # seconds
MESSAGE = torch.zeros(1)


class Machine:
    """One on which compute and gathers share as told."""

    def __init__(self, shared: Sharing) -> None:
        self.shared = shared

    def computed(self, count: int) -> float:
        return count * MATMUL

    def flight(self, part: object, count: int) -> _Flight:
        now = link = computing = 0.0
        for _ in range(IN_A_ROW):
            link, now = max(link, now) + GATHER, now + ASKING
            both = self.shared.both(count * MATMUL, link - now)
            spent = float(self.shared.slowed(count * MATMUL, link - now))
            link = float(self.shared.delayed(link, now, both))
            now, computing = now + spent, computing + spent
        return _Flight(IN_A_ROW * ASKING, computing, max(link - now, 1e-9))


@pytest.mark.parametrize("shared", [(0.0, 0.0), (0.1, 0.0), (0.2, 0.5), (0.5, 0.5), (0.1, MOST)])
def test_how_a_machine_shares_is_found_again(shared: tuple[float, float]) -> None:
    machine: Any = Machine(Sharing(*shared))
    assert _beside(machine, MESSAGE, MATMUL) == pytest.approx(shared, abs=0.02)


def test_hiding_a_gather_takes_no_longer_than_waiting_for_it() -> None:
    machine: Any = Machine(Sharing(interference=0.8, drag=0.5))
    interference, drag = _beside(machine, MESSAGE, MATMUL)
    assert (interference + drag, drag) == (pytest.approx(1.0), pytest.approx(0.5, abs=0.05))


def test_a_gather_that_stands_still_beside_compute_ends_all_the_same() -> None:
    machine: Any = Machine(Sharing(interference=0.0, drag=0.99))
    assert _beside(machine, MESSAGE, MATMUL)[1] == MOST


def test_what_is_computed_behind_asking_is_not_asking() -> None:
    asked = list[int]()

    def ask() -> torch.Tensor:
        asked.append(1)
        return torch.zeros(1)

    start = time.perf_counter()
    asking = _asking(ask, ASKED)
    assert len(asked) == ASKED and 0 < ASKED * asking <= 2 * (time.perf_counter() - start - ASKED * BETWEEN)


def test_asking_while_a_message_is_served_is_waiting() -> None:
    assert _Flight.of([0.125, 2.125, 0.125], 1.0, 0.5) == _Flight(asking=0.375, computing=1.0, waiting=2.5)
