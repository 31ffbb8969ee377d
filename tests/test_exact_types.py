"""A sharded module is of a subclass: what forward asks of exact types, and what a user's classes are told of that."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from autoshard.errors import UnsupportedError
from autoshard.exact_types import refuse_exact_types
from tests.cluster import Cluster
from tests.parity import Distance, see_state
from tests.small import TOLERANCE, Net, backward_beside, compiled_pair, config, inputs_of, what_is_said

SCALES: dict[type, float] = {nn.Linear: 2.0, nn.Tanh: 1.0}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


class Is(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * 2 if type(layer) is nn.Linear else layer(x)
        return x.pow(2).mean()


class Among(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * (2 if layer.__class__ in (nn.Linear, nn.Conv1d) else 1)
        return x.pow(2).mean()


class Table(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * SCALES[type(layer)]
        return x.pow(2).mean()


class Got(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * SCALES.get(type(layer), 1.0)
        return x.pow(2).mean()


class Inside(Layers):
    def forward(self, x: Tensor) -> Tensor:
        scales = [2 if type(layer) is nn.Linear else 1 for layer in self.layers]
        for layer, scale in zip(self.layers, scales):
            x = layer(x) * scale
        return x.pow(2).mean()


class Harmless(Layers):
    """Types of what has no parameters and of what is no module, names, and what a subclass is too."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            scale = 3 if type(layer) is nn.Tanh or type(x) is tuple or type(self.layers).__name__ == "List" else 1
            x = layer(x) * (2 if isinstance(layer, nn.Linear) else scale)
        return x.pow(2).mean()


def _call(build: type[nn.Module]) -> None:
    torch.compile(build(), backend=autoshard.backend(config(0)))(inputs_of(1)[0, dist.get_rank()])


@pytest.mark.parametrize("build", [Is, Among, Table, Got, Inside])
def test_the_exact_type_of_a_module_with_parameters_is_refused(build: type[nn.Module]) -> None:
    says = rf"{build.__name__}.forward asks for the exact type of a module \(.*test_exact_types.py:\d+\), which of a sharded Linear is a subclass"
    with pytest.raises(UnsupportedError, match=says):
        refuse_exact_types(build())


def test_processes_refuse_it_before_anything_is_sharded(two: Cluster) -> None:
    for text in two.run(what_is_said, _call, Is):
        assert text.startswith("UnsupportedError: Is.forward asks for the exact type of a module"), text


class Registered(nn.Module):
    """Of whose subclasses each is noted, and says what it is."""

    known: dict[str, type] = {}

    def __init_subclass__(cls, *, kind: str) -> None:
        cls.known[kind] = cls


class Scale(Registered, kind="scale"):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scale(x))


def beside_the_plain(zero: int, build: type[nn.Module]) -> tuple[Distance, list[type]]:
    model, plain, compiled = compiled_pair(config(zero), build)
    backward_beside(compiled, plain, inputs_of(1)[0])
    distance = Distance()
    see_state(distance, model, plain)
    return distance, list(Registered.known.values())


@pytest.mark.parametrize(("zero", "build"), [(0, Scaled), (3, Scaled), (3, Harmless)])
def test_no_class_of_the_user_s_is_told_of_what_was_made_of_it(two: Cluster, zero: int, build: type[nn.Module]) -> None:
    for distance, known in two.run(beside_the_plain, zero, build):
        assert distance.worst <= TOLERANCE and known == [Scale]
