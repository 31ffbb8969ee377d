"""Rewrite: blocks of the model that repeat become calls of one graph each, which is then compiled once.

[Note: Alike blocks] Blocks are those of the plan ("layers.3"), as for parameter groups. Two are alike if their
operations, constants and the shapes, strides and dtypes of all values are the same; which parameters they take does not
matter. Alike blocks of which the plan saves different things are different graphs. Blocks of regions are outlined however few they are
([Note: Regions] in `repeat_blocks`). Unshards stay outside, where
communication is planned. What cannot be told apart from its surroundings (foreign operations between a block's own, numbers
that are neither constants nor sizes, a mode that was switched around it) stays as it is, and so does what reads an embedding of
which only rows travel, which `sparse_rows` has to see. Where blocks are outlined, what is
before, between and after them becomes graphs of its own too, if it uses parameters: an embedding, a head with its loss.
"""

from __future__ import annotations

import hashlib
import operator
import sys
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from autoshard import torch_internals
from autoshard.errors import PassError
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage
from autoshard.passes.choose_blocks import OWN_GRAPHS
from autoshard.plan import Plan

PREFIX = "block_"
# In the meta of an outlined graph: `Run.key`; see [Note: Policies]; the blocks that it is; `Run.copies`; `Run.fixed`.
KEY, POLICY, BLOCKS, COPIES, FIXED = "key", "recompute", "blocks", "copies", "fixed"
PARAMETERS = (graphs.UNSHARD, graphs.HOLD, graphs.LOW_RANK, graphs.ADD_HELD)
MODES = ("autocast", "inference_mode", "dual_level", *graphs.TRANSFORMS)  # that a graph enters and leaves
# What transforms of functions call besides, on which nothing outside of them depends, and what a module that is made in forward does
# (`self.layers[:n]` is one):
_HARMLESS = (
    "lazy_load_decompositions", "_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable", "set_inplace_requires_grad_allowed",
    "_log_api_usage_once",
)  # fmt: skip


@dataclass(frozen=True)
class OutlineBlocks:
    """least: how many blocks must be alike. One: each that can be is a graph of its own, for a look at it by itself."""

    least: int = OWN_GRAPHS

    def __post_init__(self) -> None:
        if self.least < 1:
            raise PassError(f"passes: outline_blocks{{least={self.least}}} is not legal; legal: 1 or more")

    name: ClassVar[str] = "outline_blocks"
    stage: ClassVar[Stage] = "traced"
    requires: ClassVar[frozenset[str]] = frozenset({"merged"})
    provides: ClassVar[frozenset[str]] = frozenset({"blocks"})
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        alike: dict[str, list[Run]] = defaultdict(list)
        for run in _runs(gm, context.plan):
            if run.closed:
                alike[run.key].append(run)
        through = context.plan.through
        repeated = [runs for runs in alike.values() if len(runs) >= self.least or any(run.block in through for run in runs)]
        for runs in repeated:
            for policy in dict.fromkeys(run.policy(context) for run in runs):
                same = [run for run in runs if run.policy(context) == policy]
                _outline(gm, same, policy, tuple(run.block for run in same), context)
        if not repeated and self.least > 1:
            _say_what_keeps_them(gm, context.plan, self.least)
        for run in _stretches(gm, context.plan) if repeated else ():
            if run.closed and run.uses_parameters(context):
                _outline(gm, [run], "none", (), context)
        return gm


def _say_what_keeps_them(gm: GraphModule, plan: Plan, least: int) -> None:
    """That a call may switch a mode would be seen in the time that compiling takes alone."""
    nodes = list(gm.graph.nodes)
    call = next((node for node in nodes if _may_switch(node)), None)
    behind = nodes[nodes.index(call) :] if call is not None else []
    blocks = {_block(gm, node, plan.stacks) for node in behind if node.op.startswith("call_")} - {None}
    if call is not None and len(blocks) >= least:
        warnings.warn(
            f"outline_blocks: {graphs.callee(call)}, which forward calls, may switch a mode that the {len(blocks)} blocks behind it are "
            "in, so they are compiled together and not once for all that are alike, which takes longer; legal: a mode that is entered "
            "around the call of the model",
            stacklevel=2,
        )


def is_block(node: Node) -> bool:
    """Whether a node calls a graph that was outlined."""
    return node.op == "call_module" and str(node.target).startswith(PREFIX)


def _outline(gm: GraphModule, runs: list[Run], policy: str, blocks: tuple[str, ...], context: Context) -> None:
    name = PREFIX + hashlib.sha256(f"{runs[0].key} {policy}".encode()).hexdigest()[:12]
    if not hasattr(gm, name):
        gm.add_submodule(name, runs[0].outlined())
    meta: dict[str, Any] = getattr(gm, name).meta  # another stretch that is alike has the same graph
    meta[KEY], meta[POLICY], meta[BLOCKS] = runs[0].key, policy, meta.get(BLOCKS, ()) + blocks
    meta[COPIES] = meta.get(COPIES, frozenset()).union(*(run.copies(context.plan) for run in runs))
    meta[FIXED] = meta.get(FIXED, runs[0].fixed(context)).intersection(*(run.fixed(context) for run in runs))
    for run in runs:
        run.replace_by_call(name)


@dataclass(frozen=True, eq=False)
class Run:
    """Nodes that follow each other, without others between them. block: the block of the model that they are; "" of none."""

    gm: GraphModule
    nodes: tuple[Node, ...]
    block: str = ""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """What the block takes, in order of first use; and the graph's sizes that these are as long as: one of `length + 1` alone would
        not tell generated code how long that is."""
        inside = set(self.nodes)
        taken = dict.fromkeys(a for n in self.nodes for a in n.all_input_nodes if a not in inside)
        symbols = set[Any]().union(*(_symbols(_value(n)) for n in taken))
        sizes = (n for n in self.gm.graph.find_nodes(op="placeholder") if _is_size(n, symbols)) if symbols else ()
        return tuple(dict.fromkeys((*taken, *sizes)))

    @property
    def outputs(self) -> tuple[Node, ...]:
        """What is used outside of it."""
        inside = set(self.nodes)
        return tuple(n for n in self.nodes if any(user not in inside for user in n.users))

    @property
    def closed(self) -> bool:
        """Whether it is a function of tensors and sizes that gives tensors."""
        results = [_value(n) for n in self.outputs]
        gives = bool(results) and all(isinstance(v, Tensor) for v in results)
        return gives and all(map(_can_be_given, self.inputs)) and not any(_sets_mode(n) or _takes_a_number(n) for n in self.nodes)

    def policy(self, context: Context) -> str:
        """What the plan saves of this block for backward; what leaves it is saved or not by the graph around."""
        return context.plan.policy_inside(self.block)

    def uses_parameters(self, context: Context) -> bool:
        """Whether it takes whole parameters."""
        return len(self._of_model(context.parameters)) > 0

    def copies(self, plan: Plan) -> frozenset[int]:
        """Which inputs are gathered copies that are not kept for backward."""
        whole = ((i, node) for i, node in enumerate(self.inputs) if graphs.is_call(node, graphs.UNSHARD))
        return frozenset(i for i, node in whole if plan.group_of[str(node.args[3])].degrees.parameter > 1)

    def fixed(self, context: Context) -> frozenset[int]:
        """Which inputs are parameters or buffers, as large on all processes."""
        return self._of_model({*context.parameters, *context.buffers})

    def _of_model(self, positions: Collection[int]) -> frozenset[int]:
        """Which inputs are whole parameters, or inputs of the graph at these positions."""
        places = {n: i for i, n in enumerate(self.gm.graph.find_nodes(op="placeholder"))}
        return frozenset(i for i, n in enumerate(self.inputs) if graphs.is_call(n, *PARAMETERS) or places.get(n) in positions)

    @cached_property
    def key(self) -> str:
        """Equal for blocks that are alike."""
        text = _text(self.gm, self.inputs, self.nodes, self.outputs)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def outlined(self) -> GraphModule:
        """The block as a graph of its own."""
        graph, copies = Graph(), dict[Node, Node]()
        for n in self.inputs:
            copies[n] = graph.placeholder(n.name)
            copies[n].meta.update(n.meta)
        for n in self.nodes:
            copies[n] = graph.node_copy(n, copies.__getitem__)
        graph.output(tuple(copies[n] for n in self.outputs))
        return GraphModule(self.gm, graph)

    def replace_by_call(self, name: str) -> None:
        """Puts a call of the submodule `name` in the place of the nodes."""
        outputs = self.outputs
        with self.gm.graph.inserting_before(self.nodes[0]):
            call = self.gm.graph.call_module(name, self.inputs)
            call.meta["example_value"] = tuple(_value(n) for n in outputs)
            call.meta.update({key: self.nodes[0].meta[key] for key in ("nn_module_stack", "custom") if key in self.nodes[0].meta})
            items = [self.gm.graph.call_function(operator.getitem, (call, i)) for i in range(len(outputs))]
        for node, item in zip(outputs, items):
            item.meta.update(node.meta)
            node.replace_all_uses_with(item)
        for node in reversed(self.nodes):
            self.gm.graph.erase_node(node)


def _text(gm: GraphModule, inputs: Sequence[Node], nodes: Sequence[Node], outputs: Sequence[Node]) -> str:
    """A graph in words, the same for all that compute the same."""
    number = {n: i for i, n in enumerate((*inputs, *nodes))}
    lines = [graphs.described(_value(n)) for n in inputs]
    for n in nodes:
        arguments = graphs.arguments_text((n.args, n.kwargs), lambda a: f"%{number[a]}")
        lines.append(f"{n.op} {_target(gm, n)} {arguments} {graphs.described(_value(n))}")
    return "\n".join([*lines, str([number[n] for n in outputs])])


def _target(gm: GraphModule, node: Node) -> str:
    """What a node calls; for a region (of activation checkpointing), what is in it, and what chooses what it saves."""
    region = graphs.graph_named(gm, node)
    if region is None:
        return _name(node.target)
    *inside, output = region.graph.nodes
    inputs = [n for n in inside if n.op == "placeholder"]
    text = _text(region, inputs, [n for n in inside if n not in inputs], output.all_input_nodes)
    return f"{_name(torch_internals.saves_by(region))} {text}"


def _name(called: Any) -> str:
    """What tells a function or a method from others: its module and name; where these lead to another, or to none (as those of all
    functions that one function makes), itself too."""
    if isinstance(called, partial):
        return f"{_name(called.func)} {called.args} {called.keywords}"
    if called is None or isinstance(called, str):
        return str(called)
    module, name = getattr(called, "__module__", ""), getattr(called, "__name__", called)
    found = getattr(sys.modules.get(module), str(name), None)
    return f"{module}.{name} {id(called)}" if isinstance(called, FunctionType) and found is not called else f"{module}.{name}"


def _can_be_given(node: Node) -> bool:
    """Whether a block may take this: a size, or a tensor unless it is one that forward changes (BatchNorm's buffers)."""
    value = _value(node)
    written = node.op == "placeholder" and isinstance(value, Tensor) and torch_internals.times_written(value) > 0
    return isinstance(value, (Tensor, torch.SymInt)) and not written


def _symbols(value: Any) -> set[Any]:
    """What stands in a tensor's sizes for numbers that the trace left open."""
    lengths = (*value.shape, *value.stride()) if isinstance(value, Tensor) else ()
    return set[Any]().union(*(n.node.expr.free_symbols for n in lengths if isinstance(n, torch.SymInt)))


def _is_size(node: Node, symbols: Collection[Any]) -> bool:
    """Whether an input of the graph is one of these."""
    value = _value(node)
    return isinstance(value, torch.SymInt) and value.node.expr in symbols


def _stays(gm: GraphModule, plan: Plan) -> set[Node]:
    """What may be in no graph of its own."""
    sparse = (n for n in graphs.calls(gm, graphs.UNSHARD) if n.args[3] in plan.by_rows)
    return _in_another_mode(gm).union(*(n.users for n in sparse))


def _in_another_mode(gm: GraphModule) -> set[Node]:
    """What runs in a mode that the graph enters, with gradients switched, or behind a call that may switch anything else, such as which
    kernels attention takes: a block's own trace would not know."""
    found, entered, gradients, unknown = set(), 0, torch.is_grad_enabled(), False
    for node in gm.graph.nodes:
        if node.target is torch_internals.SET_GRAD_ENABLED:
            gradients = node.args[0]
        elif _sets_mode(node):
            entered += graphs.entered(node, *MODES)
            unknown = unknown or _may_switch(node)
        if entered or unknown or gradients is not torch.is_grad_enabled():
            found.add(node)
    return found


def _may_switch(node: Node) -> bool:
    """Whether a call gives nothing and is none that is known: it may switch any mode. A write has what it writes to, and a check what it
    checks."""
    if node.op != "call_function" or node.target is torch_internals.SET_GRAD_ENABLED or _value(node) is not None:
        return False
    known = graphs.callee(node) in _HARMLESS or graphs.entered(node, *MODES)
    return not known and all(_value(source) is None for source in node.all_input_nodes)


def _sets_mode(node: Node) -> bool:
    """Whether this is a call for its effect, such as one that turns gradients off."""
    return node.op != "get_attr" and _value(node) is None


def _takes_a_number(node: Node) -> bool:
    """Whether this takes a number out of a tensor: with torch.compile(dynamic=True) a module's own come in tensors, and what the trace
    took them for is known where the graph begins alone."""
    return node.op == "call_method" and node.target == "item"


def _runs(gm: GraphModule, plan: Plan) -> Iterator[Run]:
    """The blocks whose nodes follow each other, once unshards are put in front of them."""
    blocks: dict[str, list[Node]] = defaultdict(list)
    last, broken, apart = None, set[str](), _unshards(gm)
    stays = _stays(gm, plan)
    for node in list(gm.graph.nodes):
        if node.op in ("placeholder", "output") or node in apart:
            continue
        block = _block(gm, node, plan.stacks)
        if block is not None:
            if blocks[block] and block != last or node in stays:
                broken.add(block)
            blocks[block].append(node)
        last = block
    for block, nodes in blocks.items():
        if block not in broken:
            _move_out(nodes)
            yield Run(gm, tuple(nodes), block)


def _stretches(gm: GraphModule, plan: Plan) -> Iterator[Run]:
    """What lies between outlined blocks, calls that change a mode, and what stays."""
    nodes: list[Node] = []
    apart, stays = _unshards(gm), _stays(gm, plan)
    for node in list(gm.graph.nodes):
        if node.op == "placeholder" or node in apart:
            continue
        taken = is_block(node) or any(is_block(a) for a in node.all_input_nodes)
        if taken or node in stays or node.op in ("get_attr", "output") or _value(node) is None:
            if nodes:
                _move_out(nodes)
                yield Run(gm, tuple(nodes))
            nodes = []
        else:
            nodes.append(node)


def _move_out(nodes: list[Node]) -> None:
    """Moves what stands between the nodes (unshards, whose inputs are the graph's) in front of them."""
    inside, node = set(nodes), nodes[0]
    while node is not nodes[-1]:
        following = node.next
        if node not in inside:
            nodes[0].prepend(node)
        node = following


def _unshards(gm: GraphModule) -> set[Node]:
    """What makes whole parameters of the graph's inputs."""
    found = set(graphs.calls(gm, *PARAMETERS))
    todo = list(found)
    while todo:
        sources = [n for n in todo.pop().all_input_nodes if n.op != "placeholder" and found.issuperset(n.users)]
        found.update(sources)
        todo.extend(sources)
    return found


def _block(gm: GraphModule, node: Node, stacks: Collection[str]) -> str | None:
    """The block that a node belongs to; a region belongs to that of its last operation."""
    region = graphs.graph_named(gm, node)
    if region is not None:
        inside = [n for n in region.graph.nodes if n.op.startswith("call_")]
        return _block(region, inside[-1], stacks) if inside else None
    called = [a for a in node.all_input_nodes if graphs.graph_named(gm, a) is not None]
    if called:
        return _block(gm, called[0], stacks)
    return graphs.block_of(node, stacks)


def _value(node: Node) -> Any:
    return node.meta.get("example_value")
