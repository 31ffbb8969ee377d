"""Decision: how much of a group's parameters or gradients goes in one message. All of it, unless the transport brings more bytes a
second in smaller ones, as gloo does: it sends the whole of a gather or of an all-to-all at once, and what comes back waits in the
queues of the network behind what goes out. (Its all-reduces it cuts itself.)"""

from __future__ import annotations

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import Group, table_name
from autoshard.cost_model.kernels import look_up

UNMEASURED = 1 << 20  # bytes; see bench/results/messages.md
LEAST = 1 << 17  # below that a table is of latencies
TOLERANCE = 1.1  # of the least time a byte: the fewer messages the better


def choose_message(reduction: str, over: Group, cluster: Cluster) -> int:
    """The most bytes of whole tensors in one gather or reduction over such processes; 0: no limit."""
    if over.size == 1 or cluster.device.inside.scatters:
        return 0
    tables = [cluster.device.tables.get(table_name(name, over)) for name in ("all_gather", reduction)]
    sizes = [int(size) for size, _ in tables[0] or () if size >= LEAST]
    if not sizes or None in tables:
        return UNMEASURED if over.nodes > 1 else 0
    each = {size: sum(float(look_up(table, size)) for table in tables if table) / size for size in sizes}
    best = max(size for size in sizes if each[size] <= TOLERANCE * min(each.values()))
    return 0 if best == sizes[-1] else best
