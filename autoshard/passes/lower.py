"""Rewrite: the logical ops become functional collectives and the copies around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from autoshard.ops import logical
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage


@dataclass(frozen=True)
class Lower:
    name: ClassVar[str] = "lower"
    stage: ClassVar[Stage] = "split"
    requires: ClassVar[frozenset[str]] = frozenset({"names"})
    provides: ClassVar[frozenset[str]] = frozenset({"collectives"})
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        ops: dict[str, GraphModule] = {}  # blocks have buckets alike, and a trace takes a tenth of a second
        for node in graphs.calls(gm, *graphs.LOGICAL):
            key = _key(node)
            if key not in ops:
                ops[key] = graphs.traced(node, logical.DEFINITIONS[node.target])
            graphs.inline(gm, node, ops[key])
        return gm


def _key(node: Node) -> str:
    """Equal for calls that mean the same ops: all but the parameters' names, and which tensors these are."""
    args = list(node.args)
    if node.target in logical.NAMES:
        args[logical.NAMES[node.target]] = None
    return f"{node.target} {graphs.arguments_text((args, node.kwargs), lambda n: graphs.described(graphs.example(n)))}"
