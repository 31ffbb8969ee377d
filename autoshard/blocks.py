"""Compiles the blocks that `outline_blocks` made, each once, and makes their calls ops of the graph."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import Tensor
from torch.fx import GraphModule, Node

from autoshard import torch_internals
from autoshard.cost_model.sizes import OF_TORCH
from autoshard.ops.block import Block, Length, Value, register
from autoshard.passes import graphs
from autoshard.passes.base import Phase
from autoshard.passes.makings import makings_of_inputs
from autoshard.passes.outline_blocks import is_block
from autoshard.passes.recompute import is_repeatable


@dataclass(frozen=True)
class Halves:
    """A block's graphs. forward gives the block's `results` results, then what is saved for backward, which takes saved
    sizes, saved tensors and tangents; None where nothing is differentiated."""

    forward: GraphModule
    backward: GraphModule | None
    results: int


Differentiate = Callable[[GraphModule, list[Any]], Halves]
Generate = Callable[[GraphModule, Phase], Callable[[list[Any]], Any]]
Compile = Callable[[str, GraphModule], Block | None]


def compile_blocks(gm: GraphModule, compile_one: Compile) -> list[Block]:
    """Every outlined block compiled, its calls made calls of `autoshard::block`; the graph works as long as somebody
    holds the list. compile_one: of a block's name and graph; None where no op can stand for it (see `compile_block`). The
    operations of such a block take their old place; if it is one that repeats, those of all."""
    calls: dict[str, list[Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if is_block(node):
            calls[str(node.target)].append(node)
    made = {}
    for name in sorted(calls, key=lambda name: -len(calls[name])):
        block = compile_one(name, graphs.body(gm, name))
        if block is not None:
            made[name] = block
        elif len(calls[name]) > 1:
            made.clear()
            break
    for name, nodes in calls.items():
        if name in made:
            _call_ops(gm, nodes, made[name], register(name, made[name]))
        else:
            _inline(gm, nodes, graphs.body(gm, name))
        delattr(gm, name)
    gm.recompile()
    return list(made.values())


def _inline(gm: GraphModule, nodes: list[Node], body: GraphModule) -> None:
    for node in nodes:
        graphs.inline_body(gm, node, body, node.all_input_nodes)


def _call_ops(gm: GraphModule, nodes: list[Node], block: Block, key: str) -> None:
    for number, node in enumerate(nodes):
        tensors = [a for a, v in zip(node.args, block.inputs) if v.kind == "input"]
        sizes = [a for a, v in zip(node.args, block.inputs) if v.kind == "size"]
        with gm.graph.inserting_before(node):
            call = gm.graph.call_function(graphs.BLOCK, (tensors, sizes, key, number))
        call.meta.update(node.meta)
        node.replace_all_uses_with(call)
        gm.graph.erase_node(node)


def compile_block(body: GraphModule, differentiate: Differentiate, generate: Generate) -> Block | None:
    """An outlined block compiled; None where it changes an input, or its results lie in the memory of others."""
    given = [n.meta["example_value"] for n in body.graph.find_nodes(op="placeholder")]
    results = [n.meta["example_value"] for n in body.graph.output_node().all_input_nodes]
    if torch_internals.share_memory(results, [t for t in given if isinstance(t, Tensor)]):
        return None
    tracing = torch_internals.Tracing.here()
    halves = differentiate(body, [tracing.like(value) for value in given])
    if halves.results != len(results) or _changes_inputs(halves.forward):
        return None
    inputs = _inputs(given)
    if halves.backward is None:
        return Block(inputs, _examples(halves.forward), len(results), generate(halves.forward, "inference"))
    tangents = tuple(i for i, r in enumerate(results) if r.requires_grad)
    return _differentiable(inputs, tangents, halves, generate)


def _changes_inputs(forward: GraphModule) -> bool:
    return bool(graphs.calls(forward, graphs.WRITE))


def _inputs(given: Sequence[Any]) -> tuple[Value, ...]:
    """Tensors and sizes are counted apart."""
    counts = {"input": 0, "size": 0}
    found = []
    for value in given:
        kind = "input" if isinstance(value, Tensor) else "size"
        found.append(Value(kind, counts[kind]))  # type: ignore[arg-type]
        counts[kind] += 1
    return tuple(found)


def _examples(gm: GraphModule) -> tuple[Tensor, ...]:
    return tuple(n.meta["val"] for n in gm.graph.output_node().args[0])  # type: ignore[union-attr]


def _differentiable(
    inputs: tuple[Value, ...], tangents: tuple[int, ...], halves: Halves, generate: Generate
) -> Block | None:
    forward, backward = halves.forward, halves.backward
    assert backward is not None
    saved = _keep_new(forward, halves.results, inputs)
    arguments = backward.graph.find_nodes(op="placeholder")
    first = len(arguments) - len(saved) - len(tangents)
    if first < 0:
        return None
    known = _Sizes(forward, inputs, arguments[first : first + len(saved)], arguments[first + len(saved) :])
    sizes = [known.find(n.meta["val"]) for n in arguments[:first]]
    if None in sizes or not all(t.meta["val"].is_contiguous() for t in known.tangents):
        return None
    gradients = _keep_gradients(backward, inputs)
    outputs: Sequence[Node] = forward.graph.output_node().args[0]  # type: ignore[assignment]
    makings = tuple(map(makings_of_inputs(forward).get, outputs))  # generating code may change the graph
    repeats = all(is_repeatable(n) for n in forward.graph.nodes if n.op == "call_function")
    return Block(
        inputs=inputs,
        outputs=_examples(forward),
        results=halves.results,
        forward=generate(forward, "forward"),
        backward=generate(backward, "backward"),
        sizes=tuple(s for s in sizes if s is not None),
        saved=tuple(saved),
        tangents=tangents,
        gradients=gradients,
        gradient_examples=_examples(backward),
        repeats=repeats,
        makings=makings,
    )


def _keep_new(forward: GraphModule, results: int, inputs: tuple[Value, ...]) -> list[Value]:
    """Leaves the forward graph its results and, of what is saved, the tensors that are neither inputs nor results; says
    where everything that is saved is found then."""
    output = forward.graph.output_node()
    values: list[Node] = list(output.args[0])  # type: ignore[arg-type]
    saved = [n for n in values[results:] if isinstance(n.meta["val"], Tensor)]
    places = dict(zip(forward.graph.find_nodes(op="placeholder"), inputs))
    kept = values[:results] + [n for n in dict.fromkeys(saved) if n not in places and n not in values[:results]]
    output.args = (tuple(kept),)
    forward.recompile()
    return [places[n] if n in places else Value("output", kept.index(n)) for n in saved]


def _keep_gradients(backward: GraphModule, inputs: tuple[Value, ...]) -> tuple[int, ...]:
    """Leaves the backward graph the gradients that there are; their positions among the input tensors."""
    output = backward.graph.output_node()
    gradients = [(n, v.index) for n, v in zip(output.args[0], inputs) if isinstance(n, Node)]  # type: ignore[arg-type]
    output.args = (tuple(n for n, _ in gradients),)
    backward.recompile()
    return tuple(index for _, index in gradients)


@dataclass(frozen=True)
class _Sizes:
    """Where the graph around a block knows the sizes from that the block's backward takes."""

    forward: GraphModule
    inputs: tuple[Value, ...]
    saved: list[Node]
    tangents: list[Node]

    def find(self, size: Any) -> Length | None:
        """A size is told by its expression, the same in both graphs; what is none of theirs is computed from them."""
        place = self._place(str(size))
        if place is not None:
            return Length((place,), lambda length: length)
        symbols = sorted(size.node.expr.free_symbols, key=str)
        places = tuple(p for p in map(self._place, map(str, symbols)) if p is not None)
        compute = sympy.lambdify(symbols, size.node.expr, [OF_TORCH])
        return Length(places, compute) if len(places) == len(symbols) and _is_known(compute, len(places)) else None

    def _place(self, size: str) -> Value | None:
        for place, value in zip(self.forward.graph.find_nodes(op="placeholder"), self.inputs):
            if value.kind == "size" and str(place.meta["val"]) == size:
                return value
        for kind, nodes in (("saved", self.saved), ("tangent", self.tangents)):
            for index, node in enumerate(nodes):
                lengths = [str(length) for length in node.meta["val"].shape]
                if size in lengths:
                    return Value(kind, index, lengths.index(size))  # type: ignore[arg-type]
        return None


def _is_known(compute: Callable[..., Any], count: int) -> bool:
    """Whether all functions of a size have a name here; of so many sizes it is computed."""
    with contextlib.suppress(ArithmeticError):  # of these numbers
        try:
            compute(*[1] * count)
        except NameError:
            return False
    return True
