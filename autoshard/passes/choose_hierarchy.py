"""Decision: whether rows travel in one step over all processes, or between nodes and inside of them by themselves.

gloo's all-to-all over all processes sends each row of a node's processes from each of them; added up inside of the node first, it
leaves the node once. NCCL's rings go through nodes by themselves, and add up on the way.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.step import GroupCost
from autoshard.passes.choose_direct import choose_direct, round_trip

WORTH = 0.9  # of the time in one step, at most: two steps are twice as many collectives


def node_of(largest: GroupCost, cluster: Cluster) -> int:
    """Processes of a node, where all processes share rows and each node has as many; 0 where there is nothing to part."""
    several = cluster.nodes > 1 and cluster.per_node > 1
    return cluster.per_node if several and largest.optimizer_degree == cluster.world else 0


def choose_hierarchy(largest: GroupCost, cluster: Cluster) -> int:
    """Processes of a node, if two steps are faster for the largest group; else 0."""
    node = node_of(largest, cluster)
    if not node or cluster.device.inside.scatters:
        return 0
    return node if _seconds(replace(largest, node=node), cluster) <= WORTH * _seconds(largest, cluster) else 0


def _seconds(cost: GroupCost, cluster: Cluster) -> float:
    """One gather and one reduction; what lies between two steps is written, and read again for the second."""
    copied = 4 * (cost.brought + cost.reduced) / cost.node / cluster.device.bandwidth if cost.node else 0.0
    return copied + round_trip(replace(cost, direct=choose_direct(cost, cluster)), cluster)
