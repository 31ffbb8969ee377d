"""Decision: whether the group that is gathered first goes as two, or the next one where that is of one parameter. Nothing is computed while
forward waits for it, and nothing while its gradients, backward's last, are reduced; of two, what is used first is computed with while the
other comes, and the other's gradients go while the first's are computed. A block that is a graph of its own takes all of its parameters at
once, so there it would be of no use; and on GPUs, whose links are faster than they compute, it was never measured."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.step import GroupCost, reduction_seconds, seconds
from autoshard.inventory import Inventory
from autoshard.passes.choose_blocks import OWN_GRAPHS, block_of, blocks_of
from autoshard.passes.costs import costs_of
from autoshard.plan import ParameterGroup, Plan
from autoshard.units import bytes_text

WORTH = 4.0  # times the seconds that more messages take, at least


def choose_halves(plan: Plan, inventory: Inventory, cluster: Cluster) -> Plan:
    """The plan, with that group as two where it pays."""
    begins = replace(plan, sparse=(*plan.sparse, *plan.tied), tied=())  # the whole of what is tied comes last
    costs = costs_of(begins, inventory)
    possible = (i for i, cost in enumerate(costs) if cost.optimizer_degree > 1 and cost.brought)
    first = next((i for i in possible if len(set(plan.groups[i].parameters) - plan.by_rows) > 1), None)
    if first is None or cluster.device.inside.scatters or _is_a_graph(plan, plan.groups[first]):
        return plan
    halves = _halves(plan, plan.groups[first], inventory)
    parted = replace(plan, groups=(*plan.groups[:first], *halves, *plan.groups[first + 1 :]))
    taken = {group.name for group in plan.groups}.intersection(half.name for half in halves)
    each = costs_of(replace(begins, groups=parted.groups), inventory)[first : first + 2]
    if taken or not _pays(costs[first], each, cluster):
        return plan
    sent = bytes_text(costs[first].brought)
    return parted.because(f"{plan.groups[first].name}, {sent} that nothing is computed beside, goes in two parts")


def _is_a_graph(plan: Plan, group: ParameterGroup) -> bool:
    """Whether it is one of blocks as many as become graphs of their own."""
    stack = (block_of(group.parameters[0], plan.stacks) or "").rpartition(".")[0]
    stacks = Counter(block.rpartition(".")[0] for block in blocks_of(plan.group_of, plan.stacks))
    return bool(stack) and stacks[stack] >= OWN_GRAPHS


def _halves(plan: Plan, group: ParameterGroup, inventory: Inventory) -> list[ParameterGroup]:
    """Its parameters in the order of use: as many as have half at most of the elements that are gathered, and the others."""
    infos = {p.name: p for p in inventory.parameters}
    ends = list(itertools.accumulate(0 if name in plan.by_rows else infos[name].elements for name in group.parameters))
    count = max(1, sum(2 * end <= ends[-1] for end in ends))
    parts = group.parameters[:count], group.parameters[count:]
    return [
        replace(group, name=f"{group.name}/{i}", parameters=names, last_use=max(infos[name].last_use for name in names))
        for i, names in enumerate(parts, 1)
    ]


def _pays(whole: GroupCost, halves: list[GroupCost], cluster: Cluster) -> bool:
    """By what the second one takes, which computation may hide."""
    gathers = 2 if whole.parameter_degree > 1 else 1

    def took(cost: GroupCost) -> tuple[float, float]:
        return seconds(cost.gather, cost.brought, cost, cluster), reduction_seconds(cost, cost.reduced, cluster)

    (gather, reduction), *each = map(took, (whole, *halves))
    more = gathers * (sum(g for g, _ in each) - gather) + sum(r for _, r in each) - reduction
    return all(half.brought for half in halves) and sum(each[1]) >= WORTH * more
