"""What a collective costs: α–β models of the algorithms that transports have, over the links that lie between a group of
processes.

[Note: Algorithms] n processes on k nodes, m on each, and a whole tensor of b bytes.

ring          every part passes all others: (n-1)/n of b through each process, an all-reduce twice that. A part's way has k-1
              hops between nodes, and the others inside of them.
tree          an all-reduce to a root and back: all of b twice, in log2(k) hops between nodes and chains inside of them.
direct        every process sends each other one its part at once, an all-to-all: one hop. Two of them swap all that they have, which
              with a sum on both is an all-reduce.
hierarchical  between the processes that have the same place on their nodes, and inside of the nodes; first where parts are
              small.

NCCL makes as many rings as a node has links to the network, so m processes have m times a process's bandwidth to other nodes; it
takes the faster of ring and tree. gloo has one ring, and carries out a reduce-scatter as an all-reduce. Only all-to-alls are
direct by themselves, and what we write of sends and receives ([Note: Direct] in ops/direct.py); nothing is hierarchical: that is what
can be written with several collectives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from autoshard.cost_model.hardware import Device
from autoshard.cost_model.kernels import look_up

GATHERS = ("all_gather", "gather_direct")  # which are given a part of the whole
_DIRECT = ("all_to_all", "gather_direct", "exchange_direct", "swap_direct")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", *_DIRECT)
_TREE = 0.92  # of a ring's bandwidth, in NCCL's own tuning model


@dataclass(frozen=True)
class Group:
    """Processes that communicate: how many, and on how many nodes. beside: how many such groups a node's processes are in,
    which go at once."""

    size: int
    nodes: int = 1
    beside: int = 1

    @property
    def per_node(self) -> int:
        """At most that many of them on one node."""
        return -(-self.size // self.nodes)


def bytes_sent(collective: str, payload: int, group: Group, device: Device) -> int:
    """Bytes that each process sends in a ring, or in what does the same, for a payload of the whole tensor's bytes."""
    return _rounds(collective, device) * (payload * (group.size - 1) // group.size)


def seconds(collective: str, payload: int, group: Group, device: Device) -> float:
    """Seconds of one collective: by the device's table for such groups, or else by the fastest algorithm that its transport
    has for it."""
    if group.size == 1:
        return 0.0
    if group.beside > 1:  # a device of its own has its own link to the network; processors of a node share one
        share = 1 if device.inside.scatters else group.beside
        return seconds(collective, payload * share, replace(group, beside=1), device)
    table = device.tables.get(table_name(collective, group))
    if table is not None:
        return float(look_up(table, payload))
    if collective in _DIRECT:
        return direct(collective, payload, group, device)
    algorithms = (ring, tree) if collective == "all_reduce" and device.inside.scatters else (ring,)
    return min(algorithm(collective, payload, group, device) for algorithm in algorithms)


def issue_seconds(collective: str, payload: int, group: Group, device: Device) -> float:
    """Seconds until the process that asks for one can go on, where that was measured: sends over gloo begin in the one that asks."""
    table = device.tables.get(table_name(f"{collective}.issue", replace(group, beside=1)))
    return float(look_up(table, payload)) if table is not None else 0.0


def table_name(collective: str, group: Group) -> str:
    """"all_gather@8" of eight processes on one node, "all_gather@8/2" on two."""
    return f"{collective}@{group.size}" + (f"/{group.nodes}" if group.nodes > 1 else "")


def is_table_name(name: str) -> bool:
    """Whether `table_name` may give this of what is sent, or of the seconds until the one who asks can go on."""
    found = re.fullmatch(rf"({'|'.join(COLLECTIVES)})(\.issue)?@(\d{{1,7}})(/(\d{{1,7}}))?", name)
    return found is not None and int(found[3]) > 1 and (found[5] is None or 1 < int(found[5]) <= int(found[3]))


def measured(device: Device, group: Group) -> Device:
    """The device whose link between such a group carries what its table of all-gathers says, for groups without a table."""
    (_, least), (payload, most) = (device.tables[table_name("all_gather", group)][i] for i in (0, -1))
    rate = bytes_sent("all_gather", int(payload), group, device) / (most - least if most > least else most)
    if group.nodes == 1:
        latency = min(device.inside.latency, least / (group.size - 1))
        rest = least - (group.size - 1) * latency
        return replace(device, message=rest, inside=replace(device.inside, bandwidth=rate, latency=latency))
    rest = max(least - (group.size - group.nodes) * device.inside.latency, 0.0)
    message = min(device.message, rest)  # which groups inside a node pay too
    rings = group.per_node if device.inside.scatters else 1
    across = replace(device.across, bandwidth=rate / rings, latency=(rest - message) / (group.nodes - 1))
    return replace(device, message=message, across=across)


def ring(collective: str, payload: int, group: Group, device: Device) -> float:
    """Seconds of a ring. See [Note: Algorithms]."""
    hops = (group.nodes - 1) * device.across.latency + (group.size - group.nodes) * device.inside.latency
    moved = bytes_sent(collective, payload, group, device) / _bandwidth(group, device)
    return device.message + _rounds(collective, device) * hops + moved


def tree(collective: str, payload: int, group: Group, device: Device) -> float:
    """Seconds of an all-reduce up a tree of nodes and down again."""
    assert collective == "all_reduce", collective
    hops = math.ceil(math.log2(group.nodes)) * device.across.latency + (group.per_node - 1) * device.inside.latency
    return device.message + 2 * (hops + payload / (_TREE * _bandwidth(group, device)))


def direct(collective: str, payload: int, group: Group, device: Device) -> float:
    """Seconds of an all-to-all, which with a local sum makes a reduce-scatter; an all-gather without; an all-reduce of
    both. Of a swap, where a part is all."""
    near, far = group.per_node - 1, group.size - group.per_node
    part = payload if collective == "swap_direct" else payload / group.size
    hop = device.across.latency if far else device.inside.latency
    at_once = 1 if device.inside.scatters else group.per_node  # processors of a node share its link to others
    moved = max(near * part / device.inside.bandwidth, at_once * far * part / device.across.bandwidth)
    return (2 if collective == "all_reduce" else 1) * (device.message + hop + moved)


def hierarchical(collective: str, payload: int, group: Group, device: Device) -> float:
    """Seconds of two rings: between nodes, of a node's share, and inside of them."""
    between, inside = Group(group.nodes, group.nodes), Group(group.per_node)
    shares: list[tuple[Group, int]] = [(between, payload // group.per_node), (inside, payload)]
    steps = ["reduce_scatter", "all_gather"] if collective == "all_reduce" else [collective]
    return sum(ring(step, b, g, device) for step in steps for g, b in shares if g.size > 1)


ALGORITHMS: dict[str, Callable[[str, int, Group, Device], float]] = {
    f.__name__: f for f in (ring, tree, direct, hierarchical)
}


def _rounds(collective: str, device: Device) -> int:
    """How often a ring passes the payload round."""
    twice = collective in ("all_reduce", "swap_direct") or (collective == "reduce_scatter" and not device.inside.scatters)
    return 2 if twice else 1


def _bandwidth(group: Group, device: Device) -> float:
    """Bytes a second that rings through the whole group carry."""
    if group.nodes == 1:
        return device.inside.bandwidth
    if group.per_node == 1:
        return device.across.bandwidth
    rings = group.per_node if device.inside.scatters else 1
    return min(device.inside.bandwidth, rings * device.across.bandwidth)
