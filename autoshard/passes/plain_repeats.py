"""Rewrite: attention that drops nothing out draws no numbers, so that backward repeats it as it is.

torch's partitioner repeats each operator that may draw numbers under the random state that its first call began with. A code
generator does not look into that: it asks for no layout of what goes into it, and copies for the attention's gradient what it
laid out in its own way.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from autoshard import torch_internals
from autoshard.cost_model.work import argument
from autoshard.passes.base import Context, Stage
from autoshard.torch_internals import RandomCall


@dataclass(frozen=True)
class PlainRepeats:
    """The same in forward, which saves the state, and in backward, which takes it. An empty one is saved in its place."""

    name: ClassVar[str] = "plain_repeats"
    stage: ClassVar[Stage] = "code"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        for node in list(gm.graph.nodes):
            call = torch_internals.random_call(node)
            if call is not None and drops_nothing(call):
                _repeat_plainly(node, call)
        return gm


def drops_nothing(call: RandomCall) -> bool:
    """Whether it is an attention that gives the same each time."""
    return bool(argument("dropout_p", call.operator, call.args, call.kwargs) == 0)


def _repeat_plainly(node: Node, call: RandomCall) -> None:
    with node.graph.inserting_before(node):
        plain = node.graph.call_function(call.operator, call.args, call.kwargs)
        plain.meta.update(node.meta)
        if call.saves:
            plain.meta["val"] = node.meta["val"][1]
            state = node.graph.call_function(torch.ops.aten.empty.memory_format, ([0],), {"dtype": torch.uint8})
            state.meta["val"] = plain.meta["val"][0].new_empty(0, dtype=torch.uint8, device="cpu")
            for item in [user for user in node.users if user.target is operator.getitem]:
                item.replace_all_uses_with((state, plain)[item.args[1]])  # type: ignore[index]
                node.graph.erase_node(item)
    node.replace_all_uses_with(plain)
    node.graph.erase_node(node)
