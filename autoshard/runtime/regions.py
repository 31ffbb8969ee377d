"""Blocks that repeat as regions: of those that are alike Dynamo traces one, and its graph stands for the others.

[Note: Regions] `nested_compile_region` (torch 2.13) checks of each further block what the first one's trace took for granted,
and traces it too where that does not hold. What a block may not do in a region (break the graph, change what lies outside of
it) can fail a whole compilation, so a job has regions only in its first trace on shards, and only where a capture of the
same call had them. A class whose forward asks at each trace, unguarded, lets go of them without a recompilation.

torch does not check everything (seen on 2.13): not whether a DTensor is trained, nor a module's hooks, nor its class where the first
trace found nothing to ask of it (nn.Identity in the place of a norm). A block that is frozen would stand for those behind it,
which then get no gradients. So blocks that differ in these have regions of their own. Nor does it look at modes: a block that is called in
no_grad, or in autocast, would stand for those behind it. One that is called in other modes than the first is no region.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard import torch_internals
from autoshard.runtime.parameters import named_alike, with_own_code


@dataclass(eq=False)
class Regions:
    """on: whether traces to come find the blocks of a model as regions. modes: that the first block was called in."""

    on: bool = True
    modes: str = ""

    def wanted(self) -> bool:
        """Whether the block that is traced now is to be one."""
        modes = _modes()
        self.modes = self.modes or modes
        return self.on and modes == self.modes


def _modes() -> str:
    """What a trace depends on besides what it is given."""
    casts = [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()} {torch.get_default_dtype()} {casts}"


def make_regions(model: nn.Module, least: int, stacks: Collection[str] = ()) -> Regions | None:
    """Makes regions of the members of every list of at least so many modules; None where there is none, or Dynamo would
    trace each all the same. stacks: modules that are none, since what a region computes belongs to it alone, to no block in it."""
    modules = dict(model.named_modules())
    lists = [m for m in modules.values() if isinstance(m, nn.ModuleList) and len(m) >= least]
    stacked = {modules.get(name) for name in stacks}
    blocks = dict.fromkeys(block for several in lists for block in several if block not in stacked)
    regions = Regions()
    kinds = {block: _kind(block) for block in blocks}
    classes = {kind: _region_class(kind[0], regions) for kind in dict.fromkeys(kinds.values())}
    if not all(classes.values()):
        return None
    for block, kind in kinds.items():
        block.__class__ = classes[kind]  # type: ignore[assignment]
    return regions if blocks else None


def _kind(block: nn.Module) -> tuple[type[nn.Module], tuple[Any, ...], tuple[Any, ...]]:
    """What blocks of one region have alike: see [Note: Regions]."""
    modules = tuple((name, type(m), *map(id, torch_internals.hooks_of(m))) for name, m in block.named_modules())
    trained = tuple((name, p.requires_grad) for name, p in block.named_parameters(remove_duplicate=False))
    return type(block), modules, trained


def _region_class(cls: Any, regions: Regions) -> type[nn.Module] | None:
    region = torch_internals.traced_once(cls.forward)
    if region is None:
        return None
    body = {
        "__reduce_ex__": lambda block, protocol: _reduced(cls, block, protocol),
        "forward": _forward(cls.forward, region, regions),
    }
    return named_alike(cls, body)


def _forward(inner: Callable[..., Any], region: Callable[..., Any], regions: Regions) -> Callable[..., Any]:
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def wanted() -> bool:
        return regions.wanted()

    @functools.wraps(inner)
    def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and wanted():
            return region(block, *args, **kwargs)
        return inner(block, *args, **kwargs)

    return with_own_code(forward)


def _reduced(cls: type[nn.Module], block: nn.Module, protocol: Any) -> Any:
    """What copies and pickles a block: as one of its own class."""
    return _new, (cls,), *cls.__reduce_ex__(block, protocol)[2:]


def _new(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)
