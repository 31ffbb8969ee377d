"""Rewrite: of an embedding that the plan names only the rows travel that are looked up ([Note: Sparse rows]).

Every graph asks for them, looks up in what then comes, and asks for its gradient's mean in this way, also one that uses the parameter
otherwise, finds what to look up in what it gathers first, or has a gradient of all of it: the other processes cannot know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from autoshard.ops.layout import Layout
from autoshard.ops.sparse import ASK_ROWS, LOOK_UP_ROWS, REDUCE_ROWS, message_bytes
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage

EMBEDDING = torch.ops.aten.embedding.default
EMBEDDING_BACKWARD = torch.ops.aten.embedding_dense_backward.default


@dataclass(frozen=True)
class SparseRows:
    name: ClassVar[str] = "sparse_rows"
    stage: ClassVar[Stage] = "joint"
    requires: ClassVar[frozenset[str]] = frozenset({"names"})
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        reductions = {str(node.args[4]): node for node in graphs.calls(gm, graphs.REDUCE_GRAD)}
        for unshard in graphs.calls(gm, graphs.UNSHARD):
            name, sharded = str(unshard.args[3]), Layout.parse(str(unshard.args[2])).sharded
            reduction = reductions.get(name)
            if name in context.plan.sparse and (sharded or reduction is not None):
                _by_rows(unshard, reduction, sharded)
        return gm


def _by_rows(unshard: Node, reduction: Node | None, sharded: bool) -> None:
    """What is made of one parameter. reduction: of its gradient, if there is one."""
    shard, shape, text, name = unshard.args
    layout, table = Layout.parse(str(text)), shape[0]  # type: ignore[index]
    size, group = (layout.size, layout.group) if sharded else (layout.copies, layout.replicas)
    lookup, gradient = _only_lookup(unshard), _embedding_gradient(reduction)
    source: Any = lookup if sharded else gradient
    indices = source.args[1] if source is not None and _at_once(source.args[1]) else None
    gradient = gradient if gradient is not None and gradient.args[1] is indices else None
    messages = _ask(unshard, (indices, shard, table, gradient is None, name, size, group))
    lookup = lookup if indices is not None else None
    if sharded:
        _look_up(lookup or unshard, (shard, messages, indices, shape, text, name, group))
        if lookup is not None:
            unshard.graph.erase_node(unshard)
    if reduction is not None:
        _reduce(reduction, gradient, (messages, table), (text, group))


def _only_lookup(unshard: Node) -> Node | None:
    """The one call that reads a parameter, if it is an embedding's."""
    if len(unshard.users) != 1:
        return None
    (user,) = unshard.users
    plain = graphs.is_call(user, EMBEDDING) and user.args[0] is unshard and True not in user.args[3:]
    return user if plain and user.args[1] is not unshard else None


def _at_once(indices: Node) -> bool:
    """Whether they are there before anything was gathered or exchanged: else another process, whose are, would ask in another order."""
    made_of = indices, *graphs.sources([indices])
    return not any(node.target in graphs.STARTS or graphs.communicates(node) for node in made_of)


def _embedding_gradient(reduction: Node | None) -> Node | None:
    """What it reduces, if that is an embedding's gradient and read by nobody else."""
    found = reduction.args[0] if reduction is not None else None
    rows = isinstance(found, Node) and graphs.is_call(found, EMBEDDING_BACKWARD) and len(found.users) == 1 and not found.args[4]
    return found if rows else None  # type: ignore[return-value]


def _ask(unshard: Node, arguments: tuple[Any, ...]) -> Node:
    """What the processes tell each other, behind the indices, and before the parameter is read. It is as long everywhere, and saved
    for backward, which so asks for nothing."""
    at = graphs.positions(unshard.graph)
    behind = max((n for n in arguments[:2] if isinstance(n, Node)), key=at.__getitem__)
    last = next(reversed(unshard.graph.find_nodes(op="placeholder")))
    behind = max(behind, last, key=at.__getitem__)
    with unshard.graph.inserting_after(behind):
        asked = unshard.graph.call_function(ASK_ROWS, arguments)
    with unshard.graph.inserting_after(asked):
        messages = unshard.graph.call_function(graphs.WAIT, (asked,))
    like = graphs.example(unshard)
    example = like.new_empty(arguments[5] * message_bytes(arguments[2]), dtype=torch.uint8)
    for node in (asked, messages):
        node.meta.update(val=example, recompute=CheckpointPolicy.MUST_SAVE)
    return messages


def _look_up(old: Node, arguments: tuple[Any, ...]) -> None:
    """In the place of a parameter, or of what is looked up in it. Not called again: batches differ, and no other process would."""
    with old.graph.inserting_before(old):
        new = old.graph.call_function(LOOK_UP_ROWS, arguments)
    new.meta.update(old.meta, recompute=CheckpointPolicy.MUST_SAVE)
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def _reduce(reduction: Node, gradient: Node | None, told: tuple[Any, ...], where: tuple[Any, ...]) -> None:
    """gradient: the embedding's; None: all of it is reduced."""
    whole, shape, dtype, _, name = reduction.args
    given: tuple[Any, ...] = (whole, None) if gradient is None else gradient.args[:2]
    padding: Any = -1 if gradient is None else gradient.args[3]
    reduction.target, reduction.args = REDUCE_ROWS, (*given, shape, dtype, name, *told, padding, *where)
    if gradient is not None:
        reduction.graph.erase_node(gradient)
