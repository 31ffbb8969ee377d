"""Decision: of which embeddings the rows travel that are looked up. Of those that a model only looks up in, where that takes
less time by the first batch; with each batch the processes see anew whether it does ([Note: Sparse rows]). Of those that are a head's weight
too, all travels beside the rows, so where these take little: nothing hides what forward begins with and backward ends with, and without
rows that would be all of the largest parameter that there is. Its gradient is the first that is reduced then, so it has to be about the
first that there is. A GPU would have to be waited for to know how many rows there are, so not there."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.step import GroupCost, reduction_seconds, rows_among, rows_seconds, seconds
from autoshard.inventory import Inventory, ParameterInfo, is_trained
from autoshard.ops.sparse import pays
from autoshard.passes.costs import rows_of, whole_bytes
from autoshard.plan import Plan
from autoshard.torch_internals import KEEPS_OPERATORS

WORTH = 0.9  # of the time that all of it takes, at most
LITTLE = 0.5  # of that, where all of it travels too
NEXT_TO_NOTHING = 0.1  # of its elements


def choose_sparse(plan: Plan, inventory: Inventory, costs: Iterable[GroupCost], cluster: Cluster) -> tuple[str, ...]:
    """The names of those that a model only looks up in. costs: of the plan's groups."""
    return _chosen(plan, [p for p in inventory.parameters if not p.tied], costs, cluster, WORTH)


def choose_tied(plan: Plan, inventory: Inventory, costs: Iterable[GroupCost], cluster: Cluster) -> tuple[str, ...]:
    """The same of those that it uses otherwise too."""
    return _chosen(plan, [p for p in inventory.parameters if p.tied and _is_last(p, inventory)], costs, cluster, LITTLE)


def _is_last(info: ParameterInfo, inventory: Inventory) -> bool:
    """Whether next to nothing is used later than it, as a head's bias: what is has its gradient before, and waits for that of this one."""
    return sum(p.elements for p in inventory.parameters if p.used and p.last_use > info.last_use) <= NEXT_TO_NOTHING * info.elements


def _chosen(plan: Plan, among: Iterable[ParameterInfo], costs: Iterable[GroupCost], cluster: Cluster, most: float) -> tuple[str, ...]:
    if plan.leaves_alone or plan.compression or plan.low_rank or cluster.device.inside.scatters or not KEEPS_OPERATORS:
        return ()
    infos = {p.name: p for p in among}
    possible = [(g, cost) for g, cost in zip(plan.groups, costs) if plan.may_send_rows(g)]
    asked = ((infos[name], cost) for g, cost in possible for name in g.parameters if name in infos)
    return tuple(p.name for p, cost in asked if _share(p, plan, cost, cluster) <= most)


def _share(info: ParameterInfo, plan: Plan, cost: GroupCost, cluster: Cluster) -> float:
    """Of the time that all of a parameter takes, that of its rows; infinite where they may not travel."""
    if not (info.looked_up and (is_trained(info) or cost.optimizer_degree > 1) and pays(rows_among(info.looked_up, info.shape[0]), info.shape[0])):
        return math.inf
    copy, gradient = whole_bytes(plan, info)
    whole = seconds(cost.gather, copy, cost, cluster) if cost.optimizer_degree > 1 else 0.0
    whole += reduction_seconds(cost, gradient, cluster) if gradient else 0.0
    return rows_seconds(cost, rows_of(plan, info), cluster) / whole if whole else math.inf
