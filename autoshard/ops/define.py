"""How operators of graphs are made: with what they run and what they give, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()) -> Any:
    """`autoshard::name`, its default overload unless the name has another one behind a dot. Not by `custom_op`, whose layers (autograd, checks) take longer at each call than the
    copies of a small block."""
    torch.library.define(f"autoshard::{name}", schema, tags=tuple(tags))
    torch.library.impl(f"autoshard::{name}", "CompositeExplicitAutograd", run)
    torch.library.register_fake(f"autoshard::{name}", fake)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.autoshard, packet), overload or "default")
