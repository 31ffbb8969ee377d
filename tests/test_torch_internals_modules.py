"""What Dynamo makes of modules and their forwards, as torch_internals has it."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import torch_internals


def test_a_module_that_is_compiled_in_place_is_known() -> None:
    model = nn.Linear(2, 2)
    assert not torch_internals.is_compiled_in_place(model)
    model.compile(backend="eager")
    assert torch_internals.is_compiled_in_place(model) and not torch_internals.is_compiled_in_place(nn.Linear(2, 2))


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Layers(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks, self.layers = breaks, nn.ModuleList(Doubling() for _ in range(2))


class Looping(Layers):
    """A loop that breaks is left to Python, and what it calls is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


class Renamed(Layers):
    """Its forward calls itself otherwise than most do."""

    def forward(this, x: Tensor) -> Tensor:  # noqa: N805
        for layer in this.layers:
            x = layer(x)
            if this.breaks:
                torch._dynamo.graph_break()
        return x


def decorated(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapper(self: nn.Module, x: Tensor) -> Any:
        return forward(self, x)

    return wrapper


class Decorated(Layers):
    forward = decorated(Looping.forward)


@pytest.mark.parametrize("kind", [Looping, Renamed, Decorated])
@pytest.mark.parametrize("breaks", [False, True])
def test_a_forward_that_dynamo_gave_up_runs_in_python(kind: type[Layers], breaks: bool) -> None:
    torch.compiler.reset()
    found, model = list[bool](), kind(breaks)

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(torch_internals.runs_in_python(model))
        return gm.forward

    torch.compile(model, backend=backend)(torch.ones(2, 4))
    assert set(found) == {breaks}


def test_a_module_of_torch_nn_can_be_compiled_in_place() -> None:
    """Dynamo looks into no forward of torch.nn's by itself."""
    compiled = []

    def backend(gm: Any, inputs: Any) -> Any:
        compiled.append(gm)
        return gm.forward

    model = nn.Sequential(nn.Linear(4, 4))
    torch_internals.compile_in_place(model, backend)
    x = torch.ones(2, 4)
    assert torch.equal(model(x), model[0](x)) and len(compiled) == 1
    assert torch_internals.backend_of(model) is backend


class Raising(nn.Module):
    """Whose forward Dynamo leaves to Python from its first error on, unless it is to look again."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        if self.again and not torch.compiler.is_compiling():
            torch_internals.look_again()
        if x.dim() != 2:
            raise ValueError("two dimensions, please")
        return x + 1


@pytest.mark.parametrize("again", [False, True])
def test_dynamo_looks_again_at_a_forward_that_it_gave_up(again: bool) -> None:
    torch.compiler.reset()
    compiled = []

    def backend(gm: Any, inputs: Any) -> Any:
        compiled.append(gm)
        return gm.forward

    model = torch.compile(Raising(again), backend=backend)
    for good in (True, False, True):
        with contextlib.nullcontext() if good else pytest.raises(ValueError, match="two dimensions"):
            model(torch.ones(2, 4) if good else torch.ones(4))
    assert len(compiled) == 1 + again
