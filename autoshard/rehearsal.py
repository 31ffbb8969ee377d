"""The graphs of a step, as a job with this plan would run them, without a job: the same passes, and no code generated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autoshard import torch_internals
from autoshard.blocks import Halves, compile_block, compile_blocks
from autoshard.capture import Capture
from autoshard.codegen import Compilation, Joint
from autoshard.console import Phases
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import Group
from autoshard.cost_model.hardware import Device
from autoshard.cost_model.program import Listing
from autoshard.cost_model.step_memory import Listed
from autoshard.listing import JointList
from autoshard.ops.block import Block, block_named, register
from autoshard.ops.layout import ACROSS, INSIDE, layout_of, layout_of_parameter
from autoshard.ops.low_rank import residue_shapes
from autoshard.passes import graphs, registry
from autoshard.passes.base import Context, Pass, Phase
from autoshard.passes.choose_unused import unused
from autoshard.passes.dump import Dump
from autoshard.passes.exchange_blocks import can_exchange, exchange_blocks
from autoshard.passes.keep_overwritten import keep_overwritten
from autoshard.passes.leave_out import leave_out, without
from autoshard.passes.manager import PassManager
from autoshard.passes.outline_blocks import BLOCKS, COPIES, FIXED, KEY, POLICY, PREFIX
from autoshard.plan import ParameterGroup, Plan

EVERYONE = "everyone"
DEFAULT = registry.parse(registry.DEFAULT)
NAME_OF_AXES = "+".join  # a rehearsal's process groups have the names of their axes: see `groups_of`
# A block's key, which of its inputs are gathered copies, which are fixed, and what a trace keeps in one piece.
Computes = tuple[str, frozenset[int], frozenset[int], tuple[Any, ...]]


@dataclass(frozen=True)
class Rehearsed:
    """A step's graphs after all passes.

    backward: None where nothing is trained. results: how many of forward's outputs are the model's own. saved: which of
    forward's outputs is which of backward's inputs. blocks keep those alive that the graphs call.
    """

    forward: GraphModule
    backward: GraphModule | None
    results: int
    saved: dict[int, int]
    blocks: tuple[Block, ...]

    @property
    def listed(self) -> Listed:
        """What a program is written from."""
        backward = None if self.backward is None else Listing.of(self.backward)
        return Listed(Listing.of(self.forward), backward, self.results, self.saved, whole=not self.blocks)


def rehearse(captured: Capture, plan: Plan, inductor: bool) -> Rehearsed:
    """The graphs of rank 0, which has the most rows. Changes nothing of what was captured."""
    return prepare(captured, plan, inductor).cut(plan)


def prepare(
    captured: Capture,
    plan: Plan,
    inductor: bool,
    fuses: Device | None = None,
    passes: Sequence[Pass] = DEFAULT,
    known: Known | None = None,
) -> Prepared:
    """All of a rehearsal that comes before forward and backward are parted. fuses: see `Context`. passes: that a job would run. known:
    what was traced before, of the same capture and with the same arguments but for the plan; what this one traces is added."""
    return outline(captured, plan, inductor, fuses, passes, known or Known()).prepared()


def outline(
    captured: Capture, plan: Plan, inductor: bool, fuses: Device | None, passes: Sequence[Pass], known: Known
) -> Outlined:
    """The blocks that become graphs of their own, and what is around them. Arguments as of `prepare`."""
    gm = graphs.duplicate(captured.graph)
    residues = _write_layouts(gm, captured, plan)
    manager = PassManager(passes, Dump(None))
    context = Context(plan, captured.parameters, captured.buffers, everyone=EVERYONE, fuses=fuses)
    compilation = _Rehearsal(manager, context, inductor, Phases(shown=False))
    with _tracing(captured):
        gm, blocks, kinds = compilation.outline(gm, known)
    return Outlined(captured, compilation, known, gm, residues, blocks, kinds)


@contextmanager
def _tracing(captured: Capture) -> Iterator[None]:
    with captured.tracing.entered(), torch_internals.without_autograd_cache(), torch_internals.code_when_called():
        yield


@dataclass(frozen=True)
class Kind:
    """A block that is a graph of its own. names: of the model's blocks that are so; none of what lies between
    blocks. body: what was traced. repeats: see `Block`."""

    joint: Joint
    names: tuple[str, ...]
    body: GraphModule
    repeats: bool

    @property
    def has_backward(self) -> bool:
        """Not what frozen parameters make of inputs without gradients."""
        return self.joint.keywords is not None


@dataclass(frozen=True)
class WrittenBlock:
    """A block that has graphs in the place of code. joint: what these were parted of."""

    block: Block
    joint: Joint


@dataclass(frozen=True)
class Known:
    """What was traced before of one capture, whatever the plan. joints: of blocks, by what they compute. blocks: by that and their
    policies; None where no op can stand for one. around: of what is around blocks, or of a whole model, by all that a trace sees of
    it: parameters are whole there ([Note: Whole inputs]), so that stages and numbers of processes have it in common."""

    joints: dict[Computes, Joint] = field(default_factory=dict)
    blocks: dict[tuple[Computes, str], WrittenBlock | None] = field(default_factory=dict)
    around: dict[Hashable, Joint] = field(default_factory=dict)


@dataclass(frozen=True)
class Outlined:
    """A graph whose blocks are ops, not yet traced. residues: see `_write_layouts`."""

    captured: Capture
    compilation: _Rehearsal
    known: Known
    graph: GraphModule
    residues: list[Tensor]
    blocks: tuple[Block, ...]
    kinds: tuple[Kind, ...]

    def prepared(self) -> Prepared:
        """The same, traced."""
        captured, plan = self.captured, self.compilation.context.plan
        with _tracing(captured):
            inputs = [_input(captured, i, plan) for i in range(len(captured.inputs))]
            inputs += [captured.tracing.like(residue) for residue in self.residues]
            outer = self.compilation.around(self.graph, self.blocks, inputs)
            seen = outer.seen(self.graph, inputs)
            if seen not in self.known.around:
                self.known.around[seen] = outer.trace(self.graph, inputs)
            return Prepared(captured, outer, self.known.around[seen], self.blocks, self.kinds)


@dataclass(frozen=True)
class Prepared:
    """A graph that was traced forward and backward. kinds: the blocks in it that are graphs of their own."""

    captured: Capture
    compilation: _Rehearsal
    joint: Joint
    blocks: tuple[Block, ...]
    kinds: tuple[Kind, ...]

    def cut(self, plan: Plan) -> Rehearsed:
        """The graphs by a plan that is as the one that this was prepared for but for what it computes again. In blocks that
        are graphs of their own only that one's choice counts."""
        compilation = replace(self.compilation, context=replace(self.compilation.context, plan=plan))
        with _tracing(self.captured):
            return compilation.finish(self.joint.copied(), self.blocks)

    def cut_exchanged(self, plan: Plan, known: Known) -> Rehearsed | None:
        """The same for blocks that are graphs of their own, which save what that plan says: what is around them is not traced again.
        None where only a trace would tell what backward takes. known: as of `prepare`."""
        compilation = replace(self.compilation, context=replace(self.compilation.context, plan=plan))
        joint = self.joint.copied()
        with _tracing(self.captured):
            calls = compilation.others(joint.graph, self.kinds, known)
            made = {block: register(PREFIX, block) for block in calls.values() if block is not None}
            keys = {call: made[block] for call, block in calls.items() if block is not None}
            if len(keys) < len(calls) or not can_exchange(joint.graph, keys):
                return None
            exchange_blocks(joint.graph, keys)
            return compilation.finish(joint, (*self.blocks, *made))

    def cut_kind(self, kind: Kind, policy: str) -> Rehearsed:
        """The graphs of a kind of block alone."""
        with _tracing(self.captured):
            halves = self.compilation.cut_block(kind.joint.copied(), policy)
        assert halves.backward is not None
        return Rehearsed(halves.forward, halves.backward, halves.results, _links(halves), ())

    def listed_kind(self, kind: Kind) -> JointList:
        """A kind of block for many policies."""
        assert kind.joint.keywords is not None
        return JointList.of(kind.joint.graph, kind.joint.keywords["num_fwd_outputs"], self.compilation.context.plan.stacks)

    def listed(self, kept: Set[str]) -> JointList:
        """The whole for policies of many blocks, its collectives not lowered. kept: what is saved without any."""
        joint = self.joint.copied()
        assert joint.keywords is not None
        leave_out(joint.graph, unused(joint.graph.graph, _inside))
        with _tracing(self.captured):
            ready = self.compilation.before_parting(joint)
        found = JointList.of(ready, joint.keywords["num_fwd_outputs"], self.compilation.context.plan.stacks, kept)
        return replace(found, whole=not self.blocks)


class _Rehearsal(Compilation):
    """A compilation that ends before code is generated."""

    def generate(self, graph: GraphModule, phase: Phase) -> Callable[[list[Any]], Any]:
        """Not code, but a bearer of the graph."""
        before = graphs.duplicate(graph) if len(torch_internals.tangents(graph.graph)) > 1 else graph
        return Written(self.last(graph, phase), before, functools.cache(lambda absent: self.last(without(before, absent), phase)))

    def outline(self, gm: GraphModule, known: Known) -> tuple[GraphModule, tuple[Block, ...], tuple[Kind, ...]]:
        """All that `compile` does up to the trace of what is around blocks."""
        gm = self.manager.run(("traced",), gm, self.context)
        kinds: list[Kind] = []

        def compile_one(name: str, body: GraphModule) -> Block | None:
            written = self.written(body, body.meta[POLICY], known)
            if written is None:
                return None
            kinds.append(Kind(written.joint, body.meta[BLOCKS], body, written.block.repeats))
            return written.block

        blocks = compile_blocks(gm, compile_one)
        return gm, tuple(blocks), tuple(kinds if blocks else ())

    def seen(self, gm: GraphModule, inputs: Sequence[Any]) -> Hashable:
        """All that a trace sees of a graph of one capture; blocks by their keys."""
        listed = tuple(str(part.graph) for part in gm.modules() if isinstance(part, GraphModule))
        return self.inductor, self._kept, listed, tuple(map(_how, self._whole(inputs)))

    def others(self, joint: GraphModule, kinds: Sequence[Kind], known: Known) -> dict[Node, Block | None]:
        """For each call of a block of the model the one that this plan makes of it; None where no op can stand for that."""
        plan = self.context.plan
        kind_of = {name: kind for kind in kinds for name in kind.names}
        calls = ((node, graphs.block_of(node, plan.stacks)) for node in graphs.calls(joint, graphs.BLOCK))
        written = {node: self.written(kind_of[n].body, plan.policy_inside(n), known) for node, n in calls if n in kind_of}
        return {node: other.block if other else None for node, other in written.items()}

    def written(self, body: GraphModule, policy: str, known: Known) -> WrittenBlock | None:
        """A block's graphs, if it saves that, and the one that they were parted of, which is the same whatever it saves."""
        key = body.meta[KEY], body.meta[COPIES], body.meta[FIXED], self._kept
        if (key, policy) not in known.blocks:
            known.blocks[key, policy] = self._written(body, key, policy, known)
        return known.blocks[key, policy]

    def _written(self, body: GraphModule, key: Computes, policy: str, known: Known) -> WrittenBlock | None:
        def differentiate(body: GraphModule, given: list[Any]) -> Halves:
            if key not in known.joints:
                known.joints[key] = self.trace_block(body, given)
            return self.cut_block(known.joints[key].copied(), policy)

        block = compile_block(body, differentiate, self.generate)
        return WrittenBlock(block, known.joints[key]) if block is not None else None

    def before_parting(self, joint: Joint) -> GraphModule:
        """The graph that would be parted."""
        gm = self._joint(joint.graph, self.context)
        keep_overwritten(gm)
        return gm

    def finish(self, joint: Joint, blocks: tuple[Block, ...]) -> Rehearsed:
        """Parts the graph and runs the last passes."""
        halves = joint.halves(self.part)
        links = _links(halves)
        if halves.backward is None:
            return Rehearsed(self.last(self.infer(halves.forward), "inference"), None, halves.results, {}, blocks)
        forward, backward = self.split(halves.forward, "forward"), self.split(halves.backward, "backward")
        leave_out(backward, unused(backward.graph, _inside))
        return Rehearsed(self.last(forward, "forward"), self.last(backward, "backward"), halves.results, links, blocks)


def _how(value: Any) -> str:
    """What a trace sees of an input."""
    if not isinstance(value, Tensor):
        return str(value)
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device} {value.requires_grad}"


@dataclass(frozen=True)
class Written:
    """Stands where a block's code would be. before: the graph before the last passes, where some of several gradients may be left out.
    lacking: what is made of it for gradients that lack these."""

    graph: GraphModule
    before: GraphModule
    lacking: Callable[[tuple[int, ...]], GraphModule]

    def __call__(self, args: list[Any]) -> Any:
        """Nobody runs a rehearsal."""
        raise AssertionError("a rehearsed block has no code")


def _links(halves: Halves) -> dict[int, int]:
    """The partitioner calls what backward takes by the name that it has in forward; but for random states."""
    if halves.backward is None:
        return {}
    places = {n.name: i for i, n in enumerate(halves.backward.graph.find_nodes(op="placeholder"))}
    places |= {saved.name: places[given.name] for saved, given in torch_internals.random_states(halves.forward, halves.backward)}
    outputs: Sequence[Any] = halves.forward.graph.output_node().args[0]  # type: ignore[assignment]
    saved = list(enumerate(outputs))[halves.results :]
    return {i: places[n.name] for i, n in saved if isinstance(n, Node) and n.name in places}


def _write_layouts(gm: GraphModule, captured: Capture, plan: Plan) -> list[Tensor]:
    """Puts the plan's own layout into each unshard: what the sharder would have shown to the trace. One process has
    none. What is kept of gradients that go in low rank becomes more inputs, which these are."""
    infos = {p.name: p for p in captured.inventory.parameters}
    residues: dict[str, tuple[Node, Node]] = {}
    inputs = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    for node in graphs.calls(gm, graphs.UNSHARD):
        if plan.leaves_alone:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            gm.graph.erase_node(node)
            continue
        name = captured.parameters[inputs[node.args[0]]]  # type: ignore[index]
        whole = node.meta["example_value"]
        info = infos[name]
        layout = layout_of_parameter(plan.group_of[name], plan, NAME_OF_AXES, whole.shape, getattr(torch, info.dtype), info.trained)
        node.args = (node.args[0], node.args[1], str(layout), node.args[3])
        if layout.low_rank:
            residues[name] = residues.get(name) or _residue_inputs(node, layout.low_rank)
            _put_low_rank(node, residues[name], str(layout))
    return [given.meta["example_value"] for both in residues.values() for given in both]


def _residue_inputs(unshard: Node, rank: int) -> tuple[Node, Node]:
    graph, whole = unshard.graph, unshard.meta["example_value"]
    places = []
    for shape in residue_shapes(whole.shape, rank):
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            places.append(graph.placeholder(f"residue_of_{unshard.name}"))
        places[-1].meta["example_value"] = whole.new_empty(shape, dtype=torch.float32).requires_grad_()
    return places[0], places[1]


def _put_low_rank(unshard: Node, residue: tuple[Node, Node], layout: str) -> None:
    with unshard.graph.inserting_after(unshard):
        low_rank = unshard.graph.call_function(graphs.LOW_RANK, (unshard, *residue, layout, ""))
    low_rank.meta.update(unshard.meta)
    unshard.replace_all_uses_with(low_rank, delete_user_cb=lambda user: user is not low_rank)


def groups_of(plan: Plan, cluster: Cluster) -> dict[str, Group]:
    """The process groups that a rehearsal's graphs name."""
    found, stride = {}, 1
    for axis, size in reversed(plan.axes):
        found[axis] = cluster.group(size, stride)
        stride *= size
    everyone = cluster.group(plan.world)
    if plan.node:
        found[ACROSS], found[INSIDE] = cluster.levels(plan.world, plan.node)
    return {**found, "+".join(a for a, n in plan.axes if n > 1): everyone, EVERYONE: everyone}


def rows_of(shape: Sequence[int], group: ParameterGroup, plan: Plan) -> tuple[int, ...]:
    """What rank 0, which has the most, holds of a parameter of this shape."""
    return layout_of(group, plan, NAME_OF_AXES).cutting(shape).with_chunk(tuple(shape)) if shape else ()


def _input(captured: Capture, position: int, plan: Plan) -> Any:
    """Rows in the place of a parameter; everything else as it was."""
    value = captured.inputs[position]
    group = plan.group_of.get(captured.parameters.get(position, ""))
    if group is None or not isinstance(value, Tensor):
        return captured.tracing.like(value)
    return captured.tracing.like(value, rows_of(value.shape, group, plan))


def body_of(node: Node) -> tuple[GraphModule, list[Node]] | None:
    """The graph that a call of a block stands for, and what that takes; None of any other call."""
    arguments: tuple[Any, ...] = node.args
    if graphs.is_call(node, graphs.BLOCK, graphs.REPEAT_BLOCK):
        tensors, sizes, key, _ = arguments
        made, given = block_named(key), {"input": tensors, "size": sizes}
        return _written(made.forward).graph, [given[v.kind][v.index] for v in made.inputs]
    if graphs.is_call(node, graphs.BLOCK_BACKWARD):
        taken = graphs.given_to_backward(node)
        absent = tuple(i for i, value in enumerate(taken) if value is None)
        written = _written(block_named(arguments[-1]).backward)
        return written.lacking(absent) if absent else written.graph, [value for value in taken if value is not None]
    return None


def _inside(node: Node) -> GraphModule:
    """The backward of a block that is called here, before the last passes."""
    return _written(block_named(str(node.args[-1])).backward).before


def _written(code: Any) -> Written:
    assert isinstance(code, Written)
    return code
