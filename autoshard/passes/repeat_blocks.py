"""Rewrite: what leaves a block in a region is not saved; backward calls the block once more.

[Note: Regions] A region is several blocks one after the other, all of the policy "through" but the last. Saved is what enters the
region. Where backward comes to its last block, what leaves each of the others is computed from what entered it, in turn, and waits
until the backward of the next block has read it. That backward computes again what is inside of its block, as of the policy
"full": so of n blocks in regions of k, n/k + k of what leaves a block lie there at once beside one block's inside, where without
regions n do; and forward is computed twice more. Joining the blocks of a region into one graph, which torch's partitioner cuts,
would have the inside of all of them there at once: more than what leaves n blocks, but for very many of them.

What stands between blocks and is quickly done (a sum with what a block was given, a scale) is computed again with them.

A block is called again as an op ([Note: Repeated blocks] in `ops/block.py`), so regions are of blocks that are graphs of their own.
Of others (BatchNorm writes to its buffers), and of blocks with an operation that may not give the same again, what leaves them is saved,
and it is warned of.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autoshard import torch_internals
from autoshard.cost_model.work import kind_of
from autoshard.ops.block import block_named
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage
from autoshard.passes.recompute import AGAIN, SAVE, backward_of, draws, is_repeatable

_OF_MODULE = ("nn_module_stack", "stack_trace", "custom")  # what of a call's meta says whose it is


@dataclass(frozen=True)
class RepeatBlocks:
    name: ClassVar[str] = "repeat_blocks"
    stage: ClassVar[Stage] = "joint"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        through = context.plan.through
        backward = backward_of(gm) if through else set[Node]()
        if backward:
            found = repeat_blocks(gm, backward, through, context.plan.stacks)
            _say_what_is_saved(gm, through - found, context)
        return gm


def repeat_blocks(gm: GraphModule, backward: Collection[Node], through: Collection[str], stacks: Collection[str]) -> set[str | None]:
    """Has the backward of a joint graph compute again what leaves these blocks; of which it does."""
    chain, found = _Chain(), set[str | None]()
    for node in list(gm.graph.nodes):
        if node in backward:
            continue
        block = graphs.block_of(node, stacks)
        if graphs.is_call(node, graphs.BLOCK) and block in through and block_named(str(node.args[2])).repeats:
            chain.repeat(node)
            found.add(block)
        elif _passes_on(node, block) and not chain.again.keys().isdisjoint(node.all_input_nodes):
            chain.pass_on(node)
    graphs.fill_examples(gm)
    for value, again in chain.again.items():
        value.replace_all_uses_with(again, delete_user_cb=lambda user: user in backward)
    return found


@dataclass(frozen=True)
class _Chain:
    """again: what stands in backward for a value of forward."""

    again: dict[Node, Node] = field(default_factory=dict)

    def repeat(self, call: Node) -> None:
        """Puts a second call of a block behind the first, which takes its state too: so that is forward's, and in front of it."""
        tensors, sizes, key, number = call.args
        graph, results = call.graph, block_named(str(key)).results
        given: Any = tensors
        with graph.inserting_before(call):
            state = graph.call_function(graphs.RANDOM_STATE, (given, number))
        with graph.inserting_after(call):
            again = graph.call_function(graphs.REPEAT_BLOCK, ([self.again.get(t, t) for t in given], sizes, key, state))
        call.args = ([*given, state], sizes, key, number)
        state.meta.update(_of_module(call), recompute=SAVE)
        again.meta.update(_of_module(call), recompute=AGAIN)
        for item in list(call.users):
            if item.args[1] < results:  # type: ignore[operator]
                self._add(item, graph, again, (again, item.args[1]))

    def pass_on(self, node: Node) -> None:
        """What is made of what is computed again is too."""
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: self.again.get(n, n))  # type: ignore[misc]
        self._add(node, node.graph, node, args, kwargs)

    def _add(self, value: Node, graph: Any, after: Node, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        with graph.inserting_after(after):
            again = graph.call_function(value.target, args, kwargs)
        again.meta.update(_of_module(value), recompute=AGAIN)
        self.again[value] = again


def _passes_on(node: Node, block: str | None) -> bool:
    """A view, or what takes next to no time outside of blocks and gives the same again."""
    if node.op != "call_function":
        return False
    if torch_internals.is_view(node.target):
        return True
    quick = block is None and isinstance(node.meta.get("val"), Tensor) and kind_of(node) == "pointwise"
    return quick and is_repeatable(node) and not draws(node.target) and not graphs.is_call(node, graphs.WRITE)


def _of_module(node: Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in _OF_MODULE if key in node.meta}


def _say_what_is_saved(gm: GraphModule, blocks: Collection[str], context: Context) -> None:
    """Of blocks that the plan has in regions and this graph not: a user would wait for less memory in vain."""
    here = {graphs.block_of(node, context.plan.stacks) for node in gm.graph.nodes if node.op == "call_function"}
    named = sorted(here.intersection(blocks), key=str)
    if named:
        warnings.warn(
            f"recompute: {named[0]!r} ({len(named)} in all) cannot be called again as a whole, since it is no graph of its own "
            "(see [Note: Alike blocks]) or has an operation that may draw numbers unseen, so what leaves it is saved",
            stacklevel=2,
        )
