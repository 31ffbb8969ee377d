"""Rewrite: dropout draws what it keeps from a seed and each number's place, so that it can be a part of a kernel.

torch's dropout is a kernel of its own, that reads and writes what the operations around it read and write again. The seed is
a random number of torch's own stream: the same seed of torch gives the same dropout, other processes another. What is kept
is not what torch's kernel would keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autoshard.kernels import random  # noqa: F401  (registers `keep`)
from autoshard.passes import graphs
from autoshard.passes.base import Context, Stage

_DROPOUT = torch.ops.aten.native_dropout.default


@dataclass(frozen=True)
class SeedDropout:
    """Where kernels are generated for a device, and of dropout that is not one that backward repeats: torch wraps that."""

    name: ClassVar[str] = "seed_dropout"
    stage: ClassVar[Stage] = "code"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = False

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        for node in graphs.calls(gm, _DROPOUT) if context.fuses else ():
            if _drops(node):
                graphs.inline(gm, node, graphs.traced(node, _seeded))
        return gm


def _drops(node: Node) -> bool:
    _, p, train = node.args
    return train is not False and isinstance(p, float) and 0 < p < 1


def _seeded(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    seed = torch.randint(0, 1 << 62, (1,), dtype=torch.int64, device=x.device)
    kept = torch.ops.autoshard.keep(x, seed, p)
    return x * kept * (1 / (1 - p)), kept
