"""Rewrite: calls of compiled blocks become calls of others, which compute the same and save something else for backward.

To trace what is around many blocks takes longer than to look at what comes of it; and of another choice of what they save nothing around
them is new but which of their values backward takes. So a decision that looks at several choices traces once. This is no pass
of the pipeline: a job is traced with the choice that was made.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from autoshard.ops.block import block_named
from autoshard.passes import graphs


def can_exchange(joint: GraphModule, keys: Mapping[Node, str]) -> bool:
    """Whether no more than a trace knew has to be known. keys: for each call of a block the other one's."""
    once = all(len({n.meta.get("seq_nr") for n in nodes}) == len(nodes) for nodes in (keys, graphs.calls(joint, graphs.BLOCK_BACKWARD)))
    return once and all(_alike(str(call.args[2]), key) for call, key in keys.items())


def exchange_blocks(joint: GraphModule, keys: Mapping[Node, str]) -> None:
    """Of a joint graph in which `can_exchange` holds."""
    backwards = {node.meta["seq_nr"]: node for node in graphs.calls(joint, graphs.BLOCK_BACKWARD)}
    for call, key in keys.items():
        _exchange(joint, call, backwards.get(call.meta["seq_nr"]), key)
    graphs.fill_examples(joint)


def _alike(key: str, other: str) -> bool:
    """Sizes that backward takes are nodes that a trace makes."""
    old, new = block_named(key), block_named(other)
    same = (old.inputs, old.results, old.tangents, old.gradients) == (new.inputs, new.results, new.tangents, new.gradients)
    return same and not old.sizes and not new.sizes


def _exchange(joint: GraphModule, call: Node, backward: Node | None, key: str) -> None:
    made = block_named(key)
    tensors, sizes, _, number = call.args
    old = sorted(call.users)
    items: dict[Any, Node] = {item.args[1]: item for item in old}
    call.args = (tensors, sizes, key, number)
    call.meta.pop("val", None)  # `graphs.fill_examples` knows
    if backward is not None:
        items |= _items(joint, old[-1], range(made.results, len(made.outputs)))
        given: dict[str, Any] = {"input": tensors, "output": items}
        backward.args = ([given[value.kind][value.index] for value in made.saved], *backward.args[1:3], key)
    for item in old:
        if item.args[1] >= made.results:  # type: ignore[operator]
            joint.graph.erase_node(item)


def _items(joint: GraphModule, last: Node, indices: Iterable[int]) -> dict[int, Node]:
    """More of what a call gives, behind the last item of it that there is."""
    found = {}
    for index in indices:
        with joint.graph.inserting_after(last):
            new = joint.graph.call_function(operator.getitem, (last.args[0], index))
        new.meta.update({name: value for name, value in last.meta.items() if name not in ("val", "tensor_meta")})
        last = found[index] = new
    return found
