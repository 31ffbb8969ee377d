"""Kernels and collectives on their streams, and who waits for whom."""

from __future__ import annotations

import torch
from torch.fx import Graph

from autoshard.cost_model import timeline
from autoshard.cost_model.program import Operation, Program


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
