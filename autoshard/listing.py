"""Forward and backward by what is saved, as lists of their joint graph's own nodes.

[Note: Lists] Where it is known of each value whether it is saved or computed again, by a block's policy or, between blocks, by what
torch saved before, no cut is left to look for. Forward is what its results and what is saved are made of; backward, what gradients are
made of as far as that is not saved. What is computed again stands before its first use, an item behind what it is one of. torch's
partitioner comes to the same (a test compares them), but takes several times as long to write it as graphs, and a dozen candidates of
each block are looked at. The random states that it saves for what is repeated are no nodes of a joint graph, and not in the lists.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from autoshard import torch_internals
from autoshard.cost_model.program import Listing
from autoshard.cost_model.step_memory import Listed
from autoshard.passes import graphs
from autoshard.passes.recompute import backward_of, calls_of, kept_by, once, values_of_blocks


@dataclass(frozen=True)
class JointList:
    """A joint graph without what was there twice, but for draws. results: how many of what it gives are forward's. tangents: its inputs
    that autograd gives to backward. at: where each node stands. calls: what policies are about, by block, in the graph that it was. backward: of that.
    kept: what is saved where no policy says, by name, with its block. whole: see `Listed`."""

    graph: Graph
    results: int
    tangents: dict[Node, None]
    at: dict[Node, int]
    calls: Mapping[str | None, Sequence[Sequence[Node]]]
    backward: set[Node]
    kept: Mapping[str, str | None]
    whole: bool = True

    @staticmethod
    def of(joint: GraphModule, results: int, stacks: Collection[str], kept: Set[str] | None = None) -> JointList:
        """That of a copy of this graph. stacks: the plan's. kept: names; None of a block alone, of which nearly all is in a policy."""
        backward = backward_of(joint)
        blocks = values_of_blocks(joint, backward, stacks)
        if kept is None:
            kept = {n.name for n in blocks.get(None, ()) if not torch_internals.is_view(n.target)}
        of_block = {n.name: graphs.block_of(n, stacks) for n in joint.graph.nodes if n.name in kept}
        sizes = {n.name: None for n in joint.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)}  # which take next to nothing
        calls = {block: calls_of(block, nodes) for block, nodes in blocks.items()}
        copied = once(joint.graph)
        tangents = dict.fromkeys(n for n in copied.find_nodes(op="placeholder") if torch_internals.input_position(n) is None)
        return JointList(copied, results, tangents, graphs.positions(copied), calls, backward, of_block | sizes)

    def alone(self, policy: str) -> Listed:
        """Of a block by itself, by a policy that says what is saved: any but "none"."""
        return self.by({block: policy for block in self.calls if block is not None})

    def by(self, policies: Mapping[str, str]) -> Listed:
        """The halves by such a policy of each of these blocks."""
        between = {name for name, block in self.kept.items() if block not in policies}
        kept = (kept_by(policy, self.calls.get(block, ()), self.backward) for block, policy in policies.items())
        return self._halves(between.union(n.name for nodes in kept for n in nodes))

    def _halves(self, saved: Set[str]) -> Listed:
        """saved: of forward's values, by name, as far as backward needs them."""
        given: Sequence[Any] = self.graph.output_node().args[0]  # type: ignore[assignment]
        results, gradients = given[: self.results], given[self.results :]
        inputs = dict.fromkeys(n for n in self.graph.find_nodes(op="placeholder") if n not in self.tangents)
        backward = self._made_of(gradients, saved)
        kept = [n for n in backward if n.name in saved or n in inputs]
        forward = self._made_of((*results, *kept, *self._writes()), frozenset())
        computed = dict.fromkeys(n for n in backward if n.name not in saved)
        return Listed(
            Listing(list(inputs), _calls(forward), (*results, *kept)),
            Listing((*kept, *self.tangents), _calls(self._in_turn(computed)), gradients),
            self.results,
            {self.results + i: i for i in range(len(kept))},
            self.whole,
        )

    def _writes(self) -> list[Node]:
        """What gives buffers their new values, which nothing reads."""
        return [n for n in self.graph.nodes if graphs.is_call(n, graphs.WRITE) and not torch_internals.is_backward(n)]

    def _made_of(self, values: Iterable[Any], saved: Set[str]) -> dict[Node, None]:
        """What these values are made of, as far as it is not saved, in the graph's order; themselves and what is saved among it."""
        nodes = (n for n in values if isinstance(n, Node))
        found = graphs.reached(nodes, lambda node: () if node.name in saved else node.all_input_nodes)
        return dict.fromkeys(sorted(found, key=self.at.__getitem__))

    def _in_turn(self, backward: dict[Node, None]) -> dict[Node, None]:
        """What tangents lead to stays in order; what of forward is computed again is put in where it is needed."""
        first = min((self.at[user] for tangent in self.tangents for user in tangent.users if user in backward), default=0)
        placed: dict[Node, None] = {}

        def missing(node: Node) -> list[Node]:
            return [n for n in node.all_input_nodes if n in backward and n not in placed]

        for node in (*(n for n in backward if self.at[n] >= first), *backward):
            if node not in placed:
                placed |= dict.fromkeys(sorted(graphs.reached([node], missing), key=self.at.__getitem__))
        return placed


def _calls(nodes: Iterable[Node]) -> list[Node]:
    """Those that compute, but each item right behind what it is one of."""
    calls = [n for n in nodes if n.op == "call_function"]
    there = set(calls)

    def is_item(node: Node) -> bool:
        return node.target is operator.getitem and node.args[0] in there

    items = defaultdict[Any, list[Node]](list)
    for node in filter(is_item, calls):
        items[node.args[0]].append(node)
    return [n for call in calls if not is_item(call) for n in _with_items(call, items)]


def _with_items(call: Node, items: Mapping[Any, Sequence[Node]]) -> Iterator[Node]:
    yield call
    for item in items.get(call, ()):
        yield from _with_items(item, items)
