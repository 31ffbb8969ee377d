"""A model that was sharded in place: whose rows it has, and what the user sees of it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.errors import StaleParameterError, UnsupportedError
from autoshard.runtime.dtensors import local
from autoshard.runtime.processes import build_mesh
from tests.cluster import Cluster
from tests.parity import Distance, measure, rank0_copy, see_state, sgd, whole
from tests.small import (
    TOLERANCE,
    Experts,
    Net,
    backward_beside,
    compiled_pair,
    config,
    in_full,
    inputs_of,
    step_each,
)


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


def beside_another(mesh: dict[str, int] | None) -> tuple[Distance, int]:
    """Two models in turn, which clip their gradients by groups of their meshes; how many groups of processes the second one brought."""
    known = dist.distributed_c10d._world.pg_map
    trained = [(*compiled_pair(config(3, mesh=mesh)), list[optim.Optimizer]()) for _ in range(2)]
    counts, distance = list[int](), Distance()
    for inputs in inputs_of(3):
        for model, plain, compiled, optimizers in trained:
            backward_beside(compiled, plain, inputs)
            optimizers[:] = optimizers or [sgd(m.parameters()) for m in (model, plain)]
            for m in (model, plain):
                nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            step_each(*optimizers)
            counts.append(len(known))
    for model, plain, *_ in trained:
        see_state(distance, model, plain)
    return distance, counts[-1] - counts[0]


@pytest.mark.parametrize("mesh", [None, {"replicate": 2, "shard": 1}])
def test_models_share_groups_of_processes(two: Cluster, mesh: dict[str, int] | None) -> None:
    for distance, more in two.run(beside_another, mesh):
        assert distance.worst <= TOLERANCE, distance
        assert more == 0


def test_groups_of_processes_end_with_torch_s_own() -> None:
    for _ in range(2):
        dist.init_process_group("fake", rank=1, world_size=4)
        try:
            first, second = (build_mesh("cpu", (("replicate", 2), ("shard", 2))) for _ in range(2))
            assert first == second and first.get_all_groups() == second.get_all_groups()
            assert set(first.get_all_groups()) <= dist.distributed_c10d._world.pg_map.keys()
            group = weakref.ref(first.get_group("shard"))
            del first, second
        finally:
            dist.destroy_process_group()
        gc.collect()
        assert group() is None


def trained_by(plan: autoshard.Plan, model: nn.Module) -> Distance:
    """How far five steps are from those of the plain model."""
    plain = rank0_copy(model)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config("auto", plan=plan, replicate_below="auto")))
    optimizer, reference = sgd(model.parameters()), sgd(plain.parameters())
    distance = Distance()
    for inputs in inputs_of(5):
        backward_beside(compiled, plain, inputs)
        step_each(optimizer, reference)
    with autoshard.gathered(compiled) as whole_model:
        see_state(distance, whole_model, plain)
    return distance


def apart() -> tuple[Distance, list[int]]:
    """The first layer's rows live on rank 0 alone, the second's on rank 1: as pipeline stages will."""
    torch.manual_seed(0)
    model = Net()
    plan = autoshard.Plan(
        world=2,
        axes=(("shard", 2),),
        groups=tuple(
            autoshard.ParameterGroup(name, tuple(f"{name}.{p}" for p in ("weight", "bias")),
                                     autoshard.Degrees(2, 2, 2), ranks=(rank,))
            for rank, name in enumerate(("up", "down"))
        ),
    )  # fmt: skip
    assert plan.group_of.keys() == dict(model.named_parameters()).keys()
    return trained_by(plan, model), [p.to_local().numel() for p in model.parameters()]  # type: ignore[attr-defined]


def test_parameters_on_a_mesh_that_excludes_this_rank(two: Cluster) -> None:
    (first, held_by_0), (second, held_by_1) = two.run(apart)
    assert max(first.worst, second.worst) <= TOLERANCE
    assert held_by_0 == [120, 15, 0, 0] and held_by_1 == [0, 0, 120, 8]


def on_two_of_three() -> tuple[Distance, int]:
    """What is cut along another dimension than the first, where a process has none of it."""
    torch.manual_seed(0)
    model = Experts()
    names = [[n for n, _ in model.named_parameters() if (n == "expert") is apart] for apart in (False, True)]
    groups = [autoshard.ParameterGroup(g[0], tuple(g), autoshard.Degrees(3, 3, 3), ranks=ranks) for g, ranks in zip(names, ((), (0, 2)))]
    plan = autoshard.Plan(world=3, axes=(("shard", 3),), groups=tuple(groups))
    return trained_by(plan, model), local(model.expert).numel()


def test_some_processes_have_rows_along_another_dimension(three: Cluster) -> None:
    distances, held = zip(*three.run(on_two_of_three))
    assert max(distance.worst for distance in distances) <= TOLERANCE
    assert held == (3 * 8, 0, 2 * 8)


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


def deleted(zero: int) -> list[bool]:
    """Whether what a model was made of is there when it is not any more; each of several has small parameters that stay whole."""
    alive = []
    for _ in range(2):
        model, _, compiled = compiled_pair(config(zero, replicate_below=20))
        optimizer = torch.optim.AdamW(model.parameters())
        compiled(inputs_of(1)[0, dist.get_rank()]).backward()
        optimizer.step()
        alive += [weakref.ref(x) for x in (model, *model.children(), *model.parameters())]
        del model, compiled, optimizer
        torch.compiler.reset()
    gc.collect()
    return [ref() is not None for ref in alive]


@pytest.mark.parametrize("zero", [0, in_full(1), 3])
def test_a_model_that_was_deleted_is_gone(two: Cluster, zero: int) -> None:
    assert not any(map(any, two.run(deleted, zero)))


class Strided(nn.Module):
    """What does not lie as it is counted: a part of every other row, a transposed one, one value for all, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16)[::2])
        for name, buffer in (("gaps", torch.randn(16)[::2]), ("turned", torch.randn(3, 8).t()), ("one", torch.randn(1, 8).expand(3, 8))):
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.turned * self.weight.sum() + (self.one * self.gaps).sum() * self.weight.mean()).square().mean()  # type: ignore[operator]


def all_as_on_rank_0(zero: int) -> list[bool]:
    torch.manual_seed(dist.get_rank())
    model = Strided()
    expected = [tensor.detach().clone() for tensor in (model.weight, *model.buffers())]
    for tensor in expected:
        dist.broadcast(tensor, 0)
    torch.compile(model, backend=autoshard.backend(config(zero)))(torch.randn(4, 8)).backward()
    return [torch.equal(whole(tensor), value) for tensor, value in zip((model.weight, *model.buffers()), expected)]


@pytest.mark.parametrize("zero", [0, 3])
def test_strided_values_are_rank_0_s(two: Cluster, zero: int) -> None:
    assert all(map(all, two.run(all_as_on_rank_0, zero)))
