"""Rewrite: says for each value of a block's forward whether backward finds it saved or computes it again.

[Note: Policies] The plan has a policy for each block, as text. "none": torch's partitioner decides, which computes again
what costs next to nothing. "full": only what enters the block is saved. "selective": attention and every second matmul or
convolution are saved, as torchtitan does. "save mm#0 mm#2": these are saved, each by its op and which of the block's calls
of it, and nothing else ([Note: Verbs]). A block that is called several times has these in each call. What leaves a call is an input of another, and
saved ("through": not even that, see [Note: Regions] in `repeat_blocks`); views are made again in any case. What an operator gives that
torch does not have is saved too, since it may draw numbers in a way that nobody can repeat (one that says so by
`torch.Tag.nondeterministic_seeded` is repeated, if torch can tell on which device), what one gives that takes graphs (`torch.cond`),
whose random ops would draw anew, and what a collective of the user's own gives, since all processes would have to agree to repeat it.
In regions of torch.utils.checkpoint what may draw unseen is saved as well: eager mode winds random states back before it calls a region
again, but a compiled backward repeats operator by operator.

[Note: Verbs] A policy is a verb and operations, or several such. What a verb is said of is not computed again; what becomes of it instead
torch's partitioner reads from the values' `meta`, and MARKS has that for each of VERBS in plan.py. To offload would be another verb, whose
marks are those of "save" and `should_offload`, which torch moves to the host where its `enable_activation_offloading` is on; and candidates
with it in `savings.py`, whose bytes are elsewhere between forward and backward. A plan that says a verb that is not there is refused by name.

The tags are torch's own, as activation checkpointing leaves them: its partitioner puts a chain that is computed again just
in front of its first use, and lets random ops repeat what they gave. A policy takes the place of the user's own
checkpointing in that block.
"""

from __future__ import annotations

import operator
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from autoshard import torch_internals
from autoshard.cost_model.work import kind_of, op_name
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage
from autoshard.passes.choose_blocks import blocks_of
from autoshard.passes.take_whole import stands_for_unshard
from autoshard.plan import THROUGH, Plan, verbs_of

_REPEATABLE = ("aten", "prims", "rngprims", "inductor", "higher_order")
_KNOWN = (*_REPEATABLE, "_c10d_functional", "autoshard", "")
SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
Marks = Mapping[str, Any]  # what of a value's `meta` torch's partitioner reads
MARKS: dict[str, Marks] = {"save": {"recompute": SAVE}}  # by the verbs of plans
_AGAIN: Marks = {"recompute": AGAIN}


@dataclass(frozen=True)
class Recompute:
    name: ClassVar[str] = "recompute"
    stage: ClassVar[Stage] = "joint"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset({"recompute"})
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        if context.plan.recompute:
            found = tag(gm, context.plan.stacks, context.plan.policy_of, alone=context.plan.is_of_one_block)
            if found:
                _say_what_is_unknown(found, context.plan)
            if found and not graphs.calls(gm, graphs.BLOCK):
                _say_what_was_not_found(found, context)
        return gm


def _say_what_is_not_repeated(nodes: Iterable[Node]) -> None:
    """Of operators that torch does not have, or not so that it could repeat them: a user would wait for less memory in vain."""
    called = {target for n in nodes for target in (*_strange(n), *([n.target] if _has_graphs(n) else []))}
    names = sorted(str(target).removesuffix(".default") for target in called)
    if names:
        warnings.warn(
            f"recompute: what {', '.join(names)} gives is saved by every policy, and in regions of torch.utils.checkpoint: torch does not "
            "have it, or it takes graphs, so it may draw numbers unseen; legal: an operator with torch.Tag.nondeterministic_seeded, which is repeated if its "
            "tensors are arguments of their own, of one device",
            stacklevel=2,
        )


def _say_what_is_no_operation(block: str | None, calls: Iterable[Sequence[Node]], policy: str) -> None:
    """Of what a policy saves by name."""
    wanted = verbs_of(policy)
    known = dict.fromkeys(key for nodes in calls for key in operations(nodes)) if wanted else {}
    if unknown := [key for key in wanted if key not in known]:
        warnings.warn(f"recompute: {unknown[0]!r} is no operation of {block}, so it is not saved; it has {', '.join(known)}", stacklevel=2)


def _say_what_is_unknown(found: Collection[str | None], plan: Plan) -> None:
    known = blocks_of(plan.group_of, plan.stacks)
    for block, _ in plan.recompute:
        if block not in found and block not in known:
            warnings.warn(f"recompute: the model has no block {block!r}; it has {', '.join(known)}", stacklevel=2)


def _say_what_was_not_found(found: Collection[str | None], context: Context) -> None:
    """That a policy does nothing would be seen in the peak alone."""
    used = set(blocks_of(context.parameters.values(), context.plan.stacks))
    wanted = [block for block, _ in context.plan.recompute if block in used]
    if wanted and not set(wanted).intersection(found):
        warnings.warn(
            f"recompute: no operation of this graph is known to belong to {wanted[0]!r}, or to any other block that has a policy, "
            "though their parameters are used here: nothing of them is computed again, and the step's peak will be higher",
            stacklevel=2,
        )


def tag(
    joint: GraphModule, stacks: Collection[str], policy_of: Callable[[str | None], str], alone: bool = False
) -> Collection[str | None]:
    """Tags what forward computes in blocks that have a policy; whose operations it found. An inference graph stays as it is.
    stacks: the plan's. alone: the graph is of one block that is compiled by itself, and what has a number in it is a part of that."""
    backward = backward_of(joint)
    blocks = values_of_blocks(joint, backward, None if alone else stacks)
    for block, nodes in blocks.items():
        policy = policy_of(block)
        if policy != "none":
            calls = calls_of(block, nodes)
            _say_what_is_not_repeated(filterfalse(is_repeatable, nodes))
            _say_what_is_no_operation(block, calls, policy)
            kept = kept_by(policy, calls, backward)
            for node in nodes:
                node.meta.update(kept.get(node, _AGAIN))
                node.meta.pop("ac_graph_id", None)  # of the user's regions: torch saves what goes from one to the next
    return blocks.keys()


def kept_by(policy: str, calls: Iterable[Sequence[Node]], backward: set[Node]) -> dict[Node, Marks]:
    """Of the values of a block's calls those that a policy does not have computed again where backward needs them, with their marks."""
    kept: dict[Node, Marks] = {}
    for nodes in calls:
        kept |= dict.fromkeys(chain(filterfalse(is_repeatable, nodes), _leaving(nodes, backward)), MARKS["save"]) | _chosen(nodes, policy)
    return _with_items(kept)


def save_unrepeatable(joint: GraphModule) -> None:
    """In regions of the user's own, what may draw numbers unseen: see [Note: Policies]. Done wherever a graph is parted. What a plain
    region holds torch tags as preferred to be computed again; what a user or a pass of ours says must be stays so."""
    again = [n for n in joint.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE and n.op == "call_function"]
    unseen = [n for n in again if _is_value(n) and not is_repeatable(n) and (_strange(n) or _draws_inside(n))]
    _say_what_is_not_repeated(unseen)
    for node in _with_items(dict.fromkeys(unseen, MARKS["save"])):
        node.meta["recompute"] = SAVE


def _draws_inside(node: Node) -> bool:
    """Of graphs that an operator takes."""
    inside = (n for graph in _graphs_of(node) for n in graph.graph.nodes if n.op == "call_function")
    return any(draws(n.target) or bool(_strange(n)) or _draws_inside(n) for n in inside)


def name_repeated(backward: GraphModule, stacks: Collection[str]) -> None:
    """Names what a backward graph computes again after its block, for dumps: "layers_3_again_mm"."""
    for node in backward.graph.nodes:
        block = graphs.block_of(node, stacks)
        if node.op == "call_function" and block is not None and not torch_internals.is_backward(node):
            torch_internals.rename(node, f"{block.replace('.', '_')}_again_{op_name(node)}")


def values_of_blocks(joint: GraphModule, backward: set[Node], stacks: Collection[str] | None) -> dict[str | None, list[Node]]:
    """What forward computes, in order, by block; gathered parameters and sizes left out. Nothing of an inference graph. stacks: None of
    a graph that is one block, ""."""
    blocks: dict[str | None, list[Node]] = defaultdict(list)
    for node in joint.graph.nodes if backward else ():
        if node.op == "call_function" and node not in backward and _is_value(node):
            blocks["" if stacks is None else graphs.block_of(node, stacks)].append(node)
    return blocks


def calls_of(block: str | None, nodes: Iterable[Node]) -> list[list[Node]]:
    """A block's values by its calls, where a model calls it more than once: a policy is about each."""
    calls: dict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        calls[torch_internals.module_call(node, block) if block else 0].append(node)
    return list(calls.values())


def needed(backward: set[Node]) -> set[Node]:
    """What backward reads of forward, and what that is made of."""
    return graphs.sources(backward) - backward


def backward_of(joint: GraphModule) -> set[Node]:
    """What autograd traced for backward, and what depends on it. A view that backward takes of a value of forward depends
    on no gradient, but it is not forward's."""
    own = [node for node in joint.graph.nodes if torch_internals.is_backward(node)]
    return set(own).union(graphs.dependents(joint, own))


def _is_value(node: Node) -> bool:
    """Whether a policy is about it: not about what our own ops give, or what stands for them yet, a block that is a graph of its own
    among them."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, (list, tuple)) else [value]
    source: Any = node.args[0] if node.target is operator.getitem else node
    return any(isinstance(t, Tensor) for t in tensors) and not (
        graphs.is_call(source, *graphs.LOGICAL, graphs.BLOCK) or stands_for_unshard(node)
    )


def is_repeatable(node: Node) -> bool:
    """Whether calling this again is known to give the same. See [Note: Policies]."""
    called = (node.target, *node.args)  # operators of higher order take the one that they call
    known = all(getattr(target, "namespace", "aten") in _REPEATABLE for target in called)
    return not _has_graphs(node) and (known or (draws(node.target) and _tells_its_device(node)))


def _has_graphs(node: Node) -> bool:
    """As `torch.cond` has."""
    return bool(_taken(node))


def _graphs_of(node: Node) -> list[GraphModule]:
    found = (getattr(node.graph.owning_module, str(a.target), None) for a in _taken(node))
    return [graph for graph in found if isinstance(graph, GraphModule)]


def _taken(node: Node) -> list[Node]:
    """What an operator of higher order takes of its graph's module."""
    higher = getattr(node.target, "namespace", "") == "higher_order"
    return [a for a in node.args if isinstance(a, Node) and a.op == "get_attr"] if higher else []


def _tells_its_device(node: Node) -> bool:
    """Whether torch, which looks at tensors that an operator is given by position (2.13: the first), saves the right generator's state."""
    tensors = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    first = [a for a in node.args if isinstance(a, Node) and isinstance(a.meta.get("val"), Tensor)]
    return bool(first) and len({t.device for t in tensors}) == 1


def joins_draws(graph: Graph) -> bool:
    """Whether torch's partitioner would compute once what several alike calls draw, or may draw unseen."""
    calls = Counter(_drawing(graph))
    return max(calls.values(), default=0) > 1 and len(_drawing(torch_internals.without_repeats(graph))) < calls.total()


def once(joint: Graph) -> Graph:
    """A copy of a joint graph in which what is computed twice is there once, as torch's partitioner has it; all is there as often as it was
    where that would join draws."""
    joined = torch_internals.without_repeats(joint)
    if len(_drawing(joined)) == len(_drawing(joint)):
        return joined
    copied = Graph()
    copied.output(copied.graph_copy(joint, {}))
    return copied


def _drawing(graph: Graph) -> list[Any]:
    """What it calls that draws, or may draw unseen."""
    return [n.target for n in graph.nodes if n.op == "call_function" and _may_draw(n)]


def _may_draw(node: Node) -> bool:
    return draws(node.target) or _has_graphs(node) or bool(_strange(node))


def _strange(node: Node) -> list[Any]:
    """The operators that torch does not have, of a call of one or of one of higher order that takes such."""
    return [target for target in (node.target, *node.args) if getattr(target, "namespace", "") not in _KNOWN]


def draws(target: Any) -> bool:
    """Whether an operator says that it draws numbers: then its random state is saved where it is repeated."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _chosen(nodes: Iterable[Node], policy: str) -> dict[Node, Marks]:
    """The operations of a block's call that a policy keeps the results of."""
    named = operations(nodes)
    if policy in ("full", THROUGH):
        return {}
    if policy == "selective":
        kinds = {n: kind_of(n) for n in named.values()}
        products = [n for n, kind in kinds.items() if kind in ("matmul", "convolution")]
        return dict.fromkeys([*(n for n, kind in kinds.items() if kind == "attention"), *products[::2]], MARKS["save"])
    return {named[key]: MARKS[verb] for key, verb in verbs_of(policy).items() if key in named}


def operations(nodes: Iterable[Node]) -> dict[str, Node]:
    """A block's operations by the names that policies have for them."""
    counts: Counter[str] = Counter()
    found = {}
    for node in nodes:
        name = op_name(node)
        found[f"{name}#{counts[name]}"] = node
        counts[name] += 1
    return found


def _with_items(kept: Mapping[Node, Marks]) -> dict[Node, Marks]:
    """Of an operation with several results, these too, and what is in one that is several itself."""
    several = {n: marks for n, marks in kept.items() if isinstance(n.meta.get("val"), (list, tuple))}
    items = {user: marks for n, marks in several.items() for user in n.users if user.op == "call_function"}
    return {**kept, **_with_items(items)} if items else {**kept}


def _leaving(nodes: Sequence[Node], backward: set[Node]) -> set[Node]:
    """What is used outside of the block's forward and backward. Of a view, what it is a view of; of one of an operation's results (a norm
    that ends a block has several), the operation too: torch's partitioner would repeat it, and all that it is made of."""
    own = backward.union(nodes)
    outside = {n: [user for user in n.users if user not in own and not _asks_for_a_size(user)] for n in nodes}
    leaving = {_viewed(n, own) for n, users in outside.items() if users}
    read = (_viewed(n, own) for n, users in outside.items() if any(map(_computes, users)))
    return leaving.union(source for n in read if n.target is operator.getitem for source in n.all_input_nodes)


def _computes(user: Node) -> bool:
    """Not what gives a buffer its new value: of a norm's many results those are small ones."""
    return user.op != "output" and not graphs.is_call(user, graphs.WRITE)


def _asks_for_a_size(node: Node) -> bool:
    """Who does, where sizes are open, has no use for the value."""
    return op_name(node).startswith("sym_")


def _viewed(node: Node, inside: set[Node]) -> Node:
    while torch_internals.is_view(node.target):
        source: Any = node.args[0]
        if source not in inside:
            break
        node = source
    return node
