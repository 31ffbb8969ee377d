"""Puts a step together for the simulators: forward, backward, what exists before, and the optimizer step at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node

from autoshard.cost_model.program import Body, Category, Program, Value, Writer, pieces_of
from autoshard.cost_model.sizes import Open, Size, bytes_of


@dataclass(frozen=True)
class Held:
    """What lies there before a step and after it. categories: of forward's inputs, by position; "inputs" where absent.
    optimizer: bytes of its state; scratch: bytes that its step takes for a while. apart: bytes of parameters that the
    graphs do not use. moved: bytes that each of the optimizer's operations reads, and writes elsewhere. whole, sharded: how many
    parameters are trained, those of which a process has all and those of which it has rows."""

    categories: Mapping[int, Category]
    optimizer: Size
    scratch: Size
    apart: Size = 0
    moved: tuple[tuple[int, int], ...] = ()
    whole: int = 0
    sharded: int = 0


def program_of(
    forward: GraphModule,
    backward: GraphModule | None,
    results: int,
    saved: Mapping[int, int],
    held: Held,
    body_of: Callable[[Node], Body | None],
    scatters: bool = True,
    whole: bool = True,
    open: Open | None = None,
) -> Program:
    """The program of one step, whose last position is the optimizer's. whole: forward and backward are compiled as they
    are; else the blocks that they call. open: the sizes that the graphs leave open."""
    writer = Writer(body_of, scatters, open)
    program = writer.program
    outputs = writer.write(forward, "forward", _inputs(program, forward, held), whole)
    program.keep(outputs[:results], len(program.operations) - 1)
    for piece in pieces_of(outputs[:results]):
        program.pieces[piece].seen = True
    middle = len(program.operations)
    if backward is not None:
        given = _backward_inputs(program, backward, {b: outputs[f] for f, b in saved.items()})
        gradients = writer.write(backward, "backward", given, whole)
        _leave(program, gradients, held)
    end = len(program.operations)
    for made in program.pieces:
        if made.made == -1:
            made.last = end
        elif made.made < middle <= made.last and made.category == "temporaries":
            made.category = "activations"
    program.add(held.optimizer, "optimizer", -1, end, "optimizer")
    program.add(held.apart, "parameters", -1, end, "unused")
    program.add(held.scratch, "temporaries", end, end, "optimizer step")
    return program


def _inputs(program: Program, forward: GraphModule, held: Held) -> list[Value]:
    values: list[Value] = []
    for i, node in enumerate(forward.graph.find_nodes(op="placeholder")):
        example = node.meta["val"]
        made = isinstance(example, Tensor)
        values.append(program.add(bytes_of(example), held.categories.get(i, "inputs"), -1, 0, node.name) if made else None)
    return values


def _backward_inputs(program: Program, backward: GraphModule, saved: Mapping[int, Value]) -> list[Value]:
    """What forward saved, and tangents, which autograd makes."""
    at, values = len(program.operations), list[Value]()
    for i, node in enumerate(backward.graph.find_nodes(op="placeholder")):
        example = node.meta["val"]
        if i in saved:
            values.append(saved[i])
        elif isinstance(example, Tensor):
            values.append(program.add(bytes_of(example), "temporaries", at, at, node.name, seen=True))
        else:
            values.append(None)
    return values


def _leave(program: Program, gradients: Sequence[Value], held: Held) -> None:
    """What backward returns stays, as gradients, until the optimizer has stepped; but for changes of what compression keeps, which
    are made when it returns."""
    for i, value in enumerate(gradients):
        if isinstance(value, int) and program.pieces[value].made >= 0:
            change = held.categories.get(i) == "compression"
            program.pieces[value].category = "compression" if change else "gradients"
            program.keep(value, len(program.operations) - change)
