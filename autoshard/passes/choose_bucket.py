"""Decision: how many of a group's gradients wait for each other to be reduced together.

Each reduction costs something beside its bytes. But the first gradients of a block are there long before its last ones, and while
they wait the link has nothing to do; and what is still to be reduced when backward is through, nothing hides. So as few as go at
about the speed of many. Where the transport sums on the way (NCCL) a block's go together, as was never measured there.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.step import GroupCost, reduction_seconds
from autoshard.passes.choose_message import PIECES

LEAST = 1 << 17  # bytes; less is latency alone
TOLERANCE = 1.1  # of the least time a byte


def choose_bucket(costs: Sequence[GroupCost], cluster: Cluster) -> int:
    """The most bytes of gradients in one bucket; 0: all of a group's."""
    largest = max(costs, key=lambda cost: cost.reduced_bytes, default=None)
    if largest is None or cluster.device.inside.scatters:
        return 0
    whole, least = largest.reduced_bytes, max(LEAST, largest.reduced_bytes // PIECES)
    sizes = [least << i for i in range(PIECES) if least << i < whole]
    each = {size: reduction_seconds(largest, size, cluster) / size for size in (*sizes, whole) if size}
    best = min((size for size in each if each[size] <= TOLERANCE * min(each.values())), default=0)
    return best if best < whole else 0
