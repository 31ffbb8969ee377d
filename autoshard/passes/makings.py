"""How values of a graph are made: what tells whether every process has one alike.

[Note: Alike] What is made of whole parameters and of constants alone, by operations that draw no numbers, is the same on all processes
as long as all make it in the same way. A batch of another length, or a number of Python's that is another one on some process, would
change that way. So a way has a digest, which stands in the name of what is gathered, and lockstep compares names before anything
runs. What has open sizes, or comes of buffers (which a loop may change on one process), is not known to be alike.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

from autoshard import torch_internals
from autoshard.cost_model.work import op_name
from autoshard.ops.block import block_named
from autoshard.ops.part import Making
from autoshard.passes import graphs
from autoshard.passes.recompute import draws

_SPACES = ("aten", "prims")
Makings = dict[Node, Making]


def makings_of_parameters(forward: GraphModule) -> Makings:
    """Of the values that are made of parameters and constants alone."""
    whole = graphs.calls(forward, graphs.UNSHARD)
    return _makings(forward, {node: Making("unshard", digest(["parameter", node.args[3]])) for node in whole})


def makings_of_inputs(forward: GraphModule) -> Makings:
    """Of the values of a block's forward that are made of its tensors and constants alone."""
    given = enumerate(n for n in forward.graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], Tensor))
    return _makings(forward, {node: Making("input", digest([i]), frozenset([i])) for i, node in given})


def digest(texts: Iterable[Any]) -> str:
    """A short code of these texts."""
    return hashlib.sha256("\0".join(map(str, texts)).encode()).hexdigest()[:8]


def _makings(gm: GraphModule, given: Mapping[Node, Making]) -> Makings:
    found = dict(given)
    for node in gm.graph.nodes:
        if node.op != "call_function" or node in found:
            continue
        if (made := _by_block(node, found)) or (made := _same_as_first(node, found)):
            found[node] = made
        elif _gives_the_same(node) and found.keys() >= set(node.all_input_nodes):
            sources = [found[source] for source in node.all_input_nodes]
            found[node] = Making(op_name(node), digest([node.target, _described(node, found)]), _of_all(sources))
    return found


def _by_block(node: Node, found: Makings) -> Making | None:
    """Of what a block gives: as its graph makes it of what the block takes."""
    call: Any = node.args[0] if node.target is operator.getitem else None
    if not isinstance(call, Node) or not graphs.is_call(call, graphs.BLOCK):
        return None
    tensors: Any = call.args[0]
    makings = block_named(str(call.args[2])).makings
    made = makings[node.args[1]] if makings else None  # type: ignore[index]
    given = [found[tensors[i]] for i in sorted(made.of) if tensors[i] in found] if made else []
    if made is None or len(given) < len(made.of):
        return None
    return Making(made.op, digest([made.digest, *(one.digest for one in given)]), _of_all(given))


def _of_all(makings: Iterable[Making]) -> frozenset[int]:
    return frozenset[int]().union(*(one.of for one in makings))


def _same_as_first(node: Node, found: Makings) -> Making | None:
    first: Any = node.args[0] if graphs.is_call(node, *graphs.IDENTITIES) else None
    return found.get(first)


def _gives_the_same(node: Node) -> bool:
    """Whether an operation's results depend on what it is given alone, and are tensors of known sizes."""
    if node.target is operator.getitem:
        return True
    schema = torch_internals.schema_of(node.target)
    if getattr(node.target, "namespace", "") not in _SPACES or schema is None or schema.is_mutable:
        return False
    return "empty" not in op_name(node) and not draws(node.target) and all(map(_is_of_known_size, tree_leaves(node.meta.get("val"))))


def _is_of_known_size(value: Any) -> bool:
    return isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape)


def _described(node: Node, found: Makings) -> str:
    """A call's arguments; each process has a GPU of its own."""
    arguments = tree_map(lambda a: a.type if isinstance(a, torch.device) else a, (node.args, node.kwargs))
    return graphs.arguments_text(arguments, lambda n: found[n].digest)
