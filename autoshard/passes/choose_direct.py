"""Decision: whether rows go from each process to each by sends and receives, in the place of the transport's own gathers and
all-to-alls; and whether sums over processes that hold the same rows do, in the place of its all-reduces.

gloo's copy once more than that and bring fewer bytes a second; its ring passes what several processes of a node share once between
nodes, where each would be sent its own. NCCL's collectives are better than what we could write. A sum that alone takes as long either way
(a calibration finds one or the other ahead, by chance) adds less to a computation beside it if it goes by sends (`bench/sums.py`)."""

from __future__ import annotations

from dataclasses import replace

from autoshard.cost_model import step
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.step import GroupCost
from autoshard.passes.choose_reduction import choose_reduction

AS_LONG = 1.05  # at most: of three calibrations of one machine two had sends at 0.98 and 0.99 of the ring, and one had the ring ahead


def choose_direct(largest: GroupCost, cluster: Cluster) -> bool:
    """True if the largest group's gather and reduction take no longer by them."""
    if cluster.device.inside.scatters or largest.optimizer_degree == 1:
        return False
    return round_trip(replace(largest, direct=True), cluster) <= round_trip(replace(largest, direct=False), cluster)


def choose_direct_sums(largest: GroupCost, cluster: Cluster) -> bool:
    """True if the sum of the largest group's gradients takes as long by them, or less."""
    if cluster.device.inside.scatters or not largest.reduced:
        return False
    direct, usual = (step.sum_seconds(replace(largest, direct_sums=by), largest.reduced, cluster) for by in (True, False))
    return direct <= AS_LONG * usual


def round_trip(cost: GroupCost, cluster: Cluster) -> float:
    """Seconds of one gather and one reduction."""
    cost = replace(cost, reduction=choose_reduction(cost, cluster))
    gather = step.seconds(cost.gather, cost.brought, cost, cluster)
    return gather + step.seconds(cost.scatter, cost.reduced, cost, cluster)
