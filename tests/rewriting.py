"""Rewrites in one process that stands for rank 0 of many: what all passes, or some, make of a small model.

A module whose tests do so says `pytestmark = pytest.mark.usefixtures("many_processes")`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import autoshard
from autoshard.codegen import Compilation
from autoshard.console import Phases
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.inventory import take_inventory
from autoshard.passes import registry
from autoshard.passes.base import Context
from autoshard.passes.choose_zero import Circumstances, make_plan
from autoshard.passes.dump import Dump
from autoshard.passes.manager import PassManager
from autoshard.plan import Plan
from autoshard.runtime.processes import World, build_mesh, name_of_everyone
from autoshard.runtime.shard import Sharder
from autoshard.runtime.state import ModelState

WORLD = 256


class Blocks(nn.Module):
    """Three blocks; `order` is the order in which this graph uses them."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 512)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i in self.order:
            x = torch.relu(self.layers[i](x))
        return x.sum()


def plan_for(model: nn.Module, zero: int, world: int = WORLD, **config: Any) -> Plan:
    inventory = take_inventory(model, model.parameters())
    options = autoshard.Config(zero=zero, replicate_below=0, **config)
    return make_plan(inventory, options, Circumstances(Cluster(1, world, DEVICES["h100"]), None))


@dataclass(frozen=True)
class Record:
    """A pass of the last stage that changes nothing and keeps what it saw."""

    seen: dict[str, GraphModule] = field(default_factory=dict, hash=False)

    name: ClassVar[str] = "record"
    stage: ClassVar[str] = "code"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    bitwise: ClassVar[bool] = True

    def run(self, gm: GraphModule, context: Context) -> GraphModule:
        self.seen[context.phase] = gm
        return gm


def shard(model: nn.Module, plan: Plan) -> None:
    """In place; what was traced before is forgotten."""
    torch.compiler.reset()
    for _ in Sharder(model, plan, build_mesh("cpu", plan.axes)).shard():
        pass


def rewritten(model: nn.Module, inputs: Tensor, plan: Plan, spec: str = registry.DEFAULT) -> dict[str, GraphModule]:
    """The final graphs by phase."""
    shard(model, plan)
    state = ModelState(model, plan, World(0, WORLD, "cpu"), "model")
    record = Record()

    def backend(gm: GraphModule, given: Any) -> Any:
        names, buffers = state.names(), {id(b): name for name, b in model.named_buffers()}
        context = Context(
            plan,
            {i: names[id(x)] for i, x in enumerate(given) if id(x) in names},
            {i: buffers[id(x)] for i, x in enumerate(given) if id(x) in buffers},
            name_of_everyone(),
        )
        manager = PassManager((*registry.parse(spec), record), Dump(None))
        return Compilation(manager, context, False, Phases(False)).compile(gm, given)

    loss = torch.compile(model, backend=backend)(inputs)
    if loss.requires_grad:
        loss.backward()
    return record.seen


def collectives(gm: GraphModule) -> list[str]:
    """"gather 1024", "reduce 2048", ... with the elements that one process sends into it."""
    found = []
    for node in gm.graph.nodes:
        match = re.match(r"_c10d_functional\.(all_gather|reduce_scatter|all_to_all|all_reduce|broadcast)", str(node.target))
        if match:
            found.append(f"{match[1]} {node.args[0].meta['val'].numel()}")
    return found


def kind(node: Node) -> str:
    """What a node of a rewritten graph is, if it is one of these."""
    table = {"all_gather": "gather", "wait_tensor": "wait", "aten.addmm": "mm", "aten.mm": "mm", "reduce_sc": "reduce"}
    return next((kind for name, kind in table.items() if name in str(node.target)), "")
