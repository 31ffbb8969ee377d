"""Attention in plans for GPUs that are made without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard
from autoshard import Cluster, Config
from autoshard.attention import as_on, efficient, flash, formulas
from autoshard.capture import capture
from autoshard.cost_model.hardware import DEVICES
from autoshard.rehearsal import rehearse
from tests.recomputed import Stack, inputs
from tests.small import in_full

HEADS, WIDTH, LENGTH = 4, 64, 512
SCORES = HEADS * LENGTH * LENGTH  # numbers, of one sequence


class Attending(nn.Module):
    """With dropout, a mask of booleans, of what is added, or one that was expanded, values that lie otherwise, or fewer heads of keys than of queries."""

    def __init__(self, masked: str = "", grouped: bool = False) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH if grouped else 2 * WIDTH)
        self.masked, self.grouped = masked, grouped

    def forward(self, x: Tensor) -> Tensor:
        heads = HEADS // 2 if self.grouped else HEADS
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        if self.masked == "strided":
            v = v.mT.contiguous().mT
        row = x[..., :1].detach().transpose(1, 2)[:, None].contiguous()
        mask = {"bool": row > 0, "added": row, "expanded": (row.mT > 0).expand(-1, -1, -1, x.shape[1])}.get(self.masked)
        y = F.scaled_dot_product_attention(q, k, v, mask, 0.1, enable_gqa=self.grouped)
        return y.square().mean()


HALF, FULL = torch.bfloat16, torch.float32
CASES = [
    ("h100", HALF, "", False, flash),
    ("h100", HALF, "", True, flash),
    ("h100", HALF, "bool", False, efficient),
    ("h100", FULL, "added", False, efficient),
    ("h100", FULL, "", False, efficient),
    ("h100", FULL, "", True, formulas),
    ("h100", FULL, "expanded", False, formulas),
    ("h100", HALF, "strided", False, formulas),
    ("h100", torch.float64, "", False, formulas),
    ("v100", torch.float16, "", False, efficient),
    ("cpu", HALF, "", False, F.scaled_dot_product_attention),
]


@pytest.mark.parametrize(("device", "dtype", "masked", "grouped", "expected"), CASES)
def test_a_device_has_its_own_kernel(device: str, dtype: torch.dtype, masked: str, grouped: bool, expected: Any) -> None:
    model = Attending(masked, grouped).to(dtype).train()
    captured = capture(model, torch.zeros(2, LENGTH, WIDTH, dtype=dtype))
    as_on(DEVICES[device], captured.graph)
    targets = {n.target for n in captured.graph.graph.nodes}
    assert expected in targets and not targets & ({flash, efficient, formulas, F.scaled_dot_product_attention} - {expected})
    plan = autoshard.plan(model, torch.zeros(2, LENGTH, WIDTH, dtype=dtype), Config(codegen="eager"), Cluster(1, 1, DEVICES[device]))
    graphs = rehearse(captured, plan, inductor=False)
    assert graphs.backward is not None
    called = " ".join(str(n.target) for g in (graphs.forward, graphs.backward) for n in g.graph.nodes)
    if expected in (flash, efficient):
        assert all(f"_scaled_dot_product_{expected.__name__}_attention{half}.default" in called for half in ("", "_backward"))


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
def test_on_a_gpu_no_scores_are_saved(codegen: Any) -> None:
    x = torch.zeros(2, LENGTH, WIDTH)
    saved = {
        device: autoshard.plan(Attending().train(), x, Config(codegen=codegen), Cluster(1, 1, DEVICES[device])).predicted.peak_bytes
        for device in ("cpu", "h100")
    }
    assert saved["h100"] < 2 * SCORES * 4 < saved["cpu"]


def test_a_sweep_has_it_too() -> None:
    """Whose sizes the kernel rounds up."""
    cluster, config = Cluster(1, 2, DEVICES["h100"]), Config(zero=0, codegen="eager", recompute="none")
    sweep = autoshard.sweep(Attending().train(), torch.zeros(3, LENGTH, WIDTH), config, cluster)
    for batch in (2, 5):
        alone = autoshard.plan(Attending().train(), torch.zeros(batch, LENGTH, WIDTH), config, cluster).predicted
        assert int(sweep.at(batch=batch).peak) == alone.peak_bytes


@pytest.mark.parametrize("device", ["cpu", in_full("h100")])
def test_what_is_repeated_under_a_random_state_costs_what_it_is(device: str) -> None:
    seconds = {}
    for how in ("none", "full"):
        made = autoshard.plan(Stack().train(), inputs(64), Config(codegen="eager", recompute=how), Cluster(1, 1, DEVICES[device]))
        assert not any("a rule for" in what for what in made.predicted.unknown)
        seconds[how] = made.predicted.seconds["compute"]
    assert seconds["full"] > 1.1 * seconds["none"]
