"""A model with whole parameters, for reading."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import UnsupportedError
from autoshard.runtime.fingerprint import fingerprints
from autoshard.runtime.shard import full_value, places_of
from autoshard.runtime.state import ModelState

Swapped = tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]  # where, name, shard, full


def _marks_of(swapped: Sequence[Swapped]) -> list[tuple[int, ...]]:
    """What changes with the values of the full ones, through `.data` too, which leaves a tensor's version as it is."""
    full = [each[-1] for each in swapped]
    return [(f.data_ptr(), *mark) for f, mark in zip(full, fingerprints(full))]


@contextlib.contextmanager
def gathered(state: ModelState) -> Iterator[None]:
    """The model has whole, plain parameters, for reading; see `autoshard.gathered`."""
    if state.accumulation.gathered:
        yield
        return
    state.come("autoshard.gathered")
    swapped: list[Swapped] = []
    for places in places_of(state.model).values():
        shard = places[0].module._parameters[places[0].attribute]
        assert shard is not None
        if isinstance(shard, DTensor):
            full = nn.Parameter(full_value(shard), requires_grad=False)
            for place in places:
                swapped.append((place.module._parameters, place.attribute, shard, full))
                place.module._parameters[place.attribute] = full
    before = _marks_of(swapped)
    try:
        with state.accumulation.as_gathered():
            yield
    finally:
        replaced = [shard for parameters, name, shard, full in swapped if parameters.get(name) is not full]
        for parameters, name, shard, _ in swapped:
            parameters[name] = shard
    after = _marks_of(swapped)
    written = [shard for (*_, shard, _), was, now in zip(swapped, before, after) if was != now]
    changed = list(dict.fromkeys(state.names()[id(shard)] for shard in replaced + written))
    if changed:
        raise UnsupportedError(
            f"parameters {changed} were written inside `gathered`, or loaded there; that is lost. Outside of it write to the shards, "
            "or load a state dict"
        )
