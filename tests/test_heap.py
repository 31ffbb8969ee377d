"""What is alive, as the garbage collector knows it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from autoshard.heap import _is_frozen, alive, collect, one_look


class Layer(nn.Linear):
    pass


def test_instances_of_what_inherits_are_found_frozen_or_not() -> None:
    layer = Layer(2, 2)
    gc.freeze()
    try:
        later = Layer(2, 2)
        assert {id(m) for m in alive(Layer)} == {id(layer), id(later)}
        assert {id(layer), id(later)} <= {id(m) for m in alive(nn.Module)}
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_what_is_frozen_is_looked_through_again_where_something_was_frozen_since() -> None:
    first = Layer(2, 2)
    gc.freeze()
    try:
        assert {id(m) for m in alive(Layer)} == {id(first)}
        second = Layer(2, 2)
        frozen = gc.get_freeze_count()
        assert {id(m) for m in alive(Layer)} == {id(first), id(second)}
        assert gc.get_freeze_count() <= frozen and any(found is second for found in gc.get_objects())  # nobody froze it
        gc.unfreeze()
        assert {id(m) for m in alive(Layer)} == {id(first), id(second)}
        del first
        gc.freeze()
        assert {id(m) for m in alive(Layer)} == {id(second)}
        third = Layer(2, 2)
        gc.freeze()
        del second
        assert {id(m) for m in alive(Layer)} == {id(third)}
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("frozen", [False, True])
def test_what_nobody_holds_is_collected_frozen_or_not(frozen: bool) -> None:
    gc.disable()
    try:
        for _ in range(2):
            layer: Any = Layer(2, 2)
            layer.itself = layer
            del layer
            if frozen:
                gc.freeze()
            there = [weakref.ref(module) for module in alive(Layer)]
            assert len(there) == 1
            collect(there)
            assert there[0]() is None
    finally:
        gc.unfreeze()
        gc.enable()


def test_nothing_is_frozen_that_nobody_froze() -> None:
    """From Python 3.12 on what is immortal counts as frozen."""
    immortal = [1 << 32] * 375
    assert not _is_frozen(0, []) and not _is_frozen(375, [3, *immortal, 2])
    assert _is_frozen(2, [3, 2]) and _is_frozen(377, [3, *immortal, 2])
    before = gc.get_freeze_count()
    made = [Layer(2, 2)]
    assert id(made[0]) in {id(m) for m in alive(Layer)}
    assert gc.get_freeze_count() <= before and any(found is made for found in gc.get_objects())


def test_one_look_is_of_its_beginning_and_keeps_nothing_alive() -> None:
    here, gone = Layer(2, 2), Layer(2, 2)
    optimizer = torch.optim.SGD(here.parameters())
    with one_look():
        later = Layer(2, 2)
        del gone
        assert list(map(id, alive(Layer))) == [id(here)] and id(optimizer) in map(id, alive(Optimizer))
    assert {id(m) for m in alive(Layer)} == {id(here), id(later)}
