"""Models whose first graph ends at a graph break: what is known of the rest, and graphs that torch has to break itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.errors import BudgetError
from autoshard.report import plan_tables, rendered
from tests.cluster import Cluster
from tests.parity import Distance, see_state
from tests.small import TOLERANCE, backward_beside, compiled_pair, config, in_full, inputs_of

MIB = 2.0**20


class Broken(nn.Module):
    """Of whose 4 MiB of parameters the first graph has a few."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(8, 512), nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.sum().item() > 1e30:
            y = y + 1
        return self.rest(y).pow(2).mean()


class Checked(nn.Module):
    """Dynamo leaves a loop that breaks to Python, and the first graph is a layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.sum().item() > 1e30:
                x = x + 1
        return x.pow(2).mean()


def test_a_layer_of_a_loop_that_breaks_is_not_taken_for_the_model() -> None:
    torch.compiler.reset()
    said = autoshard.Config(codegen="eager", zero=0, memory_budget="1GiB")
    made = autoshard.plan(Checked(), torch.zeros(4, 512), said, Machines(1, 2, DEVICES["cpu"]), torch.optim.AdamW)
    assert made.covered < 0.3 and made.predicted.of_a_part
    assert made.predicted.memory["gradients"] > 3 * MIB and made.predicted.memory["optimizer"] > 7 * MIB


def checked_in_a_job() -> bool:
    model = Checked()
    torch.compile(model, backend=autoshard.backend(config("auto")))(torch.ones(4, 512)).backward()
    plan = autoshard.plan_of(model)
    assert plan is not None
    return plan.predicted.of_a_part


def test_nor_in_a_job(two: Cluster) -> None:
    assert two.run(checked_in_a_job) == [True, True]


def _planned(**options: Any) -> autoshard.Plan:
    torch.compiler.reset()
    said = autoshard.Config(codegen="eager", **options)
    return autoshard.plan(Broken(), torch.zeros(4, 8), said, Machines(1, 2, DEVICES["cpu"]), torch.optim.AdamW)


def test_gradients_and_state_of_what_is_behind_a_break_are_counted() -> None:
    """At stage 0 all of it is there four times."""
    made = _planned(zero=0)
    assert made.covered < 0.02 and made.predicted.peak_bytes > 16 * MIB
    assert made.predicted.memory["gradients"] > 4 * MIB and made.predicted.memory["optimizer"] > 8 * MIB
    sharded = _planned(memory_budget="12MiB")
    assert sharded.stage > 0 and 8 * MIB < sharded.predicted.peak_bytes <= 12 * MIB
    with pytest.raises(BudgetError, match="more than 2 processes"):
        _planned(memory_budget="7MiB")


def test_a_report_of_the_first_graph_says_no_more_than_it_knows() -> None:
    text = rendered(plan_tables(_planned(memory_budget="30MiB")))
    assert "A step takes at least " in text and " MiB at least, " in text
    assert "what is computed and saved behind a graph break" in " ".join(text.split())
    assert "fits into" not in text and "Measured" not in text and "at most" not in text


class Headed(Broken):
    """All of whose parameters the first graph has; what comes behind it is large all the same."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.rest(self.first(x))
        if y.sum().item() > 1e30:
            y = y + 1
        return y.exp().sum()


def test_a_break_behind_all_parameters_is_one_too() -> None:
    torch.compiler.reset()
    said = autoshard.Config(codegen="eager", zero=0)
    assert autoshard.plan(Headed(), torch.zeros(4, 8), said, Machines(1, 2, DEVICES["cpu"])).predicted.of_a_part


def stage_within(budget: str) -> tuple[int, Distance]:
    model, plain, compiled = compiled_pair(config("auto", memory_budget=budget), Broken)
    distance = Distance()
    for inputs in inputs_of(2):
        backward_beside(compiled, plain, inputs)
    see_state(distance, model, plain)
    plan = autoshard.plan_of(model)
    assert plan is not None
    return plan.stage, distance


def test_a_job_shards_what_the_first_graph_does_not_have(two: Cluster) -> None:
    """A budget that all of it takes, and its first graph does not."""
    for stage, distance in two.run(stage_within, "14MiB"):
        assert stage > 0 and distance.worst <= TOLERANCE, distance


class Sized(nn.Module):
    """A tensor is a size behind a break, which a backend finds when it compiles; torch breaks the graph there."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        longest = (x > 9).long().sum(dim=1).max() + 3
        where = x.nonzero()
        made = self.up(x).new_ones(longest, 8)
        return (self.down(made + x.mean()) + self.up(x).mean()).pow(2).mean() + 0 * where.sum()


def beside_the_plain(zero: int) -> Distance:
    model, plain, compiled = compiled_pair(config(zero), Sized)
    distance = Distance()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for inputs in inputs_of(2):
        backward_beside(compiled, plain, inputs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    see_state(distance, model, plain)
    return distance


@pytest.mark.parametrize("zero", [in_full(0), 3])
def test_what_torch_would_break_by_itself_is_broken(two: Cluster, zero: int) -> None:
    for distance in two.run(beside_the_plain, zero):
        assert distance.worst <= TOLERANCE, distance
