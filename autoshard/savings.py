"""What each block of a model could save for its backward, and what a step would then take: what `choose_recompute` chooses
from.

Candidates ([Note: Candidates]) are simulated from lists ([Note: Lists]): blocks that are graphs of their own, or could be, by themselves;
all others together in the whole graph.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import astuple, dataclass
from typing import Any

from torch.fx import GraphModule, Node

from autoshard.candidates import LITTLE, Candidates
from autoshard.cost_model.program import Operation, Piece, Program
from autoshard.cost_model.sizes import Size, bytes_of
from autoshard.cost_model.step_memory import Listed
from autoshard.cost_model.workspace import STATE
from autoshard.passes import graphs
from autoshard.passes.choose_recompute import Block, Option
from autoshard.passes.plain_repeats import drops_nothing
from autoshard.passes.recompute import backward_of, calls_of, draws, operations, values_of_blocks
from autoshard.plan import Plan
from autoshard.regions import Again, with_regions
from autoshard.rehearsal import Kind, Prepared, Rehearsed
from autoshard.torch_internals import RandomCall


@dataclass(frozen=True)
class Step:
    """A simulated step. totals: bytes at each operation of the program, the optimizer's step last. seconds: of each
    operation."""

    program: Program
    totals: Sequence[int]
    seconds: Sequence[float]


@dataclass(frozen=True)
class Copies:
    """The gathered copies of a block that backward gathers again. bytes: that would wait for it. seconds: that this would spare."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class Savings:
    """Of one prepared graph. kinds: the blocks that can be graphs of their own, whether they are there or not. usual: its step, nothing
    chosen. kept: the names of what is saved there. simulate: a step, or a block alone. seconds_of: what an operation
    takes. copies: by block. known: what blocks by themselves could save, by their joint graphs' ids; what is found here is added."""

    prepared: Prepared
    kinds: Sequence[Kind]
    usual: Step
    kept: Set[str]
    simulate: Callable[[Listed], Step]
    simulate_alone: Callable[[Listed], Step]
    seconds_of: Callable[[Operation], float]
    copies: Mapping[str, Copies]
    known: dict[tuple[object, ...], dict[str, Option]]

    def blocks(self, plan: Plan) -> list[Block]:
        """The model's blocks in the order of forward, each with all that it could save."""
        apart = [kind for kind in self.kinds if kind.names and kind.has_backward]
        alone = {name for kind in apart for name in kind.names}
        found = self.candidates(self.prepared.joint.graph, self.kept, plan.stacks)
        joint = {name: policies for name, policies in found.items() if name not in alone}
        usual = _measured(self.usual, {*joint, *alone}, plan.stacks)
        options = {name: {"none": seen} for name, seen in usual.items()}
        there = {} if self.prepared.kinds else self._saved_in_place(alone, plan.stacks)
        for name, policies in self._together({**joint, **{name: [it] for name, it in there.items()}}, set(options), plan.stacks).items():
            options[name] |= {policy: usual[name].moved(seen) for policy, seen in policies.items()}
        for kind in apart:
            policies_there = () if self.prepared.kinds else _most_common(found, kind.names)
            counted_alike = {name: there[name] for name in kind.names if name in there and tuple(found[name]) == policies_there}
            by_itself = self._alone(kind, policies_there, set(counted_alike.values()), plan.stacks)
            for name in usual.keys() & set(kind.names):  # generated code may have made one a part of another
                options[name] = _in_place(options[name], by_itself, counted_alike.get(name, "none"))
        return [Block(name, tuple(self._options(name, found))) for name, found in options.items()]

    def _together(self, found: Mapping[str, Sequence[str]], names: Set[str], stacks: Collection[str]) -> dict[str, dict[str, _Seen]]:
        """By how much what such policies make of blocks that are no graphs of their own is off what it is without: the first of all at
        once in the whole graph, then the second, and so on."""
        if not found:
            return {}
        joint, more = self.prepared.listed(self.kept), defaultdict[str, dict[str, _Seen]](dict)
        before = _measured(self.simulate(joint.by({})), names, stacks)
        for level in range(max(map(len, found.values()))):
            policies = {name: several[level] for name, several in found.items() if level < len(several)}
            listed = joint.by(policies)
            seen = _measured(self.simulate(listed), names, stacks)
            states = Counter(graphs.block_of(node, stacks) for node in listed.repeated if _saves_state(node))
            for name in policies.keys() & seen.keys() & before.keys():
                kept = STATE * states[name]
                more[name][policies[name]] = seen[name].less(before[name]).moved(_Seen(kept, kept, kept, 0, 0.0))
        return more

    def regions(self, blocks: Sequence[Block]) -> list[Block]:
        """These blocks, with the regions that could end at each, too: of blocks that are graphs of their own already."""
        kinds = [kind for kind in self.prepared.kinds if kind.names and kind.has_backward and kind.repeats]
        return with_regions(blocks, {name: again for kind in kinds for again in [self._again(kind)] for name in kind.names})

    def _again(self, kind: Kind) -> Again:
        listed = self.prepared.listed_kind(kind).alone("full")
        step = self.simulate_alone(listed)
        leaving = sum(self._number(bytes_of(n.meta["val"])) for n in listed.forward.gives[: listed.results])
        return Again(leaving, sum(t for o, t in zip(step.program.operations, step.seconds) if o.half == "forward"))

    def _options(self, name: str, found: Mapping[str, _Seen]) -> Iterator[Option]:
        """Each policy of a block with its gathered copies dropped, and with them kept."""
        for policy, seen in found.items():
            yield seen.option(policy)
            if name in self.copies:
                yield seen.keeping(policy, self.copies[name])

    def candidates(self, joint: GraphModule, kept: Set[str], stacks: Collection[str]) -> dict[str, list[str]]:
        """Policies for each block. kept: the names of what is saved where nothing is chosen."""
        return Candidates(kept, self._number, self.seconds_of).by_block(joint, stacks)

    def _number(self, size: Size) -> int:
        return self.prepared.captured.open.number(size)

    def _saved_in_place(self, names: Set[str], stacks: Collection[str]) -> dict[str, str]:
        """What is saved of these blocks where nothing is chosen, as policies. torch may part the whole graph otherwise than a block alone,
        so blocks alone and in their place are compared by a policy."""
        joint, found = self.prepared.joint.graph, dict[str, str]()
        usual = {graphs.made_by(n) for n in joint.graph.nodes if n.name in self.kept}  # of which backward may have taken views
        for name, values in values_of_blocks(joint, backward_of(joint), stacks).items():
            keys = [key for key, n in operations(calls_of(name, values)[0]).items() if n in usual]
            if name in names:
                found[str(name)] = " ".join(["save", *keys]) if keys else "full"
        return found

    def _alone(self, kind: Kind, policies: Sequence[str], more: set[str], stacks: Collection[str]) -> dict[str, Option]:
        """Of a block by itself, by policy: "none" is torch's own choice. policies: those of the whole graph, if the block is a part of it;
        more: others that are wanted."""
        key = id(kind.joint), *policies, *sorted(more)
        if key not in self.known:
            usual = self.prepared.cut_kind(kind, "none")
            policies = policies or next(iter(self.candidates(kind.joint.graph, kept_of(usual), stacks).values()), ())
            joint = self.prepared.listed_kind(kind)
            listed = {"none": usual.listed} | {policy: joint.alone(policy) for policy in (*policies, *sorted(more.difference(policies)))}
            self.known[key] = {policy: self._option(policy, halves) for policy, halves in listed.items()}
        return self.known[key]

    def _option(self, policy: str, listed: Listed) -> Option:
        step = self.simulate_alone(listed)
        states = STATE * sum(map(_saves_state, listed.repeated))
        saved = sum(self._number(p.bytes) for p in _saved(step.program))
        return Option(policy, saved + states, max(step.totals) + states, sum(step.seconds))


@dataclass(frozen=True)
class _Seen:
    """A block in a step of the whole graph. saved: bytes. inside, between, after: bytes at the most, without what blocks before it saved, in
    its own forward and backward, between these, and behind them, as far as that is no other block's. seconds: of all that."""

    saved: int
    inside: int
    between: int
    after: int
    seconds: float

    def option(self, policy: str) -> Option:
        own = max(self.inside, self.after)
        return Option(policy, self.saved, max(own, self.between), self.seconds, own=own)

    def keeping(self, policy: str, copies: Copies) -> Option:
        """In its own forward and backward they are there in any case."""
        peak = max(self.inside, self.between + copies.bytes, self.after)
        return Option(policy, self.saved + copies.bytes, peak, self.seconds - copies.seconds, keeps=True)

    def less(self, other: _Seen) -> _Seen:
        """By how much each of these is more than the other's."""
        return _Seen(*(a - b for a, b in zip(astuple(self), astuple(other))))

    def moved(self, by: _Seen) -> _Seen:
        """With each of these more."""
        return _Seen(*(a + b for a, b in zip(astuple(self), astuple(by))))

    def shifted(self, alone: Option, usual: Option) -> _Seen:
        """What an option of the block alone makes of the block in its place; usual: what it is alone where this is it in its place."""
        saved, inside, seconds = alone.saved - usual.saved, alone.peak - usual.peak, alone.seconds - usual.seconds
        return self.moved(_Seen(saved, inside, saved, 0, seconds))


def _in_place(seen: Mapping[str, _Seen], alone: Mapping[str, Option], there: str) -> dict[str, _Seen]:
    """What a block's options make of it in its place. seen: some of them there, "none" first. there: a policy by which as much is saved as
    by "none" in its place; where a block alone saves something else by "none", the two are off by that."""
    off = {policy: seen[policy].saved - alone[policy].saved for policy in seen if policy in alone}
    base = there if abs(off.get(there, off["none"]) - off["none"]) > LITTLE * seen["none"].saved else "none"
    by_it = {policy: seen[base].shifted(option, alone[base]) for policy, option in alone.items() if policy != "none"}
    return {"none": seen["none"], **by_it}


def _measured(step: Step, names: Set[str], stacks: Collection[str]) -> dict[str, _Seen]:
    """What each block takes in a step, in the order of forward."""
    operations = step.program.operations
    block = [graphs.block_of(o.call or o.node, stacks) for o in operations]
    saved: dict[str | None, int] = defaultdict(int)
    for piece in _saved(step.program):
        saved[block[piece.made]] += step.program.open.number(piece.bytes)
    before: dict[str, int] = {}
    back: dict[str | None, tuple[int, int]] = {}  # where its backward begins and ends
    for i, name in enumerate(block):
        if operations[i].half == "forward" and name is not None and name in names:
            before.setdefault(name, sum(saved[b] for b in before))
        if operations[i].half == "backward":
            back[name] = back.get(name, (i, i))[0], i
    peaks: dict[tuple[str, str], int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    halves = [o.half for o in operations]
    for i, name in enumerate(_running(block, halves, list(before))):
        begins, ends = back.get(name, (0, -1))  # between two calls' backwards their parameters' gradients are added up
        where = "inside" if block[i] == name or begins <= i <= ends else "between" if i < begins else "after"
        peaks[name, where] = max(peaks[name, where], step.totals[i] - before.get(name, 0))
        seconds[block[i] if block[i] in before else name] += step.seconds[i]  # type: ignore[index]
    return {n: _Seen(saved[n], peaks[n, "inside"], peaks[n, "between"], peaks[n, "after"], seconds[n]) for n in before}


def _running(block: Sequence[str | None], halves: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """The block that a step is at, by operations: what belongs to none is counted with the one before it; what is before all, with the
    first. Forward goes on from one to the next, and what generated code does of an earlier one at its end finds there what all of them
    saved; so does what backward begins with."""
    rank = {name: i for i, name in enumerate(names)}
    current = 0
    for name, half in zip(block, halves):
        current = rank.get(name or "", current) if half == "backward" else max(current, rank.get(name or "", 0))
        yield names[current] if names else ""


def kept_of(cut: Rehearsed) -> set[str]:
    """The names of what forward leaves for backward."""
    outputs: Sequence[Any] = cut.forward.graph.output_node().args[0]  # type: ignore[assignment]
    return {n.name for n in outputs[cut.results :] if isinstance(n, Node)}


def _most_common(policies: Mapping[str, Sequence[str]], names: Iterable[str]) -> Sequence[str]:
    """Of alike blocks in one graph the first may have more: what is the same for all of them is computed there."""
    counted = Counter(tuple(policies.get(name, ())) for name in names)
    return counted.most_common(1)[0][0]


def _saves_state(repeated: Node) -> bool:
    """Whether the random state that a call began with is saved where it is repeated."""
    return draws(repeated.target) and not drops_nothing(RandomCall(repeated.target, repeated.args, repeated.kwargs, saves=True))


def _saved(program: Program) -> Iterator[Piece]:
    """What forward leaves for backward."""
    return (p for p in program.pieces if p.category == "activations" and p.made >= 0)
