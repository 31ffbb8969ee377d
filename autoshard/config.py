"""Config: what a user may say, every field optional and checked at once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.cost_model.cluster import Cluster
from autoshard.dtypes import FLOATING, dtype_or_own
from autoshard.errors import ConfigError, nearest
from autoshard.plan import BUFFERS, COMPRESSIONS, MESH_AXES, OPTIMIZER_STATES, POLICIES, POWERSGD, Plan
from autoshard.units import AMOUNTS, parse_bytes

PRECISIONS = ("bf16", "fp16")
CODEGENS = ("inductor", "triton", "eager")
HIERARCHIES = ("auto", "flat", "two_level", "hpz")
LONGEST = 1e9  # seconds, 30 years
_DECIDING = (
    "zero", "mesh", "memory_budget", "recompute", "precision", "compression", "compression_rank", "partition_activations",
    "hierarchy", "early_gathers", "buffers", "replicate_below",
)


def _one_of(name: str, value: Any, legal: tuple[Any, ...]) -> None:
    if not any(value is v or (type(value) is type(v) and value == v) for v in legal):
        raise ConfigError(f"{name}: {value!r} is not legal; {nearest(value, legal)}")


def _all_ranks(mesh: DeviceMesh) -> int:
    """How many a mesh of all has; where there is no job, as many as that one has."""
    return dist.get_world_size() if dist.is_initialized() else mesh.size()


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    """Seconds that something can be waited for: not those of inf or nan, which torch takes no timeout of."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST


@dataclass(frozen=True)
class Config:
    """What a user may tell autoshard. Every default means: find out.

    zero: ZeRO stage 0 to 3, or "auto": the cheapest that fits into memory_budget. At stage 3 the gathered copy that backward
        needs first is kept, and with a memory_budget as many as fit.
    mesh: None (all processes shard, or with zero="auto" those of each node where that is faster), {"replicate": 2, "shard": 4}
        (replicate=2,shard=4 on the command line), or a DeviceMesh with those axis names.
    memory_budget: bytes, "72GiB", "80GB", or a share such as 0.9 of what the device has for the process.
    recompute: what backward computes again and forward need not save: "none" (what costs next to nothing), "selective" (all
        of a block but attention and every second matmul), "full" (all of a block), or "auto": what brings a step into
        memory_budget in the least time; at zero=3 without one, into what that stage takes by itself, if copies for which there is room then
        would have been waited for.
    partition_activations: True: saved values that every process has alike (what forward makes of parameters and constants alone, such as a
        weight of two factors or a bias of positions) may be kept in parts, one on each process, and be gathered for backward: where a
        step does not fit into memory_budget else, or takes longer. Such a job's processes must make these values alike: where
        they depend on a batch's sizes a process with another size is refused.
    accumulation: None, or how gradients of several batches add up before a step: "reduced" (each backward reduces its own) or "no_sync"
        (`autoshard.no_sync` around all but the last, which at stages 0 and 1 keeps them whole). It changes nothing but forecasts: budgets
        then hold beside the gradients of earlier batches.
    precision: None, "bf16", "fp16" (compute and gathers; reductions are fp32, and rows stay what the model is), or torch's
        MixedPrecisionPolicy (param_dtype, reduce_dtype).
    compression: None, or "bf16" or "fp16", in which gradients travel to be summed (in what they would be summed in without). Numbers
        change: each process's gradients are rounded, and once more what is sent on of their sums: by a node, or where the same rows are
        on several processes. "powersgd" is for stage 0: in the place of a matrix of gradients travel two thin ones whose product is
        near to it; what is missing is added to the next step's. Each process keeps as much memory for that as its gradients take in fp32, and needs as
        much again while a backward ends.
    compression_rank: how many columns those have.
    hierarchy: how rows travel where there are several nodes of several processes. "flat": in one step over all of them.
        "two_level": parameters between nodes and then inside of them, gradients the other way round. "hpz": so too, and at stage 3
        each node keeps a copy between its processes, from which backward gathers. "auto": "two_level" on CPUs, where the cost model
        says that it is faster.
    early_gathers: True: the gathers that a training forward starts with start when the optimizer has stepped, beside what a loop
        does in between. Each forward compares its rows with what was sent, and where anything wrote to them (a load, an average swapped
        in) gathers them anew. That takes a copy of these rows and of what they make between steps, and one small all-reduce a forward,
        for which on GPUs the process waits; so it is for loops that have something to do in between.
    codegen: "inductor", "eager" (the rewritten graph, op by op), or "triton" (so too, but on GPUs elementwise operations that
        stand together are one kernel each).
    cluster: "auto" (what `autoshard calibrate` measured here, or figures from data sheets and, on CPUs, a few messages of the
        first call), a Cluster, or a YAML file of one.
    optimizer: what a plan assumes before an optimizer is seen: "adamw", "sgd", ...
    fuse_optimizer: "auto" (torch.optim's Adam, AdamW and SGD step all their parameters at once, unless they were told how, and so
        does Adafactor on GPUs), or False. On sharded parameters Adafactor goes by rows in any case.
    buffers: "broadcast" (after each change rank 0's are everyone's, as DDP) or "local".
    replicate_below: parameters with fewer elements stay whole on every process; "auto" is 10,000, or 0 where a
        GradScaler is there at the first call.
    plan: a Plan, or a file of one: use this and decide nothing.
    passes: a text spec of the rewrite pipeline, such as "name_parameters,merge_unshards,sync_buffers,bucket{mb=25},lower"; one that lacks
        what the plan needs is refused.
    disable_passes: names of passes to leave out (early_matmuls,plain_repeats on the command line).
    timeout: seconds in which every process must arrive at the first call, and a collective must end. On CPUs that holds whatever a
        process group says that was there before; models share process groups, which have the timeout of the first. On GPUs it holds
        where autoshard starts the process group and there is one axis, else torch's own timeout does.
    arrival: seconds after which a process that gives no sign of life is not waited for at the first call; "auto": 8 where
        all are on one machine, else 60.
    dump_dir: where to write the graph before and after each pass (as AUTOSHARD_DUMP).
    verbose: show the phases of the first step on rank 0.
    """

    zero: Literal["auto", 0, 1, 2, 3] = "auto"
    mesh: dict[str, int] | DeviceMesh | None = None
    memory_budget: int | float | str | None = None
    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    partition_activations: bool = False
    accumulation: Literal["reduced", "no_sync"] | None = None
    precision: str | MixedPrecisionPolicy | None = None
    compression: Literal["bf16", "fp16", "powersgd"] | None = None
    compression_rank: int = 4
    hierarchy: Literal["auto", "flat", "two_level", "hpz"] = "auto"
    early_gathers: bool = False
    codegen: Literal["inductor", "triton", "eager"] = "inductor"
    cluster: Cluster | str | Path = "auto"
    optimizer: str = "adamw"
    fuse_optimizer: Literal["auto", False] = "auto"
    buffers: Literal["broadcast", "local"] = "broadcast"
    replicate_below: int | Literal["auto"] = "auto"
    plan: Plan | str | Path | None = None
    passes: str | None = None
    disable_passes: tuple[str, ...] = field(default=())
    timeout: float = 300.0
    arrival: float | Literal["auto"] = "auto"
    dump_dir: str | Path | None = None
    verbose: bool = True

    def __post_init__(self) -> None:
        _one_of("zero", self.zero, ("auto", 0, 1, 2, 3))
        _one_of("recompute", self.recompute, ("auto", *POLICIES))
        _one_of("compression", self.compression, (None, *COMPRESSIONS, POWERSGD))
        _one_of("hierarchy", self.hierarchy, HIERARCHIES)
        _one_of("codegen", self.codegen, CODEGENS)
        _one_of("optimizer", self.optimizer, tuple(OPTIMIZER_STATES))
        _one_of("fuse_optimizer", self.fuse_optimizer, ("auto", False))
        _one_of("partition_activations", self.partition_activations, (False, True))
        _one_of("early_gathers", self.early_gathers, (False, True))
        _one_of("accumulation", self.accumulation, (None, "reduced", "no_sync"))
        _one_of("buffers", self.buffers, BUFFERS)
        _one_of("verbose", self.verbose, (False, True))
        self._check_budget()
        self._check_mesh()
        self._check_precision()
        self._check_low_rank()
        self._check_numbers()
        self._check_passes()
        self._check_plan()
        if not isinstance(self.cluster, Cluster | str | Path):
            raise ConfigError(f"cluster: {self.cluster!r} is not legal; legal: 'auto', a Cluster, or a YAML file")
        self._check_files()
        if not isinstance(self.dump_dir, str | Path | None):
            raise ConfigError(f"dump_dir: {self.dump_dir!r} is not legal; legal: a folder, or None")

    def _check_budget(self) -> None:
        budget = self.memory_budget
        if isinstance(budget, str):
            if parse_bytes(budget) == 0:
                raise ConfigError(f"memory_budget: {budget!r} is no memory at all; legal: 1 byte or more, or a share as a float, such as 0.9")
        elif isinstance(budget, bool) or not isinstance(budget, int | float | None):
            raise ConfigError(f"memory_budget: {budget!r} is no amount of memory; legal: {AMOUNTS}")
        elif budget is not None and (not budget > 0 or (isinstance(budget, float) and budget > 1)):  # nan is neither
            raise ConfigError(
                f"memory_budget: {budget!r} is out of range; an int is bytes, a float a share in (0, 1]"
            )

    def _check_mesh(self) -> None:
        if not isinstance(self.mesh, dict | DeviceMesh | None):
            raise ConfigError(f"mesh: {self.mesh!r} is not legal; legal: None, {{'replicate': 2, 'shard': 4}}, or a DeviceMesh")
        if isinstance(self.mesh, DeviceMesh) and (ranks := self.mesh.mesh.flatten().tolist()) != list(range(_all_ranks(self.mesh))):
            raise ConfigError(f"mesh: a DeviceMesh of the ranks {ranks} is not legal; legal: all ranks of the job, in order")
        axes = dict(self.mesh_axes() or {})
        for name, size in axes.items():
            _one_of("mesh", name, MESH_AXES)
            if not _is_whole(size) or size < 1:
                raise ConfigError(f"mesh: axis {name!r} has size {size!r}; legal: a whole number of 1 or more")

    def _check_precision(self) -> None:
        policy = self.precision
        if not isinstance(policy, MixedPrecisionPolicy):
            _one_of("precision", policy, (None, *PRECISIONS))
        elif policy.output_dtype is not None or not policy.cast_forward_inputs:
            raise ConfigError(
                f"precision: {policy} has more than param_dtype and reduce_dtype, and nothing else of it is carried out; legal: "
                "output_dtype=None, cast_forward_inputs=True"
            )
        else:
            for name in ("param_dtype", "reduce_dtype"):
                if (dtype := getattr(policy, name)) not in (None, *FLOATING):
                    raise ConfigError(f"precision: {name}={dtype} is not legal; legal: None, {', '.join(map(str, FLOATING))}")

    def _check_low_rank(self) -> None:
        rank = self.compression_rank
        if not _is_whole(rank) or rank < 1:
            raise ConfigError(f"compression_rank: {rank!r} is not legal; legal: a whole number of 1 or more")
        if self.compression == POWERSGD and self.zero not in ("auto", 0):
            raise ConfigError(
                f"zero: {self.zero} with compression={POWERSGD!r}, which keeps as much as whole gradients on each process; legal: "
                "zero=0 (or 'auto', which then is 0), or compression='bf16'"
            )

    def _check_numbers(self) -> None:
        below = self.replicate_below
        if below != "auto" and (not _is_whole(below) or below < 0):
            raise ConfigError(f"replicate_below: {below!r} is not legal; legal: 'auto' or elements, 0 or more")
        if not _is_time(self.timeout):
            raise ConfigError(f"timeout: {self.timeout!r} is not legal; legal: seconds, more than 0 and at most {LONGEST:g}")
        if self.arrival != "auto" and not _is_time(self.arrival):
            raise ConfigError(f"arrival: {self.arrival!r} is not legal; legal: 'auto' or seconds, more than 0 and at most {LONGEST:g}")

    def _check_passes(self) -> None:
        from autoshard.passes import registry

        if not isinstance(self.passes, str | None):
            raise ConfigError(f"passes: {self.passes!r} is not legal; legal: None, or a text such as 'name_parameters,merge_unshards,lower'")
        if not isinstance(self.disable_passes, tuple | list):
            raise ConfigError(f"disable_passes: {self.disable_passes!r} is not legal; legal: a tuple of names, such as ('early_matmuls',)")
        legal = tuple(sorted(registry.PASSES))
        for name in self.disable_passes:
            _one_of("disable_passes", name, legal)
        names = [p.name for p in registry.pipeline_for(self.passes, self.disable_passes)]
        if self.compression in COMPRESSIONS and "compress" not in names[: names.index("lower") if "lower" in names else None]:
            raise ConfigError("compression: no pass 'compress' before 'lower'; legal: passes with it, or compression=None")
        if self.early_gathers and "early_gathers" not in names:
            raise ConfigError("early_gathers: no pass 'early_gathers'; legal: passes with it, or early_gathers=False")

    def _check_plan(self) -> None:
        if not isinstance(self.plan, Plan | str | Path | None):
            raise ConfigError(f"plan: {self.plan!r} is not legal; legal: None, a Plan, or a file of one")
        changed = [f.name for f in fields(self) if f.name in _DECIDING and getattr(self, f.name) != f.default]
        if self.plan is not None and changed:
            raise ConfigError(f"{changed[0]}: a pinned plan decides this; legal: plan= or {changed[0]}=, not both")

    def _check_files(self) -> None:
        """That they are there; what is in them is read in the first call."""
        for name, file, written in ("plan", self.plan, "plan --json"), ("cluster", self.cluster, "calibrate"):
            if (name, file) == ("cluster", "auto") or not isinstance(file, str | Path):
                continue
            if not os.path.exists(file):  # noqa: PTH110  # which raises nothing, not even of a path that is too long
                raise ConfigError(f"{name}: {str(file)!r} cannot be read (no such file); legal: one of `autoshard {written}`")

    def mesh_axes(self) -> tuple[tuple[str, int], ...] | None:
        """The axes asked for, outermost first; None where all processes shard."""
        if self.mesh is None:
            return None
        if isinstance(self.mesh, DeviceMesh):
            names = self.mesh.mesh_dim_names
            if names is None:
                raise ConfigError(f"mesh: {self.mesh!r} has no axis names; legal: {MESH_AXES}")
            return tuple(zip(names, self.mesh.shape))
        order = {name: i for i, name in enumerate(MESH_AXES)}
        return tuple(sorted(self.mesh.items(), key=lambda kv: order.get(kv[0], -1)))

    def dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """(compute, reduce), of the pinned plan if there is one: None leaves the parameter's own."""
        pinned = self.resolved_plan()
        if pinned is not None:
            return dtype_or_own(pinned.compute), dtype_or_own(pinned.reduce)
        if self.precision is None:
            return None, None
        if isinstance(self.precision, MixedPrecisionPolicy):
            return self.precision.param_dtype, self.precision.reduce_dtype
        compute = {"bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]
        return compute, torch.float32

    def dtypes_on(self, processes: int) -> tuple[torch.dtype | None, torch.dtype | None]:
        """The same on so many processes: one trains as its model is."""
        return self.dtypes() if processes > 1 else (None, None)

    @staticmethod
    def from_options(options: dict[str, Any]) -> Config:
        """A Config from keyword options; an unknown name is an error with the nearest legal one."""
        legal = tuple(f.name for f in fields(Config))
        for name in options:
            _one_of("config", name, legal)
        return Config(**options)

    def described(self) -> dict[str, str]:
        """What must be equal on all processes, field by field, as text."""
        skipped = {"dump_dir", "verbose", "plan"}
        described = {f.name: str(getattr(self, f.name)) for f in fields(self) if f.name not in skipped}
        plan = self.resolved_plan()
        return described | {"plan": plan.hash if plan else "None"}

    def resolved_cluster(self) -> Cluster | None:
        """The cluster that was said, read from its file if it is one; None for "auto"."""
        if isinstance(self.cluster, Cluster):
            return self.cluster
        return None if self.cluster == "auto" else Cluster.load(self.cluster)

    def resolved_plan(self) -> Plan | None:
        """The pinned plan, read from its file if it is one."""
        if self.plan is None or isinstance(self.plan, Plan):
            return self.plan
        return Plan.load(self.plan)
