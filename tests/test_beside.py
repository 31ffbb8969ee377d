"""Modules that are trained beside a sharded one, uncompiled, with an optimizer of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.cluster import Cluster
from tests.small import compiled_pair, config, in_full, inputs_of

Train = Callable[[nn.Linear, Any, Tensor], None]


def each_its_own(head: nn.Linear, optimizer: optim.Optimizer, x: Tensor) -> None:
    head(x[dist.get_rank()]).pow(2).mean().backward()
    optimizer.step()


def in_a_closure(head: nn.Linear, optimizer: optim.Optimizer, x: Tensor) -> None:
    def closure() -> Tensor:
        loss: Tensor = head(x[dist.get_rank()]).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def bias_averaged(head: nn.Linear, optimizer: optim.Optimizer, x: Tensor) -> None:
    head(x[dist.get_rank()]).pow(2).mean().backward()
    dist.all_reduce(head.bias.grad)
    optimizer.step()


def averaged(head: nn.Linear, optimizer: optim.Optimizer, x: Tensor) -> None:
    head(x[dist.get_rank()]).pow(2).mean().backward()
    for p in head.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()


def alike(head: nn.Linear, optimizer: optim.Optimizer, x: Tensor) -> None:
    head(x[0]).pow(2).mean().backward()
    optimizer.step()


def one_alone(head: nn.Linear, optimizer: optim.Optimizer, x: Tensor) -> None:
    if dist.get_rank() == 1:
        each_its_own(head, optimizer, x)


def averaged_in_a_hook(head: nn.Linear, optimizer: optim.Optimizer, x: Tensor) -> None:
    def average(*_: Any) -> None:
        for p in head.parameters():
            dist.all_reduce(p.grad)

    hook = optimizer.register_step_pre_hook(average)
    each_its_own(head, optimizer, x)
    hook.remove()


def by_another(head: nn.Linear, optimizer: optim.Optimizer, x: Tensor) -> None:
    each_its_own(head, optim.SGD(optimizer.param_groups, lr=0.1), x)


def standing_still(head: nn.Linear, optimizer: optim.Optimizer, x: Tensor) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    each_its_own(head, optimizer, x)


def said(ways: list[Train], outputs: int) -> list[str]:
    """What this process warns of when a head of so many outputs, which no other test has, takes a step in each of these ways."""
    _, _, compiled = compiled_pair(config(3))
    compiled(inputs_of(1)[0, dist.get_rank()]).backward()
    torch.manual_seed(0)
    head = nn.Linear(8, outputs)
    optimizer = optim.SGD([{"params": [head.bias]}, {"params": [head.weight]}], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for way, x in zip(ways, inputs_of(len(ways))):
            way(head, optimizer, x)
            optimizer.zero_grad()
    dist.barrier()
    return [str(warning.message) for warning in caught if "autoshard" in str(warning.message)]


BIAS, WEIGHT = "parameter 0 of its group 0 (bias of a Linear, of shape ({},))", "parameter 0 of its group 1 (weight of a Linear, of shape ({}, 8))"


@pytest.mark.parametrize(
    ("ways", "outputs", "step", "named"),
    [
        ([each_its_own] * 8, 3, 1, BIAS),
        in_full([in_a_closure], 4, 1, BIAS),
        in_full([bias_averaged], 5, 1, WEIGHT),
        ([alike, averaged, each_its_own, each_its_own], 6, 4, BIAS),
        ([by_another] * 3, 7, 1, BIAS),
    ],
)
def test_what_trains_apart_is_named_once(two: Cluster, ways: list[Train], outputs: int, step: int, named: str) -> None:
    (text,) = [text for of_each in two.run(said, ways, outputs) for text in of_each]
    named = named.format(outputs)
    assert text.startswith(f"autoshard: in step {step} of an optimizer SGD, the gradient of {named} is not the same on all processes")


@pytest.mark.parametrize(
    ("way", "outputs"),
    [(averaged, 9), in_full(averaged_in_a_hook, 10), (alike, 11), in_full(standing_still, 12), (one_alone, 13)],
)
def test_what_does_not_is_not(two: Cluster, way: Train, outputs: int) -> None:
    assert two.run(said, [way] * 4, outputs) == [[], []]


def of_others(kind: str) -> list[str]:
    """What is said of modules that torch looks after: here each process has gradients of its own for a while, or rows."""
    _, _, compiled = compiled_pair(config(3))
    x = inputs_of(1)[0, dist.get_rank()]
    compiled(x).backward()
    head: Any = nn.Linear(8, 4)
    if kind == "DDP":
        wrapped = nn.parallel.DistributedDataParallel(head)
        wrapped.register_comm_hook(None, noop_hook)
        wrapped(x).pow(2).mean().backward()
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name, p in list(head.named_parameters()):
            setattr(head, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
            rows = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
            getattr(head, name).grad = distribute_tensor(rows, mesh, [Shard(0)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optim.SGD(head.parameters(), lr=0.1, foreach=False).step()
    dist.barrier()
    return [str(warning.message) for warning in caught if "autoshard" in str(warning.message)]


@pytest.mark.parametrize("kind", ["DDP", "DTensor"])
def test_what_torch_looks_after_is_not_warned_of(two: Cluster, kind: str) -> None:
    assert two.run(of_others, kind) == [[], []]
