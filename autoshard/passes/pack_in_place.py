"""Rewrite: rows are packed where a direct gather sends them from. That is a part of what it brings, so nothing is copied twice and no
flat tensor of rows lies beside it. See [Note: Direct] in ops/direct.py."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from autoshard.ops.direct import GATHER_DIRECT
from autoshard.ops.packing import GATHER_PACKED, PACK_SHARDS
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage


@dataclass(frozen=True)
class PackInPlace:
    name: ClassVar[str] = "pack_in_place"
    stage: ClassVar[Stage] = "split"
    requires: ClassVar[frozenset[str]] = frozenset({"collectives"})
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        for gather in graphs.calls(gm, GATHER_DIRECT):
            pack = _packed_for(gather)
            if pack is not None:
                _join(pack, gather)
        return gm


def _packed_for(gather: Node) -> Node | None:
    """What packs what is gathered, and nothing else."""
    item = gather.args[0]
    if not isinstance(item, Node) or item.target is not operator.getitem or len(item.users) > 1:
        return None
    (pack,) = item.all_input_nodes
    return pack if graphs.is_call(pack, PACK_SHARDS) and len(graphs.example(pack)) == 1 and len(pack.users) == 1 else None


def _join(pack: Node, gather: Node) -> None:
    (item,) = pack.users
    gather.target, gather.args = GATHER_PACKED, (*pack.args, *gather.args[1:])
    gather.graph.erase_node(item)
    gather.graph.erase_node(pack)
