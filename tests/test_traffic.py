"""What a plan's groups send and hold, said before a trace, beside what the program of the step does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.config import Config
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.passes.choose_zero import make_plan, predict
from autoshard.plan import Plan
from autoshard.planning import circumstances, first_look, forecaster
from tests.models import CASES
from tests.small import config, in_full


def _both(model: nn.Module, inputs: Any, options: Config, machines: Machines, **more: Any) -> tuple[Plan, Plan]:
    """A plan with what is said of it before its step is simulated, and after."""
    torch.compiler.reset()
    forecast, where = forecaster(model, inputs, options, machines, None), circumstances(options, machines)
    inventory = forecast.captured.inventory
    plan = predict(replace(make_plan(inventory, options, where), **more), inventory, options, where)
    return plan, forecast(plan)


def _sent(plan: Plan, *phases: str) -> dict[str, tuple[int, int]]:
    return {f"{t.collective} in {t.phase}": (t.messages, t.bytes) for t in plan.predicted.traffic if t.phase in phases}


@pytest.mark.parametrize(
    ("name", "zero", "machines", "options", "more"),
    [
        ("attention", 0, Machines(1, 4, DEVICES["h100"]), {}, {}),
        ("attention", 2, Machines(1, 4, DEVICES["h100"]), {"precision": "bf16"}, {}),
        ("attention", 3, Machines(2, 2, DEVICES["h100"]), {"mesh": {"replicate": 2, "shard": 2}}, {}),
        ("attention", 0, Machines(1, 2, DEVICES["cpu"]), {"precision": "bf16"}, {"bucket": 300}),
        in_full("attention", 3, Machines(2, 2, DEVICES["cpu"]), {"hierarchy": "two_level"}, {"message": 400, "apart": 1000}),
        in_full("llama", 3, Machines(1, 4, DEVICES["cpu"]), {"compression": "bf16"}, {}),
        in_full("odd", 2, Machines(1, 3, DEVICES["h100"]), {}, {}),
        ("odd", 0, Machines(1, 3, DEVICES["cpu"]), {}, {"direct_sums": True}),
        ("odd", 0, Machines(1, 3, DEVICES["cpu"]), {"compression": "bf16"}, {}),
    ],
)
def test_what_is_sent_is_known_without_a_graph(
    name: str, zero: int, machines: Machines, options: dict[str, Any], more: dict[str, Any]
) -> None:
    """But for gathers of a backward, which does not need all that a group has."""
    case = CASES[name]
    said, simulated = _both(case.build(), case.batch(torch.Generator()), config(zero, **options), machines, **more)
    reductions = [f"{t.collective} in backward" for t in said.predicted.traffic if "gather" not in t.collective]
    for phase, kinds in (("forward", None), ("backward", reductions)):
        before, after = _sent(said, phase), _sent(simulated, phase)
        assert all(before.get(kind) == after[kind] for kind in (after if kinds is None else kinds)), (before, after)
    assert reductions


class Adapted(nn.Module):
    """Adapters over a frozen base in other dtypes, of numbers of rows that no four processes share evenly, and something unused."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.zeros(10, 64, dtype=torch.bfloat16), requires_grad=False)
        self.quantised = nn.Parameter(torch.zeros(6, 64, dtype=torch.uint8), requires_grad=False)
        self.down, self.up, self.unused = nn.Linear(64, 10, bias=False), nn.Linear(10, 64, bias=False), nn.Linear(64, 33)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.down(x))
        return (torch.tanh(self.up(h).float() + h.float() @ self.base.float()) @ self.quantised.float().T).sum()


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_groups_of_several_dtypes_send_and_hold_each_in_its_own(precision: str | None) -> None:
    """Rank 0 has 3 rows of 10, 2 of 6, 16 of 64 and 9 of 33."""
    said, simulated = _both(Adapted(), torch.zeros(5, 64), config(2, precision=precision), Machines(1, 4, DEVICES["h100"]))
    wide = 2 if precision else 4
    gathered = 4 * (64 * (3 * 2 + 2 * 1 + 3 * wide) + 16 * 10 * wide)
    reduced = 4 * (64 * 3 + 16 * 10) * 4
    for plan in (said, simulated):
        sent: Counter[str] = Counter()
        for t in plan.predicted.traffic:
            sent[t.collective] += t.bytes
        assert sent == {"all_gather": gathered * 3 // 4, "reduce_scatter": reduced * 3 // 4}
        trained = 4 * (64 * 3 + 16 * 10)
        assert plan.predicted.memory["parameters"] == 64 * (3 * 2 + 2) + trained + 4 * 9 * (64 + 1)


def test_a_first_look_counts_what_is_quantised_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 16, bias=False))
    model[0].weight = nn.Parameter(torch.zeros(1024, 1024, dtype=torch.uint8), requires_grad=False)
    memory = first_look(model, config(0), Machines(1, 2, DEVICES["h100"])).predicted.memory
    assert memory["parameters"] == 1024 * 1024 + 4 * 16 * 1024 and memory["gradients"] == 4 * 16 * 1024
