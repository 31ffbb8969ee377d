"""Layout: how one parameter lies on the processes, and how its gradient is put together.

[Note: Layout in the graph]
The logical ops carry their layout as one string, so that a graph printed in a dump says everything
and Dynamo guards on one constant. `str(layout)` and `Layout.parse` are inverse to each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from autoshard.dtypes import dtype_or_own, name_of_dtype
from autoshard.plan import ParameterGroup, Plan

INSIDE, ACROSS = "inside", "across"  # the two axes of nodes of processes
MUCH = 1.5  # times its numbers, with padding


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
    direct, message, apart, node: as in `Plan`. inside, across: the process groups of a node's processes, and of those that have the same
        place on their nodes; "" where there is no node. See `levels`.
    direct_sums: as in `Plan`, of the sums over `replicas`.
    low_rank: how many columns the matrices have that travel in the place of its gradient; 0: that itself travels.
    turns: how many chunks a process of `group` has of a parameter: those whose number is its own, and every `size`-th behind.
    dim: along which dimension a parameter is cut; its rows are all that has one index there. See `dimension_of`.
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
    direct: bool = False
    message: int = 0
    apart: int = 0
    node: int = 0
    inside: str = ""
    across: str = ""
    turns: int = 1
    low_rank: int = 0
    direct_sums: bool = False
    dim: int = 0

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

    def divides(self, dtype: torch.dtype) -> bool:
        """Whether packing divides gradients of this dtype: what is compressed is divided when it is summed, and one process's mean is
        its own."""
        return self.compress is None and self.mean_over > 1 and not self.divides_sums(dtype)

    def divides_sums(self, dtype: torch.dtype) -> bool:
        """Whether sums of gradients of this dtype are divided instead, which are fewer, or were not copied before: where this process
        makes them, and none is too large for fp16."""
        of_rows = self.direct and self.reduction == "all_to_all" and not self.replicas
        here = of_rows if self.sharded else self.direct_sums
        return here and self.compress is None and self.travels(dtype) != torch.float16

    def travels(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype gradients of this one go to be summed."""
        return self.compress or self.reduce or dtype

    def most(self, dtype: torch.dtype) -> int:
        """Elements of one process that go in one collective; 0: all, as of what is cut along another dimension than the first."""
        cut = self.message and self.sharded and not self.dim
        return max(1, self.message // (self.size * dtype.itemsize)) if cut else 0

    def chunk_rows(self, rows: int) -> int:
        """Rows in a full shard; as torch.chunk, the last shards may be shorter or empty."""
        return self.turns * math.ceil(rows / (self.turns * (len(self.owners) or self.size)))

    def with_chunk(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a padded shard of a parameter of this full shape."""
        return (*shape[: self.dim], self.chunk_rows(shape[self.dim]), *shape[self.dim + 1 :])

    def cutting(self, shape: Sequence[int]) -> Layout:
        """That of a parameter of this full shape."""
        dim = dimension_of(shape, len(self.holders)) if self.sharded else 0
        return replace(self, dim=dim) if dim else self

    def of(self, dtype: torch.dtype) -> Layout:
        """That of a parameter of this dtype: what is complex or whole numbers is gathered and reduced as it is."""
        return self if dtype.is_floating_point else replace(self, compute=None, reduce=None)

    def levels(self) -> tuple[Layout, Layout]:
        """The same in two steps: between nodes, where each process comes to what all of its place have, padded; and inside of
        a node, where that makes the whole. Gradients go the other way, and are divided once."""
        nodes = self.size // self.node
        plain = replace(self, node=0, inside="", across="")
        across = replace(plain, group=self.across, size=nodes, mean_over=1)
        across = replace(across, message=-(-self.message // self.node), apart=-(-self.apart // self.node))
        return across, replace(plain, group=self.inside, size=self.node, turns=nodes, message=0)

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
            "direct": self.direct or "",
            "message": self.message or "",
            "apart": self.apart or "",
            "node": self.node or "",
            "inside": self.inside,
            "across": self.across,
            "turns": self.turns if self.turns > 1 else "",
            "low_rank": self.low_rank or "",
            "direct_sums": self.direct_sums or "",
            "dim": self.dim or "",
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
            direct="direct" in fields,
            message=int(fields.get("message", 0)),
            apart=int(fields.get("apart", 0)),
            node=int(fields.get("node", 0)),
            inside=fields.get("inside", ""),
            across=fields.get("across", ""),
            turns=int(fields.get("turns", 1)),
            low_rank=int(fields.get("low_rank", 0)),
            direct_sums="direct_sums" in fields,
            dim=int(fields.get("dim", 0)),
        )


def dimension_of(shape: Sequence[int], size: int) -> int:
    """Along which dimension a parameter of this shape is cut for so many processes: the first, unless what is padded then is much, as of
    a few experts that are one parameter; then the one that takes the least. Rows of matrices stay whole."""
    padded = [math.ceil(n / size) * size / max(n, 1) for n in cut_along(shape)]
    return padded.index(min(padded)) if padded and padded[0] >= MUCH else 0


def cut_along(shape: Sequence[int]) -> Sequence[int]:
    """The dimensions along which a parameter may be cut: the first, and of three and more all but the last."""
    return shape[: max(1, len(shape) - 1)]


def goes_low_rank(shape: Sequence[int], rank: int) -> bool:
    """Whether two matrices of `rank` columns have less than half of the numbers of a parameter of this shape."""
    return len(shape) > 1 and 2 * thin(shape, rank) < math.prod(shape)


def thin(shape: Sequence[int], rank: int) -> int:
    """How many numbers those two matrices have."""
    return rank * (shape[0] + math.prod(shape[1:]))


def layout_of(
    group: ParameterGroup, plan: Plan, name_of: Callable[[Sequence[str]], str], shape: Sequence[int] = ()
) -> Layout:
    """How the parameters of a group travel by a plan; shape: of one whose gradient may go in low rank. name_of: the process group over
    some of the plan's axes."""
    sharded = group.degrees.optimizer > 1
    axes = [axis for axis, size in plan.axes if size > 1]
    over = [axis for axis in axes if axis == "shard"] if sharded else []
    node = plan.node if sharded else 0
    return Layout(
        group=name_of(over),
        size=plan.shard_size if sharded else 1,
        owners=group.ranks if sharded else (),
        replicas=name_of([axis for axis in axes if axis not in over]),
        mean_over=plan.world,
        compute=dtype_or_own(plan.compute),
        reduce=dtype_or_own(plan.reduce),
        reduction=group.reduction,
        direct=plan.direct and sharded,
        message=plan.message,
        apart=plan.apart if sharded else 0,
        node=node,
        inside=name_of([INSIDE]) if node else "",
        across=name_of([ACROSS]) if node else "",
        low_rank=plan.low_rank if plan.low_rank and goes_low_rank(shape, plan.low_rank) else 0,
        direct_sums=plan.direct_sums,
    )


def layout_of_parameter(
    group: ParameterGroup, plan: Plan, name_of: Callable[[Sequence[str]], str], shape: Sequence[int], dtype: torch.dtype, trained: bool
) -> Layout:
    """How one parameter of a group travels, and its gradient. That of one that is frozen, which may be trained later, goes whole, and what
    is complex does."""
    thinned = shape if trained and dtype.is_floating_point else ()
    return layout_of(group, plan, name_of, thinned).of(dtype).cutting(shape)
