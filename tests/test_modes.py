"""Shapes that change, and modes that a loop or a forward enters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from tests.cluster import Cluster
from tests.models import Case, features
from tests.parity import Distance, measure_case, see_gradients, see_state, sgd
from tests.small import (
    TOLERANCE,
    Net,
    backward_beside,
    compiled_pair,
    config,
    in_full,
    inputs_of,
    step_each,
    trained_beside,
    what_is_said,
)


def looked_at(zero: int) -> tuple[Distance, str]:
    """In torch's anomaly mode, which looks at each gradient: a step, and what it says of a gradient that is not a number."""
    model, plain, compiled = compiled_pair(config(zero))
    distance = Distance()
    with torch.autograd.set_detect_anomaly(True):
        backward_beside(compiled, plain, list(inputs_of(1)[0]))
        see_gradients(distance, model, plain)
        return distance, what_is_said(lambda: compiled(inputs_of(1)[0, dist.get_rank()] * float("nan")).backward())


@pytest.mark.parametrize("zero", [in_full(0), in_full(1), 3])
def test_gradients_may_be_looked_at_for_what_is_no_number(two: Cluster, zero: int) -> None:
    for distance, said in two.run(looked_at, zero):
        assert distance.worst <= TOLERANCE, distance
        assert said.startswith("RuntimeError") and "returned nan values" in said, said


class Reader(nn.Module):
    """The mean loss of padded sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(29, 8), nn.Linear(8, 15), nn.Linear(15, 8)

    def forward(self, ids: Tensor) -> Tensor:
        shown = (ids > 0).unsqueeze(-1)
        y = self.down(torch.tanh(self.up(self.embed(ids)))) * shown
        return y.pow(2).sum() / shown.sum()


def padded_batch(step: int, rank: int) -> Tensor:
    """Padded to the longest of its own sentences; every fifth batch is what was left over, of one sentence."""
    g = torch.Generator().manual_seed(97 * step + rank)
    ids = torch.randint(1, 29, (1 if step % 5 == 4 else 4, 3 + (7 * step + 5 * rank) % 11), generator=g)
    ids[1:, -2:] = 0
    return ids


def changing_shapes(zero: int) -> tuple[Distance, int]:
    """Another length at each of 20 steps and on each process, evaluation in between."""
    model, plain, compiled = compiled_pair(config(zero), Reader)
    optimizer, reference = sgd(model.parameters()), sgd(plain.parameters())
    distance, rank, world = Distance(), dist.get_rank(), dist.get_world_size()
    for step in range(20):
        batches = [padded_batch(step, r) for r in range(world)]
        backward_beside(compiled, plain, batches)
        see_gradients(distance, model, plain)
        step_each(optimizer, reference)
        if step % 3 == 2:
            with torch.no_grad():
                distance.see("loss", compiled(batches[rank]), plain(batches[rank]))
            with torch.inference_mode():
                distance.see("loss", compiled(batches[rank]), plain(batches[rank]))
    see_state(distance, model, plain)
    return distance, sum(p.name == "name_parameters" for p in autoshard.report(model).passes)


@pytest.mark.parametrize("zero", [in_full(0), 3])
def test_changing_shapes_and_evaluation(two: Cluster, zero: int) -> None:
    """Each of training, no_grad and inference_mode: the first shape, any length, any length of one sentence."""
    for distance, graphs in two.run(changing_shapes, zero):
        assert distance.worst <= TOLERANCE, distance
        assert graphs <= 9


class Routed(nn.Module):
    """Alike layers, each of which sees some rows; how many is found out as it goes, which breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        x = self.first(x)
        for layer, mask in zip(self.layers, shown):
            rows = mask.nonzero().squeeze(-1)
            x = x.index_add(0, rows, torch.tanh(layer(x[rows])))
        return x.pow(2).mean()


def routed(zero: int, captured: bool) -> Distance:
    """One process compiles a graph for the last layer, which sees a single row there, that another has from the first one. captured:
    the graph is not broken, and checks how many rows there are."""
    model, plain, compiled = compiled_pair(config(zero), Routed)
    distance, rank, world = Distance(), dist.get_rank(), dist.get_world_size()
    for step, inputs in enumerate(inputs_of(3)):
        shown = [torch.arange(4) < torch.tensor([[3 - step * r], [3], [3 - 2 * r]]) for r in range(world)]
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=captured):
            compiled(inputs[rank], shown[rank]).backward()
        for x, mask in zip(inputs, shown):
            (plain(x, mask) / world).backward()
        see_gradients(distance, model, plain)
    return distance


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("zero", [in_full(0), in_full(1), 3])
def test_rows_may_be_routed_to_layers(two: Cluster, zero: int, captured: bool) -> None:
    for distance in two.run(routed, zero, captured):
        assert distance.worst <= TOLERANCE, distance


class Transformed(Net):
    """Weighs each row by itself, and takes a gradient on the way."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.vmap(lambda row: torch.softmax(row, 0))(x)
        return super().forward(x * weights + torch.func.grad(lambda y: y.pow(3).sum())(x))


class Mapped(Net):
    """Its layers see a row at a time first."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(super().forward)(x).mean() + super().forward(x)


class Inferred(nn.Module):
    """Looks at what it will train in inference mode first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 512, bias=False), nn.Linear(512, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            mean = self.body(x).mean()
        return (self.head(self.body(x)) - mean.clone()).pow(2).mean()


class Budgeted(nn.Module):
    """Says how much the activations of its blocks may take; in eager mode there is nothing to say."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(9))

    def _loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return self._loss(x)
        with torch.autograd.graph.region_activation_memory_budget(0.5):
            return self._loss(x)


class Halved(Net):
    """Called with a weight that is made of its own, too."""

    def forward(self, x: Tensor) -> Tensor:
        other = {"weight": self.up.weight / 2, "bias": self.up.bias}
        return self.down(torch.tanh(self.up(x)) + torch.func.functional_call(self.up, other, (x,))).pow(2).mean()


def gradients_of(build: Callable[[], nn.Module], zero: int) -> Distance:
    model, plain, compiled = compiled_pair(config(zero), build)
    distance = Distance()
    for x in inputs_of(2):
        backward_beside(compiled, plain, x)
        see_gradients(distance, model, plain)
        for m in (model, plain):
            m.zero_grad()
    return distance


needs_budgets = pytest.mark.skipif(not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="new in torch 2.13")


@pytest.mark.parametrize(
    ("build", "zero"), [(Transformed, 3), (Mapped, 0), (Inferred, 3), (Halved, 3), in_full(Halved, 0), pytest.param(Budgeted, 3, marks=needs_budgets)]
)
def test_modes_that_forward_enters(two: Cluster, build: Callable[[], nn.Module], zero: int) -> None:
    for distance in two.run(gradients_of, build, zero):
        assert distance.worst <= TOLERANCE, distance


def evaluated_first(zero: int) -> tuple[Distance, bool]:
    """Training after a first call in inference mode."""
    model, plain, compiled = compiled_pair(config(zero))
    with torch.inference_mode():
        compiled(inputs_of(1)[0, dist.get_rank()])
    distance = trained_beside(model, plain, compiled, [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)])
    return distance, any(p.is_inference() for p in model.parameters())


@pytest.mark.parametrize("zero", [in_full(0), in_full(1), 3])
def test_the_first_call_may_be_in_inference_mode(two: Cluster, zero: int) -> None:
    for distance, inference in two.run(evaluated_first, zero):
        assert distance.worst <= TOLERANCE and not inference, distance


class Flattened(nn.Module):
    """What its head is trained on is as long as the image is large."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 3, 4, 2, 1), nn.Linear(3 * 4 * 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)).flatten(1)).pow(2).mean()


def _of_open_sizes(zero: int, codegen: str) -> Distance:
    case = Case(Flattened, features(2, 1, 8, 12), loss=lambda out: out)
    return measure_case(case, config(zero, codegen=codegen), dynamic=True)


@pytest.mark.parametrize(("zero", "codegen"), [(0, "eager"), (3, "eager"), (1, "inductor"), in_full(3, "inductor")])
def test_gradients_may_have_sizes_by_those_of_inputs(two: Cluster, zero: int, codegen: str) -> None:
    """In the trace; it is the parameter's size all the same."""
    for distance in two.run(_of_open_sizes, zero, codegen):
        assert distance.worst <= TOLERANCE, distance
