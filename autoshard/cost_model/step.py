"""What a step takes for its parameters alone: bytes of state by category, and the messages of each group.

Needs no graph, so plans are put in order by it; a forecast then completes it. `UNKNOWN` is what it leaves out.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autoshard.cost_model import collectives
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import Group

UNKNOWN = ("activations", "temporaries", "compute time", "overlap")
Sent = tuple[str, str, int, int, float]  # a collective, its phase, messages, bytes that a process sends, seconds


@dataclass(frozen=True)
class Rows:
    """An embedding of which only the rows travel that are looked up, in bytes. told: which these are, by one process. brought: of those
    that a process looks up; summed: of their gradients, where these are summed; 0 of one that is not trained."""

    told: int
    brought: int
    summed: int


def rows_among(places: float, table: int) -> float:
    """How many of an embedding's `table` rows a batch of so many places looks up, if each is as likely; fewer where it is not."""
    return table * (1 - (1 - 1 / table) ** places) if table else 0.0


@dataclass(frozen=True)
class GroupCost:
    """What the model needs to know of a group of parameters, whose dtypes may differ, in bytes.

    held: of the rows of the process that has the most of them; trained: of those that have gradients. whole: of the gathered
    copies; brought: of what gathers bring, where what is uneven is padded. gradients: of whole gradients as backward makes them,
    but for those of `rows`; reduced: of these as they travel, padded too, without what is `thin`. Degrees, reduction, direct, direct_sums, message and node
    as in the plan. replicas: processes that hold the same rows. compressed: gradients travel in fewer bits than they are summed in.
    buckets: of the gradients that are reduced together. apart: of each parameter that is gathered by itself. low_rank: of how many
    elements the gradients travel as thin matrices, which have `thin` fp32 numbers, and for which `residue` are kept. rows: embeddings,
    which are in none of the others but `held` and `trained`, unless all of them travels too. otherwise: of `brought` and `reduced`, what is
    cut along another dimension than the first, which goes by itself, in one message.
    """

    held: int
    trained: int
    whole: int
    brought: int
    gradients: int
    reduced: int
    parameter_degree: int
    optimizer_degree: int
    replicas: int
    reduction: str
    compressed: bool = False
    buckets: tuple[int, ...] = ()
    direct: bool = False
    direct_sums: bool = False
    message: int = 0
    node: int = 0
    apart: tuple[int, ...] = ()
    low_rank: int = 0
    thin: int = 0
    residue: int = 0
    rows: tuple[Rows, ...] = ()
    otherwise: tuple[int, int] = (0, 0)

    @property
    def gather(self) -> str:
        """The collective that brings whole parameters."""
        return "gather_direct" if self.direct else "all_gather"

    @property
    def scatter(self) -> str:
        """That which brings rows of gradients."""
        return "exchange_direct" if self.direct and self.reduction == "all_to_all" else self.reduction

    @property
    def sums(self) -> tuple[str, ...]:
        """Those that sum over the processes that hold the same rows, one after the other."""
        if self.compressed:
            return "all_to_all", "all_gather"
        if not self.direct_sums:
            return ("all_reduce",)
        return ("swap_direct",) if self.replicas == 2 else ("exchange_direct", "gather_direct")


def levels(g: GroupCost, cluster: Cluster) -> list[tuple[int, Group]]:
    """The steps of a gather, between nodes first: of what part of the whole (a half: 2), over which processes."""
    if not g.node or g.optimizer_degree == 1:
        return [(1, cluster.group(g.optimizer_degree))]
    across, inside = cluster.levels(g.optimizer_degree, g.node)
    return [(g.node, across), (1, inside)]


def seconds(name: str, payload: int, g: GroupCost, cluster: Cluster) -> float:
    """Of a collective of the rows, in as many steps as it takes; payload: bytes of the whole."""
    return sum(collectives.seconds(name, payload // part, over, cluster.device) for part, over in levels(g, cluster))


def memory(groups: Iterable[GroupCost], optimizer_states: int) -> dict[str, int]:
    """Bytes a process, by category, at the end of a backward, where all gradients exist."""
    groups = tuple(groups)
    out: dict[str, int] = defaultdict(int)
    for g in groups:
        out["parameters"] += g.held
        out["gradients"] += g.trained
        out["compression"] += g.residue * 4
        out["optimizer"] += g.trained * optimizer_states
    out["gathered"], out["buckets"] = _gathered(groups), _buckets(groups)
    return dict(out)


def _gathered(groups: tuple[GroupCost, ...]) -> int:
    """Copies kept from forward to backward, a node's between its processes too, or the two largest that are alive at once."""
    bytes_of = [(g, g.whole) for g in groups if g.optimizer_degree > 1]
    kept = sum(b // g.parameter_degree for g, b in bytes_of if g.parameter_degree < g.optimizer_degree)
    passing = sorted((b for g, b in bytes_of if g.parameter_degree > 1), reverse=True)
    beside = 1 if any(g.parameter_degree == 1 for g, _ in bytes_of) else 2  # those used last are kept: no two others beside them
    return max(kept + sum(passing[:beside]), sum(passing[:2]))


def _buckets(groups: tuple[GroupCost, ...]) -> int:
    """The whole gradients of the group in reduction, and the flat copy that travels."""
    sizes = [g.gradients + g.reduced for g in groups if g.optimizer_degree * g.replicas > 1]
    return max(sizes, default=0)


def traffic(groups: Iterable[GroupCost], cluster: Cluster) -> list[Sent]:
    """Of one step; a program knows it better (`step_time.traffic`)."""
    return added_up(_sent(message, cluster) for g in groups for message in _messages(g, cluster))


def added_up(sent: Iterable[Sent]) -> list[Sent]:
    """Same collectives of a phase as one."""
    total: dict[tuple[str, str], tuple[int, int, float]] = defaultdict(lambda: (0, 0, 0.0))
    for collective, phase, *found in sent:
        messages, bytes, seconds = map(operator.add, total[collective, phase], found)
        total[collective, phase] = messages, bytes, seconds
    return [(*kind, *found) for kind, found in total.items()]


def _sent(message: tuple[str, str, int, Group, int], cluster: Cluster) -> Sent:
    collective, phase, payload, group, most = message
    parts, took = _seconds(collective, payload, group, most, cluster)
    return collective, phase, parts, collectives.bytes_sent(collective, payload, group, cluster.device), took


def _messages(g: GroupCost, cluster: Cluster) -> Iterable[tuple[str, str, int, Group, int]]:
    """(collective, phase, payload bytes, processes, the most bytes in one message) of one group in one step."""
    steps = levels(g, cluster) if g.optimizer_degree > 1 else []
    for part, over in steps:
        inside = len(steps) > 1 and part == 1  # of a node, where rows are put in order: nothing is cut, and nothing goes apart
        most, alone = (0, ()) if inside else (g.message // part, g.apart)
        again = g.parameter_degree > (g.node if part > 1 else 1)
        for phase in ("forward", "backward") if again else ("forward",):
            for payload in (*alone, *filter(None, [g.brought - sum(alone) - g.otherwise[0]])):
                yield g.gather, phase, payload // part, over, most
            if g.otherwise[0]:
                yield g.gather, phase, g.otherwise[0] // part, over, 0
    payloads = [(g, payload) for payload in g.buckets or (g.reduced - g.otherwise[1],)] + [(replace(g, message=0), g.otherwise[1])]
    for cost, payload in payloads:
        for collective, sent, over, most in _reductions(cost, payload, cluster) if payload else ():
            yield collective, "backward", sent, over, most
    for rows in g.rows:
        for collective, phase, sent, over in _rows(g, rows, cluster):
            yield collective, phase, sent, over, 0
    if g.thin and g.replicas > 1:
        for _ in ("left", "right"):
            yield "all_reduce", "backward", g.thin * 4 // 2, cluster.group(g.replicas, g.optimizer_degree), 0


def _reductions(g: GroupCost, payload: int, cluster: Cluster) -> Iterable[tuple[str, int, Group, int]]:
    """(collective, payload bytes, processes, the most bytes in one message) of one bucket of so many bytes of whole gradients."""
    steps = levels(g, cluster) if g.optimizer_degree > 1 else []
    for part, over in reversed(steps):
        inside = len(steps) > 1 and part == 1
        yield g.scatter, payload // part, over, 0 if inside else g.message // part
    if payload and g.replicas > 1:
        yield from _sums(g, payload, cluster)


def _sums(g: GroupCost, payload: int, cluster: Cluster) -> Iterable[tuple[str, int, Group, int]]:
    """The same of the sum over the processes that hold the same rows."""
    for collective in g.sums:
        yield collective, payload // g.optimizer_degree, cluster.group(g.replicas, g.optimizer_degree), 0


def sum_seconds(g: GroupCost, payload: int, cluster: Cluster) -> float:
    """What that takes."""
    return sum(_seconds(*each, cluster)[1] for each in _sums(g, payload, cluster))


def reduction_seconds(g: GroupCost, payload: int, cluster: Cluster) -> float:
    """What it takes to reduce a bucket of so many bytes of whole gradients."""
    return sum(_seconds(*each, cluster)[1] for each in _reductions(g, payload, cluster))


def _rows(g: GroupCost, rows: Rows, cluster: Cluster) -> Iterable[tuple[str, str, int, Group]]:
    """(collective, phase, payload bytes, processes) of an embedding: what all tell, rows, and sums of their gradients."""
    sharded = g.optimizer_degree > 1
    over = cluster.group(g.optimizer_degree) if sharded else cluster.group(g.replicas, g.optimizer_degree)
    yield "gather_direct", "forward", rows.told * over.size, over
    if sharded:
        yield "gather_direct", "forward", rows.brought, over
    if rows.summed:
        yield ("exchange_direct", "backward", rows.summed, over) if sharded else ("gather_direct", "backward", rows.summed * over.size, over)


def rows_seconds(g: GroupCost, rows: Rows, cluster: Cluster) -> float:
    """What that takes."""
    return sum(_seconds(collective, sent, over, 0, cluster)[1] for collective, _, sent, over in _rows(g, rows, cluster))


def _seconds(collective: str, payload: int, group: Group, most: int, cluster: Cluster) -> tuple[int, float]:
    """In how many messages a payload goes, and what they take."""
    parts = -(-payload // most) if most else 1
    return parts, parts * collectives.seconds(collective, -(-payload // max(parts, 1)), group, cluster.device)
