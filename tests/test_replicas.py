"""What all processes have whole, found out where it is not the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.errors import DivergenceError
from autoshard.runtime.agreement import Statement
from autoshard.runtime.fingerprint import fingerprints
from autoshard.runtime.meetings import Meetings
from autoshard.runtime.optimizers import options_of
from autoshard.runtime.presence import Patience
from autoshard.runtime.processes import World
from autoshard.runtime.replicas import Replicas
from tests.cluster import Cluster
from tests.small import compiled_pair, config, in_full, inputs_of, step_each, what_is_said


class Tied(nn.Module):
    """Its loss may take the embedding's weight, as fused losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.relu(self.embedding(x)))


def _outside(model: Tied, compiled: Any, x: Tensor) -> None:
    F.linear(compiled(x), model.embedding.weight).pow(2).mean().backward()


def _hook(model: Tied, compiled: Any, x: Tensor) -> None:
    compiled(x)
    handle = model.up.weight.register_hook(lambda grad: grad + dist.get_rank())
    compiled(x).mean().backward()
    handle.remove()


def _loads_alone(model: Tied, compiled: Any, x: Tensor) -> None:
    compiled(x).mean().backward()
    if dist.get_rank() == 1:
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


def _misses_one(model: Tied, compiled: Any, x: Tensor) -> None:
    compiled(x).mean().backward()
    if dist.get_rank() == 1:
        model.up.bias.grad = None


def _penalty(model: Tied, compiled: Any, x: Tensor) -> None:
    (compiled(x).mean() + 0.01 * sum(p.pow(2).sum() for p in model.parameters())).backward()


def step_by(ways: list[Callable[..., None]], zero: int) -> str:
    def train() -> None:
        model, _, compiled = compiled_pair(config(zero), Tied)
        x = inputs_of(1)[0, dist.get_rank()]
        optimizer: Any = None
        for way in ways:
            way(model, compiled, x)
            optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.step()
            optimizer.zero_grad()

    return what_is_said(train)


APART = {
    _outside: "the gradient of 'embedding.weight'",
    _hook: "the gradient of 'up.weight'",
    _loads_alone: "parameter 'embedding.weight'",
    _misses_one: "the gradient of 'up.bias'",
}


@pytest.mark.parametrize("way", [_outside, in_full(_hook), _loads_alone, _misses_one])
def test_what_differs_is_named_before_the_first_step(two: Cluster, way: Callable[..., None]) -> None:
    for said in two.run(step_by, [way], 0):
        assert said.startswith(f"DivergenceError: before step 1, {APART[way]} is not on rank 1 what it is on rank 0"), said


def test_what_differs_later_is_found_at_the_next_power_of_two(two: Cluster) -> None:
    for said in two.run(step_by, [_penalty, _penalty, _outside, _penalty], 0):
        assert said.startswith("DivergenceError: before step 4, "), said


@pytest.mark.parametrize("zero", [0, 1])
def test_a_penalty_on_weights_is_the_same_everywhere(two: Cluster, zero: int) -> None:
    for said in two.run(step_by, [_penalty] * 4, zero):
        assert said == "nothing" if zero == 0 else "DTensor" in said, said


def step_at_another_rate(zero: int, first: int) -> str:
    """Rank 1, from this step on, as by a schedule that looks at its own loss."""

    def train() -> None:
        model, _, compiled = compiled_pair(config(zero), Tied)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(1, 5):
            compiled(inputs_of(1)[0, dist.get_rank()]).mean().backward()
            optimizer.param_groups[0]["lr"] = 0.05 if step >= first and dist.get_rank() == 1 else 0.1
            step_each(optimizer)

    return what_is_said(train)


@pytest.mark.parametrize(("zero", "first", "found"), [(3, 1, 1), (3, 3, 4), in_full(0, 1, 1)])
def test_another_rate_is_named(two: Cluster, zero: int, first: int, found: int) -> None:
    """Where nothing is whole too."""
    for said in two.run(step_at_another_rate, zero, first):
        assert said.startswith(f"DivergenceError: before step {found}, lr of group 0 of AdamW is 0.05 on rank 1 and 0.1 on rank 0"), said


def load_alone(zero: int) -> None:
    """One process goes back to what its optimizer was, of which it has rows alone."""
    model, _, compiled = compiled_pair(config(zero))
    optimizer = torch.optim.AdamW(model.parameters())
    for step, inputs in enumerate(inputs_of(8)):
        compiled(inputs[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            early = autoshard.state_dict(optimizer, keep=True)
        if step == 4 and dist.get_rank() == 1:
            optimizer.load_state_dict(early)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_state_that_one_process_alone_loaded_is_named(two: Cluster, zero: int) -> None:
    for text in two.run(what_is_said, load_alone, zero):
        assert "before step 8, the count of steps of group 0 of AdamW is 4.0 on rank 1 and 7.0 on rank 0" in text, text


def test_an_option_that_one_process_lacks_is_not_there() -> None:
    said = [{"_kind": "", "_seen": [], "_options": options} for options in ({"lr of group 0 of SGD": 0.1}, {})]
    with pytest.raises(DivergenceError, match="lr of group 0 of SGD is not there on rank 1 and 0.1 on rank 0"):
        Replicas(Meetings(World(0, 1, "cpu"), "", Patience(0.0, None, print)), "")._compare(said)


def test_options_are_alike_but_for_rounding() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5))
    optimizer.param_groups[0]["weight_decay"] = math.nan
    options = options_of(optimizer)
    assert options["lr of group 0 of AdamW"] == 0.5 and options["betas of group 0 of AdamW"] == [0.9, 0.999]
    rates = [0.1, math.nextafter(0.1, 1.0), 0.2]
    said = [{"_kind": "", "_seen": [], "_options": {**options, "lr": [rate]}} for rate in rates]
    replicas = Replicas(Meetings(World(0, 1, "cpu"), "", Patience(0.0, None, print)), "")
    assert replicas._compare(said[:2]) == ""
    with pytest.raises(DivergenceError, match=r"lr is \[0\.2\] on rank 2"):
        replicas._compare(said)


class Plain(torch.optim.Optimizer):
    """Whose step fails when told to."""

    fails = False

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.fails:
            raise ArithmeticError
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1)


class Extended(Plain):
    """Whose step is that of another class, and more. Hooks are around the inner one too where a plain one was made."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.param_groups[0]["lr"] *= 0.5


def step_extended() -> tuple[str, str]:
    """What is said of steps of an optimizer within whose steps rank 0 alone has hooks; and of one that fails between them."""
    model, _, compiled = compiled_pair(config(0, timeout=10), Tied)
    x = inputs_of(1)[0, dist.get_rank()]
    if dist.get_rank() == 0:
        Plain([nn.Parameter(x)])
    optimizer = Extended(model.parameters())

    def steps(count: int) -> None:
        for _ in range(count):
            compiled(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    said = what_is_said(steps, 1)
    optimizer.fails = True
    failed = what_is_said(steps, 1)
    optimizer.fails = False
    return failed, said + what_is_said(steps, 6)


def test_a_step_within_a_step_is_not_counted(two: Cluster) -> None:
    assert two.run(step_extended) == [("ArithmeticError: ", "nothingnothing")] * 2


class Recording(Meetings):
    """Of a process that meets nobody. stated: by it. decided: what it is told."""

    def __init__(self, rank: int, decided: list[str]) -> None:
        super().__init__(World(rank, 3, "cpu"), "", Patience(0.0, None, print))
        self.stated: list[Statement] = []
        self._decided = iter(decided)

    def meet(self, what: str, statement: Statement, decide: Any = None) -> str:
        self.stated.append(statement)
        return next(self._decided)


@pytest.mark.parametrize(("rank", "whole"), [(0, 200), (1, 200), (2, 0)])
def test_a_digest_is_compared_and_only_two_that_differ_state_all_of_it(rank: int, whole: int) -> None:
    meetings = Recording(rank, ["1 0", ""])
    Replicas(meetings, "cpu").before_step(lambda: {str(i): torch.zeros(2) for i in range(100)}, dict)
    first, second = meetings.stated
    assert first["_kind"] == "cpu" and len(first["_seen"]) == 64
    assert len(second.get("_seen", ())) == whole


VALUES = {
    "odd": torch.randn(7),
    "two bytes each": torch.randn(3, 5).bfloat16(),
    "transposed": torch.arange(24).view(2, 3, 4).transpose(0, 2),
    "within another": torch.randn(9)[1:],
    "conjugated": torch.randn(2, dtype=torch.complex64).conj(),
    "one": torch.tensor(3.0),
    "every second": torch.randn(10)[::2],
    "one, expanded": torch.tensor(3.0).expand(5),
}


@pytest.mark.parametrize("which", VALUES)
def test_fingerprints_differ_where_a_value_does(which: str) -> None:
    values = VALUES[which]
    other = values.clone()
    assert fingerprints([values, other, values.reshape(-1)[:0]]) == [*fingerprints([values]) * 2, ()]
    for i in range(values.numel()):
        other = values.clone(memory_format=torch.contiguous_format)
        other.view(-1)[i] += 1
        assert fingerprints([values]) != fingerprints([other])


@pytest.mark.parametrize("size", [2, 3000, 2**20 + 5])
def test_fingerprints_differ_where_values_change_places(size: int) -> None:
    values = torch.randn(2 * size)
    (mark,) = fingerprints([values])
    for first, second in ((0, 2), (0, 2 * size - 1), (size // 2 * 2, 1), (size // 4 * 2, size // 2 * 2)):
        if first != second:
            other = values.clone()
            other[[first, second]] = values[[second, first]]
            assert fingerprints([other]) != [mark], (first, second)
    assert fingerprints([values.flip(0)]) != [mark] != fingerprints([values.roll(2)])
    assert fingerprints([values.view(2, -1).flip(0)]) != [mark]


def test_fingerprints_differ_where_sums_of_rows_and_columns_do_not() -> None:
    one, other = torch.zeros(2, 3, 2048)
    one[0, 0] = one[1, 2] = other[0, 2] = other[1, 0] = 1.0
    table, swapped = torch.eye(1024, 2048), torch.eye(1024, 2048)
    swapped[[3, 700]] = swapped[[700, 3]]
    marks = fingerprints([one, other, table, swapped])
    assert len(set(marks)) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_fingerprints_differ_where_only_signs_do(dtype: torch.dtype) -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    signs = torch.randint(0, 2, (40, 3000), generator=torch.Generator().manual_seed(1)) * 2 - 1
    ones = values.abs().sign() if not dtype.is_complex else torch.ones_like(values)
    others = [values, -values, *(values * s for s in signs), *(ones * s for s in signs)]
    if dtype.is_complex:
        others.append(values.conj())
    marks = fingerprints(others)
    assert len(set(marks)) == len(marks)


def test_fingerprints_of_sparse_tensors() -> None:
    eye = torch.eye(3).to_sparse()
    once, twice, same = fingerprints([eye, 2 * eye, torch.eye(3).to_sparse()])
    assert once == same != twice
