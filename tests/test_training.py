"""What a loop may do beside plain steps, on two processes, against the unsharded model."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.errors import StaleParameterError, UnsupportedError
from autoshard.passes.choose_zero import make_plan
from tests.cluster import Cluster
from tests.models import CASES
from tests.parity import (
    Distance,
    Trainer,
    batches_of,
    clipped_step,
    measure,
    rank0_copy,
    see_gradients,
    see_state,
    sgd,
)
from tests.small import TOLERANCE, Net, backward_beside, compiled_pair, config, in_full, inputs_of, step_each
from tests.test_plan import _where

# --- precision


def train_in(precision: str | None, autocast: bool, zero: int) -> tuple[list[float], list[float], set[torch.dtype]]:
    """(losses, those of the unsharded model in fp32, dtypes of the rows) of overfitting one batch a process"""
    case, make = CASES["llama"], functools.partial(torch.optim.AdamW, lr=1e-2)
    torch.manual_seed(0)
    model = case.build()
    reference, optimizer = Trainer(rank0_copy(model), case, make), make(model.parameters())
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(zero, precision=precision)))
    batches = [case.batch(torch.Generator().manual_seed(rank)) for rank in range(dist.get_world_size())]
    losses, exact = [], []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = case.loss(compiled(**batches[dist.get_rank()]))
        loss.backward()
        clipped_step(model, optimizer)
        losses.append(loss.item())
        exact.append(reference.backward(batches)[dist.get_rank()].item())
        reference.step()
    return losses, exact, {p.dtype for p in model.parameters()}


@pytest.mark.parametrize(("precision", "autocast"), [("bf16", False), in_full(None, True)])
@pytest.mark.parametrize("zero", [in_full(0), 3])
def test_bf16_trains_like_fp32(two: Cluster, precision: str | None, autocast: bool, zero: int) -> None:
    for losses, exact, dtypes in two.run(train_in, precision, autocast, zero):
        assert dtypes == {torch.float32} and exact[-1] < 0.7 * exact[0]
        assert losses[0] == pytest.approx(exact[0], rel=1e-2) and losses[-1] == pytest.approx(exact[-1], rel=0.1)


# --- shapes and modes


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
    torch.manual_seed(0)
    model = Reader()
    plain = rank0_copy(model)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(zero)))
    optimizer, reference = sgd(model.parameters()), sgd(plain.parameters())
    distance, rank, world = Distance(), dist.get_rank(), dist.get_world_size()
    for step in range(20):
        batches = [padded_batch(step, r) for r in range(world)]
        compiled(batches[rank]).backward()
        for ids in batches:
            (plain(ids) / world).backward()
        see_gradients(distance, model, plain)
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
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


# --- meshes


def on_two_axes() -> tuple[Distance, str, tuple[int, ...]]:
    distance = measure("gpt2", config(3, mesh={"replicate": 2, "shard": 2}), steps=4)
    model, _, compiled = compiled_pair(config(3, mesh={"replicate": 2, "shard": 2}))
    compiled(inputs_of(1)[0, dist.get_rank()])
    parameter = next(model.parameters())
    assert isinstance(parameter, DTensor)
    return distance, str(parameter.placements), tuple(parameter.to_local().shape)


@pytest.mark.full
def test_shards_over_one_axis_and_replicates_over_the_other(four: Cluster) -> None:
    for distance, placements, rows in four.run(on_two_axes):
        assert distance.worst <= TOLERANCE, distance
        assert placements == "(Replicate(), Shard(dim=0))" and rows in ((8, 8), (7, 8))


def apart() -> tuple[Distance, list[int]]:
    """The first layer's rows live on rank 0 alone, the second's on rank 1: as pipeline stages will."""
    torch.manual_seed(0)
    model = Net()
    inventory_plan = _plan_of(model)
    plan = autoshard.Plan(
        world=2,
        axes=(("shard", 2),),
        groups=tuple(
            autoshard.ParameterGroup(name, tuple(f"{name}.{p}" for p in ("weight", "bias")),
                                     autoshard.Degrees(2, 2, 2), ranks=(rank,))
            for rank, name in enumerate(("up", "down"))
        ),
    )  # fmt: skip
    assert inventory_plan.group_of.keys() == plan.group_of.keys()
    plain = rank0_copy(model)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config("auto", plan=plan, replicate_below="auto")))
    optimizer, reference = sgd(model.parameters()), sgd(plain.parameters())
    distance = Distance()
    for inputs in inputs_of(5):
        compiled(inputs[dist.get_rank()]).backward()
        for x in inputs:
            (plain(x) / 2).backward()
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    with autoshard.gathered(compiled) as whole_model:
        see_state(distance, whole_model, plain)
    return distance, [p.to_local().numel() for p in model.parameters()]  # type: ignore[attr-defined]


def _plan_of(model: nn.Module) -> autoshard.Plan:
    from autoshard.inventory import take_inventory

    return make_plan(take_inventory(model, model.parameters()), config(3), _where(2))


def test_parameters_on_a_mesh_that_excludes_this_rank(two: Cluster) -> None:
    (first, held_by_0), (second, held_by_1) = two.run(apart)
    assert max(first.worst, second.worst) <= TOLERANCE
    assert held_by_0 == [120, 15, 0, 0] and held_by_1 == [0, 0, 120, 8]


# --- what the user sees of the model


def look_around() -> dict[str, Any]:
    model, plain, compiled = compiled_pair(config(3))
    before = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    compiled(inputs_of(1)[0, dist.get_rank()]).backward()
    seen: dict[str, Any] = {"repointed": optimizer.param_groups[0]["params"][0] is model.up.weight}
    seen["names"] = list(model.state_dict())
    seen["rows"] = tuple(model.up.weight.to_local().shape)
    seen["gone"] = [p.untyped_storage().size() for p in before]
    with contextlib.suppress(StaleParameterError):
        torch.nn.utils.clip_grad_norm_(before, 1.0)
        seen["stale"] = "silent"
    with autoshard.gathered(compiled):
        seen["gathered"] = torch.equal(model.up.weight, plain.up.weight)
        seen["eager"] = torch.equal(model(torch.ones(2, 8)), plain(torch.ones(2, 8)))
    model.load_state_dict({k: v + 1 for k, v in plain.state_dict().items()})
    seen["loaded"] = torch.equal(model.up.weight.full_tensor(), plain.up.weight + 1)  # type: ignore[operator]
    for name, act in {"pickle": lambda: torch.save(model, "/dev/null"), "write": lambda: _write(compiled)}.items():
        try:
            act()
        except UnsupportedError as error:
            seen[name] = str(error)
    return seen


def _write(compiled: Any) -> None:
    with autoshard.gathered(compiled) as model:
        model.up.weight.zero_()


def test_the_model_stays_what_it_was(two: Cluster) -> None:
    for rank, seen in enumerate(two.run(look_around)):
        assert seen["repointed"] and seen["gathered"] and seen["eager"] and seen["loaded"], seen
        assert seen["names"] == ["up.weight", "up.bias", "down.weight", "down.bias"]
        assert seen["rows"] == (8 - rank, 8) and set(seen["gone"]) == {0} and "stale" not in seen
        assert "cannot be pickled" in seen["pickle"] and "written inside `gathered`" in seen["write"]


# --- buffers


def local_buffers() -> tuple[Tensor, Tensor]:
    case = CASES["conv"]
    torch.manual_seed(0)
    model = case.build()
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(0, buffers="local")))
    alone: Any = rank0_copy(model)
    batch = batches_of(case, dist.get_world_size(), 1)[0][dist.get_rank()]
    case.loss(compiled(**batch)).backward()
    alone(**batch)
    return model.body[1].running_mean, alone.body[1].running_mean


class Averaging(nn.Module):
    """Replaces its buffer in forward, which no graph knows for a write."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("last", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        self.last = x.detach().mean(0)
        return (self.linear(x) - self.mean).pow(2).mean()


def replaced_buffers(buffers: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The buffer after each of some steps, and as it is when everyone has rank 0's (or its own) before each."""
    model, plain, compiled = compiled_pair(config(3, buffers=buffers), Averaging)
    found, expected = [], []
    for x in inputs_of(5):
        if buffers == "broadcast":
            dist.broadcast(plain.mean, 0)
        for m in (plain, compiled):
            m(x[dist.get_rank()]).backward()
            m.zero_grad()
        found.append(torch.stack([model.mean, model.last]))
        expected.append(torch.stack([plain.mean, plain.last]))
    return found, expected


@pytest.mark.parametrize("buffers", ["broadcast", "local"])
def test_a_buffer_that_forward_replaces_is_as_ddp_has_it(two: Cluster, buffers: str) -> None:
    first, second = two.run(replaced_buffers, buffers)
    for found, expected in (first, second):
        torch.testing.assert_close(found, expected)
    assert not torch.equal(first[0][-1], second[0][-1])


def replaced_and_called_alone() -> tuple[Tensor, Tensor]:
    """The buffer after three calls on rank 0, of which it makes one alone, inside of `gathered`; and the input's mean."""
    model, _, compiled = compiled_pair(config(3, timeout=10), Averaging)
    x = inputs_of(1)[0, 0]
    compiled(x).backward()
    with autoshard.gathered(model), torch.no_grad():
        if dist.get_rank() == 0:
            compiled(x)
    compiled(x).backward()
    return model.mean, x.mean(0)


def test_inside_gathered_a_replaced_buffer_waits_for_nobody(two: Cluster) -> None:
    for found, mean in two.run(replaced_and_called_alone):
        torch.testing.assert_close(found, 0.875 * mean)


def test_on_one_process_a_replaced_buffer_is_left_alone() -> None:
    model = Averaging()
    compiled: Any = torch.compile(model, backend=autoshard.backend(config("auto")))
    for x in torch.ones(3, 4, 8):
        compiled(x).backward()
    torch.testing.assert_close(model.mean, torch.full((8,), 0.875))


@pytest.mark.parametrize("kept", [True, False])
def test_on_one_process_each_model_of_a_class_has_a_state_of_its_own(kept: bool) -> None:
    """With one backend, as where a notebook's cell runs again: Dynamo calls one graph for all."""
    backend, models = autoshard.backend(config("auto")), []
    for _ in range(3):
        model = Net()
        compiled: Any = torch.compile(model, backend=backend)
        compiled(torch.ones(4, 8)).backward()
        assert model.up.weight.grad is not None and autoshard.report(model).compiled == 1.0
        with autoshard.gathered(model):
            models += [model] * kept
        del model, compiled
        gc.collect()


def evaluated_first(zero: int) -> tuple[Distance, bool]:
    """Training after a first call in inference mode."""
    model, plain, compiled = compiled_pair(config(zero))
    with torch.inference_mode():
        compiled(inputs_of(1)[0, dist.get_rank()])
    optimizer, reference = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain))
    for x in inputs_of(3):
        backward_beside(compiled, plain, x)
        step_each(optimizer, reference)
    distance = Distance()
    see_state(distance, model, plain)
    return distance, any(p.is_inference() for p in model.parameters())


@pytest.mark.parametrize("zero", [in_full(0), in_full(1), 3])
def test_the_first_call_may_be_in_inference_mode(two: Cluster, zero: int) -> None:
    for distance, inference in two.run(evaluated_first, zero):
        assert distance.worst <= TOLERANCE and not inference, distance


def test_local_buffers_are_each_process_s_own(two: Cluster) -> None:
    (first, alone), (second, alone_too) = two.run(local_buffers)
    torch.testing.assert_close(first, alone)
    torch.testing.assert_close(second, alone_too)
    assert not torch.equal(first, second)


# --- silent divergence


class Skipped(nn.Module):
    """One layer runs where Dynamo does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.skipped = nn.Linear(8, 8), nn.Linear(8, 8)

    @torch.compiler.disable
    def outside(self, x: Tensor) -> Tensor:
        return self.skipped(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(self.seen(x)).pow(2).mean()


def step_beside_the_graph() -> str:
    model = Skipped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(0)))
    try:
        compiled(inputs_of(1)[0, dist.get_rank()]).backward()
        optimizer.step()
    except autoshard.AutoshardError as error:
        return f"{type(error).__name__}: {error}"
    return "stepped"


def test_gradients_that_no_graph_reduced_are_refused(two: Cluster) -> None:
    for text in two.run(step_beside_the_graph):
        assert text.startswith("UnsupportedError: a Linear that autoshard trains was called outside of any compiled graph")


class Half(nn.Module):
    """Two layers; only the first is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(), nn.Linear(8, 8)


def step_outside(what: str) -> str:
    model = Half()
    compiled: Any = torch.compile(model.first, backend=autoshard.backend(config(0)))
    x = inputs_of(1)[0, dist.get_rank()]
    try:
        if what == "grown":
            compiled(x).backward()
            model.first.down = nn.Linear(15, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled(model.second(x)).backward()
        optimizer.step()
    except autoshard.AutoshardError as error:
        return f"{type(error).__name__}: {error}"
    return "stepped"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("beside", "DivergenceError: the optimizer steps a parameter of shape (8, 8) that is in no model"),
        ("grown", "UnsupportedError: parameter 'down.weight' of shape (8, 15) came after the first call"),
    ],
)
def test_parameters_that_nothing_reduces_are_refused(two: Cluster, what: str, says: str) -> None:
    for text in two.run(step_outside, what):
        assert text.startswith(says), text
