"""Decision: how many of a group's gradients wait for each other to be reduced together, where every process has the group whole.

Each reduction costs something beside its bytes. But the first gradients of a block are there long before its last ones, and while
they wait the link has nothing to do; and what is still to be reduced when backward is through, nothing hides. So as few as go at
about the speed of many. Measured on gloo: stage 0 takes 0.93 of its time at 1 Gbit/s; where rows are shared, each reduction has
half of the bytes, and nothing was gained. NCCL was never measured, so it keeps one a group.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.step import GroupCost, reduction_seconds
from autoshard.passes.choose_message import LEAST, PIECES, TOLERANCE


def choose_bucket(costs: Sequence[GroupCost], cluster: Cluster) -> int:
    """The most bytes of gradients in one bucket; 0: all of a group's."""
    whole = [cost for cost in costs if cost.optimizer_degree == 1 and not cost.compressed and not cost.low_rank]
    largest = max(whole, key=lambda cost: cost.reduced, default=None)
    if largest is None or not largest.reduced or cluster.device.inside.scatters:
        return 0
    total, least = largest.reduced, max(LEAST, largest.reduced // PIECES)
    sizes = [*(least << i for i in range(PIECES) if least << i < total), total]
    each = {size: reduction_seconds(largest, size, cluster) / size for size in sizes}
    best = min(size for size in sizes if each[size] <= TOLERANCE * min(each.values()))
    return best * largest.gradients // total if best < total else 0
