"""Buffers: rank 0's everywhere, or each process's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from autoshard.runtime.state import state_of
from tests.cluster import Cluster
from tests.models import CASES
from tests.parity import batches_of
from tests.small import compiled_pair, config, inputs_of, what_is_said


def local_buffers() -> tuple[Tensor, Tensor]:
    case = CASES["conv"]
    model, alone, compiled = compiled_pair(config(0, buffers="local"), case.build)
    batch = batches_of(case, dist.get_world_size(), 1)[0][dist.get_rank()]
    case.loss(compiled(**batch)).backward()
    alone(**batch)
    return model.body[1].running_mean, alone.body[1].running_mean


def test_local_buffers_are_each_process_s_own(two: Cluster) -> None:
    (first, alone), (second, alone_too) = two.run(local_buffers)
    torch.testing.assert_close(first, alone)
    torch.testing.assert_close(second, alone_too)
    assert not torch.equal(first, second)


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


class Domains(nn.Module):
    """Norms that are alike, of which each call takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norms = nn.ModuleList(nn.BatchNorm1d(8, affine=False) for _ in range(2))

    def forward(self, x: Tensor, domain: int) -> Tensor:
        return self.norms[domain](self.linear(x)).pow(2).mean()


def another_domain_each() -> None:
    compiled: Any = torch.compile(Domains(), backend=autoshard.backend(config(0)))
    compiled(inputs_of(1)[0][dist.get_rank()], dist.get_rank())


def test_statistics_of_unlike_norms_are_not_taken_for_each_other(two: Cluster) -> None:
    for said in two.run(what_is_said, another_domain_each):
        assert said.startswith("DisagreementError: rank 1 disagrees with rank 0 about its call: 'training")
        assert "to norms.1.running_mean,norms.1.running_var' where" in said and "to norms.0.running_mean,norms.0.running_var'" in said


class Counting(nn.Module):
    """Has buffers of a dtype that not every transport takes; forward writes to one of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.register_buffer("seen", torch.full((3,), 300 * (rank + 1)).to(dtype))
        self.register_buffer("table", torch.full((2, 3), 7.0 + rank).to(dtype).T)

    def forward(self, x: Tensor) -> Tensor:
        if self.seen.dtype is torch.int16:
            self.seen.add_((x.detach() > 0).sum().to(torch.int16))
        return (self.linear(x) * self.table.float().sum()).pow(2).mean()


class Coded(nn.Module):
    """A table of a dtype that not every transport takes, which is no buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.table = nn.Parameter(torch.full((8, 8), 7.0 + rank).to(dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x @ self.table.float()).pow(2).mean()


def coded(dtype: torch.dtype, zero: int) -> tuple[float, float]:
    torch.manual_seed(0)
    model = Coded(dtype)
    compiled = torch.compile(model, backend=autoshard.backend(config(zero)))
    loss = compiled(torch.ones(2, 8))
    loss.backward()
    return float(autoshard.state_dict(model, keep=True)["table"].float().mean()), float(loss.detach())


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn])
def test_frozen_parameters_of_any_dtype_are_rank_0_s(two: Cluster, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    expected = 7.0, pytest.approx(float(Coded(dtype)(torch.ones(2, 8)).detach()), rel=1e-5)
    assert two.run(coded, dtype, 3) == [expected] * 2


def counted(dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    torch.manual_seed(0)
    model = Counting(dtype)
    compiled = torch.compile(model, backend=autoshard.backend(config(3)))
    x = inputs_of(1)[0][dist.get_rank()]
    compiled(x).backward()
    return model.seen.float(), model.table.float(), int((x > 0).sum())


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn])
def test_buffers_of_any_dtype_become_rank_0_s(two: Cluster, dtype: torch.dtype) -> None:
    first, second = two.run(counted, dtype)
    expected = torch.full((3,), 300).to(dtype).float() + (first[2] if dtype is torch.int16 else 0)
    for seen, table, _ in (first, second):
        torch.testing.assert_close(seen, expected)
        torch.testing.assert_close(table, torch.full((3, 2), 7.0))


class Overlapping(nn.Module):
    """Writes to a buffer that is a part of another one, which it reads: autograd's trace makes one input of both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("moments", torch.zeros(2, 8))
        self.register_buffer("mean", self.moments[0])

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return (self.linear(x) - self.moments.sum(0)).pow(2).mean()


def overlapping_buffers() -> tuple[Tensor, Tensor]:
    """Both after some steps, and as they are on rank 0."""
    model, plain, compiled = compiled_pair(config(3), Overlapping)
    for x in inputs_of(3):
        compiled(x[dist.get_rank()]).backward()
        plain(x[0])
    return torch.cat([model.moments, model.mean[None]]), torch.cat([plain.moments, plain.mean[None]])


def test_buffers_that_share_memory_become_rank_0_s(two: Cluster) -> None:
    for found, expected in two.run(overlapping_buffers):
        torch.testing.assert_close(found, expected)


class Scaling(nn.Module):
    """Replaces its buffer where it trains, and multiplies by it, so that backward needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale = 0.5 * self.scale + 0.5 * x.detach().abs().mean(0)
        return (self.linear(x) * self.scale).pow(2).mean()


def evaluated_behind_a_replaced_buffer() -> tuple[Tensor, Tensor]:
    """A gradient behind an evaluation in inference mode, and that of both processes alone."""
    model, plain, compiled = compiled_pair(config(0), Scaling)
    inputs = inputs_of(1)[0, 0].expand(2, 4, 8)
    for _ in range(2):
        compiled.train()
        model.zero_grad()
        plain.zero_grad()
        compiled(inputs[dist.get_rank()]).backward()
        plain(inputs[0]).backward()
        compiled.eval()
        with torch.inference_mode():
            compiled(inputs[dist.get_rank()])
    return model.linear.weight.grad, plain.linear.weight.grad


def test_an_evaluation_in_inference_mode_leaves_a_replaced_buffer_to_training(two: Cluster) -> None:
    for found, expected in two.run(evaluated_behind_a_replaced_buffer):
        torch.testing.assert_close(found, expected)


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


class Written(nn.Module):
    """Writes to its buffer behind its graph: in a piece without parameters, in Python, or as torch.nn does where it breaks the graph."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8, momentum=None if where == "norm" else 0.1)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.where == "norm":
            return self.norm(x)  # its momentum is 1 / a number in a tensor, which no graph has
        if self.training and self.where == "piece":
            torch._dynamo.graph_break()
            self.mean.lerp_(x.detach().mean(0), 0.5)
        elif self.training:
            self.keep(x.detach())
        return x - self.mean

    @torch.compiler.disable
    def keep(self, x: Tensor) -> None:
        self.mean.lerp_(x.mean(0), 0.5)


def written_buffers(where: str, zero: Any) -> tuple[list[Tensor], list[Tensor]]:
    """An evaluation of one input behind some steps with inputs that differ, its buffers then, and both as rank 0 alone has them."""
    torch._dynamo.reset()
    model, plain, compiled = compiled_pair(config(zero), lambda: Written(where))
    for x in inputs_of(3):
        compiled(x[dist.get_rank()]).pow(2).mean().backward()
        plain(x[0])
    x = inputs_of(1)[0, 0]
    found = []
    for called, module in ((compiled, model), (plain, plain)):
        module.eval()
        with torch.no_grad():
            out = called(x)
        found.append([out, *(b.clone() for b in module.buffers())])
    return found[0], found[1]


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("where", ["piece", "python", "norm"])
def test_a_buffer_that_is_written_behind_a_graph_is_rank_0_s_at_the_next_call(two: Cluster, where: str, zero: int) -> None:
    for found, expected in two.run(written_buffers, where, zero):
        torch.testing.assert_close(found, expected)


def loaded_buffers() -> tuple[Tensor, Tensor]:
    """What a state dict that differs between processes leaves in buffers behind a call."""
    model, plain, compiled = compiled_pair(config(1), lambda: Written("norm"))
    compiled(inputs_of(1)[0, 0])
    rank = dist.get_rank()
    model.load_state_dict({name: value + rank if value.is_floating_point() else value for name, value in plain.state_dict().items()})
    model.eval()
    with torch.no_grad():
        compiled(inputs_of(1)[0, 0])
    return model.norm.running_mean, model.norm.running_var


def test_buffers_of_a_loaded_state_dict_are_rank_0_s_at_the_next_call(two: Cluster) -> None:
    for mean, var in two.run(loaded_buffers):
        torch.testing.assert_close((mean, var), (torch.zeros(8), torch.ones(8)))


def trained_norm() -> tuple[list[str], list[str], list[str], int]:
    """What a call would broadcast: behind steps whose graph does so itself, behind a load, and behind an evaluation after that. And how
    many batches the norm counted."""
    case = CASES["conv"]
    model, _, compiled = compiled_pair(config(0), case.build)
    for batch in batches_of(case, dist.get_world_size(), 3):
        case.loss(compiled(**batch[dist.get_rank()])).backward()
    state, counted = state_of(model), int(model.body[1].num_batches_tracked)
    assert state is not None
    trained = state.buffers.changed()
    model.load_state_dict(model.state_dict())
    loaded = state.buffers.changed()
    model.eval()
    compiled(**batch[dist.get_rank()])
    assert not state.buffers._by_value, "a graph's norms cost no fingerprints"
    return trained, loaded, state.buffers.changed(), counted


def test_what_a_graph_writes_is_no_change_and_what_is_loaded_is_one(two: Cluster) -> None:
    for trained, loaded, evaluated, counted in two.run(trained_norm):
        assert (trained, evaluated, counted) == ([], [], 3)
        assert {name.rpartition(".")[2] for name in loaded} == {"running_mean", "running_var", "num_batches_tracked"}


def written_alone() -> None:
    model, _, compiled = compiled_pair(config(3), lambda: Written("python"))
    model.eval()
    compiled(inputs_of(1)[0, 0])
    if dist.get_rank() == 1:
        model.mean.add_(1)
    compiled(inputs_of(1)[0, 0])


def test_a_buffer_that_one_process_alone_wrote_to_is_named(two: Cluster) -> None:
    for said in two.run(what_is_said, written_alone):
        assert said.startswith("DisagreementError") and "changed buffers (mean to mean)" in said, said
