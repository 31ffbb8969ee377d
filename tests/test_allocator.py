"""The model of CUDA's caching allocator: by its rules, by what must be so, and beside the real one where there is a GPU."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph

from autoshard import Config
from autoshard.cost_model.allocator import MIB, Block, CachingAllocator, reserved
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
    assert allocator.allocate(11 * MIB).number == blocks[1].number
    assert allocator.allocate(18 * MIB).number == blocks[2].number
    assert allocator.reserved == 72 * MIB


@given(st.lists(st.tuples(SIZES, st.integers(0, 5)), max_size=40))
def test_what_is_freed_becomes_whole_segments_again(requests: list[tuple[int, int]]) -> None:
    allocator, held = CachingAllocator(), list[Block]()
    for size, keep in requests:
        held.append(allocator.allocate(size))
        assert held[-1].size >= size
        assert allocator.allocated == sum(b.size for b in held) <= allocator.reserved
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


def test_a_budget_is_for_what_is_reserved() -> None:
    """A step of fewer bytes, which lie so that the allocator has to hold more, does not fit."""
    cluster, model = Cluster(1, 1, DEVICES["h100"]), nn.Linear(8, 8)

    def planned(budget: int) -> Plan:
        def forecast(plan: Plan) -> Plan:
            return replace(plan, predicted=replace(plan.predicted, memory={"parameters": 10 * MIB}, reserved=14 * MIB))

        return make_plan(take_inventory(model, model.parameters()), Config(zero=0, memory_budget=budget), Circumstances(cluster, budget), forecast)

    assert planned(14 * MIB).predicted.footprint == 14 * MIB
    with pytest.raises(BudgetError, match="a step takes 14.00 MiB"):
        planned(12 * MIB)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_reserves_what_cuda_s_does() -> None:
    draw = random.Random(0)
    gc.collect()
    torch.cuda.empty_cache()
    base, ours, held = torch.cuda.memory_reserved(), CachingAllocator(), []
    for _ in range(400):
        size = draw.choice((draw.randint(1, 4096), draw.randint(1, 3 * MIB), draw.randint(1, 64 * MIB)))
        held.append((torch.empty(size, dtype=torch.uint8, device="cuda"), ours.allocate(size)))
        while len(held) > draw.randint(0, 12):
            tensor, block = held.pop(draw.randrange(len(held)))
            del tensor
            ours.release(block)
        assert torch.cuda.memory_reserved() - base == ours.reserved
