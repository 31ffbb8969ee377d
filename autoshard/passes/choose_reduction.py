"""Decision: which collective brings each process its rows of a group's summed gradients. A reduce-scatter, or where the
transport carries that out as an all-reduce, as gloo does, an all-to-all of the rows, which each process then sums itself."""

from __future__ import annotations

from dataclasses import replace

from autoshard.cost_model import step
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.step import GroupCost
from autoshard.plan import REDUCTIONS


def choose_reduction(cost: GroupCost, cluster: Cluster) -> str:
    """The faster one for the gradients of a group of parameters."""
    if cost.compressed and cost.optimizer_degree > 1:  # no transport sums in another dtype than it carries
        return REDUCTIONS[1]
    if cluster.device.inside.scatters:  # NCCL sums on the way, in one pass over memory
        return REDUCTIONS[0]
    return min(REDUCTIONS, key=lambda name: step.seconds(replace(cost, reduction=name).scatter, cost.reduced, cost, cluster))
