"""What cannot be right is refused by name, in the first call or the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
import torch.nn.utils.parametrizations
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module, distribute_tensor
from torch.utils.checkpoint import checkpoint

import autoshard
from tests.cluster import Cluster
from tests.small import Net, config, inputs_of, what_is_said


class MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x.long()).sum()


def _call(model: Any, x: Tensor | None = None) -> Tensor:
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(3)))
    loss: Tensor = compiled(torch.ones(4, 8) if x is None else x)
    return loss


def distributed_already() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _call(distribute_module(Net(), mesh), distribute_tensor(torch.ones(4, 8), mesh))


def sharded_by_fsdp() -> None:
    _call(fully_shard(Net(), mesh=init_device_mesh("cpu", (dist.get_world_size(),))))


def sharded_by_the_first_fsdp() -> None:
    """Which Dynamo skips, so the first step refuses it."""
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _call(model).backward()
    optimizer.step()


def without_values() -> None:
    with torch.device("meta"):
        model = Net()
    _call(model)


def hook_from_before() -> None:
    model = Net()
    model.up.weight.register_post_accumulate_grad_hook(lambda p: None)
    _call(model)


def gradient_from_before() -> None:
    model = Net()
    model(torch.ones(4, 8)).backward()
    _call(model)


def errors_suppressed() -> None:
    """Dynamo then swallows whatever goes wrong in a backend, what we refuse as well."""
    model = MaxNorm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(3)))
    with torch._dynamo.config.patch(suppress_errors=True):
        compiled(torch.ones(4, 8)).backward()
        optimizer.step()


def written_in_forward() -> None:
    _call(MaxNorm())


class Clamped(Net):
    """Writes behind autograd's back, as clipped weights of a critic do."""

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data.view(-1).clamp_(min=0)
        return super().forward(x)


def written_through_data() -> None:
    _call(Clamped())


class AgainMaxNorm(MaxNorm):
    """Writes where activations are computed again."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def written_in_a_region() -> None:
    _call(AgainMaxNorm())


class AgainClamped(Clamped):
    """The same through `.data`."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def written_through_data_in_a_region() -> None:
    _call(AgainClamped())


class Mapped(Net):
    """Its layers see a row at a time."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(super().forward)(x).mean()


def mapped_over_rows() -> None:
    _call(Mapped())


class Twice(Net):
    """What its optimizer does to the one it does to the other."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("first", self.up.weight.data)
        else:
            self.down.weight = nn.Parameter(self.up.weight.data.view(8, 15))


def memory_shared_by_a_buffer() -> None:
    _call(Twice(buffer=True))


def memory_shared_by_parameters() -> None:
    _call(Twice(buffer=False))


class Scanned(Net):
    """Parameters inside of a higher-order operator."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.up(y).sum(), lambda y: self.up(2 * y).sum(), (x,))


def inside_cond() -> None:
    _call(Scanned())


def list_from_before() -> None:
    model = Net()
    kept = [p for p in model.parameters() if p.requires_grad]
    _call(model).backward()
    torch.nn.utils.clip_grad_norm_(kept, 1.0)


def penalty_on_a_list_from_before() -> None:
    model = Net()
    kept = list(model.parameters())
    (_call(model) + 1e-3 * sum(p.pow(2).sum() for p in kept)).backward()


def read_by_another_module() -> None:
    model, other = Net(), nn.Linear(8, 15)
    other.weight = model.up.weight
    _call(model)
    other(torch.ones(4, 8))


def replaced_by_a_frozen_one() -> None:
    """What is whole would be taken for rows."""
    model = Net()
    compiled = torch.compile(model, backend=autoshard.backend(config(3)))
    compiled(torch.ones(4, 8)).backward()
    model.zero_grad()
    model.up.weight = nn.Parameter(torch.ones(15, 8), requires_grad=False)
    compiled(torch.ones(4, 8))


def shared_with_a_sharded_one() -> None:
    model = Net()
    _call(model.up).sum().backward()
    _call(model)


def gradient_of_gradients() -> None:
    model = Net()
    loss = _call(model)
    (gradient,) = torch.autograd.grad(loss, [model.up.weight], create_graph=True)
    gradient.pow(2).sum().backward()


def penalty_on_gradients() -> None:
    """Beside a loss, whose own backward nothing stops."""
    model = Net()
    loss = _call(model)
    (gradient,) = torch.autograd.grad(loss, [model.up.weight], create_graph=True)
    (loss + gradient.full_tensor().pow(2).sum()).backward()  # type: ignore[attr-defined]


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.unseen = nn.Linear(8, 8), [nn.Linear(8, 8)]

    def forward(self, x: Tensor) -> Tensor:
        return self.unseen[0](self.seen(x)).pow(2).mean()


def a_plain_list() -> None:
    _call(Listed())


def pruned_later() -> None:
    model = Net()
    torch.compile(model, backend=autoshard.backend(config(0)))(torch.ones(4, 8)).backward()
    torch.nn.utils.prune.l1_unstructured(model.up, "weight", amount=0.3)


def parametrized_later() -> None:
    model = Net()
    torch.compile(model, backend=autoshard.backend(config(3)))(torch.ones(4, 8)).backward()
    torch.nn.utils.parametrizations.weight_norm(model.up)


def a_sparse_buffer() -> None:
    model = Net()
    model.register_buffer("adjacent", torch.eye(4).to_sparse())
    _call(model)


def scripted() -> None:
    model = Net()
    model.up = torch.jit.script(nn.Sequential(model.up, nn.ReLU()))
    _call(model)


CASES: dict[Callable[[], None], str] = {
    scripted: "module 'up' is TorchScript, which Dynamo leaves out of every graph",
    a_plain_list: "a parameter of shape (8, 8) is in no module of the model, or of another model; legal: modules that hold it as",
    pruned_later: "parameter 'weight' of a Linear cannot become something else after the first call; legal: prune, parametrize and the like",
    parametrized_later: "parameter 'weight' of a Linear cannot become something else after the first call; legal: prune, parametrize and",
    a_sparse_buffer: "buffer 'adjacent' is torch.sparse_coo, which rank 0 cannot send; legal: Config(buffers=\"local\")",
    distributed_already: "parameter 'up.weight' is a DTensor already",
    sharded_by_fsdp: "is wrapped by fully_shard; autoshard takes the plain module",
    sharded_by_the_first_fsdp: "the model is wrapped by FullyShardedDataParallel; autoshard takes the plain module",
    without_values: "parameter 'up.weight' is on the meta device and has no values; legal: model.to_empty",
    hook_from_before: "parameter 'up.weight' has hooks or a gradient from before its first call",
    gradient_from_before: "parameter 'up.weight' has hooks or a gradient from before its first call",
    errors_suppressed: "compiling MaxNorm failed, which suppress_errors of Dynamo's config hides",
    written_in_forward: "in place (an embedding's max_norm, say)",
    written_through_data: "forward writes to parameter 'up.weight' in place",
    written_in_a_region: "forward writes to parameter 'embed.weight' in place",
    written_through_data_in_a_region: "forward writes to parameter 'up.weight' in place",
    mapped_over_rows: "forward uses parameter 'up.weight' in a transform of functions",
    memory_shared_by_a_buffer: "parameter 'up.weight' and buffer 'first' share memory",
    memory_shared_by_parameters: "parameter 'up.weight' and parameter 'down.weight' share memory",
    inside_cond: "a region of its own uses parameters of 'up'",
    list_from_before: "this parameter was sharded by autoshard and is empty now",
    penalty_on_a_list_from_before: "this parameter was sharded by autoshard and is empty now",
    read_by_another_module: "this parameter was sharded by autoshard and is empty now",
    replaced_by_a_frozen_one: "parameter 'up.weight' of shape (15, 8) came after the first call",
    shared_with_a_sharded_one: "parameter 'up.weight' is a DTensor already; autoshard takes plain parameters. Of models that share it",
    gradient_of_gradients: "RuntimeError",  # torch's own, as the next
    penalty_on_gradients: "RuntimeError",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_is_refused(two: Cluster, case: Callable[[], None]) -> None:
    for said in two.run(what_is_said, case):
        assert CASES[case] in said, said


def with_a_scripted_function() -> None:
    compiled: Any = torch.compile(nn.Sequential(Net(), torch.jit.script(nn.ReLU())), backend=autoshard.backend(config(3)))
    compiled(torch.ones(4, 8)).sum().backward()


def test_scripted_functions_are_left_to_torch(two: Cluster) -> None:
    assert two.run(what_is_said, with_a_scripted_function) == ["nothing"] * 2


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


def step_beside_the_graph() -> None:
    model = Skipped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(0)))
    compiled(inputs_of(1)[0, dist.get_rank()]).backward()
    optimizer.step()


def test_gradients_that_no_graph_reduced_are_refused(two: Cluster) -> None:
    for text in two.run(what_is_said, step_beside_the_graph):
        assert text.startswith("UnsupportedError: Linear, which autoshard trains, was called outside of any compiled graph")


class Half(nn.Module):
    """Two layers; only the first is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(), nn.Linear(8, 8)


def step_outside(what: str) -> None:
    model = Half()
    compiled: Any = torch.compile(model.first, backend=autoshard.backend(config(0)))
    x = inputs_of(1)[0, dist.get_rank()]
    if what == "grown":
        compiled(x).backward()
        model.first.down = nn.Linear(15, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled(model.second(x)).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("beside", "DivergenceError: the optimizer steps a parameter of shape (8, 8) that is in no model"),
        ("grown", "UnsupportedError: parameter 'down.weight' of shape (8, 15) came after the first call"),
    ],
)
def test_parameters_that_nothing_reduces_are_refused(two: Cluster, what: str, says: str) -> None:
    for text in two.run(what_is_said, step_outside, what):
        assert text.startswith(says), text


class Penalized(Net):
    """Uses its parameters directly, as a penalty on weights may."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(p.pow(2).sum() for p in self.parameters())


class Mixed(Net):
    """Uses a parameter beside what depends on inputs: Dynamo gets through no trace of its rows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + dict(self.named_parameters())["up.weight"].sum())


def uses_directly(build: Callable[[], nn.Module], zero: int) -> None:
    compiled: Any = torch.compile(build(), backend=autoshard.backend(config(zero)))
    compiled(inputs_of(1)[0, dist.get_rank()]).backward()


@pytest.mark.parametrize(("build", "zero"), [(Penalized, 0), (Penalized, 3), (Mixed, 3)])
def test_parameters_used_inside_forward_are_refused(two: Cluster, build: Callable[[], nn.Module], zero: int) -> None:
    for text in two.run(what_is_said, uses_directly, build, zero):
        assert "UnsupportedError: forward uses parameter 'up.weight' other than through its module" in text, text
