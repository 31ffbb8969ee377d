"""From a graph to something that runs: AOTAutograd, our passes around the partition, then Inductor or eager.

[Note: Order before calls] The plan says in which order gathers start, and in which reductions do; how the two take turns in a backward
follows from a process's own graph. Where one process goes through its blocks another way than others (by a branch, on its data), each
waits in it for what another would send only after that. Sends have streams of their own for gathers and for reductions, but wait for
each other all the same. Where all start everything in one order nobody can: what was started first and has not ended, all have started
or will, since they wait for nothing but what ended. So a call says in which order it and its backward start what they do
(`Collectives.order`), and lockstep refuses another one. That must be known when forward is called, long before AOTAutograd compiles the
backward. So the passes that decide it run as part of the partition, on both halves; code is generated when AOTAutograd asks for it. It
could be asked to do so at once (`force_non_lazy_backward_lowering`), but would then take for granted that no backward keeps its graph,
and generate code for backwards that never come.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from functorch.compile import aot_module_simplified, min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from autoshard import torch_internals
from autoshard.backwards import Backwards, note_held
from autoshard.blocks import Halves, compile_block, compile_blocks
from autoshard.console import Phases
from autoshard.errors import UnsupportedError
from autoshard.kernels.region import OPERATORS
from autoshard.ops import block, direct, packing, sparse
from autoshard.ops.block import Block
from autoshard.ops.collectives import Collectives
from autoshard.ops.early import GATHER_EARLY
from autoshard.passes import graphs, recompute
from autoshard.passes.base import Context, Phase
from autoshard.passes.copy_results import copy_results
from autoshard.passes.expand_unshards import expand_unshards
from autoshard.passes.keep_overwritten import keep_overwritten
from autoshard.passes.manager import PassManager
from autoshard.passes.outline_blocks import COPIES, FIXED, POLICY
from autoshard.passes.partition_activations import gathers_of_parts, mark_alike
from autoshard.passes.regather import keep_mixed
from autoshard.passes.sparse_rows import EMBEDDING_BACKWARD
from autoshard.passes.take_rows import takers
from autoshard.passes.take_whole import Whole, put_unshards, wholes
from autoshard.runtime.dtensors import taking_rows
from autoshard.runtime.lost_peers import naming_lost_peers
from autoshard.runtime.undefined import leaving_undefined
from autoshard.version import __version__

# what sends, beside torch's collectives
IN_ORDER = (direct.GATHER_DIRECT, packing.GATHER_PACKED, direct.EXCHANGE_DIRECT, direct.SWAP_DIRECT, GATHER_EARLY, *sparse.NAMES)
Cut = Callable[..., tuple[GraphModule, GraphModule]]
_C = TypeVar("_C", bound="Compilation")


@dataclass(frozen=True)
class Joint:
    """A graph as AOTAutograd traced it, before its halves are parted. keywords: for the partitioner; None where nothing is
    differentiated."""

    graph: GraphModule
    inputs: Sequence[Any] = ()
    keywords: dict[str, Any] | None = None

    def copied(self) -> Joint:
        """One to part while this one stays as it is."""
        return replace(self, graph=graphs.duplicate(self.graph))

    def halves(self, cut: Cut) -> Halves:
        """Forward and backward, as `cut` parts them."""
        if self.keywords is None:
            return Halves(self.graph, None, len(self.graph.graph.output_node().args[0]))  # type: ignore[arg-type]
        return Halves(*cut(self.graph, self.inputs, **self.keywords), self.keywords["num_fwd_outputs"])


class _Traced(Exception):
    """Ends AOTAutograd: the joint graph is there."""

    def __init__(self, joint: Joint) -> None:
        super().__init__("traced")
        self.joint = joint


@dataclass(frozen=True)
class Compilation:
    """One graph to compile: the passes and what they need to know, and whether Inductor generates code. wholes: the inputs
    that AOTAutograd takes whole, see [Note: Whole inputs]. collectives: is told what it communicates; None where nobody asks."""

    manager: PassManager
    context: Context
    inductor: bool
    phases: Phases
    wholes: dict[int, Whole] = field(default_factory=dict)
    collectives: Collectives | None = None

    def compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A callable with the graph's signature; its backward hangs on what it returns."""
        expand_unshards(gm)
        gm = self.manager.run(("traced",), gm, self.context)
        rows = {i: torch_internals.Tracing.here().like(row) for i, row in takers(gm).items()}
        inputs = [rows.get(i, x) for i, x in enumerate(inputs)]
        with torch_internals.without_autograd_cache():
            blocks = compile_blocks(gm, lambda _, body: compile_block(body, self.differentiate, self.generate))
            outer = self.around(gm, blocks, inputs)
            run = outer._inductor(gm, inputs) if outer.inductor else outer._eager(gm, inputs)
        named = taking_rows(naming_lost_peers(leaving_undefined(run)), tuple(rows))
        named.blocks = blocks  # type: ignore[attr-defined]  # its code names them by keys, which live as long as they do
        return named

    def around(self: _C, gm: GraphModule, blocks: Sequence[Block], inputs: Sequence[Any]) -> _C:
        """Of the graph that has these blocks; what is around compiled ones takes longer to compile than to run."""
        return replace(self, inductor=self.inductor and not blocks, wholes=wholes(gm, inputs))

    def trace(self, gm: GraphModule, inputs: Sequence[Any]) -> Joint:
        """A graph's forward and backward in one: AOTAutograd alone, as far as Inductor's operators if need be. inputs: rows
        where they are whole."""
        inputs = self._whole(inputs)

        def partition(joint: GraphModule, joint_inputs: Sequence[Any], **keywords: Any) -> Any:
            raise _Traced(Joint(joint, joint_inputs, keywords))

        def infer(graph: GraphModule, *_: Any, **__: Any) -> Any:
            raise _Traced(Joint(graph))

        try:
            if self.inductor:
                patches = {"custom_partitioner_fn": Partitioner(partition, "block")}
                torch_internals.compile_with_inductor(gm, inputs, infer, patches, self._kept)
            else:
                aot_module_simplified(
                    gm, inputs, fw_compiler=infer, partition_fn=partition, keep_inference_input_mutations=True
                )
        except _Traced as traced:
            return traced.joint
        raise AssertionError("AOTAutograd partitions or compiles")

    def differentiate(self, block: GraphModule, inputs: list[Any]) -> Halves:
        """The halves of one block."""
        with torch_internals.Tracing.here().entered():
            return self.cut_block(self.trace_block(block, inputs), block.meta[POLICY])

    def trace_block(self, block: GraphModule, inputs: list[Any]) -> Joint:
        """A block's forward and backward in one; see [Note: Mixed with copies]."""
        joint = self.trace(block, inputs)
        graphs.fill_examples(joint.graph)
        copies, fixed = (graphs.inputs_at(joint.graph, block.meta[role]) for role in (COPIES, FIXED))
        keep_mixed(joint.graph, copies, fixed)
        return joint

    def cut_block(self, joint: Joint, policy: str) -> Halves:
        """The halves of one block, whose views are not saved beside what they are views of."""
        graphs.recompute_views(joint.graph)
        if policy != "none":
            recompute.tag(joint.graph, self.context.plan.stacks, lambda block: policy if block else "none")
        return joint.halves(self._cut)

    def generate(self, graph: GraphModule, phase: Phase) -> Callable[[list[Any]], Any]:
        """What runs one graph of a block."""
        if phase != "backward":
            return self._generated(graph, phase)
        tracing = torch_internals.Tracing.here()

        def backward(part: GraphModule, _: Sequence[int]) -> Callable[[list[Any]], Any]:
            with tracing.entered():  # what is known of the graph around it does not hold for a block
                return self._generated(part, "backward")

        return Backwards(graph, backward)

    def _generated(self, graph: GraphModule, phase: Phase) -> Callable[[list[Any]], Any]:
        with self.phases.phase(phase, f"a block of {_size(graph)}"):
            graph = self.last(graph, phase)
            if not self.inductor:
                return _boxed(graph)
            return torch_internals.inductor_alone(graph, is_backward=phase == "backward", is_inference=phase == "inference")

    def partition(self, joint: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """Forward and backward, parted and as code is generated for them but for the last passes, see [Note: Order before calls]."""
        forward, backward = self.part(joint, inputs, **kwargs)
        return self.split(forward, "forward"), self.split(backward, "backward")

    def part(self, joint: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """The joint passes, then torch's partitioner, which follows the tags that they left."""
        halves = self._cut(self._joint(joint, self.context), inputs, **kwargs)
        note_held(halves[1])
        mark_alike(*halves, kwargs["num_fwd_outputs"], self.context)
        if self.collectives is not None:
            forward, backward = map(graphs.collectives, halves)
            self.collectives.note(forward, [*backward, *gathers_of_parts(halves[0])])
        return halves

    def _joint(self, gm: GraphModule, context: Context) -> GraphModule:
        graphs.fill_examples(gm)
        put_unshards(gm, self.wholes)
        copy_results(gm)
        return self.manager.run(("joint",), gm, context)

    def _cut(self, joint: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        keep_overwritten(joint)
        recompute.save_unrepeatable(joint)
        # A block was parted by a budget already; repeated as a whole it would draw other random numbers.
        budgets = torch_internals.without_budgets(joint) if graphs.calls(joint, graphs.BLOCK) else contextlib.nullcontext()
        apart = torch_internals.repeats_stay() if recompute.joins_draws(joint.graph) else contextlib.nullcontext()
        with budgets, apart, torch_internals.random_states_are_tensors():
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        torch_internals.put_random_states_first(forward, backward)
        graphs.fill_examples(forward)
        graphs.fill_examples(backward)
        recompute.name_repeated(backward, self.context.plan.stacks)
        return forward, backward

    def split(self, gm: GraphModule, phase: Phase) -> GraphModule:
        """The passes that decide in which order a graph communicates."""
        gm = self.manager.run(("split",), gm, replace(self.context, phase=phase))
        if self.collectives is not None:
            self.collectives.note_order(phase, graphs.started(gm))
        return gm

    def infer(self, gm: GraphModule) -> GraphModule:
        """A graph without a backward as `partition` leaves one that has it."""
        gm = self._joint(gm, replace(self.context, phase="inference"))
        if self.collectives is not None:
            self.collectives.note(graphs.collectives(gm))
        return self.split(gm, "inference")

    def last(self, gm: GraphModule, phase: Phase) -> GraphModule:
        """The last passes, on any graph that code is generated for; one of a block has had no others."""
        return self.manager.run(("code",), gm, replace(self.context, phase=phase))

    def _finished(self, gm: GraphModule, phase: Phase) -> GraphModule:
        return self.last(self.infer(gm) if phase == "inference" else gm, phase)

    def _whole(self, inputs: Sequence[Any]) -> list[Any]:
        """Inputs as AOTAutograd takes them."""
        return [self.wholes[i].value if i in self.wholes else x for i, x in enumerate(inputs)]

    def _rows(self, graph: GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """Inputs as a graph takes them that AOTAutograd gave."""
        found = self._wholes_of(graph)
        return [found[n].rows if n in found else x for n, x in zip(graph.graph.find_nodes(op="placeholder"), inputs)]

    def _wholes_of(self, graph: GraphModule) -> dict[Node, Whole]:
        """The inputs of such a graph that are whole."""
        places = {n: torch_internals.input_position(n) for n in graph.graph.find_nodes(op="placeholder")}
        return {n: self.wholes[i] for n, i in places.items() if i in self.wholes}

    def _eager(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def compiler(phase: Phase) -> Callable[..., Any]:
            def compile_one(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
                with self.phases.phase(phase, _size(graph)):
                    return _boxed(self._finished(graph, phase))

            return compile_one

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def backward(graph: GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
            """Where a frame that Dynamo compiles calls `loss.backward()`, it would go on with this, and with what this gives."""
            torch_internals.leave_what_is_saved()
            return torch.compiler.disable(Backwards(graph, compiler("backward")))  # type: ignore[no-any-return]

        return aot_module_simplified(  # type: ignore[no-any-return]
            gm,
            self._whole(inputs),
            fw_compiler=compiler("forward"),
            bw_compiler=backward,
            inference_compiler=compiler("inference"),
            partition_fn=self.partition,
            keep_inference_input_mutations=True,
        )

    def _inductor(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def inner(graph: GraphModule, graph_inputs: Sequence[Any], **kwargs: Any) -> Any:
            if kwargs.get("is_backward"):
                return backward(graph, graph_inputs, **kwargs)
            phase: Phase = "inference" if kwargs.get("is_inference") else "forward"
            with self.phases.phase(phase, _size(graph)):
                graph = self._finished(graph, phase)
                graph_inputs = self._rows(graph, graph_inputs)
                gathered = {n for n, whole in self._wholes_of(graph).items() if whole.sharded}
                torch_internals.leave_as_they_lie(graph.graph, gathered)
                return compiled(graph, graph_inputs, **kwargs)

        def backward(graph: GraphModule, graph_inputs: Sequence[Any], **kwargs: Any) -> Any:
            """It is given what forward saves, as that lies there."""

            def generate(part: GraphModule, absent: Sequence[int]) -> Callable[[list[Any]], Any]:
                given = [x for i, x in enumerate(graph_inputs) if i not in absent]
                with self.phases.phase("backward", _size(part)):
                    return compiled(self._finished(part, "backward"), given, **kwargs)

            return Backwards(graph, generate, patches)

        def compiled(graph: GraphModule, graph_inputs: Sequence[Any], **kwargs: Any) -> Any:
            return torch_internals.wrap_compiled(torch_internals.inner_inductor(graph, graph_inputs, **kwargs), naming_lost_peers)

        identity = f"autoshard {__version__} {self.context.plan.hash} {self.manager.spec} in order {IN_ORDER}"
        torch_internals.keep_in_order(IN_ORDER)
        patches = {
            "custom_partitioner_fn": Partitioner(self.partition, identity),
            # Inductor would undo the planned order of collectives.
            "reorder_for_peak_memory": False,
            "reorder_for_locality": False,
            "cpp_wrapper": False,  # with it processes crash in backward (2.13)
        }
        if self.context.plan.partition_activations:
            patches["shape_padding"] = False  # which each GPU decides by measuring: values would be made in other ways
        return torch_internals.compile_with_inductor(gm, self._whole(inputs), inner, patches, self._kept)

    @property
    def _kept(self) -> tuple[Any, ...]:
        """What a rewrite of the joint graph has to find in one piece."""
        return (EMBEDDING_BACKWARD,) if self.context.plan.by_rows else ()


def _size(gm: GraphModule) -> str:
    return f"{len(gm.graph.nodes)} nodes"


class Partitioner(torch_internals.CustomPartitionerFn):  # type: ignore[misc]
    """Our partition in the form that Inductor takes; `identity` keeps caches of other plans apart."""

    def __init__(self, partition: Callable[..., Any], identity: str) -> None:
        self._partition, self._identity = partition, identity

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """The forward and the backward graph of a joint one."""
        return self._partition(gm, joint_inputs, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        return self  # Inductor copies its configuration when it writes debug output

    def __reduce__(self) -> Any:
        return str, (self._identity,)  # and pickles it into its cache's keys

    def uuid(self) -> str:
        """What a cache entry of Inductor's belongs to."""
        return self._identity


def call_directly(graph: Graph) -> None:
    """Has a graph that runs op by op call what our operators do without torch's dispatcher: that takes longer than most of them, and
    of a region takes the kernel as one to trace, whose tile is not measured."""
    called: dict[Any, Callable[..., Any]] = {**block.DIRECT, **packing.DIRECT, **direct.DIRECT, **sparse.DIRECT, **graphs.DIRECT}
    called |= {op: region.run for op, region in OPERATORS.items()}
    for node in graph.nodes:
        node.target = called.get(node.target, node.target)


def _boxed(gm: GraphModule) -> Callable[[list[Any]], Any]:
    """Runs a graph op by op, frees its inputs when they were last used, and names peers that are lost."""
    call_directly(gm.graph)
    run, devices = torch_internals.boxed(gm), drawn_on(gm)
    if devices:
        run = _current(run, devices[0])
    guarded = naming_lost_peers(run)
    guarded._boxed_call = True  # type: ignore[attr-defined]
    return guarded


def drawn_on(gm: GraphModule) -> list[torch.device]:
    """The GPUs whose random states a graph saves or begins with. UnsupportedError of several, of which torch would look at one."""
    calls = [n for n in gm.graph.nodes if torch_internals.random_call(n)]
    made = (v for n in calls for v in tree_leaves(n.meta.get("val")) if isinstance(v, torch.Tensor) and v.device.type == "cuda")
    devices = list(dict.fromkeys(v.device for v in made))
    if len(devices) > 1:
        raise UnsupportedError(f"recompute: backward repeats what forward drew on {devices[0]} and {devices[1]}; legal: one GPU a process")
    return devices


def _current(run: Callable[[list[Any]], Any], device: torch.device) -> Callable[[list[Any]], Any]:
    """Runs with this GPU as the current one, whose generator is the one that torch looks at: in a thread of autograd's it is, in the
    user's it need not be."""

    def on_device(given: list[Any]) -> Any:
        with torch.cuda.device(device):
            return run(given)

    return on_device


def has_compiler() -> bool:
    """True if Inductor will find a C++ compiler."""
    return any(shutil.which(c) for c in (os.environ.get("CXX", "g++"), "g++", "clang++", "c++"))
