"""Regions of torch.utils.checkpoint that the user wrote, beside what the plan says of their blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autoshard.plan import Plan
from autoshard.rehearsal import Rehearsed, rehearse
from autoshard.savings import kept_of
from tests import models
from tests.recomputed import (
    Checkpointed,
    Noisy,
    Plain,
    Stack,
    forecaster_of,
    inputs,
    planned,
    trained,
    two_steps,
    with_policies,
)
from tests.small import in_full, same


class Regions(Checkpointed):
    """Layers of one kind, each called as a region."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(layer() for _ in range(3))


class Alone(Regions):
    """The same without regions."""

    forward = Stack.forward


@torch.library.custom_op("autoshard_tests::seeded_noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def seeded_noise(x: Tensor) -> Tensor:
    """Draws numbers, and says so."""
    return torch.rand_like(x)


@seeded_noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Seeded(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(super().forward(x)) * seeded_noise(x.detach()).sin()


NOISY, SEEDED, PLAIN = (partial(Noisy, 32, 32), partial(Seeded, 32, 32), Plain)


def _as_alone(make: Callable[[], nn.Module], plan: Plan, codegen: str = "eager") -> None:
    """Losses and gradients are those of the model in eager mode."""
    got = trained(make, inputs(), plan, codegen)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(1)
    for ours, expected in zip(got, two_steps(model, model, inputs()), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
def test_an_operator_that_may_draw_unseen_runs_once(codegen: Any) -> None:
    make = partial(Regions, NOISY)
    plan = planned(forecaster_of(make(), inputs(), codegen))
    with pytest.warns(UserWarning, match=r"what autoshard_tests.noise gives is saved .*regions of torch.utils.checkpoint"):
        _as_alone(make, plan, codegen)


def test_an_operator_that_says_that_it_draws_is_repeated() -> None:
    make = partial(Regions, SEEDED)
    forecaster = forecaster_of(make(), inputs())
    plan = planned(forecaster)
    cut = rehearse(forecaster.captured, plan, inductor=False)
    assert cut.backward is not None
    assert sum("seeded_noise" in str(n.args) for n in cut.backward.graph.nodes if n.op == "call_function") == 3
    _as_alone(make, plan)


@pytest.mark.parametrize(
    ("layer", "policy"),
    [(PLAIN, "full"), (SEEDED, "save addmm#0"), in_full(SEEDED, "full"), in_full(PLAIN, "save addmm#0")],
)
def test_results_are_bitwise_those_without_where_a_policy_takes_their_place(layer: Callable[[], nn.Module], policy: str) -> None:
    regions, alone = partial(Regions, layer), partial(Alone, layer)
    plan = planned(forecaster_of(regions(), inputs()))
    again = with_policies(plan, regions, [policy])  # type: ignore[arg-type]
    assert same(trained(alone, inputs(), plan, "eager"), trained(regions, inputs(), again, "eager"))  # type: ignore[arg-type]


class Halved(nn.Module):
    """A block of two regions, one behind the other."""

    def __init__(self, around: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second, self.around = Plain(), Plain(), around

    def forward(self, x: Tensor) -> Tensor:
        x = self.around(self.first, x)
        return self.around(self.second, x)  # type: ignore[no-any-return]


def _full(make: Callable[[], nn.Module]) -> Rehearsed:
    forecaster = forecaster_of(make(), inputs())
    plan = with_policies(planned(forecaster), make, ["full"])  # type: ignore[arg-type]
    return rehearse(forecaster.captured, plan, inductor=False)


def test_a_policy_knows_no_border_between_two_regions() -> None:
    """torch saves what goes from one to the next."""
    with_regions = _full(partial(Alone, partial(Halved, partial(checkpoint, use_reentrant=False))))
    without = _full(partial(Alone, partial(Halved, lambda part, x: part(x))))
    assert len(kept_of(with_regions)) == len(kept_of(without))


class Chooses(Plain):
    """Saves its products, and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=context)  # type: ignore[no-any-return]


def test_what_a_region_chooses_to_save_is_saved() -> None:
    make = partial(Alone, Chooses)
    forecaster = forecaster_of(make(), inputs())
    plan = planned(forecaster)
    kept = {name.rpartition("_")[0] or name for name in kept_of(rehearse(forecaster.captured, plan, inductor=False))}
    assert "addmm" in kept and "gelu" not in kept and "native_layer_norm" not in kept
    _as_alone(make, plan)


def test_the_regions_of_transformers_leave_a_choice_to_a_budget() -> None:
    model = models.llama(3).train()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    forecaster = forecaster_of(model, models.tokens(67)(torch.Generator().manual_seed(0)))
    plan = planned(forecaster)
    blocks = forecaster.blocks(plan)
    assert [b.name for b in blocks] == [f"model.layers.{i}" for i in range(3)]
    assert all(len(b.options) > 4 for b in blocks)
    least, most = (f(sum(o.saved for o in taken) for taken in zip(*(b.options for b in blocks))) for f in (min, max))
    assert least < most
