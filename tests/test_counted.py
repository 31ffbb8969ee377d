"""Steps of many parameters that are counted by one addition."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn, optim
from torch._subclasses import FakeTensorMode

import autoshard
from autoshard.runtime.counted import Counted


def stepped(times: int) -> optim.Optimizer:
    """An optimizer whose second parameter had no gradient in the first step."""
    optimizer = autoshard.optim.AdamW([nn.Parameter(torch.ones(3)) for _ in range(3)], lr=0.1)
    for step in range(times):
        for i, p in enumerate(optimizer.param_groups[0]["params"]):
            p.grad = None if i == 1 and step == 0 else torch.ones(3)
        optimizer.step()
    return optimizer


def steps_of(optimizer: optim.Optimizer) -> list[Tensor]:
    return [optimizer.state[p]["step"] for p in optimizer.param_groups[0]["params"]]


def test_each_count_is_a_tensor_with_memory_of_its_own() -> None:
    counts = steps_of(stepped(4))
    assert counts == [4.0, 3.0, 4.0]
    assert all(count.shape == () and count.dtype is torch.float32 for count in counts)
    assert [count.untyped_storage().nbytes() for count in counts] == [4] * 3
    assert len({count.untyped_storage().data_ptr() for count in counts}) == 3


def by_torch(counts: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    written = io.BytesIO()
    torch.save(counts, written)
    written.seek(0)
    return torch.load(written)  # type: ignore[no-any-return]


def by_safetensors(counts: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    save_file(counts, folder / "counts.safetensors")
    return load_file(folder / "counts.safetensors")


def by_checkpoint(counts: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    dcp.save(counts, checkpoint_id=folder)
    read = {name: torch.zeros(()) for name in counts}
    dcp.load(read, checkpoint_id=folder)
    return read


@pytest.mark.parametrize("written", [by_torch, by_safetensors, by_checkpoint, lambda counts, _: copy.deepcopy(counts)])
def test_counts_are_written_and_read_as_any_tensors(
    written: Callable[[dict[str, Tensor], Path], dict[str, Tensor]], tmp_path: Path
) -> None:
    counts = dict(zip("abc", steps_of(stepped(4))))
    read = written(counts, tmp_path)
    counts["a"] += 1
    assert list(read.values()) == [4.0, 3.0, 4.0]


@pytest.mark.parametrize("move", [Tensor.share_memory_, lambda count: setattr(count, "data", count.data.clone())])
def test_a_count_that_was_moved_is_counted_on(move: Callable[[Tensor], object]) -> None:
    optimizer = stepped(4)
    move(steps_of(optimizer)[2])
    for _ in range(2):
        optimizer.step()
    assert steps_of(optimizer) == [6.0, 5.0, 6.0]


def test_a_count_that_somebody_else_put_there_is_counted_on() -> None:
    optimizer = stepped(4)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] = torch.tensor(10.0)
    optimizer.step()
    steps_of(optimizer)[1].fill_(20.0)
    optimizer.step()
    assert steps_of(optimizer) == [12.0, 21.0, 6.0]


def test_a_count_that_a_loop_holds_is_the_one_that_counts() -> None:
    optimizer = stepped(1)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    held = state["step"]
    for _ in range(3):
        optimizer.step()
    assert held == 4.0 and held is state["step"]


@pytest.mark.parametrize("kind", [optim.AdamW, autoshard.optim.AdamW])
def test_a_state_dict_that_was_loaded_goes_on_as_a_whole(kind: type[optim.Optimizer]) -> None:
    """torch keeps the very tensors of it, steps and moments alike, so loaded once more it is where training is."""
    optimizer, parameter = stepped(3), nn.Parameter(torch.ones(3))
    other = kind([parameter], lr=0.1)  # type: ignore[call-arg]
    loaded = copy.deepcopy(optimizer.state_dict())
    loaded = {"state": {0: loaded["state"][0]}, "param_groups": [{**loaded["param_groups"][0], "params": [0]}]}
    for _ in range(2):
        other.load_state_dict(loaded)
        for _ in range(2):
            parameter.grad = torch.ones(3)
            other.step()
    assert other.state[parameter]["step"] == loaded["state"][0]["step"] == 7.0
    assert other.state[parameter]["exp_avg"] is loaded["state"][0]["exp_avg"]


def test_two_optimizers_that_share_state_both_count() -> None:
    optimizer = stepped(3)
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    other = autoshard.optim.AdamW(parameters, lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    for p in parameters:
        p.grad = torch.ones(3)
    for each in (other, optimizer, other, other, optimizer):
        each.step()
    assert steps_of(optimizer) == steps_of(other) == [8.0, 7.0, 8.0]


def test_counts_that_are_one_tensor_or_parts_of_one_stay_so() -> None:
    one, many = torch.zeros(()), torch.zeros(2)
    assert Counted.of([one, one]) is None and Counted.of(list(many)) is None
    assert Counted.of([one]) is not None


def test_fake_counts_are_left_as_they_are() -> None:
    with FakeTensorMode():
        assert Counted.of([torch.zeros(())]) is None
    assert Counted.of([]) is None
