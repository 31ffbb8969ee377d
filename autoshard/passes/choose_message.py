"""Decision: how much of a group's parameters or gradients goes in one message, and what goes in one of its own.

All of a group goes in one, unless the transport brings more bytes a second in smaller ones, as gloo's own collectives do between
nodes: they send the whole of a gather or of an all-to-all at once, and what comes back waits in the queues of the network behind what
goes out. (Its all-reduces gloo cuts itself.) Large parameters are gathered by themselves, and then used where they arrive."""

from __future__ import annotations

import math

from autoshard.cost_model import collectives
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import table_name
from autoshard.cost_model.kernels import look_up
from autoshard.cost_model.step import GroupCost, levels

UNMEASURED = 1 << 19  # bytes that one process sends another; see bench/results/messages.md
LEAST = 1 << 17  # below that a table is of latencies
TOLERANCE = 1.1  # of the least time a byte: the fewer messages the better
ONE_MORE = 200e-6  # seconds, in round figures: 75 us of CPU each were seen, and no gain at 700 kB
PIECES = 16  # of one group; each is an operation of the graph, which somebody has to issue


def choose_message(largest: GroupCost, cluster: Cluster) -> int:
    """The most bytes of whole tensors in one gather or reduction, where the largest group is this; 0: no limit."""
    part, over = levels(largest, cluster)[0]
    if over.nodes == 1 or cluster.device.inside.scatters or largest.direct:
        return 0
    whole = max(largest.brought, largest.reduced) // part
    tables = [cluster.device.tables.get(table_name(name, over)) for name in (largest.gather, largest.scatter)]
    sizes = [int(size) for size, _ in tables[0] or () if size >= LEAST]
    best = UNMEASURED * over.size
    if sizes and None not in tables:
        each = {size: sum(float(look_up(table, size)) for table in tables if table) / size for size in sizes}
        best = max(size for size in sizes if each[size] <= TOLERANCE * min(each.values()))
        best = whole if best == sizes[-1] else best
    best = max(best, -(-whole // PIECES))
    return best * part if best < whole else 0


def choose_apart(largest: GroupCost, cluster: Cluster) -> int:
    """From how many bytes on a parameter is gathered by itself: where to copy it out of what came together, reading and writing
    it once, takes longer than one more collective of next to nothing; or, of a message that goes beside others, than the processor is
    busy with that."""
    part, over = levels(largest, cluster)[0]
    if largest.direct:
        return math.ceil(ONE_MORE * (over.size - 1) * cluster.device.bandwidth / 2) * part
    return math.ceil(collectives.seconds(largest.gather, over.size, over, cluster.device) * cluster.device.bandwidth / 2) * part
