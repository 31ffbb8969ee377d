"""Decision: which embeddings' gradients travel as the rows that were looked up. Of those that every process has whole and only looks
up in, where that takes less time by the first batch; with each batch the processes see anew whether it does ([Note: Sparse
gradients]). Where a GPU's collectives are many it would have to wait for counts, so not there."""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.step import GroupCost, reduction_seconds, sparse_seconds
from autoshard.inventory import Inventory, ParameterInfo, is_trained
from autoshard.ops.sparse import pays
from autoshard.passes.costs import reduced_itemsize
from autoshard.plan import Plan
from autoshard.torch_internals import KEEPS_OPERATORS

WORTH = 0.9  # of the time that the whole gradient takes, at most


def choose_sparse(plan: Plan, inventory: Inventory, costs: Iterable[GroupCost], cluster: Cluster) -> tuple[str, ...]:
    """Their names. costs: of the plan's groups."""
    if plan.leaves_alone or plan.compression or plan.low_rank or cluster.device.inside.scatters or not KEEPS_OPERATORS:
        return ()
    infos = {p.name: p for p in inventory.parameters}
    whole = [(g, cost) for g, cost in zip(plan.groups, costs) if g.degrees.optimizer == 1]
    return tuple(name for g, cost in whole for name in g.parameters if _pays(infos[name], reduced_itemsize(plan, infos[name]), cost, cluster))


def _pays(info: ParameterInfo, itemsize: int, cost: GroupCost, cluster: Cluster) -> bool:
    """itemsize: bytes an element where gradients are summed."""
    if not (info.looked_up and is_trained(info) and pays([info.looked_up] * cost.replicas, info.shape[0])):
        return False
    whole = info.elements * itemsize
    return sparse_seconds(cost, whole * info.looked_up // info.shape[0], cluster) <= WORTH * reduction_seconds(cost, whole, cluster)
