"""Sharding in place: each parameter becomes a DTensor that holds this process's rows, rank 0's values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from autoshard.dtypes import dtype_or_own
from autoshard.inventory import names_of
from autoshard.ops import wire
from autoshard.ops.layout import ACROSS, INSIDE, Layout, layout_of_parameter
from autoshard.plan import ParameterGroup, Plan
from autoshard.runtime.accumulation import Accumulation
from autoshard.runtime.buffers import take_rank_0_s
from autoshard.runtime.dtensors import dtensor_of
from autoshard.runtime.holder import Holder
from autoshard.runtime.lost_peers import naming_lost_peers
from autoshard.runtime.parameters import retire, sharded_class
from autoshard.runtime.processes import build_mesh, name_of_everyone
from autoshard.runtime.residue import RESIDUES, Residue, forget


@dataclass(frozen=True)
class Place:
    """Where one parameter's name lives in the model."""

    module: nn.Module
    attribute: str


def places_of(model: nn.Module) -> dict[int, list[Place]]:
    """All places of each parameter, by id: several if it is tied."""
    found: dict[int, list[Place]] = defaultdict(list)
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                found[id(parameter)].append(Place(module, attribute))
    return found


class Sharder:
    """Carries out a plan on a model, one parameter at a time, so that the peak is one parameter above.

    `shard` yields (old, new) for each parameter, one and the same where it stays as it lies, and lets go of an old one's storage.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
        self.model, self.plan, self.mesh = model, plan, mesh
        self.accumulation = Accumulation.of(model)
        self._submeshes: dict[tuple[int, ...], DeviceMesh] = {}
        self._nodes = _mesh_of_nodes(plan, mesh)

    def shard(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Shards every parameter, then lets the modules show traces what they need."""
        names = names_of(self.model)
        places = places_of(self.model)
        parameters = [(p, names[id(p)], places[id(p)]) for p in self.model.parameters()]
        shown: dict[nn.Module, dict[str, str]] = defaultdict(dict)
        planned: dict[nn.Module, list[object]] = defaultdict(list)
        for parameter, name, where in parameters:
            group = self.plan.group_of[name]
            layout = self.layout(group, parameter)
            new = self._place(parameter, group, layout.dim)
            for place in where:
                place.module._parameters[place.attribute] = new
                shown[place.module][place.attribute] = str(layout)
                planned[place.module].append(self._planned(group, name))
            yield parameter, new
            if new is not parameter:
                parameter.data = parameter.data.new_empty(0)  # the last who holds the whole one is gone, but for a user who keeps it
                retire(parameter)
            self._hold(group, new, where)
            _remember(layout, name, new, where)
            self._stand_in(group, new, where, layout.dim)
        self._replicate_buffers()
        compute = dtype_or_own(self.plan.compute)
        for module, layouts in shown.items():
            _show_sharded(module, layouts, compute, self.accumulation, tuple(planned[module]))

    def layout(self, group: ParameterGroup, parameter: nn.Parameter) -> Layout:
        """How a parameter of a group travels, and its gradient."""
        return layout_of_parameter(group, self.plan, self._group_name, parameter.shape, parameter.dtype, parameter.requires_grad)

    def _planned(self, group: ParameterGroup, name: str) -> object:
        """What the plan says of a parameter that its layout does not, where the model may be compiled in pieces: see [Note: What a
        module shows]."""
        return (group.degrees.parameter, name in self.plan.sparse, name in self.plan.tied) if self.plan.covered < 1 else None

    def _group_name(self, axes: Sequence[str]) -> str:
        """The process group over these mesh axes; "" over none."""
        if not axes:
            return ""
        if self._nodes is not None and set(axes) <= {ACROSS, INSIDE}:
            return self._nodes.get_group(axes[0]).group_name
        if len(axes) == len([n for _, n in self.plan.axes if n > 1]):
            return name_of_everyone()
        (axis,) = axes
        return self.mesh.get_group(axis).group_name

    @naming_lost_peers
    def _place(self, parameter: nn.Parameter, group: ParameterGroup, dim: int) -> nn.Parameter:
        if not self.plan.sharded:
            take_rank_0_s(parameter)
            return parameter
        if parameter.dtype not in wire.TAKEN:  # whole, then, and sent by its bytes
            take_rank_0_s(parameter)
            local = distribute_tensor(parameter.data, self.mesh, self._placements(group, dim), src_data_rank=None)
        elif group.ranks and group.degrees.optimizer > 1:
            local = self._on_submesh(parameter, group.ranks, dim)
        else:
            local = distribute_tensor(parameter.data, self.mesh, self._placements(group, dim))
        new = nn.Parameter(local, requires_grad=parameter.requires_grad)
        new.__dict__.update(parameter.__dict__)
        return new

    def _placements(self, group: ParameterGroup, dim: int) -> list[Placement]:
        sharded = group.degrees.optimizer > 1
        return [
            Shard(dim) if sharded and axis == "shard" else Replicate() for axis, _ in self.plan.axes
        ]

    def _on_submesh(self, parameter: nn.Parameter, ranks: tuple[int, ...], dim: int) -> DTensor:
        """Rows on some processes only. The others hold a DTensor of the full shape with nothing in it."""
        if ranks not in self._submeshes:
            self._submeshes[ranks] = DeviceMesh(self.mesh.device_type, list(ranks))
        mesh = self._submeshes[ranks]
        take_rank_0_s(parameter)
        rows = parameter.data.chunk(len(ranks), dim)
        at = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else None
        mine = rows[at] if at is not None and at < len(rows) else parameter.data.narrow(dim, 0, 0)
        return dtensor_of(mine.clone(memory_format=torch.contiguous_format), parameter, mesh, [Shard(dim)])

    def _hold(self, group: ParameterGroup, new: nn.Parameter, where: list[Place]) -> None:
        if group.degrees.gradient > 1 or not new.requires_grad:
            return
        holder = Holder(where[0].module, where[0].attribute, self.mesh, self.accumulation.has_held)
        self.accumulation.holders.append(holder)
        for place in where:
            place.module.__dict__.setdefault("_autoshard_holders", {})[place.attribute] = holder.leaf

    def _stand_in(self, group: ParameterGroup, new: nn.Parameter, where: list[Place], dim: int) -> None:
        """See `parameters._rows`."""
        if group.degrees.optimizer == 1 or not group.ranks or self._position in group.ranks:
            return
        leaf = torch.empty((*new.shape[:dim], 0, *new.shape[dim + 1 :]), dtype=new.dtype, device=new.device)
        leaf.requires_grad_(new.requires_grad)
        for place in where:
            place.module.__dict__.setdefault("_autoshard_absent", {})[place.attribute] = leaf

    @property
    def _position(self) -> int:
        """This process's place on the shard axis."""
        return self.mesh.get_local_rank("shard")

    def _replicate_buffers(self) -> None:
        if self.plan.buffers == "broadcast":
            for buffer in self.model.buffers():
                take_rank_0_s(buffer)


def _remember(layout: Layout, name: str, new: nn.Parameter, where: list[Place]) -> None:
    """Gives the parameter what PowerSGD keeps of it."""
    if not layout.low_rank:
        return
    residue = Residue(name, tuple(new.shape), layout.low_rank, new.device)
    for place in where:
        place.module.__dict__.setdefault(RESIDUES, {})[place.attribute] = residue
        place.module.register_load_state_dict_post_hook(forget)


def _mesh_of_nodes(plan: Plan, mesh: DeviceMesh) -> DeviceMesh | None:
    """All processes once more, by nodes; None where the plan knows of none."""
    if not plan.node:
        return None
    return build_mesh(mesh.device_type, ((ACROSS, plan.world // plan.node), (INSIDE, plan.node)))


def show_as_sharded(model: nn.Module, layout: Layout, accumulation: Accumulation) -> None:
    """Traces of `model` find every parameter as `unshard` of it, with this layout; its values stay as they are."""
    shown: dict[nn.Module, dict[str, str]] = defaultdict(dict)
    for places in places_of(model).values():
        for place in places:
            parameter = place.module._parameters[place.attribute]
            assert parameter is not None  # or it had no place
            shown[place.module][place.attribute] = str(layout.of(parameter.dtype))
    for module, layouts in shown.items():
        _show_sharded(module, layouts, layout.compute, accumulation)


def _show_sharded(
    module: nn.Module,
    layouts: dict[str, str],
    compute: torch.dtype | None,
    accumulation: Accumulation,
    planned: tuple[object, ...] = (),
) -> None:
    more = [module.__dict__.setdefault(kept, {}) for kept in ("_autoshard_holders", "_autoshard_absent", RESIDUES)]
    described = tuple((name, layout, not any(name in kept for kept in more)) for name, layout in layouts.items())
    cls: Any = type(module)
    module.__class__ = sharded_class(cls, described, compute, accumulation, planned)


@naming_lost_peers
def full_value(parameter: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter, on every process. A collective."""
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    full: torch.Tensor = DTensor.full_tensor(parameter.detach())  # type: ignore[arg-type]
    if parameter.device_mesh.size() < dist.get_world_size():
        return _from_owner(parameter, full)
    return full


def _from_owner(parameter: DTensor, full: torch.Tensor) -> torch.Tensor:
    """The value from a mesh that not all processes are in, for all of them."""
    source = int(parameter.device_mesh.mesh.flatten()[0])
    if dist.get_rank() not in parameter.device_mesh.mesh:
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=full.device)
    full = full.contiguous()
    dist.broadcast(full, source)
    return full
