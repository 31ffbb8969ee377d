"""The model of CUDA's caching allocator: by its rules, by what must be so, and beside the real one where there is a GPU."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph

from autoshard import Config
from autoshard.cost_model.allocator import MIB, Block, CachingAllocator, ExpandingAllocator, expands, reserved
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.cost_model.program import Operation, Program
from autoshard.errors import BudgetError
from autoshard.inventory import take_inventory
from autoshard.passes.choose_zero import Circumstances, make_plan
from autoshard.plan import Plan

SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(1, 64 * MIB))


def test_requests_are_rounded_and_share_segments() -> None:
    allocator = CachingAllocator()
    small = allocator.allocate(100)
    assert (allocator.reserved, allocator.allocated) == (2 * MIB, 512)
    allocator.allocate(3 * MIB)
    assert (allocator.reserved, allocator.allocated) == (22 * MIB, 3 * MIB + 512)
    own = allocator.allocate(31 * MIB + 1)
    assert (allocator.reserved, own.size) == (54 * MIB, 32 * MIB)  # what is left is too small to be split off
    allocator.release(small)
    assert allocator.allocate(MIB).size == MIB and allocator.reserved == 54 * MIB


def test_the_smallest_block_that_holds_it_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 12, 20)]
    for block in blocks:
        allocator.release(block)
    assert allocator.allocate(11 * MIB).address == blocks[1].address
    assert allocator.allocate(18 * MIB).address == blocks[2].address
    assert allocator.reserved == 72 * MIB


def test_of_blocks_of_one_size_the_first_is_taken() -> None:
    allocator = CachingAllocator()
    x, _, z, _ = (allocator.allocate(size * MIB) for size in (4, 2, 2, 2))
    allocator.release(x)
    allocator.allocate(2 * MIB)  # of x's, whose rest is newer than z
    allocator.release(z)
    assert allocator.allocate(2 * MIB).address == 2 * MIB


def test_segments_that_expand_grow_by_pages_behind_their_last_block() -> None:
    allocator = ExpandingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (30, 15, 12)]
    assert allocator.reserved == 60 * MIB  # three pages of 20
    allocator.release(blocks[1])
    assert allocator.allocate(3 * MIB).address == blocks[1].address, "3 are there at the end, but another block holds them"
    beginning = blocks[1].address + 3 * MIB
    allocator.release(blocks[2])  # 27 at the end, with what is free on both sides
    last = allocator.allocate(32 * MIB)
    assert (last.address, last.size, allocator.reserved) == (beginning, 32 * MIB, 80 * MIB)
    assert allocator.allocate(100).size == 512 and allocator.reserved == 82 * MIB  # small ones have their own


def test_where_segments_expand_a_larger_tensor_takes_the_place_of_smaller_ones_and_what_it_lacks() -> None:
    """By segments of their own none of them can be a part of it."""
    held = {}
    for allocator in (CachingAllocator(), ExpandingAllocator()):
        for size in range(20, 200, 20):
            allocator.release(allocator.allocate(size * MIB))
        held[type(allocator)] = allocator.reserved // MIB
    assert held == {CachingAllocator: sum(range(20, 200, 20)), ExpandingAllocator: 180}


@pytest.mark.parametrize("kind", [CachingAllocator, ExpandingAllocator])
@given(requests=st.lists(st.tuples(SIZES, st.integers(0, 5)), max_size=40))
def test_what_is_freed_becomes_whole_segments_again(kind: type[CachingAllocator], requests: list[tuple[int, int]]) -> None:
    allocator, held = kind(), list[Block]()
    for size, keep in requests:
        held.append(allocator.allocate(size))
        assert held[-1].size >= size
        assert allocator.allocated == sum(b.size for b in held) <= allocator.reserved
        places = sorted((b.address, b.address + b.size) for b in held)
        assert all(end <= begin for (_, end), (begin, _) in zip(places, places[1:]))
        while len(held) > keep:
            allocator.release(held.pop(0))
    for block in held:
        allocator.release(block)
    before = allocator.reserved
    assert allocator.allocated == 0
    for size, _ in requests:  # each fits alone into what is reserved
        allocator.release(allocator.allocate(size))
    assert allocator.reserved == before


def test_a_step_that_repeats_reserves_at_least_its_peak() -> None:
    node = Graph().call_function(torch.ops.aten.relu.default, ())
    program = Program([Operation(node, "forward", (), ()) for _ in range(3)])
    program.add(30 * MIB, "parameters", -1, 3)
    program.add(12 * MIB, "activations", 0, 2)
    program.add(14 * MIB, "temporaries", 1, 1)
    program.add(15 * MIB, "temporaries", 2, 2)  # does not fit where the one before lay
    assert reserved(program) == (30 + 12 + 14 + 16) * MIB
    assert reserved(program, expanding=True) == 60 * MIB  # one of them after the other lies behind those 42


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128, expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True,expandable_segments:False"}, False),
    ],
)
def test_settings_are_read_as_torch_does(said: dict[str, str], found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert expands() is found


def test_a_budget_is_for_what_is_reserved() -> None:
    """A step of fewer bytes, which lie so that the allocator has to hold more, does not fit."""
    cluster, model = Cluster(1, 1, DEVICES["h100"]), nn.Linear(8, 8)

    def planned(budget: int) -> Plan:
        def forecast(plan: Plan) -> Plan:
            held = {"reserved": 14 * MIB, "expanding": 11 * MIB}
            return replace(plan, predicted=replace(plan.predicted, memory={"parameters": 10 * MIB}, **held))

        return make_plan(take_inventory(model, model.parameters()), Config(zero=0, memory_budget=budget), Circumstances(cluster, budget), forecast)

    assert planned(14 * MIB).predicted.footprint == 14 * MIB
    with pytest.raises(BudgetError, match="a step takes 14.00 MiB") as refused:
        planned(12 * MIB)
    assert "Cheapest fix: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True set, by which CUDA's allocator should reserve 11.00 MiB" in str(refused.value)
    with pytest.raises(BudgetError) as refused:
        planned(10 * MIB)
    assert "expandable_segments" not in str(refused.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_reserves_what_cuda_s_does() -> None:
    _beside_cuda_s(CachingAllocator())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_reserves_what_cuda_s_does_where_segments_expand() -> None:
    """In a process of its own, since torch reads the setting once."""
    script = "from tests.test_allocator import ExpandingAllocator, _beside_cuda_s; _beside_cuda_s(ExpandingAllocator())"
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=Path(__file__).parents[1], check=True, timeout=120)


def _beside_cuda_s(ours: CachingAllocator) -> None:
    draw, held = random.Random(0), list[tuple[torch.Tensor, Block]]()
    gc.collect()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_reserved()
    for _ in range(400):
        size = draw.choice((draw.randint(1, 4096), draw.randint(1, 3 * MIB), draw.randint(1, 64 * MIB)))
        held.append((torch.empty(size, dtype=torch.uint8, device="cuda"), ours.allocate(size)))
        while len(held) > draw.randint(0, 12):
            tensor, block = held.pop(draw.randrange(len(held)))
            del tensor
            ours.release(block)
        assert torch.cuda.memory_reserved() - base == ours.reserved
