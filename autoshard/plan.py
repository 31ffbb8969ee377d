"""Plan: everything that was decided, and the only thing that decisions and rewrites share."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

from autoshard.dtypes import LEGAL
from autoshard.errors import PlanError
from autoshard.prediction import Prediction
from autoshard.typed import check_types, from_data

FORMAT = 1
REDUCTIONS = ("reduce_scatter", "all_to_all")  # see [Note: Algorithms] in cost_model/collectives.py
COMPRESSIONS = ("bf16", "fp16")
POWERSGD = "powersgd"  # see [Note: PowerSGD] in ops/low_rank.py
POLICIES = ("none", "selective", "full")  # see [Note: Policies] in passes/recompute.py
THROUGH = "through"  # see [Note: Regions] in passes/repeat_blocks.py
VERBS = ("save",)  # what a policy may say of operations; see [Note: Verbs] in passes/recompute.py
BUFFERS = ("broadcast", "local")
MESH_AXES = ("replicate", "shard")

# Numbers of the parameter's size that an optimizer keeps for each parameter, from torch.optim's own state.
OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1, "adagrad": 1, "rmsprop": 1}

# The least that these numbers of a plan may be, and of what they are numbers.
_LEAST = {
    "low_rank": (0, "columns"),
    "bucket": (0, "bytes"),
    "shared_bucket": (0, "bytes"),
    "message": (0, "bytes"),
    "apart": (0, "bytes"),
    "ahead": (1, "groups"),
    "behind": (1, "groups"),
    "node": (0, "processes"),
}


def verbs_of(policy: str) -> dict[str, str]:
    """What a policy says of a block's operations: {"mm#0": "save", "mm#2": "save"} of "save mm#0 mm#2"; of one by name, nothing."""
    said, verb = {}, ""
    for word in policy.split():
        if word in VERBS:
            verb = word
        elif verb:
            said[word] = verb
    return said


def _is_sentence(policy: str) -> bool:
    """Whether a policy is a verb and operations, or several such, of which none is there twice."""
    once = len(verbs_of(policy)) == sum(word not in VERBS for word in policy.split())
    return once and re.fullmatch(rf"((^| )({'|'.join(VERBS)})( \S+#\d+)+)+", policy) is not None


@dataclass(frozen=True)
class Degrees:
    """Over how many processes each of the three lies. ZeRO-0 to 3, HSDP and MiCS are points of this space.

    parameter: 1 keeps the gathered copy from forward to backward, more drops and gathers it again: over all processes that share
        the rows, or over those of a node, which keep a copy between them (hpZ).
    gradient: 1 lets whole gradients accumulate, more keeps only this process's rows.
    optimizer: over how many processes parameter rows and optimizer state lie at rest; 1 is plain replication.
    """

    parameter: int
    gradient: int
    optimizer: int

    def __post_init__(self) -> None:
        check_types(self, "degrees")
        if not 1 <= self.parameter <= self.gradient <= self.optimizer:
            raise PlanError(f"degrees: {self} is not legal; legal: 1 <= parameter <= gradient <= optimizer")
        if self.gradient not in (1, self.optimizer):
            raise PlanError(f"degrees: {self} is not supported; legal: gradient is 1 or the optimizer's")

    @staticmethod
    def of_stage(stage: int, size: int) -> Degrees:
        """The degrees of a ZeRO stage over `size` processes."""
        return Degrees(*(size if stage >= first else 1 for first in (3, 2, 1)))

    @property
    def stage(self) -> int:
        """The ZeRO stage that this is."""
        return sum(d > 1 for d in (self.parameter, self.gradient, self.optimizer))

    def __str__(self) -> str:
        return f"{self.parameter}/{self.gradient}/{self.optimizer}"


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are treated alike and travel together.

    name: the block they belong to, as in the model, such as "model.layers.3".
    parameters: names in the order of first use.
    ranks: positions on the shard axis that hold the rows; () stands for all (a pipeline stage holds some).
    last_use: orders the groups by when forward is done with them.
    reduction: how each process comes to its rows of the sum: by the transport's reduce-scatter, or by an all-to-all of the
        rows, which it then sums itself.
    """

    name: str
    parameters: tuple[str, ...]
    degrees: Degrees
    ranks: tuple[int, ...] = ()
    last_use: int = 0
    reduction: str = "reduce_scatter"

    def __post_init__(self) -> None:
        check_types(self, f"plan: group {self.name!r}")
        if self.reduction not in REDUCTIONS:
            raise PlanError(
                f"plan: group {self.name!r}: reduction: {self.reduction!r} is not legal; legal: {', '.join(REDUCTIONS)}"
            )


@dataclass(frozen=True)
class Plan:
    """How a model is trained on `world` processes.

    axes: the mesh, outermost first; the gradient is the mean over all of it.
    groups: in the order of first use, which is that of the gathers in forward, and reversed that of the reductions.
    compute, reduce: dtype names of gathered copies and of reductions; "" leaves the parameter's own.
    compression: dtype name in which gradients travel, while they are summed as they would be without; "": none.
    low_rank: how many columns the two matrices have that travel in the place of a gradient (PowerSGD); 0: gradients travel.
    sparse: embeddings of which only the rows travel that are looked up; see [Note: Sparse rows] in ops/sparse.py.
    tied: embeddings of which what is looked up, and its gradient, goes by rows too, beside all of them, which something else uses.
    bucket: bytes of gradients that wait for each other to be reduced together, in groups that every process has whole, about at
        most: what has more goes by itself, and what has next to nothing with another; 0: all of a group's do.
    shared_bucket: the same, in groups whose rows are shared.
    direct: gathers of rows, and all-to-alls of their gradients, are sends of each process to each other one; see [Note: Direct] in
        ops/direct.py.
    direct_sums: so are the sums of gradients over processes that hold the same rows.
    message: bytes of whole tensors that go in one gather or reduction to rows, at most; 0: all of a group's.
    apart: bytes of a whole parameter from which on it is gathered by itself, and used where it arrives; 0: none is.
    ahead: how many groups before their use gathers start.
    behind: reductions of how many groups are on their way at once, at most.
    early: the gathers that a forward starts with start when the optimizer has stepped; see [Note: Early gathers] in ops/early.py.
    node: processes of a node, where gathers go between nodes first and then inside of them, and reductions the other way round;
        0: each in one step over all processes.
    stacks: modules under a number that are no blocks, since blocks are in them; see [Note: Stacks] in passes/choose_blocks.py.
    recompute: (block, policy) of each block of which backward computes something again, such as ("model.layers.3", "full"), or "" of one
        that is compiled by itself; see [Note: Policies] in passes/recompute.py.
    partition_activations: saved values that every process has alike, and of which each keeps a part; ("all",): all such values. See
        [Note: Partitioned activations] in ops/part.py.
    covered: share of the model's elements that the captured graph held. why: the decisions, in words.
    """

    world: int
    axes: tuple[tuple[str, int], ...]
    groups: tuple[ParameterGroup, ...]
    compute: str = ""
    reduce: str = ""
    compression: str = ""
    low_rank: int = 0
    sparse: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    bucket: int = 0
    shared_bucket: int = 0
    direct: bool = False
    direct_sums: bool = False
    message: int = 0
    apart: int = 0
    ahead: int = 1
    behind: int = 2
    early: bool = False
    node: int = 0
    buffers: str = "broadcast"
    stacks: tuple[str, ...] = ()
    recompute: tuple[tuple[str, str], ...] = ()
    partition_activations: tuple[str, ...] = ()
    covered: float = 1.0
    predicted: Prediction = field(default_factory=Prediction, compare=False)
    why: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        check_types(self, "plan")
        names = {"compression": ("", *COMPRESSIONS), "compute": ("", *LEGAL), "reduce": ("", *LEGAL), "buffers": BUFFERS}
        for name, legal in names.items():
            if getattr(self, name) not in legal:
                said = ", ".join(value or "''" for value in legal)
                raise PlanError(f"plan: {name}: {getattr(self, name)!r} is not legal; legal: {said}")
        for name, (least, what) in _LEAST.items():
            if (value := getattr(self, name)) < least:
                raise PlanError(f"plan: {name}: {value!r} is not legal; legal: {what}, {least} or more")
        if len({name for name, _ in self.axes} & {*MESH_AXES}) < len(self.axes):
            raise PlanError(f"plan: axes: {[name for name, _ in self.axes]} are not legal; legal: {', '.join(MESH_AXES)}, each once at most")
        size = math.prod(n for _, n in self.axes)
        if size != self.world:
            raise PlanError(f"plan: axes {dict(self.axes)} have {size} processes, world says {self.world}")
        self._check_node()
        self._check_sparse()
        self._check_low_rank()
        self._check_stacks()
        self._check_recompute()
        self._check_groups()

    def _check_groups(self) -> None:
        twice = [name for name, count in Counter(name for group in self.groups for name in group.parameters).items() if count > 1]
        if twice:
            raise PlanError(f"plan: {twice[0]!r} is in two groups; legal: one a parameter")
        for group in self.groups:
            if group.degrees.parameter not in (1, self.node, group.degrees.optimizer):
                raise PlanError(
                    f"plan: group {group.name!r} is gathered again over {group.degrees.parameter} processes; "
                    f"legal: 1{f', those of a node, {self.node},' if self.node else ''} or {group.degrees.optimizer}"
                )
            if group.degrees.optimizer not in (1, self.shard_size):
                raise PlanError(
                    f"plan: group {group.name!r} shards over {group.degrees.optimizer} processes; "
                    f"legal: 1 or the shard axis, {self.shard_size}"
                )
            if group.ranks and self.shard_size != self.world:
                raise PlanError(f"plan: group {group.name!r} names ranks; legal only where all processes shard")
            if any(not 0 <= r < self.shard_size for r in group.ranks) or list(group.ranks) != sorted({*group.ranks}):
                raise PlanError(
                    f"plan: group {group.name!r} lies on ranks {group.ranks}; legal: 0 to {self.shard_size - 1}, each once, in this order"
                )

    def _check_node(self) -> None:
        if not self.node:
            return
        if self.shard_size != self.world or not 1 < self.node < self.world or self.world % self.node:
            raise PlanError(
                f"plan: node: {self.node} processes a node is not legal on axes {dict(self.axes)}; legal: a part of "
                f"{self.world} between 1 and all, where all processes shard"
            )
        if any(group.ranks for group in self.groups):
            raise PlanError("plan: node: groups name ranks; legal only where all processes hold rows")

    def _check_sparse(self) -> None:
        for kind, name in (*(("sparse", n) for n in self.sparse), *(("tied", n) for n in self.tied)):
            if name not in self.group_of or not self.may_send_rows(self.group_of[name]):
                raise PlanError(
                    f"plan: {kind}: {name!r} is not legal; legal: parameters that all processes have whole, or whose rows all of them share, "
                    "with direct=True and no node or ranks"
                )
            if self.compression or self.low_rank:
                raise PlanError(f"plan: {kind}: {name!r} beside compression is not legal; legal: one of them")
        if both := sorted({*self.sparse} & {*self.tied}):
            raise PlanError(f"plan: tied: {both[0]!r} is in sparse too; legal: one of them")

    def _check_low_rank(self) -> None:
        if not self.low_rank:
            return
        if self.compression:
            raise PlanError(f"plan: low_rank: {self.low_rank} beside compression {self.compression!r} is not legal; legal: one of them")
        if self.sharded:
            raise PlanError(f"plan: low_rank: {self.low_rank} is not legal where rows are sharded; legal: 0, or degrees of 1")

    def _check_stacks(self) -> None:
        for name in self.stacks:
            if not name.rpartition(".")[2].isdigit():
                raise PlanError(f"plan: stacks: {name!r} is not legal; legal: names of modules that end in a number")

    def _check_recompute(self) -> None:
        seen = set[str]()
        for block, policy in self.recompute:
            if policy not in (*POLICIES, THROUGH) and not _is_sentence(policy):
                legal = ", ".join((*POLICIES, THROUGH))
                raise PlanError(f"plan: recompute: {policy!r} is not legal; legal: {legal}, or operations behind a verb ({', '.join(VERBS)}), as in 'save mm#0'")
            if block in seen:
                raise PlanError(f"plan: recompute: {block!r} has two policies; legal: one a block")
            seen.add(block)

    @property
    def shard_size(self) -> int:
        """Processes of the axis over which parameters are sharded."""
        return dict(self.axes).get("shard", 1)

    @property
    def part(self) -> int:
        """How many processes share rows, where these are some of all; else 0."""
        return self.shard_size if 1 < self.shard_size < self.world else 0

    @property
    def stage(self) -> int:
        """The highest ZeRO stage of a group."""
        return max(g.degrees.stage for g in self.groups)

    @property
    def summary(self) -> str:
        """In a few words: "ZeRO-3 over 8 processes, with recomputation"."""
        over = f" over {self.part} processes" if self.part and self.stage else ""
        again = ", with recomputation" if self.recompute else ""
        return f"ZeRO-{self.stage}{over}{again}{', values in parts' if self.partition_activations else ''}"

    def may_send_rows(self, group: ParameterGroup) -> bool:
        """Whether only rows of a group's embeddings may travel: where all have all rows, or each some of them, and sends to each other."""
        sent = self.direct and not self.node and not group.ranks
        return group.degrees.optimizer == 1 or (sent and group.degrees.optimizer == self.world)

    @property
    def leaves_alone(self) -> bool:
        """True for one process: nothing is rewritten."""
        return self.world == 1

    @cached_property
    def sharded(self) -> bool:
        """True if some parameter's rows lie on several processes."""
        return any(g.degrees.optimizer > 1 for g in self.groups)

    @cached_property
    def by_rows(self) -> frozenset[str]:
        """The embeddings of which rows travel, with all of them or without."""
        return frozenset((*self.sparse, *self.tied))

    @cached_property
    def group_of(self) -> dict[str, ParameterGroup]:
        """The group of each parameter, by name."""
        return {name: group for group in self.groups for name in group.parameters}

    @cached_property
    def _policies(self) -> dict[str, str]:
        return dict(self.recompute)

    @cached_property
    def through(self) -> frozenset[str]:
        """The blocks of which not even what leaves them is saved."""
        return frozenset(block for block, policy in self.recompute if policy == THROUGH)

    def because(self, *why: str) -> Plan:
        """The plan with these reasons too."""
        return replace(self, why=(*self.why, *why))

    def policy_of(self, block: str | None) -> str:
        """What backward finds saved of a block ("model.layers.3"); of what lies outside of blocks torch decides."""
        return self._policies.get(block or "", "none")

    def policy_inside(self, block: str | None) -> str:
        """The same without what leaves it: whether that is saved, the graph around it says."""
        return "full" if block in self.through else self.policy_of("" if self.is_of_one_block else block)

    @property
    def is_of_one_block(self) -> bool:
        """Whether what is compiled is a block by itself, and what has a number in it is a part of that."""
        return "" in self._policies

    @cached_property
    def order(self) -> dict[str, int]:
        """Position of each group in the order of first use, by the names of its parameters."""
        return {name: i for i, group in enumerate(self.groups) for name in group.parameters}

    @cached_property
    def order_of_last_use(self) -> dict[str, int]:
        """The same in the order of last use. A tied embedding, first in forward, is first in backward too."""
        return {name: at for at, group in enumerate(self._by_last_use) for name in group.parameters}

    @cached_property
    def order_of_calls(self) -> dict[str, float]:
        """Where in that order backward calls the blocks of a region again, by the names of their parameters: the first of them first,
        behind the block that ends the region and before all that is used later than it."""
        groups = self._by_last_use
        found, end = dict[str, float](), len(groups)
        for at, group in reversed(list(enumerate(groups))):
            end = end if group.name in self.through else at
            found |= dict.fromkeys(group.parameters, end + (len(groups) - at) / (len(groups) + 1))
        return found

    @cached_property
    def _by_last_use(self) -> list[ParameterGroup]:
        order = sorted(range(len(self.groups)), key=lambda i: (self.groups[i].last_use, i))
        return [self.groups[i] for i in order]

    @cached_property
    def rank_of(self) -> dict[str, int]:
        """Position of each parameter in the order of first use."""
        names = (name for group in self.groups for name in group.parameters)
        return {name: i for i, name in enumerate(names)}

    def to_json(self) -> str:
        """The plan as text that `from_json` reads, meant to be read and edited by people too."""
        data = {"format": FORMAT, **asdict(self)}
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Inverse of `to_json`; PlanError names what is wrong."""
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or "format" not in data:
                raise ValueError("no 'format' is in it")
            if data.pop("format") != FORMAT:
                raise PlanError(f"plan: this file is of another format; legal: {FORMAT}")
            data.pop("regions", None)  # of files from before 2026-11-26: whether blocks were traced once, which none is now
            return from_data(Plan, data, "plan")
        except PlanError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"plan: not a plan file ({error}); write one with `autoshard plan --json`") from error

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The plan in a file. PlanError names the file, and what is wrong with it."""
        try:
            return Plan.from_json(Path(path).read_text(encoding="utf-8-sig"))  # with or without the mark that some editors write
        except OSError as error:
            raise PlanError(f"plan: {str(path)!r} cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:  # of weights, say
            raise PlanError(f"plan: {str(path)!r} is no text; legal: what `autoshard plan --json` prints") from error
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    @cached_property
    def hash(self) -> str:
        """Stable over processes, machines and time; what was predicted and why does not enter."""
        data = asdict(replace(self, predicted=Prediction(), why=()))
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
