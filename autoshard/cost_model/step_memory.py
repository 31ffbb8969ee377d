"""Puts a step together for the simulators: forward, backward, what exists before, and the optimizer step at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from autoshard import torch_internals
from autoshard.cost_model.program import Body, Category, Listing, Program, Value, Writer, pieces_of
from autoshard.cost_model.sizes import Open, Size, bytes_of


@dataclass(frozen=True)
class Held:
    """What lies there before a step and after it. categories: of forward's inputs, by position; "inputs" where absent.
    optimizer: bytes of its state; scratch: of each tensor that its step has for a while. apart: bytes of parameters that the
    graphs do not use. moved: bytes that each of the optimizer's operations reads, and writes elsewhere. whole, sharded: how many
    parameters are trained, those of which a process has all and those of which it has rows. by_itself: of a block, whose tangents are
    what others give. earlier: bytes of gradients of earlier batches, to which those of this one are added. later: of gradients that graphs
    behind a graph break leave before this one's backward."""

    categories: Mapping[int, Category]
    optimizer: Size
    scratch: tuple[int, ...] = ()
    apart: Size = 0
    moved: tuple[tuple[int, int], ...] = ()
    whole: int = 0
    sharded: int = 0
    by_itself: bool = False
    earlier: Size = 0
    later: Size = 0


@dataclass(frozen=True)
class Listed:
    """A step's graphs. backward: None where nothing is trained. results: how many of what forward gives are the model's own. saved:
    which of the others is which of backward's inputs. whole: both are compiled as they are; else the blocks that they call."""

    forward: Listing
    backward: Listing | None
    results: int
    saved: Mapping[int, int]
    whole: bool = True

    @property
    def repeated(self) -> set[Node]:
        """What both halves call, where they are lists of one graph."""
        return set(self.forward.calls) & set(self.backward.calls if self.backward else ())


def _is_a_loss(result: object) -> bool:
    """Of one number, on which the loop calls backward, and so has it until that is over."""
    value = result.meta.get("val") if isinstance(result, Node) else None
    return isinstance(value, Tensor) and not value.dim()


def program_of(
    listed: Listed, held: Held, body_of: Callable[[Node], Body | None], scatters: bool = True, open: Open | None = None
) -> Program:
    """The program of one step, whose last position is the optimizer's. body_of, scatters: see `Writer`. open: the sizes that the
    graphs leave open."""
    writer = Writer(body_of, scatters, open)
    program = writer.program
    outputs = writer.write(listed.forward, "forward", _inputs(program, listed.forward, held), listed.whole)
    results = outputs[: listed.results]
    program.keep(results, len(program.operations) - 1)
    for piece in pieces_of(results):
        program.pieces[piece].seen = True
    middle = len(program.operations)
    if listed.backward is not None:
        given = _backward_inputs(program, listed.backward, {b: outputs[f] for f, b in listed.saved.items()})
        gradients = writer.write(listed.backward, "backward", given, listed.whole)
        if torch_internals.HOLDS_TANGENTS and not held.by_itself:
            program.keep([value for i, value in enumerate(given) if i not in listed.saved.values()], len(program.operations) - 1)
        program.keep([v for v, node in zip(outputs, listed.forward.gives[: listed.results]) if _is_a_loss(node)], len(program.operations) - 1)
        _leave(program, gradients, held)
    end = len(program.operations)
    for made in program.pieces:
        if made.made == -1:
            made.last = end
        elif made.made < middle <= made.last and made.category == "temporaries":
            made.category = "activations"
    program.add(held.optimizer, "optimizer", -1, end, "optimizer")
    program.add(held.apart, "parameters", -1, end, "unused")
    if held.later:
        program.add(held.later, "gradients", middle, end, "behind a graph break")
    if held.earlier:
        program.add(held.earlier, "gradients", -1, end - 1, "earlier batches")
    for size in held.scratch:
        program.add(size, "temporaries", end, end, "optimizer step")
    return program


def _inputs(program: Program, forward: Listing, held: Held) -> list[Value]:
    values: list[Value] = []
    for i, node in enumerate(forward.inputs):
        example = node.meta["val"]
        made = isinstance(example, Tensor)
        values.append(program.add(bytes_of(example), held.categories.get(i, "inputs"), -1, 0, node.name) if made else None)
    return values


def _backward_inputs(program: Program, backward: Listing, saved: Mapping[int, Value]) -> list[Value]:
    """What forward saved, and tangents, which autograd makes."""
    at, values = len(program.operations), list[Value]()
    for i, node in enumerate(backward.inputs):
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
