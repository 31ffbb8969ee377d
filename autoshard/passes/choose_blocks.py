"""Decision: which modules under a number are the blocks of a model, and which are stacks that hold them.

[Note: Stacks] A block is what repeats. The plan treats it as one: its parameters travel together, and a policy says what it
saves for backward. It is the first module under a number ("model.layers.3"), unless that is a stack: in
`nn.Sequential(encoder, head)` the encoder is "0", and its blocks are "0.layers.3". Stacks are told by the names and shapes of
parameters, which all processes have alike:

- What has a twin beside it, of the same names and shapes, is a block, whatever repeats in it: experts, heads, an MLP's layers. So
  is an odd one in a list where MOST have twins: the one with experts, or the first, which has what all share. Twins that are
  nothing but lists of twins are stacks all the same: stages of one width.
- What has none is a stack if something in it repeats, at any depth: an encoder, a stage that is wider than the one before it.
  There two modules are alike if half of their matrices are: the first of a stage often has a shortcut, or is narrower. Alike ones
  that are fewer than LAYERS layers in all are parts of a block: an MLP, a pair of convolutions.

What is in a stack and in no block of it (an embedding, a stage's downsampling) is as what lies outside of blocks. Names and shapes
do not tell everything: two towers that are alike are as much a list of blocks as two layers with experts are, so each is one
block; and one layer with experts that is alone, or beside one or two without, is taken for a stack of experts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from autoshard.inventory import Inventory

LAYERS = 6  # modules that have parameters of their own
OWN_GRAPHS = 8  # blocks that are alike; as many become graphs of their own (`outline_blocks`)
MOST = 0.75  # of a list; single layers do not count, as those around an encoder may be alike

Shape = tuple[int, ...]
Kind = frozenset[tuple[str, Shape]]


def block_of(name: str, stacks: Collection[str] = ()) -> str | None:
    """"model.layers.3" for "model.layers.3.mlp.up.weight": up to the first number that is not a stack's; None without one."""
    parts = name.split(".")
    numbered = (".".join(parts[: i + 1]) for i, part in enumerate(parts[:-1]) if part.isdigit())
    return next((module for module in numbered if module not in stacks), None)


def blocks_of(names: Iterable[str], stacks: Collection[str]) -> list[str]:
    """The blocks that parameters of these names are in, in their order."""
    return list(dict.fromkeys(filter(None, (block_of(name, stacks) for name in names))))


def choose_stacks(inventory: Inventory) -> tuple[str, ...]:
    """The modules under a number that are no blocks, since blocks are in them; each before those in it."""
    return tuple(_stacks(_Module("", {p.name: p.shape for p in inventory.parameters})))


@dataclass(frozen=True, eq=False)
class _Module:
    """shapes: of its parameters, by their names in it."""

    name: str
    shapes: dict[str, Shape]

    @cached_property
    def lists(self) -> list[list[_Module]]:
        """The modules in it that are the first under a number, those of one list together."""
        inside: dict[str, dict[str, Shape]] = defaultdict(dict)
        for name, shape in self.shapes.items():
            if (module := block_of(name)) is not None:
                inside[module][name.removeprefix(f"{module}.")] = shape
        lists: dict[str, list[_Module]] = defaultdict(list)
        for module, shapes in inside.items():
            lists[module.rpartition(".")[0]].append(_Module(f"{self.name}.{module}".lstrip("."), shapes))
        return list(lists.values())

    @cached_property
    def kind(self) -> Kind:
        """Equal for twins."""
        return frozenset(self.shapes.items())

    @cached_property
    def layers(self) -> int:
        """How many modules in it, or itself, have parameters of their own."""
        return len({name.rpartition(".")[0] for name in self.shapes})

    @property
    def single(self) -> bool:
        """Whether there is no module in it."""
        return not any("." in name for name in self.shapes)

    @cached_property
    def repeats(self) -> bool:
        """Whether something in it does."""
        return any(_repeat(modules) or any(m.repeats for m in modules) for modules in self.lists)

    @property
    def only_twins(self) -> bool:
        """Whether it is nothing but a list of what repeats, without a difference."""
        if len(self.lists) != 1 or sum(len(m.shapes) for m in self.lists[0]) < len(self.shapes):
            return False
        return len({m.kind for m in self.lists[0]}) == 1 and _repeat(self.lists[0])


def _stacks(module: _Module) -> Iterator[str]:
    for modules in module.lists:
        kinds = Counter(m.kind for m in modules if not m.single)
        mostly = sum(n for n in kinds.values() if n > 1) >= MOST * sum(kinds.values())
        for inner in modules:
            if inner.only_twins if mostly or kinds[inner.kind] > 1 else inner.repeats:
                yield inner.name
                yield from _stacks(inner)


def _repeat(modules: list[_Module]) -> bool:
    """Whether several of a list are alike, and LAYERS layers in all."""
    kinds: dict[Kind, list[_Module]] = defaultdict(list)
    for m in modules:
        kinds[m.kind].append(m)
    for kind in kinds:
        alike = [m for other, several in kinds.items() if _alike(kind, other) for m in several]
        if len(alike) > 1 and sum(m.layers for m in alike) >= LAYERS:
            return True
    return False


def _alike(one: Kind, other: Kind) -> bool:
    """Whether half of what the smaller has is in both, norms and biases aside: whatever is of one width may have the same."""
    one, other = _matrices(one), _matrices(other)
    return 2 * len(one & other) >= min(len(one), len(other))


def _matrices(kind: Kind) -> Kind:
    return frozenset(p for p in kind if len(p[1]) > 1) or kind
