"""What is alive, as the garbage collector knows it."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.optim import Optimizer

from autoshard.heap import _is_frozen, alive, one_look


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
