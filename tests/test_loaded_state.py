"""State that an optimizer loads, of which it steps rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import autoshard
from tests.cluster import Cluster
from tests.small import config, what_is_said

OPTIMIZERS: dict[str, Any] = {
    "AdamW": optim.AdamW,
    "AdamW foreach": lambda ps: optim.AdamW(ps, foreach=True),
    "SGD momentum": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "autoshard": autoshard.optim.AdamW,
}


def state_of_fewer_rows(name: str) -> str:
    """What is said of state that has as many rows as a process, of a model with half of them."""
    small, large = nn.Linear(6, 4, bias=False), nn.Linear(6, 8, bias=False)
    before, optimizer = (OPTIMIZERS[name](m.parameters()) for m in (small, large))
    small(torch.ones(2, 6)).sum().backward()
    before.step()
    compiled: Any = torch.compile(large, backend=autoshard.backend(config(3, replicate_below=0)))
    compiled(torch.ones(2, 6)).sum().backward()
    optimizer.load_state_dict(before.state_dict())
    return what_is_said(optimizer.step)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_other_rows_is_not_taken_for_a_process_s_own(two: Cluster, name: str) -> None:
    for text in two.run(state_of_fewer_rows, name):
        assert "has the shape (4, 6), its parameter (8, 6); legal: whole, as autoshard.state_dict(optimizer) has it" in text
