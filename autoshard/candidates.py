"""What a block could save for its backward: the policies that are worth a simulation.

[Note: Candidates] Corners are the choices that are the cheapest at some price of a second in bytes, of all that operations give
([Note: Parametric cut]); LEVELS at most. What an operation takes is only about right: generated code makes some one kernel. So
there is a second way from nothing to what torch saves: operations that are costly to repeat (matmuls, convolutions, attention), that costly
ones would be repeated for (dropout, whose mask is small), whose results are small (sums), or that torch's own partition
saves, ordered by the seconds that a saved byte spares; the first of them, the first two, and so on (but for little ones, and what saves
about as much as a corner).
Between two of them lies as much as the last value takes, which may be a hundredth of the step's peak; so
there is a fill, too: the point but for the last smaller value before that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from autoshard.cost_model import parametric_cut
from autoshard.cost_model.parametric_cut import Value
from autoshard.cost_model.program import Operation
from autoshard.cost_model.sizes import Size, bytes_of
from autoshard.cost_model.work import kind_of
from autoshard.passes import graphs
from autoshard.passes.recompute import backward_of, calls_of, kept_by, needed, operations, values_of_blocks

LEVELS = 16  # of what a block may save, between nothing and what torch saves
LITTLE = 1 / 128  # of all that a block may save: no level of its own
_COSTLY = ("matmul", "convolution", "attention", "random", "reduction")


@dataclass(frozen=True)
class Candidates:
    """kept: the names of what is saved where nothing is chosen. number: of bytes, where sizes are open. seconds_of: what an operation
    takes."""

    kept: Set[str]
    number: Callable[[Size], int]
    seconds_of: Callable[[Operation], float]

    def by_block(self, joint: GraphModule, stacks: Collection[str]) -> dict[str, list[str]]:
        """Policies for each block; for what belongs to none (the seeds that Inductor draws) there is none."""
        backward = backward_of(joint)
        wanted = needed(backward)
        found = values_of_blocks(joint, backward, stacks)
        return {name: self._policies(calls_of(name, nodes)[0], backward, wanted) for name, nodes in found.items() if name}

    def _policies(self, nodes: Sequence[Node], backward: set[Node], wanted: set[Node]) -> list[str]:
        made = {key: n for key, n in operations(nodes).items() if n in wanted and graphs.made_by(n) is n}
        sizes = {key: self._bytes_kept(n, wanted) for key, n in made.items()}
        corners = list(self._corners(made, sizes, nodes, backward))
        known = [sum(sizes[key] for key in keys) for keys in corners]
        between = (keys for keys in self._in_order(made, sizes, nodes) if not _is_near(sum(sizes[key] for key in keys), known))
        saves = dict.fromkeys([*between, *corners])
        return ["full", *(" ".join(["save", *(key for key in made if key in keys)]) for keys in saves if keys)]

    def _corners(
        self, made: Mapping[str, Node], sizes: Mapping[str, int], nodes: Sequence[Node], backward: set[Node]
    ) -> Iterator[frozenset[str]]:
        """Of what a parametric cut would save."""
        there = kept_by("full", [nodes], backward)
        read = {graphs.made_by(n) for n in nodes if not backward.isdisjoint(n.users)}
        place, keys, values = {n: i for i, n in enumerate(made.values())}, list(made), list[Value]()
        for key, node in made.items():
            size = 0 if node in there else sizes[key]
            sources = {place[source] for source in map(graphs.made_by, node.all_input_nodes) if source in place}
            values.append(Value(size, round(1e9 * self._seconds(node)), tuple(sorted(sources)), node in read))
        least = int(LITTLE * sum(v.bytes for v in values))
        for corner in parametric_cut.corners(tuple(values), least, LEVELS):
            if corner.bytes >= least:  # or "full" is as good
                yield frozenset(keys[i] for i in corner.saved if values[i].bytes)

    def _in_order(self, made: Mapping[str, Node], sizes: Mapping[str, int], nodes: Sequence[Node]) -> Iterator[frozenset[str]]:
        """Of values in the order of what a byte of them spares the first, the first two, and so on, and what lies between these."""
        usual = {graphs.made_by(n) for n in nodes if n.name in self.kept}
        found = {key: n for key, n in made.items() if kind_of(n) in _COSTLY or n in usual}
        saved, own = set(found.values()), set(nodes)
        spared = {key: self._seconds_again(n, own, saved) / sizes[key] for key, n in found.items()}
        worth = sorted(found, key=lambda key: -spared[key])
        points = [worth[:count] for count in levels([sizes[key] for key in worth])]
        yield from map(frozenset, (*points, *fills(points, {key: sizes[key] for key in found})))

    def _bytes_kept(self, node: Node, wanted: set[Node]) -> int:
        several = isinstance(node.meta["val"], (list, tuple))
        kept = [user for user in node.users if user in wanted] if several else [node]
        made = sum(self.number(bytes_of(t)) for n in kept for t in tree_leaves(n.meta["val"]) if isinstance(t, Tensor))
        return max(made, 1)

    def _seconds_again(self, node: Node, own: set[Node], saved: set[Node]) -> float:
        """Of computing it from what is saved and what enters the block."""
        again = own - saved
        chain = graphs.reached([node], lambda n: again.intersection(map(graphs.made_by, n.all_input_nodes)))
        return math.fsum(map(self._seconds, chain))  # of a set: the same in any order

    def _seconds(self, node: Node) -> float:
        return self.seconds_of(Operation(node, "forward", (), ()))


def _is_near(size: int, known: Iterable[int]) -> bool:
    """Whether it differs little from one of these."""
    return any(abs(size - one) < LITTLE * size for one in known)


def levels(sizes: Sequence[int]) -> list[int]:
    """How many of values of these bytes each level saves: one more of those that are worth one, but for LEVELS at most."""
    least = LITTLE * sum(sizes)
    counts = [i for i, size in enumerate(sizes, 1) if size >= least or i == len(sizes)]
    return sorted({counts[-(-i * len(counts) // LEVELS) - 1] for i in range(1, LEVELS + 1)}) if counts else []


def fills(points: Iterable[Sequence[str]], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Each point but for the last value before its last that is smaller, and not too small to matter. sizes: of all values."""
    least = LITTLE * sum(sizes.values())
    for point in points:
        smaller = [key for key in point if least <= sizes[key] < sizes[point[-1]]]
        if smaller:
            yield [key for key in point if key != smaller[-1]]
