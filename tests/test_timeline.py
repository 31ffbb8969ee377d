"""Kernels and collectives on their streams, and who waits for whom."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph

from autoshard.cost_model import timeline
from autoshard.cost_model.program import Operation, Program
from autoshard.cost_model.timeline import Link, Sharing


def test_collectives_hide_behind_compute_until_they_are_waited_for() -> None:
    graph, c10d = Graph(), torch.ops._c10d_functional
    started = graph.call_function(c10d.all_reduce.default, ())
    wait = graph.call_function(c10d.wait_tensor.default, (started,))
    kernel = graph.call_function(torch.ops.aten.relu.default, ())
    operations = [
        Operation(started, "forward", (0,), (1,)),
        Operation(kernel, "forward", (2,), (3,)),
        Operation(wait, "forward", (1,), ()),
    ]
    for compute, exposed in ((3.0, 2.0), (7.0, 0.0)):
        line = timeline.simulate(Program(operations), lambda _, c=compute: c, lambda _: 5.0)
        assert (line.seconds, line.exposed, line.communication) == (max(compute, 5.0), exposed, 5.0)
    slowed = timeline.simulate(Program(operations), lambda _: 7.0, lambda _: 5.0, timeline.Sharing(interference=0.4))
    assert slowed.seconds == 7.0 + 0.4 * 5.0
    for compute, exposed in ((2.0, 4.0), (12.0, 0.0)):  # at half its rate the collective is through after 10 seconds
        dragged = timeline.simulate(Program(operations), lambda _, c=compute: c, lambda _: 5.0, timeline.Sharing(drag=0.5))
        assert (dragged.exposed, dragged.communication) == (exposed, 5.0)
        assert next(s.end for s in dragged.spans if s.stream == "link") == (6.0 if compute == 2.0 else 10.0)


def test_a_link_at_rest_begins_later_and_a_busy_one_does_not() -> None:
    graph, reduce = Graph(), torch.ops._c10d_functional.all_reduce.default
    first, second = (Operation(graph.call_function(reduce, ()), "forward", (), (i,)) for i in range(2))
    kernel = Operation(graph.call_function(torch.ops.aten.relu.default, ()), "forward", (2,), (3,))
    for between, end in ((1.0, 11.5), (5.0, 11.5), (5.5, 12.0), (7.0, 13.5)):
        line = timeline.simulate(Program([first, kernel, second]), lambda _, c=between: c, lambda _: 5.0, timeline.Sharing(wake=1.5))
        assert max(span.end for span in line.spans if span.stream == "link") == end


def test_asking_for_a_collective_takes_compute_s_time() -> None:
    """The collective may begin in it."""
    graph, c10d = Graph(), torch.ops._c10d_functional
    started = graph.call_function(c10d.all_reduce.default, ())
    wait = Operation(graph.call_function(c10d.wait_tensor.default, (started,)), "forward", (1,), ())
    kernel = Operation(graph.call_function(torch.ops.aten.relu.default, ()), "forward", (2,), (3,))
    program = Program([Operation(started, "forward", (0,), (1,)), kernel, wait])
    for compute, step in ((1.0, 5.0), (4.0, 6.0)):
        line = timeline.simulate(program, lambda _, c=compute: c, lambda _: 5.0, issue=lambda _: 2.0)
        assert (line.seconds, line.compute, line.exposed) == (step, compute + 2.0, step - compute - 2.0)


def test_what_goes_inside_of_nodes_and_what_goes_between_them_have_links_of_their_own() -> None:
    graph, reduce = Graph(), torch.ops._c10d_functional.all_reduce.default
    first, second = (Operation(graph.call_function(reduce, ()), "forward", (), (i,)) for i in range(2))
    for link, end in (("inside", 10.0), ("between", 5.0)):
        line = timeline.simulate(
            Program([first, second]), lambda _: 0.0, lambda _: 5.0, link_of=lambda o, x=link: "inside" if o is first else x
        )
        assert max(span.end for span in line.spans) == end


def test_what_the_transport_holds_is_there_while_its_collective_is_carried_out() -> None:
    """Two gathers are issued at once; the second is carried out when the first is through."""
    graph, c10d = Graph(), torch.ops._c10d_functional
    gathers = [graph.call_function(c10d.all_gather_into_tensor.default, ()) for _ in range(2)]
    waits = [graph.call_function(c10d.wait_tensor.default, (gather,)) for gather in gathers]
    kernel = graph.call_function(torch.ops.aten.relu.default, ())
    calls = [(gathers[0], (), (0,)), (gathers[1], (), (1,)), (kernel, (), (2,)), (waits[0], (0,), ()), (kernel, (), (3,)), (waits[1], (1,), ())]
    program = Program([Operation(node, "forward", reads, makes) for node, reads, makes in calls])
    for issued, waited in ((0, 3), (1, 5)):
        program.pieces[program.add(8, "communication", issued, waited)].flight = True
    line = timeline.simulate(program, lambda operation: {2: 3.0, 3: 4.0}[operation.makes[0]], lambda _: 5.0)
    timeline.land(program, line)
    assert [(piece.made, piece.last) for piece in program.pieces] == [(2, 3), (4, 5)]


# --- against brute force, on random programs

AMOUNTS = st.integers(0, 8).map(float)  # seconds


@dataclass(frozen=True)
class Drawn:
    """A program; by the position of an operation its seconds, on which link it is, and what asking for it takes. waited: by the position of
    a wait, that of its collective."""

    program: Program
    seconds: list[float]
    links: list[Link]
    asking: list[float]
    waited: dict[int, int]

    def simulated(self, sharing: Sharing, asking: bool = True) -> timeline.Timeline:
        at = {id(operation): i for i, operation in enumerate(self.program.operations)}

        def seconds(operation: Operation) -> float:
            return self.seconds[at[id(operation)]]

        def link_of(operation: Operation) -> Link:
            return self.links[at[id(operation)]]

        def issue(operation: Operation) -> float:
            return self.asking[at[id(operation)]] if asking else 0.0

        return timeline.simulate(self.program, seconds, seconds, sharing, link_of, issue)


@st.composite
def programs(draw: st.DrawFn, two_links: bool = True) -> Drawn:
    """Kernels, collectives, and waits for some of those, each once."""
    graph, c10d = Graph(), torch.ops._c10d_functional
    kernel, reduce = (graph.call_function(op, ()) for op in (torch.ops.aten.relu.default, c10d.all_reduce.default))
    operations: list[Operation] = []
    flying: dict[int, int] = {}
    waited: dict[int, int] = {}
    for i, kind in enumerate(draw(st.lists(st.sampled_from(["kernel", "collective", "wait"]), max_size=12))):
        if kind == "wait" and flying:
            piece = draw(st.sampled_from(sorted(flying)))
            waited[i] = flying.pop(piece)
            operations.append(Operation(graph.call_function(c10d.wait_tensor.default, (reduce,)), "forward", (piece,), ()))
        else:
            operations.append(Operation(reduce if kind == "collective" else kernel, "forward", (), (i,)))
            flying |= {i: i} if kind == "collective" else {}
    count = len(operations)
    links: list[Link] = draw(st.lists(st.sampled_from(["between", "inside"] if two_links else ["between"]), min_size=count, max_size=count))
    amounts = st.lists(AMOUNTS, min_size=count, max_size=count)
    return Drawn(Program(operations), draw(amounts), links, draw(amounts), waited)


def longest_path(drawn: Drawn) -> float:
    """Of all that must be in turn: operations on compute, collectives of a link, and a wait behind its collective."""
    graph, before, busy = nx.DiGraph(), "begin", dict[Link, str]()
    graph.add_node(before)
    for i, operation in enumerate(drawn.program.operations):
        here = f"compute {i}"
        collective = operation.starts_collective
        graph.add_edge(before, here, taken=drawn.asking[i] if collective else 0.0 if i in drawn.waited else drawn.seconds[i])
        if i in drawn.waited:
            graph.add_edge(f"link {drawn.waited[i]}", here, taken=0.0)
        if collective:  # it may begin while it is asked for
            graph.add_edge(before, f"link {i}", taken=drawn.seconds[i])
            if (last := busy.get(drawn.links[i])) is not None:
                graph.add_edge(last, f"link {i}", taken=drawn.seconds[i])
            busy[drawn.links[i]] = f"link {i}"
        before = here
    return max(nx.dag_longest_path_length(graph.subgraph(nx.ancestors(graph, before) | {before}), "taken"), 0.0)


def waited(line: timeline.Timeline) -> float:
    return sum(span.end - span.start for span in line.spans if span.stream == "wait")


@given(programs())
def test_a_step_is_the_longest_path_through_what_must_be_in_turn(drawn: Drawn) -> None:
    line = drawn.simulated(timeline.ALONE)
    assert line.seconds == pytest.approx(longest_path(drawn))
    assert line.exposed == pytest.approx(line.seconds - line.compute)
    assert line.exposed == pytest.approx(waited(line))


@given(programs(), st.sampled_from([0.25, 0.5]))
def test_most_processes_wait_for_the_slowest(drawn: Drawn, skew: float) -> None:
    """A step is that of the slowest alone; one as fast as most computes for less, waits for the rest, and uses nothing before it is there."""
    line = drawn.simulated(Sharing(skew=skew))
    slowest = replace(drawn, seconds=[s * (1 if o.starts_collective else 1 + skew) for s, o in zip(drawn.seconds, drawn.program.operations)])
    assert line.seconds == pytest.approx(slowest.simulated(timeline.ALONE).seconds)
    assert line.compute == pytest.approx(drawn.simulated(timeline.ALONE).compute)
    assert line.exposed == pytest.approx(line.seconds - line.compute)
    assert -1e-9 <= line.exposed - waited(line) <= skew * line.compute + 1e-9  # the rest of what it is ahead, for the next step
    through = {span.operation: span.end for span in line.spans if span.stream == "link"}
    process = [span for span in line.spans if span.stream != "link"]
    assert all(before.end <= after.start + 1e-9 for before, after in itertools.pairwise(process))
    for wait, collective in drawn.waited.items():
        assert all(span.start >= through[collective] - 1e-9 for span in process if span.operation > wait)


def in_small_steps(drawn: Drawn, sharing: Sharing, step: float) -> float:
    """A clock that goes on by `step`: in each, compute and the link do a part of what is left of each, less where both are at work."""
    now, stack = 0.0, list[list[float]]()  # what is left of each collective, in turn
    flying: dict[int, list[float]] = {}

    def advance(computing: bool) -> float:
        nonlocal now
        while stack and stack[0][0] <= 0:
            stack.pop(0)
        if stack:
            stack[0][0] -= step * (1 - (sharing.drag if computing else 0.0))
        now += step
        return step * (1 - (sharing.interference if stack else 0.0))

    for i, operation in enumerate(drawn.program.operations):
        if i in drawn.waited:
            while any(each is flying[drawn.waited[i]] for each in stack):
                advance(False)
        elif operation.starts_collective:
            flying[i] = [drawn.seconds[i]]
            stack.append(flying[i])
        else:
            left = drawn.seconds[i]
            while left > 0:
                left -= advance(True)
    return now


@given(programs(two_links=False), st.sampled_from([0.0, 0.25, 0.5]), st.sampled_from([0.0, 0.25, 0.5]))
def test_beside_each_other_both_are_slower_as_a_clock_would_say(drawn: Drawn, interference: float, drag: float) -> None:
    sharing, step = Sharing(interference, drag), 1 / 64
    taken = drawn.simulated(sharing, asking=False).seconds
    assert taken == pytest.approx(in_small_steps(drawn, sharing, step), abs=4 * step * max(1, len(drawn.seconds)))
