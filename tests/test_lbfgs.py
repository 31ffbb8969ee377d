"""LBFGS, whose closure decides how often a step calls the model."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import Tensor, nn, optim

from tests.cluster import Cluster
from tests.parity import Distance, see_state
from tests.small import TOLERANCE, Net, compiled_pair, config, in_full, inputs_of


def in_double() -> nn.Module:
    return Net().double()


def by_lbfgs(search: str | None, steps: int) -> Distance:
    """With a closure that gives the mean loss over all processes."""
    model, plain, compiled = compiled_pair(config(0), in_double)
    optimizer, reference = (optim.LBFGS(m.parameters(), lr=0.1, max_iter=3, line_search_fn=search) for m in (model, plain))
    distance, world = Distance(), dist.get_world_size()
    for inputs in inputs_of(steps).double():

        def closure(inputs: Tensor = inputs) -> Tensor:
            optimizer.zero_grad()
            loss = compiled(inputs[dist.get_rank()])
            loss.backward()
            dist.all_reduce(mean := loss.detach() / world)
            return mean

        def of_all(inputs: Tensor = inputs) -> Tensor:
            reference.zero_grad()
            loss: Tensor = sum(plain(x) for x in inputs) / world  # type: ignore[assignment]
            loss.backward()
            return loss.detach()

        distance.see("loss", optimizer.step(closure), reference.step(of_all))
        see_state(distance, model, plain)
    return distance


@pytest.mark.parametrize("search", ["strong_wolfe", in_full(None)])
def test_lbfgs_by_the_mean_loss(two: Cluster, search: str | None) -> None:
    for distance in two.run(by_lbfgs, search, 3):
        assert distance.worst <= TOLERANCE, distance


def by_its_own_loss() -> None:
    """A line search looks at losses, which processes have of their own."""
    model, _, compiled = compiled_pair(config(0, timeout=4))
    optimizer = optim.LBFGS(model.parameters(), max_iter=20, max_eval=64, line_search_fn="strong_wolfe")
    for inputs in inputs_of(4):

        def closure(inputs: Tensor = inputs) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = compiled((1 + 3 * dist.get_rank()) * inputs[dist.get_rank()])
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.full
def test_lbfgs_by_losses_of_their_own_is_named(two: Cluster) -> None:
    said = two.answers(by_its_own_loss)
    assert [kind for kind, _ in said] == ["error", "error"]
    named = {name: text for _, (name, text, _) in said}
    assert "before step " in named.get("DivergenceError", "") or "did not come to step " in named.get("DisagreementError", ""), said
