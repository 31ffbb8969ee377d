"""What is alive when: counted by brute force, and found again by a search over sizes."""

from __future__ import annotations

import itertools

import numpy as np
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph

from autoshard.cost_model import liveness
from autoshard.cost_model.liveness import CATEGORIES
from autoshard.cost_model.program import Operation, Program

BATCH, LENGTH = sympy.Symbol("batch"), sympy.Symbol("length")


def _operation() -> Operation:
    node = Graph().call_function(torch.ops.aten.relu.default, ())
    return Operation(node, "forward", (), ())


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Pieces of sizes in two symbols, alive at random."""
    length = draw(st.integers(1, 8))
    program = Program([_operation() for _ in range(length)])
    for _ in range(draw(st.integers(1, 10))):
        made = draw(st.integers(-1, length - 1))
        factor = st.integers(0, 50)
        size = draw(factor) * BATCH * LENGTH + draw(factor) * BATCH + draw(factor)
        program.add(size, draw(st.sampled_from(CATEGORIES)), made, draw(st.integers(made, length)))
    return program


@given(programs(), st.integers(1, 9), st.integers(1, 9))
def test_liveness_is_what_counting_gives(program: Program, batch: int, length: int) -> None:
    point = {BATCH: batch, LENGTH: length}
    curve = liveness.simulate(program)
    alive = [
        sum(int(sympy.sympify(p.bytes).subs(point)) for p in program.pieces if max(p.made, 0) <= i <= p.last)
        for i in range(len(program.operations) + 1)
    ]
    assert curve.at(point).sum(1).tolist() == alive
    assert curve.peak(point).bytes == max(alive) == sum(curve.peak(point).categories.values())


@given(programs())
def test_a_search_sees_the_same_peaks(program: Program) -> None:
    curve = liveness.simulate(program)
    grid = np.array(list(itertools.product(range(1, 5), repeat=2)), dtype=float)
    found = curve.peaks({"batch": grid[:, 0], "length": grid[:, 1]})
    assert found.tolist() == [curve.peak({BATCH: b, LENGTH: s}).bytes for b, s in grid.astype(int).tolist()]
    assert (np.diff(curve.peaks({"batch": np.arange(1.0, 9), "length": np.full(8, 3.0)})) >= 0).all()  # monotone in batch
