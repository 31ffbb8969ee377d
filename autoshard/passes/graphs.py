"""Small things that several rewrites do with an FX graph."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from autoshard import torch_internals
from autoshard.ops import block, logical, sparse  # noqa: F401  (registers ops)
from autoshard.ops.collectives import Op
from autoshard.ops.direct import EXCHANGE_DIRECT, GATHER_DIRECT, SWAP_DIRECT
from autoshard.ops.early import GATHER_EARLY
from autoshard.ops.layout import Layout
from autoshard.ops.packing import GATHER_PACKED
from autoshard.ops.part import UNSHARD_PART
from autoshard.passes import choose_blocks

UNSHARD = torch.ops.autoshard.unshard.default
REDUCE_GRAD = torch.ops.autoshard.reduce_grad.default
UNSHARD_BUCKET = torch.ops.autoshard.unshard_bucket.default
REDUCE_BUCKET = torch.ops.autoshard.reduce_bucket.default
HOLD = torch.ops.autoshard.hold.default
ADD_HELD = torch.ops.autoshard.add_held.default
COMPLETE_GRAD = torch.ops.autoshard.complete_grad.default
LOW_RANK = torch.ops.autoshard.low_rank.default
MEAN_LOW_RANK = torch.ops.autoshard.mean_low_rank.default
REPLICATE_BUFFERS = torch.ops.autoshard.replicate_buffers.default
BLOCK, BLOCK_BACKWARD = torch.ops.autoshard.block.default, torch.ops.autoshard.block_backward.default
RANDOM_STATE, REPEAT_BLOCK = torch.ops.autoshard.random_state.default, torch.ops.autoshard.repeat_block.default
LOGICAL = frozenset(logical.DEFINITIONS)
IDENTITIES = (HOLD, ADD_HELD, LOW_RANK)  # in forward, of their first input
TRANSFORMS = ("vmap", "grad", "jvp")

WRITE = torch.ops.aten.copy_.default  # to an input: nothing else of a graph is written to, until it is lowered
_TO_COPY, _CONVERT = torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default
CASTS = (_TO_COPY, _CONVERT)
_c10d = torch.ops._c10d_functional
GATHERS = frozenset({_c10d.all_gather_into_tensor.default, GATHER_DIRECT, GATHER_PACKED})
ALL_REDUCES = frozenset({_c10d.all_reduce.default, _c10d.all_reduce_.default})
REDUCTIONS = frozenset(
    {_c10d.reduce_scatter_tensor.default, _c10d.all_to_all_single.default, EXCHANGE_DIRECT, SWAP_DIRECT, *ALL_REDUCES}
)
WAIT = _c10d.wait_tensor.default
STARTS = GATHERS | REDUCTIONS | {_c10d.broadcast.default}
_NAMES = {**logical.NAMES, **sparse.NAMES}


def is_call(node: Node, *targets: Any) -> bool:
    """Whether a node calls one of these ops. Dynamo's graphs name an op by its packet, AOT's by its overload."""
    if node.op != "call_function":
        return False
    return node.target in targets or node.target in {t.overloadpacket for t in targets}


def callee(node: Node) -> str:
    """The name of the function or method that a node calls: "detach". What is a method on later torch is on 2.11 now and
    then a function of Dynamo's, with that name at the end of its own."""
    return str(getattr(node.target, "__name__", node.target))


def entered(node: Node, *modes: str) -> int:
    """1 of a call of Dynamo's that enters one of these modes ("autocast", "vmap"), -1 of one that leaves one, else 0."""
    name = callee(node)
    enters = any(name in (f"_enter_{mode}", f"_{mode}_increment_nesting") for mode in modes)
    leaves = any(name in (f"_exit_{mode}", f"_{mode}_decrement_nesting") for mode in modes)
    return enters - leaves


def in_transforms(gm: GraphModule) -> set[Node]:
    """What a graph of Dynamo's does in transforms of functions (torch.vmap, torch.func.grad)."""
    depth, found = 0, set[Node]()
    for node in gm.graph.nodes:
        depth += entered(node, *TRANSFORMS)
        if depth:
            found.add(node)
    return found


def written(gm: GraphModule) -> Callable[[Node], bool]:
    """Of a graph of Dynamo's: whether something in it, or in a graph inside of it, writes in place to what a node gives, or to what
    shares its memory (`.data` does, whose version is its own)."""
    given = ((n, n.meta.get("example_value")) for graph in (*nested(gm), gm) for n in graph.graph.nodes)
    values = {n: torch_internals.unwrapped(v) for n, v in given if isinstance(v, Tensor)}
    storages = {n: torch_internals.storage_of(v) for n, v in values.items() if v.layout == torch.strided}
    written_to = {storage for n, storage in storages.items() if torch_internals.times_written(values[n]) > 0}
    return lambda node: storages.get(node) in written_to


def leads_to(node: Node, *targets: Any) -> bool:
    """Whether a reader of a parameter is a call of these ops, or all that it leads to by to_local and detach are."""
    if is_call(node, *targets):
        return True
    return callee(node).endswith(("to_local", "detach")) and all(leads_to(user, *targets) for user in node.users)


def collectives(gm: GraphModule) -> list[Op]:
    """What a graph communicates, before its messages are put together: each op is of one parameter still. What a block takes that is
    called again is gathered twice."""
    called = (source for call in calls(gm, REPEAT_BLOCK) for source in call.all_input_nodes)
    return [(str(node.target), serves(node)) for node in (*gm.graph.nodes, *called) if communicates(node)]


def started(gm: GraphModule) -> list[Op]:
    """The collectives that a graph starts, in order, behind the passes of the last stage: what each is, over which processes, and for
    which parameters. Groups of processes are numbered as they come, since their names may differ between processes; an op has the name that
    its overloads share, since a process with fewer rows than others may have packed them. Those of the model itself are left out."""
    groups: dict[str, int] = {}
    found = []
    for node in gm.graph.nodes:
        if node.target in STARTS and "part_of" in node.meta:
            over = groups.setdefault(str(node.args[-1]), len(groups))
            found.append((f"{node.target.overloadpacket} {over}", serves(node)))
        elif communicates(node):
            found.append((str(node.target), serves(node)))
    return found


def serves(node: Node) -> tuple[str, ...]:
    """The names of the parameters that a collective, or what becomes some, is for."""
    at = _NAMES.get(node.target)
    return node.meta.get("serves") or (() if at is None else (str(node.args[at]),))


def communicates(node: Node) -> bool:
    """Whether a node is an op of ours that becomes collectives, or has some in it."""
    if is_call(node, UNSHARD, UNSHARD_BUCKET):
        return Layout.parse(str(node.args[2 if is_call(node, UNSHARD) else 4])).sharded
    return is_call(node, REPLICATE_BUFFERS, *sparse.NAMES, REDUCE_GRAD, REDUCE_BUCKET, MEAN_LOW_RANK, GATHER_EARLY)


def gathers(node: Node) -> bool:
    """Whether a node is a gather of parameters; a model may have some of its own."""
    return is_call(node, *GATHERS) and "unshard" in node.meta.get("part_of", "") and not gathers_part(node)


def gathers_part(node: Node) -> bool:
    """Whether a node is the gather of a saved value."""
    return is_call(node, *GATHERS) and node.meta.get("part_of") == str(UNSHARD_PART)


def reduces(node: Node) -> bool:
    """Whether a node is a collective of gradients: where they are compressed, a gather may be too."""
    return is_call(node, *GATHERS, *REDUCTIONS) and any(name in node.meta.get("part_of", "") for name in ("reduce", "mean_low_rank"))


def calls(gm: GraphModule, *targets: Any) -> list[Node]:
    """The calls of these ops, in graph order."""
    return [n for n in gm.graph.nodes if is_call(n, *targets)]


def body(gm: GraphModule, name: Any) -> GraphModule:
    """The graph inside this one that `name` calls."""
    found = gm.get_submodule(str(name))
    assert isinstance(found, GraphModule)
    return found


def region(gm: GraphModule, call: Node) -> GraphModule:
    """The graph that the call of a higher-order operator takes first."""
    where = call.args[0]
    assert isinstance(where, Node)
    return body(gm, where.target)


def graph_named(gm: GraphModule, node: Node) -> GraphModule | None:
    """The graph that a get_attr node names, if it names one."""
    found = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
    return found if isinstance(found, GraphModule) else None


def nested(gm: GraphModule) -> list[GraphModule]:
    """The graphs that this one's nodes name, and all inside of those; each once, and behind what is inside of it."""
    found = (graph_named(gm, node) for node in gm.graph.find_nodes(op="get_attr"))
    return list(dict.fromkeys(graph for inner in found if inner is not None for graph in (*nested(inner), inner)))


def positions(graph: Graph) -> dict[Node, int]:
    """Where each node stands."""
    return {node: i for i, node in enumerate(graph.nodes)}


def dependents(gm: GraphModule, nodes: Iterable[Node]) -> list[Node]:
    """All that depends on these nodes, themselves and the output left out, in graph order."""
    seeds, found = set(nodes), set[Node]()
    todo = [user for node in seeds for user in node.users]
    while todo:
        node = todo.pop()
        if node not in found and node not in seeds and node.op != "output":
            found.add(node)
            todo.extend(node.users)
    return [node for node in gm.graph.nodes if node in found]


def sources(nodes: Iterable[Node]) -> set[Node]:
    """All that these nodes are made of, inputs of the graph among it; themselves as far as one is made of another."""
    return reached((source for node in nodes for source in node.all_input_nodes), lambda node: node.all_input_nodes)


def reached(nodes: Iterable[Node], steps: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """These nodes, those that `steps` leads to from each, those that it leads to from these, and so on."""
    found = set(nodes)
    todo = list(found)
    while todo:
        more = set(steps(todo.pop())) - found
        found |= more
        todo.extend(more)
    return found


def made_by(node: Node) -> Node:
    """The operation whose result it is, or is a view of."""
    while node.target is operator.getitem or torch_internals.is_view(node.target):
        node = node.args[0]  # type: ignore[assignment]
    return node


def follows_another(gather: Node) -> bool:
    """Whether a gather takes what another one brought, between nodes."""
    return any(gathers(source) for source in sources([gather]))


def sources_behind(nodes: Iterable[Node], limit: Node, at: dict[Node, int]) -> list[Node]:
    """These nodes and what they are made of, as far as it stands behind `limit`, in graph order. at: `positions`."""
    found, todo = set[Node](), list(nodes)
    while todo:
        node = todo.pop()
        if node.op != "placeholder" and node not in found and at[node] > at[limit]:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return sorted(found, key=at.__getitem__)


def op_counts(gm: GraphModule) -> dict[str, int]:
    """How often each op is called, for diffs."""
    counts: dict[str, int] = {}
    for node in gm.graph.nodes:
        if node.op.startswith("call_"):
            key = str(node.target)
            counts[key] = counts.get(key, 0) + 1
    return counts


def example(node: Node) -> Any:
    """The fake value of a node."""
    return node.meta["val"]


def inputs_at(joint: GraphModule, positions: Collection[int]) -> list[Node]:
    """The inputs of a joint graph that are these of the graph that was traced."""
    return [n for n in joint.graph.find_nodes(op="placeholder") if torch_internals.input_position(n) in positions]


def fill_examples(gm: GraphModule) -> None:
    """Computes the fake values that are missing: torch's partitioner adds calls without, around random ops that
    backward repeats; AOTAutograd those that check a size, which have none."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or "val" in node.meta:
            continue
        if torch_internals.gives_nothing(node.target):
            node.meta["val"] = None
        else:
            args, kwargs = map_arg((node.args, node.kwargs), example)
            with _fake_mode(gm.graph.nodes):
                node.meta["val"] = node.target(*args, **kwargs)


def _fake_mode(nodes: Iterable[Node]) -> Any:
    for node in nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if hasattr(item, "fake_mode"):
                return item.fake_mode
    raise AssertionError("a graph without fake values")


def recompute_views(joint: GraphModule) -> None:
    """Tags the views of a joint graph, so that none is saved beside what it is a view of."""
    for node in joint.graph.nodes:
        if node.op == "call_function" and torch_internals.is_view(node.target):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def traced(node: Node, define: Callable[..., Any]) -> GraphModule:
    """The ops that `define` makes of a call's arguments. Only tensors become inputs of the traced function; the rest are
    constants of it."""
    flat, spec = torch.utils._pytree.tree_flatten((node.args, node.kwargs))
    tensors = _tensors(node)

    def on_tensors(*values: torch.Tensor) -> Any:
        given = iter(values)
        filled = [next(given) if isinstance(a, Node) else a for a in flat]
        args, kwargs = torch.utils._pytree.tree_unflatten(filled, spec)
        return define(*args, **kwargs)

    with _fake_mode(tensors or node.graph.nodes):
        made = make_fx(on_tensors, decomposition_table={_TO_COPY: _cast})(*map(_by_itself, map(example, tensors)))
    made.graph.eliminate_dead_code()
    return made


def _by_itself(value: Any) -> Any:
    """Calls that were inlined from one trace have the same fake tensor for their results, which a trace would take for one input."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def _cast(value: torch.Tensor, *, dtype: torch.dtype, **_: Any) -> torch.Tensor:
    """In the form that Inductor takes."""
    return _CONVERT(value, dtype)  # type: ignore[no-any-return]


# Graphs that are run op by op call these instead: torch's own runs in Python, which takes longer than the copy of a small tensor.
DIRECT: dict[Any, Callable[..., torch.Tensor]] = {_CONVERT: lambda value, dtype: torch.ops.aten._to_copy.default(value, dtype=dtype)}


def inline(gm: GraphModule, node: Node, ops: GraphModule) -> None:
    """Puts the ops, traced of this call or one like it, in the place of it. Each remembers what it was a part of."""
    with gm.graph.inserting_before(node):
        copies = dict(zip(ops.graph.find_nodes(op="placeholder"), _tensors(node)))
        result: Any = gm.graph.graph_copy(ops.graph, copies)
    for copied in set(copies.values()) - set(_tensors(node)):
        copied.meta["part_of"], copied.meta["part"] = str(node.target), node.name
        copied.meta["group"] = node.meta.get("group", node.name)
        copied.meta["serves"] = serves(node)
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
        gm.graph.erase_node(node)
    else:
        _take_items(gm, node, result)


def _take_items(gm: GraphModule, call: Node, results: Sequence[Node]) -> None:
    """Each of these takes the place of that item of what the call gave; the call goes."""
    for item in list(call.users):
        assert item.target is operator.getitem
        item.replace_all_uses_with(results[item.args[1]])  # type: ignore[index]
        gm.graph.erase_node(item)
    gm.graph.erase_node(call)


def given_to_backward(call: Node) -> list[Any]:
    """What the backward of a block is given by this call of it, in order; None in the place of gradients that are not there."""
    saved, tangents, sizes, _ = call.args
    return [*sizes, *saved, *tangents]  # type: ignore[misc]


def block_of(node: Node, stacks: Collection[str]) -> str | None:
    """The block of the model that a node belongs to ("model.layers.3"), by the module that called it. stacks: the plan's."""
    return choose_blocks.block_of(f"{torch_internals.module_path(node)}.", stacks)


def inline_body(gm: GraphModule, call: Node, body: GraphModule, given: Sequence[Node]) -> None:
    """Puts the operations of a graph that is called in front of the call, which goes. They belong to the call's module,
    where those of the body belong to the one that it was traced for."""
    stack = call.meta.get("nn_module_stack", {})
    names = _adopt(gm, body, call.name, stack)
    copies = dict(zip(body.graph.find_nodes(op="placeholder"), given))
    with gm.graph.inserting_before(call):
        results: Any = gm.graph.graph_copy(body.graph, copies)
    for copied in set(copies.values()) - set(given):
        copied.meta["nn_module_stack"] = stack
        if copied.op in ("get_attr", "call_module"):
            copied.target = names[str(copied.target)]
    for item in call.users:  # two calls' results are not the same memory
        results[item.args[1]].meta["example_value"] = item.meta["example_value"]  # type: ignore[index]
    _take_items(gm, call, results)


def _adopt(gm: GraphModule, body: GraphModule, prefix: str, stack: Any) -> dict[str, str]:
    """What the body has by name, made the graph's own; the new names by the old. stack: the modules that graphs among it belong to."""
    names = {}
    for name, value in (*body.named_children(), *body.named_parameters(recurse=False), *body.named_buffers(recurse=False)):
        names[name] = f"{prefix}_{name}"
        setattr(gm, names[name], _copied(value, stack) if isinstance(value, GraphModule) else value)
    return names


def _copied(gm: GraphModule, stack: Any) -> GraphModule:
    """A graph for one call alone, since passes change it, and so all graphs inside of it."""
    made = GraphModule(gm, copy.deepcopy(gm.graph))
    made.meta.update(gm.meta)
    for node in made.graph.nodes:
        if node.op != "output":
            node.meta["nn_module_stack"] = stack
    for name, inner in list(made.named_children()):
        if isinstance(inner, GraphModule):
            setattr(made, name, _copied(inner, stack))
    return made


def duplicate(gm: GraphModule) -> GraphModule:
    """A copy of a graph and its nodes, for what changes them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 of its own tree specs
        return copy.deepcopy(gm)


def described(value: Any) -> str:
    """Shape, strides, dtype and device of a tensor: all of its value that code depends on."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device} {value.requires_grad}"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(described, value))
    return str(value)


def arguments_text(arguments: Any, of: Callable[[Node], str]) -> str:
    """A call's arguments as text, each node as `of` has it."""
    return str(map_arg(arguments, lambda node: _Text(of(node))))


class _Text(str):
    """A text that stands without quotes in the text of a tuple."""

    def __repr__(self) -> str:
        return str(self)


def _tensors(node: Node) -> list[Node]:
    return [a for a in torch.utils._pytree.tree_leaves((node.args, node.kwargs)) if isinstance(a, Node)]
