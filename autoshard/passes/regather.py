"""Rewrite: says for each gathered copy whether backward keeps it (ZeRO-1, 2) or gathers it again (ZeRO-3), all of it or from
what a node keeps (hpZ)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage


@dataclass(frozen=True)
class Regather:
    name: ClassVar[str] = "regather"
    stage: ClassVar[Stage] = "joint"
    requires: ClassVar[frozenset[str]] = frozenset({"names"})
    provides: ClassVar[frozenset[str]] = frozenset({"regather"})
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        for node in graphs.calls(gm, graphs.UNSHARD):
            degrees = context.plan.group_of[str(node.args[3])].degrees
            # A whole parameter is an input of both graphs: "recomputing" it is taking it again.
            if degrees.parameter > 1 or degrees.optimizer == 1:
                kept = degrees.parameter < degrees.optimizer and any(graphs.is_call(u, graphs.UNSHARD) for u in node.users)
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE
        return gm
