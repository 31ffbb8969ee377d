"""Rewrite: of an embedding that the plan names the rows travel that are looked up ([Note: Sparse rows]): these alone, or, where it is used
otherwise too (`Plan.tied`), beside all of it.

Every graph asks for them, looks up in what then comes, and asks for its gradient's mean in this way, also one that uses the parameter
otherwise, finds what to look up in what it gathers first, or has a gradient of all of it: the other processes cannot know. But of what is
tied only a graph that looks up in it: one process that does and another that does not are refused for the order of their collectives.

[Note: Tied embeddings] A gradient is a sum, and so is its mean. Of a head's weight that is an embedding too, the head's part is there when
backward begins, and is reduced beside all of it; what the lookup adds is there at the end, and is few rows. As one sum all of the
parameter, mostly the largest, would travel when there is nothing left to hide it. So forward begins with rows too, and gathers the head's
weight when it comes to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from autoshard.ops.layout import Layout
from autoshard.ops.sparse import ASK_ROWS, LOOK_UP_ROWS, REDUCE_ROWS, message_bytes
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage

EMBEDDING = torch.ops.aten.embedding.default
_ADD = torch.ops.aten.add.Tensor
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
            elif name in context.plan.tied:
                _apart(unshard, reduction, sharded)
        return gm


def _by_rows(unshard: Node, reduction: Node | None, sharded: bool) -> None:
    """What is made of one parameter. reduction: of its gradient, if there is one."""
    shard, shape, text, name = unshard.args
    size, group = _processes(str(text), sharded)
    table = shape[0]  # type: ignore[index]
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


def _apart(unshard: Node, reduction: Node | None, sharded: bool) -> None:
    """The same of what is looked up in a parameter that others read. See [Note: Tied embeddings]."""
    shard, shape, text, name = unshard.args
    size, group = _processes(str(text), sharded)
    table = shape[0]  # type: ignore[index]
    lookup = next((user for user in unshard.users if _looks_up(user, unshard) and _at_once(user.args[1])), None)  # type: ignore[arg-type]
    gradient = _summand(reduction.args[0], lookup.args[1]) if reduction is not None and lookup is not None else None
    if lookup is None or len(unshard.users) == 1 or not (sharded or gradient is not None):
        return
    indices = lookup.args[1]
    messages = _ask(unshard, (indices, shard, table, False, name, size, group))
    if sharded:
        _look_up(lookup, (shard, messages, indices, shape, text, name, group))
        at = graphs.positions(unshard.graph)
        min(unshard.users, key=at.__getitem__).prepend(unshard)  # where all of it is first used now
    if reduction is not None and gradient is not None:
        _reduce_apart(reduction, gradient, (messages, table), (text, group))


def _processes(layout: str, sharded: bool) -> tuple[int, str]:
    """How many of them tell each other what they look up, and their group: those that hold some of the rows each, or all of them."""
    spec = Layout.parse(layout)
    return (spec.size, spec.group) if sharded else (spec.copies, spec.replicas)


def _summand(total: Any, indices: Any) -> Node | None:
    """The gradient of what was looked up at these indices, if a gradient is the sum of that and others, which nobody else reads."""
    if not isinstance(total, Node) or not graphs.is_call(total, _ADD) or len(total.users) != 1 or total.kwargs:
        return None
    if len({(v.shape, v.dtype) for v in map(graphs.example, total.all_input_nodes)}) > 1:
        return None
    for part in total.args:
        if _is_embedding_gradient(part) and part.args[1] is indices:
            return part
    return next(filter(None, (_summand(part, indices) for part in total.args)), None)


def _reduce_apart(reduction: Node, gradient: Node, told: tuple[Any, ...], where: tuple[Any, ...]) -> None:
    """The mean of the one, as soon as that is there, and of the others."""
    (total,), (_, shape, dtype, _, name) = gradient.users, reduction.args
    (others,) = (part for part in total.args if part is not gradient)
    with gradient.graph.inserting_before(total):
        rows = gradient.graph.call_function(REDUCE_ROWS, (*gradient.args[:2], shape, dtype, name, *told, gradient.args[3], *where))
        both = gradient.graph.call_function(_ADD, (reduction, rows))
    for node in (rows, both):
        node.meta.update(reduction.meta)
    reduction.replace_all_uses_with(both, delete_user_cb=lambda user: user is not both)
    if reduction.args[0] is total and others.op != "placeholder":  # type: ignore[union-attr]
        others.append(reduction)  # type: ignore[union-attr]
    else:
        reduction.append(both)
    total.replace_all_uses_with(others)  # type: ignore[arg-type]
    for node in (total, gradient):
        gradient.graph.erase_node(node)


def _only_lookup(unshard: Node) -> Node | None:
    """The one call that reads a parameter, if it is an embedding's."""
    if len(unshard.users) != 1:
        return None
    (user,) = unshard.users
    return user if _looks_up(user, unshard) else None


def _looks_up(user: Node, unshard: Node) -> bool:
    """Whether a reader of a parameter is an embedding's call, whose gradient is a sum of what its places give."""
    plain = graphs.is_call(user, EMBEDDING) and user.args[0] is unshard and True not in user.args[3:]
    return plain and user.args[1] is not unshard


def _at_once(indices: Node) -> bool:
    """Whether they are there before anything was gathered or exchanged: else another process, whose are, would ask in another order."""
    made_of = indices, *graphs.sources([indices])
    return not any(node.target in graphs.STARTS or graphs.communicates(node) for node in made_of)


def _embedding_gradient(reduction: Node | None) -> Node | None:
    """What it reduces, if that is an embedding's gradient and read by nobody else."""
    found = reduction.args[0] if reduction is not None else None
    return found if _is_embedding_gradient(found) else None


def _is_embedding_gradient(found: Any) -> TypeGuard[Node]:
    """That nobody else reads."""
    return isinstance(found, Node) and graphs.is_call(found, EMBEDDING_BACKWARD) and len(found.users) == 1 and not found.args[4]


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
