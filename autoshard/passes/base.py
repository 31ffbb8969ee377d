"""What a rewrite pass is.

A pass is a frozen dataclass in a file of its own, file name = pass name; its fields are its options. It says
at which stage it runs, what it requires and provides, and whether results stay bitwise the same.

[Note: Stages]
traced    the graph as Dynamo gives it, parameters as inputs; before autograd
joint     forward and backward in one graph, after AOTAutograd, with the logical ops; also an inference graph
split     the forward, the backward, or an inference graph, each alone, as soon as they are parted
code      each graph that code is generated for: those, and the halves of blocks
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from torch.fx import GraphModule

from autoshard.cost_model.hardware import Device
from autoshard.ops.early import Early
from autoshard.plan import Plan

Stage = Literal["traced", "joint", "split", "code"]
Phase = Literal["forward", "backward", "inference"]
STAGES: tuple[Stage, ...] = ("traced", "joint", "split", "code")


@dataclass(frozen=True)
class Context:
    """What a pass may know beside the graph.

    parameters: the name of each graph input that is a parameter, by position, of the traced and joint graphs.
    buffers: that of each that is a buffer of the model.
    everyone: process group of all processes. rank: this one's. phase: which graph this is, at stages "split" and "code". fuses: the device that
    kernels are generated for; None where none are. early: where gathers may start when the optimizer has stepped.
    """

    plan: Plan
    parameters: dict[int, str] = field(default_factory=dict)
    buffers: dict[int, str] = field(default_factory=dict)
    everyone: str = ""
    rank: int = 0
    phase: Phase = "forward"
    fuses: Device | None = None
    early: Early | None = None


class Pass(Protocol):
    """The interface of a rewrite pass."""

    name: ClassVar[str]
    stage: ClassVar[Stage]
    requires: ClassVar[frozenset[str]]
    provides: ClassVar[frozenset[str]]
    bitwise: ClassVar[bool]

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        """Rewrites `gm`, in place or not, and returns the graph to go on with."""
        ...
