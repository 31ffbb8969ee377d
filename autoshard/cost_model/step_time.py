"""The time of a step on a device: kernels, collectives and the optimizer put into the time simulator."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import tree_leaves

from autoshard.cost_model import collectives, timeline
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import GATHERS, Group
from autoshard.cost_model.generated import is_generated
from autoshard.cost_model.hardware import Device
from autoshard.cost_model.kernels import calling, look_up, seconds
from autoshard.cost_model.program import ASK_ROWS, LOOK_UP_ROWS, SPARSE, Operation, Program
from autoshard.cost_model.schedule import Schedule, schedule_of
from autoshard.cost_model.sizes import Open, bytes_of, product
from autoshard.cost_model.step import Sent, added_up, rows_among
from autoshard.cost_model.step_memory import Held
from autoshard.cost_model.timeline import Link, Sharing, Timeline
from autoshard.cost_model.work import VIEW, Work, work_of

_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_reduce_": "all_reduce",
    "broadcast": "all_reduce",  # at most
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part; a timeline of forward and backward. overhead: what a step does for each parameter beside
    kernels. host: what the processor takes that a device's kernels run behind."""

    timeline: Timeline
    optimizer: float
    overhead: float
    host: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self._of_device + self.launching

    @property
    def launching(self) -> float:
        """How much longer than the device the processor takes."""
        return max(0.0, self.host - self._of_device)

    @property
    def _of_device(self) -> float:
        return self.timeline.seconds + self.optimizer + self.overhead


def step_time(program: Program, held: Held, cluster: Cluster, groups: Mapping[str, Group], fused: bool) -> StepTime:
    """The time of a program, sizes as they were in the trace. held: beside it. groups: of processes, by name. fused:
    generated code."""

    @functools.cache
    def spent(work: Work, generated: bool) -> float:
        return float(seconds(work, cluster.device, generated))

    known: dict[object, float] = {}  # a block that is called 48 times has the same nodes in each

    def kernel(operation: Operation) -> float:
        generated = fused and is_generated(operation)
        key = operation.costed_by, generated
        if key not in known:
            known[key] = spent(work_of(operation).at(program.open.number), generated)
        return known[key] + operation.views * spent(VIEW, False)

    def collective(operation: Operation) -> float:
        return collective_seconds(operation, cluster, groups, program.open)

    sharing = Sharing.on(cluster.device, groups.values())
    issue = functools.partial(_issue_seconds, cluster=cluster, groups=groups)
    line = timeline.simulate(program, kernel, collective, sharing, functools.partial(_link_of, groups), issue)
    return StepTime(line, _optimizer(held, cluster.device), _overhead(held, cluster.device), _host(program, cluster.device, fused))


def schedule(program: Program, held: Held, cluster: Cluster, groups: Mapping[str, Group], fused: bool) -> Schedule:
    """The same step for many sizes at once."""
    return schedule_of(
        program,
        lambda operation: collective_seconds(operation, cluster, groups, program.open),
        lambda operation: fused and is_generated(operation),
        cluster.device,
        Sharing.on(cluster.device, groups.values()),
        _optimizer(held, cluster.device) + _overhead(held, cluster.device),
        functools.partial(_link_of, groups),
        functools.partial(_issue_seconds, cluster=cluster, groups=groups),
        _host(program, cluster.device, fused),
    )


def _optimizer(held: Held, device: Device) -> float:
    return sum(float(seconds(Work("pointwise", 0, *bytes), device)) for bytes in held.moved)


def _overhead(held: Held, device: Device) -> float:
    """None where kernels run behind the processor that asks for them."""
    counts = {"parameter": held.whole, "sharded": held.sharded}
    return sum(float(look_up(device.tables[name], count)) for name, count in counts.items() if count and name in device.tables)


def _host(program: Program, device: Device, fused: bool) -> float:
    return len(program.operations) * calling(device, fused)


def collective_seconds(operation: Operation, cluster: Cluster, groups: Mapping[str, Group], sizes: Open) -> float:
    """Of its group, and what it is given; of open sizes, what these were in the trace."""
    group = _group(groups, operation)
    return collectives.seconds(*_message(operation, group, sizes), group, cluster.device)


def traffic(program: Program, cluster: Cluster, groups: Mapping[str, Group]) -> list[Sent]:
    """What a program sends; sizes as in the trace."""
    asked = (o for o in program.operations if o.name in SPARSE or o.starts_collective)
    return added_up(_sent(o, _group(groups, o), cluster.device, program.open) for o in asked)


def _sent(operation: Operation, group: Group, device: Device, sizes: Open) -> Sent:
    name, payload = _message(operation, group, sizes)
    bytes, took = (f(name, payload, group, device) for f in (collectives.bytes_sent, collectives.seconds))
    return name, operation.half, 1, int(bytes), took


def _issue_seconds(operation: Operation, cluster: Cluster, groups: Mapping[str, Group]) -> float:
    group = _group(groups, operation)
    return collectives.issue_seconds(*_message(operation, group, Open()), group, cluster.device)


def _message(operation: Operation, group: Group, sizes: Open) -> tuple[str, int]:
    """Which collective an operation is, and the bytes of the whole tensor."""
    if operation.name in SPARSE:
        return _of_rows(operation, group, sizes)
    packet = operation.node.target.overloadpacket.__name__.removesuffix("_coalesced")  # type: ignore[union-attr]
    name = "gather_direct" if operation.name == ASK_ROWS else _NAMES.get(packet, packet)
    sent = tree_leaves(operation.node.meta["val"] if name in GATHERS else [n.meta["val"] for n in tree_leaves(operation.node.args[0])])
    return name, sum(value.numel() * value.element_size() for value in sent)


def _of_rows(operation: Operation, group: Group, sizes: Open) -> tuple[str, int]:
    """The same of an embedding's rows, or of all of it where there are no indices. Each process brings those that it looks up, or
    sends the sums of their gradients to who holds them, or to all."""
    node, looks_up = operation.node, operation.name == LOOK_UP_ROWS
    indices: Any = node.args[2 if looks_up else 1]
    table: Any = node.args[3][0] if looks_up else node.args[6]  # type: ignore[index]
    value = node.meta["val"] if looks_up else node.args[0].meta["val"]  # type: ignore[union-attr]
    spread = not looks_up and node.args[2][0] == table  # type: ignore[index]
    sent = sizes.number(bytes_of(value))
    if indices is None:
        return ("gather_direct" if looks_up else "all_reduce" if spread else "exchange_direct"), sent
    places = sizes.number(product(indices.meta["val"].shape))
    sent = int(rows_among(places, table) * sent / max(places, 1))
    return ("gather_direct", sent * group.size) if spread else ("gather_direct" if looks_up else "exchange_direct", sent)


def _group(groups: Mapping[str, Group], operation: Operation) -> Group:
    """The processes of a collective; of one of the model's own, whose group no plan knows, all."""
    known = groups.get(group_name(operation))
    return known or max(groups.values(), key=lambda group: group.size, default=Group(1))


def group_name(operation: Operation) -> str:
    """Of a collective's processes."""
    return str(operation.node.kwargs.get("group_name", operation.node.args[-1]))


def _link_of(groups: Mapping[str, Group], operation: Operation) -> Link:
    return "between" if _group(groups, operation).nodes > 1 else "inside"


