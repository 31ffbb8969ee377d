"""A block that is listed by halves is what torch's partitioner makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from autoshard.cost_model.program import Listing
from autoshard.cost_model.step_memory import Listed
from autoshard.cost_model.work import op_name
from autoshard.cost_model.workspace import STATE
from autoshard.passes.choose_recompute import peak_of
from autoshard.rehearsal import Kind
from autoshard.savings import Savings, kept_of
from tests import models
from tests.recomputed import Stack, forecaster_of, inputs, noise, planned
from tests.small import in_full

TEXT = models.tokens(67)(torch.Generator().manual_seed(0))


class Strange(nn.Module):
    """A block with an operator that nobody may repeat, an operation that is there twice, and one whose second result is read too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up((self.norm(x) * noise(x.detach())).tanh() + x.exp() + x.exp().sin())
        most, where = y.max(-1, keepdim=True)
        return x + self.down(nn.functional.dropout(y.gather(-1, where) * most * y.tanh(), 0.1)).square()


class Stranges(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Strange() for _ in range(2))


@pytest.mark.parametrize(
    ("make", "given", "codegen"),
    [
        (Stranges, inputs(), "eager"), (Stranges, inputs(), "inductor"), in_full(models.llama, TEXT, "eager"),
        *(in_full(make, TEXT, codegen) for make, codegen in [(models.llama, "inductor"), (models.bert, "eager"), (models.bert, "inductor")]),
    ],
)  # fmt: skip
def test_lists_are_what_torch_writes(make: Callable[[], nn.Module], given: Any, codegen: Any) -> None:
    forecaster = forecaster_of(make(), given, codegen)
    plan = planned(forecaster)
    savings = forecaster._savings(plan)
    kind = next(kind for kind in savings.kinds if kind.names and kind.has_backward)
    joint, policies = savings.prepared.listed_kind(kind), _policies(savings, kind, plan.stacks)
    assert len(policies) > 4
    for policy in policies:
        cut, listed = savings.prepared.cut_kind(kind, policy).listed, joint.alone(policy)
        assert cut.backward is not None and listed.backward is not None
        assert _called(listed.forward.calls) == _called(cut.forward.calls)
        assert _called(listed.backward.calls) == _called(cut.backward.calls)
        assert _given(listed.backward) == _given(cut.backward)
        _take_the_same(savings, policy, listed, cut)


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
def test_blocks_that_are_no_graphs_are_listed_together(codegen: Any) -> None:
    """Of BatchNorm, which writes to its buffers."""
    forecaster = forecaster_of(Stack(), inputs(16), codegen)
    plan = planned(forecaster)
    blocks = forecaster.blocks(plan)
    assert [b.name for b in blocks] == [f"layers.{i}" for i in range(3)] and all(len(b.options) > 4 for b in blocks)
    for options in zip(*(b.options for b in blocks)):
        policies = tuple((b.name, o.policy) for b, o in zip(blocks, options) if o.policy != "none")
        simulated = forecaster(replace(plan, recompute=policies)).predicted
        assert peak_of(options) == pytest.approx(simulated.peak_bytes, rel=0.02)
        assert sum(o.seconds for o in options) == pytest.approx(simulated.step_seconds - simulated.seconds["optimizer"], rel=0.02)


def _policies(savings: Savings, kind: Kind, stacks: Sequence[str]) -> list[str]:
    usual = savings.prepared.cut_kind(kind, "none")
    (found,) = savings.candidates(kind.joint.graph, kept_of(usual), stacks).values()
    return [*found, "selective"]


def _called(calls: Sequence[Node]) -> list[str]:
    """Without items: a call under a random state, which no list has, gives one more."""
    return [op_name(n) for n in calls if op_name(n) != "getitem"]


def _given(listing: Listing) -> list[str]:
    return sorted(n.name for n in listing.inputs if not n.name.startswith("rng_state_output"))


def _take_the_same(savings: Savings, policy: str, listed: Listed, cut: Listed) -> None:
    """But for random states: torch saves them of attention without dropout too, which a pass undoes; who puts one aside takes memory."""
    ours, torchs = (savings._option(policy, halves) for halves in (listed, cut))
    counts = Counter(op_name(n) for n in listed.repeated)
    dropouts, attentions = counts["native_dropout"], counts["_scaled_dot_product_flash_attention_for_cpu"]
    states = dropouts + attentions
    assert ours.saved == torchs.saved - STATE * attentions
    assert _bytes_made(savings, listed) + STATE * states == _bytes_made(savings, cut)
    assert abs(ours.peak - torchs.peak) <= STATE * (states + bool(states))
    assert ours.seconds == pytest.approx(torchs.seconds, rel=0.03 if attentions else 0.01 if states else 1e-9)  # one small kernel may be joined or not


def _bytes_made(savings: Savings, halves: Listed) -> int:
    pieces = savings.simulate_alone(halves).program.pieces
    return sum(int(p.bytes) for p in pieces if p.made >= 0 and p.category != "workspace" and p.maker != "optimizer step")
