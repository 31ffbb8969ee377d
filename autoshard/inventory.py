"""Inventory: what a plan is made from. Names, shapes and order of use of a model's parameters, no values."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.parameter import UninitializedParameter

from autoshard.errors import UnsupportedError


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter. Shared (tied) parameters appear once, under their first name. last_use: its place in the order in which
    forward is done with parameters, the reverse of that in which backward needs them. looked_up: how many rows of it a process's
    batch asked for, if it is used as an embedding's weight, and as that once; else 0. tied: it is used otherwise too, as a head's weight
    is. later: the captured graph does not use it, and one behind a graph break may."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trained: bool
    used: bool
    last_use: int = 0
    looked_up: int = 0
    tied: bool = False
    later: bool = False

    @property
    def elements(self) -> int:
        """Numbers in the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Lookup:
    """How many rows of a parameter a batch looks up, and whether it is used otherwise too."""

    rows: int
    tied: bool


NEVER = Lookup(0, False)


@dataclass(frozen=True)
class Inventory:
    """The parameters of a model, those that the captured graph uses first, in the order of use. broken: that ended at a graph break."""

    model: str
    parameters: tuple[ParameterInfo, ...]
    broken: bool = False

    @property
    def covered(self) -> float:
        """Share of the elements that the captured graph uses."""
        total = sum(p.elements for p in self.parameters)
        return sum(p.elements for p in self.parameters if p.used) / total if total else 1.0


def names_of(model: nn.Module) -> dict[int, str]:
    """The names of a model's parameters, by id; the first name of one that is shared."""
    return {id(p): name for name, p in model.named_parameters()}


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are; the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def take_inventory(
    model: nn.Module,
    used_in_order: Iterable[nn.Parameter],
    by_last_use: Iterable[nn.Parameter] = (),
    looked_up: Mapping[int, Lookup] | None = None,
    broken: bool = False,
) -> Inventory:
    """The inventory of `model`; `used_in_order` are the parameters that a captured graph takes as inputs, `by_last_use` the
    same by `in_order_of_last_use`, `looked_up` by `rows_looked_up`. Where one is not given, the order before it stands for it, and for the first the
    model's own. broken: that graph ended at a graph break."""
    names = names_of(model)
    parameters = {id(p): p for p in model.parameters()}
    used = [id(p) for p in used_in_order if id(p) in names] or list(parameters)
    order = list(dict.fromkeys([*used, *parameters]))
    last = {key: i for i, key in enumerate(dict.fromkeys([*(id(p) for p in by_last_use if id(p) in names), *order]))}
    return Inventory(
        type(model).__name__,
        tuple(
            _info(names[key], parameters[key], i < len(used), last[key], (looked_up or {}).get(key, NEVER), broken and i >= len(used))
            for i, key in enumerate(order)
        ),
        broken,
    )


def rows_looked_up(gm: GraphModule, inputs: Sequence[object]) -> dict[int, Lookup]:
    """Of each parameter among a graph's inputs that is looked up in once, by id. What other parameters say is to be looked up is known
    when these are gathered, and not before."""
    places = {place: x for place, x in zip(gm.graph.find_nodes(op="placeholder"), inputs) if isinstance(x, nn.Parameter)}
    found = {id(x): _lookup(place) for place, x in places.items()}
    asked = {key: (_indices(node), tied) for key, (node, tied) in found.items() if node is not None}
    return {key: Lookup(_count(indices), tied) for key, (indices, tied) in asked.items() if not _is_made_of(indices, places)}


def _lookup(weight: Node) -> tuple[Node | None, bool]:
    """The one call of an embedding that reads a weight, gathered from its rows or as it is; and whether others read it."""
    reading = list(_readers(weight))
    found = [user for by, user in reading if user.target is torch.nn.functional.embedding and _indices(user) is not by]
    return (found[0] if len(found) == 1 and _is_plain(found[0]) else None), len(reading) > 1


def _readers(weight: Node) -> Iterable[tuple[Node, Node]]:
    """Who reads it, and as what."""
    for user in weight.users:
        gathers = user.all_input_nodes == [weight] and "unshard" in str(user.target)
        yield from _readers(user) if gathers else [(weight, user)]


def _is_plain(lookup: Node) -> bool:
    """Whether its gradient is a sum of what its places give."""
    return True not in (*lookup.args[5:], lookup.kwargs.get("scale_grad_by_freq"), lookup.kwargs.get("sparse"))


def _is_made_of(node: Node, sources: Container[Node]) -> bool:
    """Whether one of these is among all that a node is made of."""
    todo, seen = [node], set[Node]()
    while todo:
        one = todo.pop()
        if one in sources:
            return True
        todo += [source for source in one.all_input_nodes if source not in seen]
        seen.update(one.all_input_nodes)
    return False


def _indices(lookup: Node) -> Any:
    """What it looks up, which may be given by name."""
    return lookup.args[0] if lookup.args else lookup.kwargs["input"]


def _count(indices: Any) -> int:
    """How many there were in the trace."""
    sizes = indices.meta["example_value"].shape
    return math.prod(int(s.node.hint) if isinstance(s, torch.SymInt) else int(s) for s in sizes)


def in_order_of_last_use(gm: GraphModule, inputs: Sequence[object]) -> list[nn.Parameter]:
    """The parameters among a graph's inputs, those first that forward is done with first. What is made of one alone (the
    unshard of its rows, a transpose) stands for it."""
    at = {node: i for i, node in enumerate(gm.graph.nodes)}
    last: dict[Node, int] = {}
    for node in reversed(gm.graph.nodes):
        uses = (last[user] if len(user.all_input_nodes) == 1 else at[user] for user in node.users)
        last[node] = max(uses, default=at[node])
    places = gm.graph.find_nodes(op="placeholder")
    found = [(last[place], i) for i, place in enumerate(places) if isinstance(inputs[i], nn.Parameter)]
    return [inputs[i] for _, i in sorted(found)]  # type: ignore[misc]


def refuse_lazy(name: str, parameter: nn.Parameter) -> None:
    """UnsupportedError of one that has no shape before the first batch."""
    if isinstance(parameter, UninitializedParameter):
        raise UnsupportedError(f"parameter {name!r} is lazy and has no shape yet; run one batch in eager first")


def _info(name: str, parameter: nn.Parameter, used: bool, last_use: int, lookup: Lookup, later: bool) -> ParameterInfo:
    refuse_lazy(name, parameter)
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ParameterInfo(
        name, tuple(parameter.shape), dtype, parameter.element_size(), parameter.requires_grad, used, last_use, lookup.rows, lookup.tied, later
    )


def is_trained(parameter: ParameterInfo) -> bool:
    """Whether backward gives it a gradient."""
    dtype = getattr(torch, parameter.dtype)
    return parameter.trained and (parameter.used or parameter.later) and (dtype.is_floating_point or dtype.is_complex)


def floating(dtype: str) -> bool:
    """True if a dtype of this name is one that others are cast to and from."""
    return bool(getattr(torch, dtype).is_floating_point)
