"""All rewrite passes by name, the default pipeline, and the text form of a pipeline."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from autoshard.errors import PassError
from autoshard.passes.base import STAGES, Pass
from autoshard.passes.begin_in_parts import BeginInParts
from autoshard.passes.bucket import Bucket
from autoshard.passes.compress import Compress
from autoshard.passes.early_gathers import EarlyGathers
from autoshard.passes.early_matmuls import EarlyMatmuls
from autoshard.passes.fuse_elementwise import FuseElementwise
from autoshard.passes.gather_twice import GatherTwice
from autoshard.passes.hoist_unshards import HoistUnshards
from autoshard.passes.inline_regions import InlineRegions
from autoshard.passes.lower import Lower
from autoshard.passes.merge_unshards import MergeUnshards
from autoshard.passes.name_parameters import NameParameters
from autoshard.passes.outline_blocks import OutlineBlocks
from autoshard.passes.overlap import Overlap
from autoshard.passes.pack_in_place import PackInPlace
from autoshard.passes.partition_activations import PartitionActivations
from autoshard.passes.plain_repeats import PlainRepeats
from autoshard.passes.recompute import Recompute
from autoshard.passes.regather import Regather
from autoshard.passes.repeat_blocks import RepeatBlocks
from autoshard.passes.seed_dropout import SeedDropout
from autoshard.passes.sparse_rows import SparseRows
from autoshard.passes.sync_buffers import SyncBuffers
from autoshard.passes.take_rows import TakeRows
from autoshard.passes.take_whole import TakeWhole
from autoshard.passes.two_levels import TwoLevels
from autoshard.passes.widen_held import WidenHeld

PASSES: dict[str, type[Any]] = {
    p.name: p
    for p in (
        InlineRegions, HoistUnshards, NameParameters, MergeUnshards, TakeRows, OutlineBlocks, TakeWhole, SyncBuffers,
        WidenHeld, TwoLevels, SparseRows, Regather, Recompute, RepeatBlocks, PartitionActivations, GatherTwice, Bucket, Compress, Lower,
        BeginInParts, Overlap, EarlyGathers, PackInPlace, EarlyMatmuls, PlainRepeats, SeedDropout, FuseElementwise,
    )
}

DEFAULT = (
    "inline_regions,hoist_unshards,name_parameters,merge_unshards,take_rows,outline_blocks,take_whole,sync_buffers,"
    "widen_held,two_levels,sparse_rows,regather,recompute,repeat_blocks,partition_activations,gather_twice,bucket,compress,lower,"
    "begin_in_parts,overlap,early_gathers,pack_in_place,early_matmuls,plain_repeats,seed_dropout,fuse_elementwise"
)


_ITEM = re.compile(r"\s*([^{}]+?)\s*(?:\{([^{}]*)\}\s*)?")


def parse(spec: str) -> tuple[Pass, ...]:
    """The pipeline of a spec such as "name_parameters,merge_unshards,bucket{mb=25},lower"; checked, see `check`."""
    items = [_ITEM.fullmatch(item) or _refuse(item) for item in re.split(r",(?![^{]*\})", spec)]
    pipeline = tuple(_build(item[1], item[2] or "") for item in items)
    check(pipeline)
    return pipeline


def _refuse(item: str) -> NoReturn:
    raise PassError(f"passes: {item!r} is not legal; legal: a pass such as 'lower', or with options 'bucket{{mb=25}}'")


def spec(pipeline: Sequence[Pass]) -> str:
    """The text that `parse` reads; options that are not at their default are written out."""
    return ",".join(_text(p) for p in pipeline)


def _build(name: str, options: str) -> Pass:
    if name not in PASSES:
        raise PassError(f"passes: {name!r} is no pass; legal: {', '.join(sorted(PASSES))}")
    cls = PASSES[name]
    kinds = {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    for option in filter(None, options.split(" ")):
        key, _, text = option.partition("=")
        if key not in kinds:
            raise PassError(
                f"passes: {name} has no option {key!r}; legal: {', '.join(kinds) or 'none'}"
            )
        values[key] = _value(name, key, text, type(kinds[key].default))
    return cls(**values)  # type: ignore[no-any-return]


def _value(name: str, key: str, text: str, kind: type) -> Any:
    if kind is bool:
        legal = {"true": True, "false": False}
        if text in legal:
            return legal[text]
        raise PassError(f"passes: {name}{{{key}={text}}} is not legal; legal: true, false")
    try:
        return kind(text)
    except ValueError:
        raise PassError(f"passes: {name}{{{key}={text}}} is not legal; legal: {kind.__name__}") from None


def _text(p: Any) -> str:
    changed = [
        f"{f.name}={_option_text(getattr(p, f.name))}"
        for f in dataclasses.fields(p)
        if getattr(p, f.name) != f.default
    ]
    return p.name + (f"{{{' '.join(changed)}}}" if changed else "")


def _option_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check(pipeline: Sequence[Pass]) -> None:
    """Fails if a pass comes at the wrong place or lacks what it requires, before anything runs."""
    there: set[str] = set()
    stage = 0
    for p in pipeline:
        if STAGES.index(p.stage) < stage:
            raise PassError(
                f"passes: {p.name} works on the {p.stage} graph and cannot come after a pass on the "
                f"{STAGES[stage]} graph"
            )
        stage = STAGES.index(p.stage)
        missing = p.requires - there
        if missing:
            givers = [" or ".join(n for n, c in PASSES.items() if name in c.provides) for name in sorted(missing)]
            raise PassError(
                f"passes: {p.name} requires {', '.join(sorted(missing))}; put {' and '.join(givers)} before it"
            )
        there |= p.provides


def pipeline_for(config_spec: str | None, disabled: Sequence[str]) -> tuple[Pass, ...]:
    """The pipeline that a config asks for."""
    chosen = parse(config_spec or DEFAULT)
    kept = tuple(p for p in chosen if p.name not in disabled)
    check(kept)
    return kept
