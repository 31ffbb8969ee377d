"""Models that torch.compile never gave a graph: no job trains them apart in silence."""

from __future__ import annotations

import textwrap
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard import skipped
from tests.cluster import Cluster
from tests.launch import launch
from tests.small import what_is_said

CONFIG = autoshard.Config(zero=3, codegen="eager", replicate_below=0, timeout=60, verbose=False)


def skipped_by_dynamo(name: str, how: str) -> None:
    model = {"lstm": lambda: nn.LSTM(6, 6), "sequential": lambda: nn.Sequential(nn.Linear(6, 6))}[name]()
    model.compile(backend=autoshard.backend(CONFIG))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        out = model(torch.ones(2, 6))
        loss = (out[0] if isinstance(out, tuple) else out).sum()
        loss.backward()
        return loss

    if how == "in a closure":
        optimizer.step(closure)
        return
    if how == "behind a step of nothing":
        optimizer.step()
    model.requires_grad_(how != "frozen at first")
    if how in ("behind a step of another", "frozen at first"):
        other = nn.Linear(6, 6)
        optimizer.add_param_group({"params": other.parameters()})
        other(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    if how == "added later":
        optimizer = torch.optim.SGD(nn.Linear(6, 6).parameters(), lr=0.1)
        sum(p.sum() for p in optimizer.param_groups[0]["params"]).backward()
        optimizer.step()
        optimizer.add_param_group({"params": model.parameters()})
    model.requires_grad_(True)
    closure()
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("lstm", "as ever"),
        ("sequential", "as ever"),
        ("sequential", "in a closure"),
        ("sequential", "behind a step of nothing"),
        ("sequential", "behind a step of another"),
        ("sequential", "added later"),
        ("sequential", "frozen at first"),
    ],
)
def test_a_model_that_dynamo_skips_does_not_train_apart(two: Cluster, name: str, how: str) -> None:
    for text in two.run(what_is_said, skipped_by_dynamo, name, how):
        says = "is an LSTM: Dynamo leaves it out of every graph" if name == "lstm" else "never gave it a graph"
        assert says in text


def looks_for_what_was_skipped(thaws: bool) -> list[int]:
    """How many looks each step took. Beside the model the optimizer has a parameter of nobody's, which is frozen."""
    torch.manual_seed(0)
    beside = nn.Parameter(torch.ones(2), requires_grad=False)
    model = nn.Sequential(nn.Linear(6, 6))
    compiled = torch.compile(model, backend=autoshard.backend(CONFIG))
    compiled(torch.ones(2, 6)).sum().backward()
    optimizer = torch.optim.SGD([*model.parameters(), *([beside] if thaws else [])], lr=0.1)
    found = []
    for step in range(3):
        if step:
            optimizer.zero_grad()
            compiled(torch.ones(2, 6)).sum().backward()
        with mock.patch.object(skipped, "_check", wraps=skipped._check) as looks:
            optimizer.step()
        found.append(looks.call_count)
    return found


def test_what_was_looked_at_is_not_looked_at_again(two: Cluster) -> None:
    assert two.run(looks_for_what_was_skipped, False) == [[1, 0, 0]] * 2
    assert two.run(looks_for_what_was_skipped, True) == [[1, 1, 1]] * 2


@pytest.mark.parametrize("how", ["TORCHDYNAMO_DISABLE", "torch._dynamo.config", "disable=True"])
def test_a_torch_compile_that_compiles_nothing_is_not_silent(how: str) -> None:
    body = f"""
    how = {how!r}
    if how == "TORCHDYNAMO_DISABLE":
        os.environ[how] = "1"
    if how == "torch._dynamo.config":
        torch._dynamo.config.disable = True
    backend = autoshard.backend(autoshard.Config(verbose=False))
    again = torch.compile(model, backend=backend, disable=how == "disable=True")
    again(torch.randn(4, 8)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    """
    for ended in launch(2, textwrap.dedent(body)):
        if how == "disable=True":
            assert ended.code == 0 and "a backend of autoshard has no model: of torch.compile(..., disable=True)" in ended.output
        else:
            assert ended.code != 0 and "ConfigError: torch.compile is told to compile nothing" in ended.output


def test_a_first_call_that_was_refused_is_no_model_that_got_no_backend() -> None:
    """Beside it the loop trains another module, whose gradients DDP averages."""
    body = """
    refused = torch.compile(torch.nn.Linear(8, 8), backend=autoshard.backend(autoshard.Config(zero=3, memory_budget=64, verbose=False)))
    try:
        refused(torch.randn(4, 8))
    except autoshard.AutoshardError:
        print("refused")
    del refused
    compiled()(torch.randn(4, 8)).sum().backward()
    wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    """
    for ended in launch(2, textwrap.dedent(body), timeout=60):
        assert ended.code == 0 and "refused" in ended.output and "a backend of autoshard has no model" not in ended.output, ended.output
