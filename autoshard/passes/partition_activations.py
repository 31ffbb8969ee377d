"""Rewrite: saved values that every process has alike are kept in parts. See [Note: Partitioned activations] in ops/part.py.

Which are alike [Note: Alike] in `makings` says. What takes memory in any case (parameters, gathered copies, and their views) is left as
it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autoshard import torch_internals
from autoshard.dtypes import LEGAL, dtype_named
from autoshard.ops.collectives import Op
from autoshard.ops.layout import Layout
from autoshard.ops.part import KEEP_PART, UNSHARD_PART, Making, like_part, order_in_memory
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage
from autoshard.passes.makings import makings_of_parameters

_PARTED = "kept_in_parts"  # in the meta of what backward takes, and, by position, of what forward returns
_TRAVELS = (*map(dtype_named, LEGAL), torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)  # by every transport
ALL = "all"  # in the place of names in a plan


@dataclass(frozen=True)
class Parted:
    """A value that is kept in parts. name: the same on all processes that make it in the same way. bytes: of all parts."""

    name: str
    bytes: int


@dataclass(frozen=True)
class PartitionActivations:
    name: ClassVar[str] = "partition_activations"
    stage: ClassVar[Stage] = "split"
    requires: ClassVar[frozenset[str]] = frozenset({"names"})
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        if context.phase == "forward":
            _keep_parts(gm, context)
        elif context.phase == "backward":
            for node in gm.graph.find_nodes(op="placeholder"):
                if _PARTED in node.meta:
                    _gather(node, context)
        return gm


def mark_alike(forward: GraphModule, backward: GraphModule, results: int, context: Context) -> None:
    """Names, in both halves, the saved values that are to be kept in parts: the only thing that one half alone cannot tell. results: of
    forward, in front of what it saves. Where no parameter is taken, no other process need come to the graph; where a model is in several
    graphs, alike modules share one, which may have been traced for another of them on each process."""
    wanted = context.plan.partition_activations
    if not wanted or context.plan.leaves_alone or not context.parameters or context.plan.covered < 1:
        return
    outputs: Sequence[Any] = forward.graph.output_node().args[0]  # type: ignore[assignment]
    saved = {node: i for i, node in enumerate(outputs) if i >= results}
    for result in outputs[:results]:  # which the caller holds
        saved.pop(result, None)
    taken = {n.name: n for n in backward.graph.find_nodes(op="placeholder") if n.users}
    makings = {n: made for n, made in makings_of_parameters(forward).items() if n in saved and n.name in taken}
    devices = {graphs.example(n).device for n in graphs.calls(forward, graphs.UNSHARD)}
    there = {
        _named(n, made): n for n, made in makings.items()
        if not _is_held(n, saved) and _can_be_sent(graphs.example(n), context.plan.world, devices)
    }
    marks = forward.graph.output_node().meta.setdefault(_PARTED, {})
    for name, node in there.items():
        if name in wanted or ALL in wanted:
            marks[saved[node]] = taken[node.name].meta[_PARTED] = Parted(name, graphs.example(node).nbytes)
    if not marks and ALL not in wanted:
        _say_that_none_is_there(wanted, there)


def _named(node: Node, made: Making) -> str:
    return f"{made.op} {tuple(graphs.example(node).shape)} {made.digest}"


def _say_that_none_is_there(wanted: Sequence[str], there: Collection[str]) -> None:
    """Their sizes may depend on a batch's, or the plan be of another version of torch; it would be seen in the peak alone."""
    warnings.warn(
        f"partition_activations: this graph does not save {wanted[0]!r}, or any other value that the plan keeps in parts: its peak will be "
        f"higher; legal here: {', '.join(there) or 'none'}",
        stacklevel=2,
    )


def gathers_of_parts(forward: GraphModule) -> list[Op]:
    """What backward will communicate for these, before it has the gathers."""
    return [(str(UNSHARD_PART), (value.name,)) for value in parted(forward).values()]


def parted(forward: GraphModule) -> dict[int, Parted]:
    """What a forward keeps in parts, as it is made, by position in what it returns."""
    return forward.graph.output_node().meta.get(_PARTED, {})  # type: ignore[no-any-return]


def _is_held(value: Node, saved: Container[Node]) -> bool:
    """Whether something else holds its memory in any case."""
    made = graphs.made_by(value)
    return made.op == "placeholder" or graphs.is_call(made, *graphs.LOGICAL) or (made is not value and made in saved)


def _can_be_sent(example: Tensor, world: int, devices: Container[torch.device]) -> bool:
    """Whether each of so many processes would have something of it, and it goes as parameters on these devices do."""
    there = example.numel() >= world and order_in_memory(example) is not None
    return there and example.dtype in _TRAVELS and example.device in devices


def _keep_parts(forward: GraphModule, context: Context) -> None:
    output = forward.graph.output_node()
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for i in parted(forward):
        whole = outputs[i]
        with forward.graph.inserting_after(whole):
            arguments = whole, order_in_memory(graphs.example(whole)), context.plan.world, context.rank
            outputs[i] = forward.graph.call_function(KEEP_PART, arguments)
        outputs[i].meta["val"] = like_part(graphs.example(whole), context.plan.world)
        torch_internals.rename(outputs[i], f"{whole.name}_part")
    output.args = (tuple(outputs) if isinstance(output.args[0], tuple) else outputs,)


def _gather(taken: Node, context: Context) -> None:
    """What comes as a part becomes whole in front of its first use."""
    whole, users = graphs.example(taken), list(taken.users)
    at, plan = graphs.positions(taken.graph), context.plan
    layout = Layout(context.everyone, plan.world, (), "", plan.world, direct=plan.direct or plan.direct_sums)
    with taken.graph.inserting_before(min(users, key=at.__getitem__)):
        arguments = taken, list(whole.shape), order_in_memory(whole), str(layout), taken.meta[_PARTED].name
        gathered = taken.graph.call_function(UNSHARD_PART, arguments)
    gathered.meta["val"] = whole
    taken.meta["val"] = like_part(whole, plan.world)
    torch_internals.rename(taken, f"{taken.name}_part")
    taken.target = taken.name
    for user in users:
        user.replace_input_with(taken, gathered)
