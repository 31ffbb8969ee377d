"""Decision: how the rows of a plan travel. In one step or two (`choose_hierarchy`), by which collective (`choose_direct`, `choose_reduction`), in how
many messages and which parameters by themselves (`choose_message`), how many gradients together (`choose_bucket`), and which as rows of an
embedding (`choose_sparse`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.cost_model import step
from autoshard.cost_model.cluster import Cluster
from autoshard.errors import ConfigError
from autoshard.inventory import Inventory
from autoshard.passes.choose_bucket import choose_bucket
from autoshard.passes.choose_direct import choose_direct, choose_direct_sums
from autoshard.passes.choose_hierarchy import choose_hierarchy, node_of
from autoshard.passes.choose_message import choose_apart, choose_message
from autoshard.passes.choose_reduction import choose_reduction
from autoshard.passes.choose_sparse import choose_sparse, choose_tied
from autoshard.passes.choose_unshard import dropped
from autoshard.passes.costs import costs_of
from autoshard.plan import POWERSGD, Plan
from autoshard.units import bytes_text, counted


def choose_travel(plan: Plan, inventory: Inventory, cluster: Cluster, hierarchy: str) -> Plan:
    """The plan with all of that. hierarchy: as in `Config`; ConfigError if that is not possible here."""
    plan = _with_direct(_with_hierarchy(plan, inventory, cluster, hierarchy), inventory, cluster)
    plan = _with_direct_sums(_with_reductions(plan, inventory, cluster), inventory, cluster)
    plan = _with_messages(plan, inventory, cluster)
    plan = _with_some_apart(_with_sparse(plan, inventory, cluster), inventory, cluster)
    return _with_buckets(plan, inventory, cluster)


def choose_sums(plan: Plan, inventory: Inventory, cluster: Cluster) -> Plan:
    """The plan with what of that is about gradients that all processes sum, where some groups are whole and others are not. Those of the
    others are there as soon; each process sends another one part of them."""
    plan = plan if plan.direct_sums else _with_direct_sums(plan, inventory, cluster)
    plan = plan if plan.bucket else _with_buckets(plan, inventory, cluster)
    return replace(plan, shared_bucket=plan.bucket * plan.shard_size)


def _with_direct(plan: Plan, inventory: Inventory, cluster: Cluster) -> Plan:
    largest = _largest(plan, inventory)
    if largest is None or not choose_direct(largest, cluster):
        return plan
    return replace(plan, direct=True).because("each process sends each other one its rows, and sums what it gets of gradients: less to copy than for gloo's collectives")


def _with_direct_sums(plan: Plan, inventory: Inventory, cluster: Cluster) -> Plan:
    """What is compressed each process sums already, and what is thin is too little."""
    summed = (cost for cost in costs_of(plan, inventory) if cost.replicas > 1)
    largest = max(summed, key=lambda cost: cost.reduced, default=None)
    if plan.compression or plan.low_rank or largest is None or not choose_direct_sums(largest, cluster):
        return plan
    why = "sums over processes that hold the same rows are sends of each to each, which add up themselves: less to copy than in gloo's"
    return replace(plan, direct_sums=True).because(f"{why} all-reduces")


def _with_reductions(plan: Plan, inventory: Inventory, cluster: Cluster) -> Plan:
    costs = costs_of(plan, inventory)
    chosen = [choose_reduction(cost, cluster) for cost in costs]
    plan = replace(plan, groups=tuple(replace(g, reduction=name) for g, name in zip(plan.groups, chosen)))
    if plan.low_rank:
        return _with_low_rank(plan, costs)
    if plan.compression and (plan.leaves_alone or not any(cost.compressed for cost in costs)):
        return replace(plan, compression="").because(f"compression={plan.compression!r}: no gradients travel in more bits")
    if plan.compression:
        return plan.because(f"gradients travel in {plan.compression}, as was asked for: numbers change. Each process sums them itself")
    if "all_to_all" not in chosen or plan.direct:
        return plan
    return plan.because("gradients of sharded groups go by all_to_all and are summed here: less time than a reduce_scatter")


def _with_low_rank(plan: Plan, costs: Sequence[step.GroupCost]) -> Plan:
    whole, thin = sum(cost.low_rank for cost in costs), sum(cost.thin for cost in costs)
    if plan.leaves_alone or not thin:
        why = "no gradients travel" if plan.leaves_alone else f"two matrices of rank {plan.low_rank} are half of no gradient, or more"
        return replace(plan, low_rank=0).because(f"compression={POWERSGD!r}: {why}")
    return plan.because(
        f"PowerSGD of rank {plan.low_rank}, as was asked for: numbers change. {counted(thin, 'number travels', 'numbers travel')} "
        f"in the place of {whole}"
    )


def _with_hierarchy(plan: Plan, inventory: Inventory, cluster: Cluster, asked: str) -> Plan:
    largest = _largest(plan, inventory)
    if asked == "flat":
        return plan
    if largest is None:
        return plan if asked == "auto" else plan.because(f"hierarchy={asked!r}: no rows are shared, so nothing goes in two steps")
    if asked == "auto":
        node = choose_hierarchy(largest, cluster)
        why = "between nodes first, and inside of them after: less time than in one step over all processes"
        return replace(plan, node=node).because(why) if node else plan
    node = node_of(largest, cluster)
    if not node:
        raise ConfigError(
            f"hierarchy: {asked!r} is for several nodes of several processes that all share rows; here are "
            f"{counted(cluster.nodes, 'node', 'nodes')} of {cluster.per_node}, axes {dict(plan.axes)}; legal here: 'auto' or 'flat'"
        )
    plan = replace(plan, node=node).because(f"hierarchy={asked!r} was asked for")
    return _with_node_copies(plan) if asked == "hpz" else plan


def _with_node_copies(plan: Plan) -> Plan:
    """What backward gathers again comes from the processes of a node."""
    if not dropped(plan):
        return plan.because("hierarchy='hpz': backward gathers nothing again at this stage, so nodes keep no copies")
    groups = (replace(g, degrees=replace(g.degrees, parameter=min(g.degrees.parameter, plan.node))) for g in plan.groups)
    return replace(plan, groups=tuple(groups)).because("each node keeps a copy of the parameters, from which backward gathers")


def _largest(plan: Plan, inventory: Inventory) -> step.GroupCost | None:
    """The largest group of those whose rows are shared."""
    sharded = (cost for cost in costs_of(plan, inventory) if cost.optimizer_degree > 1)
    return max(sharded, key=lambda cost: cost.whole, default=None)


def _with_messages(plan: Plan, inventory: Inventory, cluster: Cluster) -> Plan:
    largest = _largest(plan, inventory)
    most = choose_message(largest, cluster) if largest else 0
    if not most:
        return plan
    return replace(plan, message=most).because(f"messages of at most {bytes_text(most)}: gloo fills links better with those")


def _with_some_apart(plan: Plan, inventory: Inventory, cluster: Cluster) -> Plan:
    largest = _largest(plan, inventory)
    found = replace(plan, apart=choose_apart(largest, cluster)) if largest else plan
    count = sum(len(cost.apart) for cost in costs_of(found, inventory))
    if not count:
        return plan
    return found.because(f"{counted(count, 'parameter', 'parameters')} of {bytes_text(found.apart)} or more: gathered apart, with less to copy")


def _with_sparse(plan: Plan, inventory: Inventory, cluster: Cluster) -> Plan:
    costs = costs_of(plan, inventory)
    names, tied = (choose(plan, inventory, costs, cluster) for choose in (choose_sparse, choose_tied))
    if names:
        plan = replace(plan, sparse=names).because(f"of {', '.join(names)} only rows that are looked up travel, which are few")
    if tied:
        why = "what is looked up, and its gradient, goes by rows, which are few: the rest has all of forward and backward to hide in"
        plan = replace(plan, tied=tied).because(f"of {', '.join(tied)} {why}")
    return plan


def _with_buckets(plan: Plan, inventory: Inventory, cluster: Cluster) -> Plan:
    most = 0 if plan.leaves_alone else choose_bucket(costs_of(plan, inventory), cluster)
    if not most:
        return plan
    return replace(plan, bucket=most).because(f"gradients are reduced as soon as {bytes_text(most)} of a group's are there")
