"""Layout: how one parameter lies on the processes, and how its gradient is put together.

[Note: Layout in the graph]
The logical ops carry their layout as one string, so that a graph printed in a dump says everything
and Dynamo guards on one constant. `str(layout)` and `Layout.parse` are inverse to each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autoshard.dtypes import dtype_or_own, name_of_dtype
from autoshard.plan import ParameterGroup, Plan


@dataclass(frozen=True)
class Layout:
    """Where the rows of one parameter are, and over which processes its gradient is averaged.

    group: the process group (c10d name) that holds the shards together; "" if every process is whole.
    size: number of processes in `group` (1 if "").
    owners: the positions in `group` that hold rows, in the order of the rows; () stands for all.
    replicas: the process group over which the sharded gradient is still to be summed; "" if none.
    mean_over: how many processes' batches the gradient is the mean of.
    compute: dtype of the gathered copy; None leaves the parameter's own.
    reduce: dtype in which gradients travel to be summed; None leaves the gradient's own.
    reduction: as in `ParameterGroup`.
    compress: dtype in which gradients travel, whatever they are summed in; None: that of the sum.
    message: as in `Plan`.
    """

    group: str
    size: int
    owners: tuple[int, ...]
    replicas: str
    mean_over: int
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    reduction: str = "reduce_scatter"
    compress: torch.dtype | None = None
    message: int = 0

    @property
    def sharded(self) -> bool:
        """False if every process holds all rows."""
        return self.group != ""

    @property
    def copies(self) -> int:
        """How many processes hold the same rows."""
        return self.mean_over // self.size

    @property
    def holders(self) -> tuple[int, ...]:
        """Positions in `group` that hold rows."""
        return self.owners or tuple(range(self.size))

    def travels(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype gradients of this one go to be summed."""
        return self.compress or self.reduce or dtype

    def most(self, dtype: torch.dtype) -> int:
        """Elements of one process that go in one collective; 0: all."""
        return max(1, self.message // (self.size * dtype.itemsize)) if self.message and self.sharded else 0

    def chunk_rows(self, rows: int) -> int:
        """Rows in a full shard; as torch.chunk, the last shards may be shorter or empty."""
        return math.ceil(rows / len(self.holders))

    def with_chunk(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a padded shard of a parameter of this full shape."""
        return (self.chunk_rows(shape[0]), *shape[1:])

    def __str__(self) -> str:
        fields = {
            "group": self.group,
            "size": self.size,
            "owners": ",".join(map(str, self.owners)),
            "replicas": self.replicas,
            "mean": self.mean_over,
            "compute": name_of_dtype(self.compute) if self.compute else "",
            "reduce": name_of_dtype(self.reduce) if self.reduce else "",
            "reduction": self.reduction if self.reduction != "reduce_scatter" else "",
            "compress": name_of_dtype(self.compress) if self.compress else "",
            "message": self.message or "",
        }
        return " ".join(f"{key}={value}" for key, value in fields.items() if value != "")

    @staticmethod
    @functools.cache
    def parse(text: str) -> Layout:
        """The layout that `str` printed."""
        fields = dict(part.split("=", 1) for part in text.split(" "))
        owners = fields.get("owners", "")
        return Layout(
            group=fields.get("group", ""),
            size=int(fields["size"]),
            owners=tuple(map(int, owners.split(","))) if owners else (),
            replicas=fields.get("replicas", ""),
            mean_over=int(fields["mean"]),
            compute=dtype_or_own(fields.get("compute", "")),
            reduce=dtype_or_own(fields.get("reduce", "")),
            reduction=fields.get("reduction", "reduce_scatter"),
            compress=dtype_or_own(fields.get("compress", "")),
            message=int(fields.get("message", 0)),
        )


def layout_of(group: ParameterGroup, plan: Plan, name_of: Callable[[Sequence[str]], str]) -> Layout:
    """How the parameters of a group travel by a plan. name_of: the process group over some of the plan's axes."""
    sharded = group.degrees.optimizer > 1
    axes = [axis for axis, size in plan.axes if size > 1]
    over = [axis for axis in axes if axis == "shard"] if sharded else []
    return Layout(
        group=name_of(over),
        size=plan.shard_size if sharded else 1,
        owners=group.ranks if sharded else (),
        replicas=name_of([axis for axis in axes if axis not in over]),
        mean_over=plan.world,
        compute=dtype_or_own(plan.compute),
        reduce=dtype_or_own(plan.reduce),
        reduction=group.reduction,
        message=plan.message,
    )
