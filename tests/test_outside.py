"""Calls outside of the compiled graph: in pieces where Dynamo breaks, whole inside `gathered`, or refused by name."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoshard
from tests.cluster import Cluster
from tests.parity import Distance, clipped_step, see_gradients, see_state, sgd, whole
from tests.small import TOLERANCE, backward_beside, compiled_pair, config, in_full, inputs_of, what_is_said


class Masked(nn.Module):
    """torch.nn's own encoder asks whether its mask is causal, which breaks the graph inside of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 15, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.encoder(x, mask)).pow(2).mean()  # type: ignore[no-any-return]


def in_pieces(zero: int) -> tuple[Distance, float]:
    model, plain, compiled = compiled_pair(config(zero), Masked)
    optimizer, reference = sgd(model.parameters()), sgd(plain.parameters())
    distance = Distance()
    for inputs in torch.randn(4, dist.get_world_size(), 2, 6, 8, generator=torch.Generator().manual_seed(5)):
        backward_beside(compiled, plain, inputs)
        see_gradients(distance, model, plain)
        distance.see("norm", clipped_step(model, optimizer), clipped_step(plain, reference))
    see_state(distance, model, plain)
    return distance, autoshard.report(model).compiled


@pytest.mark.parametrize("zero", [in_full(0), in_full(1), in_full(3)])
def test_a_frame_that_breaks_inside_torch_trains_in_pieces(two: Cluster, zero: int) -> None:
    for distance, compiled in two.run(in_pieces, zero):
        assert distance.worst <= TOLERANCE, distance
        assert compiled == 1.0


def past_the_limit() -> None:
    """Another graph in every step, until Dynamo compiles no more and would run plain Python."""
    _, _, compiled = compiled_pair(config(0))
    with torch._dynamo.config.patch(recompile_limit=2):
        for size in (4, 3, 2, 1):
            with torch.autocast("cpu", enabled=size % 2 == 0), torch.set_grad_enabled(size != 3):
                compiled(torch.ones(size, 8))


def called_as_it_was() -> None:
    """The module itself, not what torch.compile returned."""
    model, _, compiled = compiled_pair(config(3))
    compiled(torch.ones(4, 8)).backward()
    with torch.no_grad():
        model(torch.ones(4, 8))


def trained_as_it_was() -> None:
    """The same where parameters are whole: nothing would average the gradients."""
    model, _, compiled = compiled_pair(config(0))
    compiled(torch.ones(4, 8)).backward()
    model(torch.ones(4, 8)).backward()


@pytest.mark.parametrize("case", [past_the_limit, called_as_it_was, trained_as_it_was])
def test_what_is_not_compiled_is_refused(two: Cluster, case: Any) -> None:
    for said in two.run(what_is_said, case):
        assert "was called outside of any compiled graph" in said


class BreaksInCheckpoint(nn.Module):
    """torch runs a checkpoint without Dynamo where that cannot trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def region(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.second(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.region, self.first(x), use_reentrant=False).pow(2).mean()  # type: ignore[no-any-return]


def breaks_in_checkpoint() -> None:
    _, _, compiled = compiled_pair(config(3), BreaksInCheckpoint)
    compiled(inputs_of(1)[0, dist.get_rank()]).backward()


def test_a_checkpoint_that_breaks_is_refused_by_name(two: Cluster) -> None:
    for said in two.run(what_is_said, breaks_in_checkpoint):
        assert "Linear, which autoshard trains, was called outside of any compiled graph" in said
        assert "a graph break inside of torch.utils.checkpoint" in said


class Strict(nn.Linear):
    """With parameters of its own, so that the frame that raises is a sharded module's."""

    error: type[Exception] = ValueError

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen: list[Tensor] = []
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().sum())
        self.mean = 0.5 * self.mean + x.detach().mean()
        if x.dim() != 2:
            raise self.error("two dimensions, please")
        return super().forward(x)


def a_batch_that_forward_refuses(inside: bool, error: type[Exception]) -> tuple[list[str], list[float], list[float]]:
    """A loop that catches it, and goes on. What the module keeps of each batch is as it is in eager."""
    Strict.error = error
    torch._dynamo.reset()  # what is refused when nothing is compiled yet
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), Strict(8, 8)) if inside else Strict(8, 8)
    plain = copy.deepcopy(model)
    compiled, said = torch.compile(model, backend=autoshard.backend(config(3))), []
    for shape in ((4, 8), (2, 4, 8), (4, 8), (2, 4, 8), (4, 8)):
        said.append(what_is_said(lambda shape: compiled(torch.ones(shape)).sum().backward(), shape))
        what_is_said(lambda shape: plain(torch.ones(shape)).sum().backward(), shape)
    kept, meant = (next(m for m in each.modules() if isinstance(m, Strict)) for each in (model, plain))
    assert torch.allclose(torch.stack(kept.seen), torch.stack(meant.seen)) and torch.allclose(kept.mean, meant.mean)
    grads, expected = ([p.grad for p in each.parameters()] for each in (model, plain))
    return said, [float(whole(g).sum()) for g in grads], [float(whole(g).sum()) for g in expected]


@pytest.mark.parametrize(("inside", "error"), [(False, ValueError), (True, ValueError), in_full(False, RuntimeError)])
def test_what_forward_raises_is_the_user_s_and_no_end(two: Cluster, inside: bool, error: type[Exception]) -> None:
    for said, grads, expected in two.run(a_batch_that_forward_refuses, inside, error):
        assert said == ["nothing", *[f"{error.__name__}: two dimensions, please", "nothing"] * 2]
        assert grads == pytest.approx(expected, rel=1e-5)


def asked_for_by_another_thread() -> bool:
    """Of the parameters, while a forward runs as Python."""
    torch._dynamo.reset()
    model, seen = Strict(8, 8), []

    class Asking(ValueError):
        def __init__(self, text: str) -> None:
            super().__init__(text)
            thread = threading.Thread(target=lambda: seen.append(model.weight is not None))
            thread.start()
            thread.join()

    Strict.error = Asking
    compiled = torch.compile(model, backend=autoshard.backend(config(3)))
    compiled(torch.ones(4, 8)).sum().backward()
    assert "two dimensions" in what_is_said(compiled, torch.ones(2, 4, 8))
    return bool(seen) and all(seen) and model.weight is not None


def test_a_forward_in_python_is_one_thread_s(two: Cluster) -> None:
    assert two.run(asked_for_by_another_thread) == [True, True]


def inside_gathered() -> list[float]:
    """(compiled, as it was): on all processes, then on one alone."""
    model, plain, compiled = compiled_pair(config(3))
    x = inputs_of(1)[0, 0]
    compiled(x).backward()
    with autoshard.gathered(compiled) as whole, torch.no_grad():
        found = [compiled(x) - plain(x), whole(x) - plain(x)]
        if dist.get_rank() == 0:
            found.append(compiled(2 * x) - plain(2 * x))
    compiled(x).backward()
    return [f.item() for f in found]


def test_inside_gathered_the_model_is_whole_compiled_or_not(two: Cluster) -> None:
    for found in two.run(inside_gathered):
        assert found and all(abs(f) < 1e-6 for f in found)


def write_inside(how: str) -> None:
    model, _, compiled = compiled_pair(config(3))
    compiled(torch.ones(4, 8)).backward()
    with autoshard.gathered(model), torch.no_grad():
        if how == "in place":
            model.up.weight.mul_(2)
        elif how == "data":
            model.up.weight.data += 1
        else:
            model.up.weight = nn.Parameter(torch.ones(15, 8))


@pytest.mark.parametrize("how", ["in place", "data", "replaced"])
def test_a_write_inside_gathered_is_refused(two: Cluster, how: str) -> None:
    for text in two.run(what_is_said, write_inside, how):
        assert "['up.weight'] were written inside `gathered`" in text


def step_inside(zero: int) -> None:
    model, _, compiled = compiled_pair(config(zero))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled(torch.ones(4, 8)).backward()
    with autoshard.gathered(model):
        optimizer.step()


def test_a_step_inside_gathered_is_refused_where_rows_would_step(two: Cluster) -> None:
    for text in two.run(what_is_said, step_inside, 3):
        assert text.startswith("UnsupportedError: a step inside autoshard.gathered(model) would leave its whole parameters as they are")
    assert two.run(what_is_said, step_inside, 0) == ["nothing"] * 2


def gather_a_part() -> None:
    model, _, compiled = compiled_pair(config(3))
    compiled(torch.ones(4, 8)).backward()
    with autoshard.gathered(model.up):
        pass


def test_gathered_takes_no_part_of_a_model(two: Cluster) -> None:
    for text in two.run(what_is_said, gather_a_part):
        assert text.endswith("autoshard.gathered takes a model that was compiled, after its first call (this is a part of one)")


def evaluate_alone_first() -> None:
    """As loops do that evaluate once before they train."""
    _, _, compiled = compiled_pair(config(3))
    if dist.get_rank() == 0:
        with torch.no_grad():
            compiled(torch.ones(4, 8))
    compiled(torch.ones(4, 8)).backward()


def test_evaluation_on_one_process_before_the_first_step_is_refused(two: Cluster) -> None:
    for said in two.run(what_is_said, evaluate_alone_first):
        assert said.startswith("DisagreementError: rank 1 disagrees with rank 0 about its call: 'training, with"), said
        assert "where rank 0 has 'evaluation, with" in said
