"""The programs of one backward graph: one for each set of results that are differentiated. See [Note: Results that nobody uses] in
passes/leave_out.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule

from autoshard import torch_internals
from autoshard.passes import graphs
from autoshard.passes.leave_out import leave_out

Boxed = Callable[[list[Any]], Any]
Generate = Callable[[GraphModule, Sequence[int]], Boxed]


class Backwards:
    """Runs a backward graph, whose tangents may be None. generate: code for a graph that lacks these inputs; called when such gradients
    first come, and at once where there is one result only. A loop may differentiate another few of many results in each step: of the
    fifth set on, all are, with zeros in the place of what is not there."""

    LIMIT = 4

    def __init__(self, graph: GraphModule, generate: Generate) -> None:
        self._graph, self._generate = graph, generate
        inputs = graph.graph.find_nodes(op="placeholder")
        self._tangents = [inputs.index(n) for n in torch_internals.tangents(graph.graph)]
        self._programs: dict[tuple[int, ...], Boxed] = {}
        self._boxed_call = True
        if len(self._tangents) == 1:
            self._program(())

    def __call__(self, given: list[Any]) -> Any:
        """The gradients of the graph's inputs. given: what it takes, in a list that is emptied."""
        return self._program(tuple(i for i in self._tangents if given[i] is None))(given)

    def _program(self, absent: tuple[int, ...]) -> Boxed:
        if absent not in self._programs:
            several = len(self._programs) >= self.LIMIT
            self._programs[absent] = self._filled(absent) if several and absent else self._without(absent)
        return self._programs[absent]

    def _without(self, absent: tuple[int, ...]) -> Boxed:
        graph = graphs.duplicate(self._graph)
        inputs = graph.graph.find_nodes(op="placeholder")
        leave_out(graph, [inputs[i] for i in absent])
        program = self._generate(graph, absent)

        return lambda given: program(present(given, absent))

    def _filled(self, absent: tuple[int, ...]) -> Boxed:
        zeros, whole = zeros_for(self._graph, absent), self._program(())

        def run(given: list[Any]) -> Any:
            for i, zero in zip(absent, zeros(*present(list(given), absent))):
                given[i] = zero
            return whole(given)

        return run


def present(given: list[Any], absent: Sequence[int]) -> list[Any]:
    """`given`, which loses what is not there."""
    for i in reversed(absent):
        del given[i]
    return given


def zeros_for(backward: GraphModule, absent: Sequence[int]) -> GraphModule:
    """Makes these inputs of a backward graph, all zeros, of its other inputs, among which all open sizes are."""
    graph = Graph()
    inputs = [graph.node_copy(node) for node in backward.graph.find_nodes(op="placeholder")]
    graph.output(tuple(made := [inputs[i] for i in absent]))
    gm = GraphModule({}, graph)
    leave_out(gm, made)
    return gm
