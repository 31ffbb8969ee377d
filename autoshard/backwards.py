"""The programs of one backward graph: one for each set of results that are differentiated. See [Note: Results that nobody uses] in
passes/leave_out.py. What gradients were held for it ([Note: Held gradients] in runtime/holder.py) its first run adds, and none behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Graph, GraphModule

from autoshard import torch_internals
from autoshard.passes import graphs
from autoshard.passes.leave_out import leave_out, without
from autoshard.runtime.holder import spend

HELD = "held"  # of an input of a backward graph: whether it is a held gradient

Boxed = Callable[[list[Any]], Any]
Generate = Callable[[GraphModule, Sequence[int]], Boxed]


class Backwards:
    """Runs a backward graph, whose tangents may be None. generate: code for a graph that lacks these inputs, called when such gradients
    first come, in the compilation that has ended by then; for one result at once. A loop may differentiate another few of many results
    in each step: beyond `LIMIT` sets of them all are differentiated, with zeros in the place of what is not there. patches: see
    `torch_internals.entering_again`."""

    LIMIT = 4

    def __init__(self, graph: GraphModule, generate: Generate, patches: Mapping[str, Any] | None = None) -> None:
        self._graph, self._generate, self._entered = graph, generate, torch_internals.entering_again(patches or {})
        self._given, inputs = Graph(), graph.graph.find_nodes(op="placeholder")
        for node in inputs:
            self._given.node_copy(node)
        self._held = tuple(i for i, node in enumerate(inputs) if node.meta.get(HELD))
        self._tangents = tuple(inputs.index(n) for n in torch_internals.tangents(graph.graph))
        self._programs: dict[tuple[int, ...], Boxed] = {}
        self._zeros: dict[int, GraphModule] = {}
        self._boxed_call = True
        self._most = self.LIMIT
        if len(self._tangents) == 1:
            self._most, self._programs[()] = 1, generate(graph, ())  # which has the graph for itself

    def __call__(self, given: list[Any]) -> Any:
        """The gradients of the graph's inputs. given: what it takes, in a list that is emptied."""
        for i in self._held:
            given[i] = spend(given[i])
        absent = tuple(i for i in self._tangents if given[i] is None)
        if absent and absent not in self._programs and len(self._programs) >= self._most:
            self._fill(given, absent)
            absent = ()
        return self._program(absent)(present(given, absent))

    def _program(self, absent: tuple[int, ...]) -> Boxed:
        if absent not in self._programs:
            with self._entered():
                self._programs[absent] = self._generate(without(self._graph, absent), absent)
        return self._programs[absent]

    def _fill(self, given: list[Any], absent: Sequence[int]) -> None:
        others = present(list(given), self._tangents)
        for i in absent:
            if i not in self._zeros:
                self._zeros[i] = zeros_for(self._given, i)
            given[i] = self._zeros[i](*others)


def note_held(backward: GraphModule) -> None:
    """Marks the inputs of a backward graph that are held gradients."""
    for node in graphs.calls(backward, graphs.COMPLETE_GRAD):
        node.args[1].meta[HELD] = True  # type: ignore[union-attr]


def present(given: list[Any], absent: Sequence[int]) -> list[Any]:
    """`given`, which loses what is not there."""
    for i in reversed(absent):
        del given[i]
    return given


def zeros_for(given: Graph, tangent: int) -> GraphModule:
    """Makes zeros for a tangent of a backward graph, of its inputs that are none, among which all open sizes are. given: its inputs."""
    graph = Graph()
    inputs = [graph.node_copy(node) for node in given.find_nodes(op="placeholder")]
    graph.output(inputs[tangent])
    gm = GraphModule({}, graph)
    leave_out(gm, torch_internals.tangents(graph))
    return gm
