"""Random numbers of a model that is compiled: as many draws as it has, and the same when they are repeated."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

import autoshard
from autoshard import Config
from autoshard.codegen import drawn_on
from autoshard.errors import UnsupportedError
from autoshard.passes.recompute import is_repeatable, joins_draws, once
from tests.recomputed import Stack, forecaster_of, inputs, noise, planned, trained, two_steps, with_policies
from tests.small import in_full, same
from tests.test_user_regions import seeded_noise

SEEDED = (torch.Tag.nondeterministic_seeded,)


@torch.library.custom_op("autoshard_tests::of_several", mutates_args=(), tags=SEEDED)
def of_several(tensors: Sequence[Tensor]) -> Tensor:
    """Draws, and is given a list of tensors, where torch does not look for the device."""
    return torch.rand_like(tensors[0])


@of_several.register_fake
def _(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(tensors[0])


@torch.library.custom_op("autoshard_tests::of_both", mutates_args=())
def of_both(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Draws unseen, and gives a list beside a tensor."""
    return torch.rand_like(x), [torch.rand_like(x), torch.rand_like(x)]


@of_both.register_fake
def _(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(x), [torch.empty_like(x), torch.empty_like(x)]


@torch.library.custom_op("autoshard_tests::fill", mutates_args={"out"})
def fill(out: Tensor) -> None:
    """Draws unseen, into what it is given."""
    out.uniform_()


@fill.register_fake
def _(out: Tensor) -> None:
    return None


def _filled(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    fill(out)
    return out


def _of_list(x: Tensor) -> Tensor:
    return of_several([x.detach()])


def _nested(x: Tensor) -> Tensor:
    first, (second, third) = of_both(x.detach())
    return first + second * third


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 100).float(),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "gumbel": lambda x: nn.functional.gumbel_softmax(x, dim=-1),
    "rrelu": lambda x: nn.functional.rrelu(x - 2, training=True),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "dropout": nn.functional.dropout,
    "noise": lambda x: noise(x.detach()),
    "seeded": lambda x: seeded_noise(x.detach()),
}


class Twice(nn.Linear):
    """Draws twice by the same call."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__(32, 32)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return x + (self.draw(y) - self.draw(y)) * y.sin()


def _stack(draw: Callable[[Tensor], Tensor]) -> Any:
    class Drawing(Stack):
        def __init__(self) -> None:
            super().__init__(0)
            self.layers = nn.ModuleList(Twice(draw) for _ in range(2))

    return Drawing


def _beside_eager(make: Any, got: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(1)
    for ours, expected in zip(got, two_steps(model, model, inputs()), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("name", [n if n in ("noise", "seeded") else in_full(n) for n in DRAWS])
def test_what_is_drawn_twice_is_not_drawn_once(name: str) -> None:
    """Of most of these torch's partitioner would keep one. In eager the numbers are the plain model's, wherever they are repeated."""
    make = _stack(DRAWS[name])
    plan = planned(forecaster_of(make(), inputs()))
    plain = trained(make, inputs(), plan, "eager")
    _beside_eager(make, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that of unseen draws nothing is repeated
        assert same(plain, trained(make, inputs(), with_policies(plan, make, ["full"]), "eager"))


@pytest.mark.parametrize("name", ["noise", in_full("rrelu"), in_full("seeded"), in_full("gumbel")])
def test_neither_is_it_on_inductor(name: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Twice(DRAWS[name])
    out = torch.compile(model, backend=autoshard.backend(Config(codegen="inductor", verbose=False)))(inputs())
    assert (out - inputs()).abs().max() > 0


def _calls(target: Any, *several: tuple[Any, ...]) -> torch.fx.Graph:
    """A graph that calls an operator with each of these arguments, and computes a sine twice."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    made = [graph.call_function(torch.ops.aten.sin.default, (x,)) for _ in range(2)]
    graph.output([*made, *(graph.call_function(target, (x, *more)) for more in several)])
    return graph


def test_only_draws_that_torch_would_join_are_kept_apart() -> None:
    aten, ours = torch.ops.aten, torch.ops.autoshard_tests
    for target in (aten.randn_like.default, aten.uniform.default, ours.noise.default, ours.seeded_noise.default):
        assert joins_draws(_calls(target, (), ())) and len(once(_calls(target, (), ())).nodes) == 6
        assert not joins_draws(_calls(target, ()))
    for target in (aten.sin.default, aten.bernoulli.default):
        assert not joins_draws(_calls(target, (), ()))
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default  # of which torch says that it may draw
    assert not joins_draws(_calls(attention, (1, 2), (3, 4))) and joins_draws(_calls(attention, (1, 2), (1, 2)))
    assert len(once(_calls(attention, (1, 2), (3, 4))).nodes) == 5  # one sine is left


def _saving(*made: str) -> GraphModule:
    """A graph that saves random states in front of draws whose results are on these devices."""
    from torch._prims import rng_prims

    graph = torch.fx.Graph()
    with FakeTensorMode():
        for device in made:
            call = graph.call_function(rng_prims.run_and_save_rng_state, (torch.ops.aten.rand.default, [2]), {"device": device})
            call.meta["val"] = (torch.empty(16, dtype=torch.uint8), torch.empty(2, device=device))
    graph.output(())
    return GraphModule(nn.Module(), graph)


def test_a_graph_draws_with_its_own_gpu_as_the_current_one() -> None:
    """That has no tensor to tell it by, too."""
    assert drawn_on(_saving()) == drawn_on(_saving("cpu")) == []
    assert drawn_on(_saving("cuda:1", "cuda:1")) == [torch.device("cuda", 1)]
    with pytest.raises(UnsupportedError, match="what forward drew on cuda:0 and cuda:1; legal: one GPU a process"):
        drawn_on(_saving("cuda:0", "cuda:1"))


def test_a_draw_is_repeated_where_torch_finds_its_device() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"], y.meta["val"] = torch.ones(2), torch.ones(2, device="meta")
    seeded = torch.ops.autoshard_tests.seeded_noise.default
    given: Any = [(x,), ([x],), (x, y)]
    assert [is_repeatable(graph.call_function(seeded, args)) for args in given] == [True, False, False]


@pytest.mark.parametrize(("draw", "said"), [(_of_list, "of_several"), in_full(_nested, "of_both"), in_full(_filled, "fill")])
def test_what_cannot_be_repeated_is_saved_with_all_that_it_gives_and_named(draw: Callable[[Tensor], Tensor], said: str) -> None:
    make = _stack(draw)
    plan = planned(forecaster_of(make(), inputs()))
    plain = trained(make, inputs(), plan, "eager")
    with pytest.warns(UserWarning, match=f"what autoshard_tests.{said} gives is saved by every policy"):
        again = trained(make, inputs(), with_policies(plan, make, ["full"]), "eager")
    assert same(plain, again)
