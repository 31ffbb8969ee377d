"""The pass manager: runs a pipeline stage by stage, checks every graph, times, counts and dumps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule

from autoshard.errors import PassError
from autoshard.passes import graphs, registry
from autoshard.passes.base import Context, Pass, Stage
from autoshard.passes.dump import Dump


@dataclass(frozen=True)
class PassRun:
    """One pass on one graph: seconds, and by how much the count of each op changed."""

    name: str
    phase: str
    seconds: float
    changed: dict[str, int]


@dataclass
class PassManager:
    """Runs `pipeline`; keeps a record of every run in `history`."""

    pipeline: Sequence[Pass]
    dump: Dump
    history: list[PassRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        registry.check(self.pipeline)

    @property
    def spec(self) -> str:
        """The pipeline as text."""
        return registry.spec(self.pipeline)

    def run(self, stages: tuple[Stage, ...], gm: GraphModule, context: Context) -> GraphModule:
        """All passes of these stages."""
        counts = graphs.op_counts(gm)
        for p in self.pipeline:
            if p.stage in stages:
                gm, counts = self._run_one(p, gm, counts, context)
        gm.recompile()  # once: writing a graph as code takes longer than most passes
        return gm

    def _run_one(
        self, p: Pass, gm: GraphModule, counts: dict[str, int], context: Context
    ) -> tuple[GraphModule, dict[str, int]]:
        """The graph that it leaves, and how often that calls each op; counts: of the graph that it is given."""
        phase = context.phase if p.stage in ("split", "code") else p.stage
        before = self.dump.text(gm)
        start = time.perf_counter()
        gm = p.run(gm, context)
        self._verify(p, gm)
        seconds = time.perf_counter() - start
        after = graphs.op_counts(gm)
        changed = _difference(counts, after)
        self.history.append(PassRun(p.name, phase, seconds, changed))
        self.dump.sources(gm)
        self.dump.write(p.name, phase, before, self.dump.text(gm), changed, seconds)
        return gm, after

    def _verify(self, p: Pass, gm: GraphModule) -> None:
        try:
            gm.graph.lint()
        except RuntimeError as error:
            raise PassError(f"passes: {p.name} left a graph that is not legal: {error}") from error
        if p.stage != "traced":
            for node in gm.graph.nodes:
                if node.op == "call_function" and "val" not in node.meta:
                    raise PassError(f"passes: {p.name} left {node.format_node()} without meta['val']")


def _difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    keys = sorted(before.keys() | after.keys())
    counts = {k: after.get(k, 0) - before.get(k, 0) for k in keys}
    return {k: n for k, n in counts.items() if n}
