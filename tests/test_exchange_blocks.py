"""Another choice of what compiled blocks save, put into a graph that was traced before: as one that is traced with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autoshard import Config
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.passes.choose_unshard import dropped, keeping
from autoshard.plan import Plan
from autoshard.planning import first_look
from autoshard.rehearsal import Known, Prepared, Rehearsed, body_of, prepare
from tests.recomputed import Deep, Layer, Plain, Stack, forecaster_of, inputs, planned
from tests.small import in_full

TWO = Cluster(2, 1, DEVICES["cpu"])


class Attending(Layer):
    """Heads without a norm's buffers, which would keep blocks from being graphs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)  # type: ignore[assignment]


class Heads(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList([*(Attending() for _ in range(8)), *(Plain() for _ in range(8))])


def _text(gm: GraphModule) -> str:
    """What a graph computes of what, whatever its nodes are called; of blocks, what is in them."""
    number: dict[Any, str] = {node: f"%{i}" for i, node in enumerate(gm.graph.nodes)}
    lines = []
    for node in gm.graph.nodes:
        body = body_of(node)
        if body is not None:
            given = [number.get(n, n) for n in body[1]]
            lines.append(f"{number[node]} = {{\n{_text(body[0])}\n}} {given} {_sizes(node)}")
        elif node.op != "placeholder":
            given = map_arg((node.args, node.kwargs), lambda n: number[n])
            lines.append(f"{number[node]} = {node.target} {given} {_sizes(node)}")
    return "\n".join(lines)


def _sizes(node: Node) -> Any:
    return torch.utils._pytree.tree_map(lambda v: (v.shape, v.dtype) if isinstance(v, Tensor) else v, node.meta.get("val"))


def _texts(found: Rehearsed) -> tuple[Any, ...]:
    assert found.backward is not None
    return _text(found.forward), _text(found.backward), found.results, found.saved


def _prepared(make: Callable[[], nn.Module], zero: int, inductor: bool) -> tuple[Prepared, Plan, Known]:
    torch.compiler.reset()
    model, known = make(), Known()
    plan = first_look(model, Config(zero=zero, replicate_below=0), TWO)
    return prepare(capture(model, inputs()), plan, inductor, known=known), plan, known


@pytest.mark.parametrize(("make", "zero", "inductor"), [(Deep, 0, False), in_full(Heads, 3, False), in_full(Heads, 2, True)])
def test_blocks_that_save_something_else_are_as_if_they_were_traced(make: Callable[[], nn.Module], zero: int, inductor: bool) -> None:
    prepared, plan, known = _prepared(make, zero, inductor)
    names = [name for kind in prepared.kinds for name in kind.names]
    policies = ("full", "save mm#0" if inductor else "save addmm#0", "none", "selective")
    plans = [replace(plan, recompute=tuple((name, policies[i % n]) for i, name in enumerate(names))) for n in (1, 4)]
    plans += [replace(plan, recompute=tuple((name, "full" if i % 3 == 2 else "through") for i, name in enumerate(names)))]
    plans += [keeping(plans[1], len(dropped(plan)) // 2)] if zero == 3 else []
    for other in plans:
        found = prepared.cut_exchanged(other, known)
        assert found is not None and _texts(found) == _texts(prepare(prepared.captured, other, inductor).cut(other))
        assert _texts(found) != _texts(prepared.cut(plan))


def test_what_backward_takes_sizes_for_is_traced() -> None:
    torch.compiler.reset()
    model = Deep()
    captured = capture(model, inputs(), open=True)
    plan = first_look(model, Config(zero=0), TWO)
    known = Known()
    prepared = prepare(captured, plan, inductor=False, known=known)
    assert any(block.sizes for block in prepared.blocks)
    full = replace(plan, recompute=tuple((f"layers.{i}", "full") for i in range(9)))
    assert prepared.cut_exchanged(full, known) is None


def test_a_budget_is_met_without_another_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    forecaster = forecaster_of(Deep(), inputs(256))
    plan = planned(forecaster)
    traced = list[Plan]()
    outlined = forecaster._outlined
    monkeypatch.setattr(forecaster, "_outlined", lambda plan, passes: traced.append(plan) or outlined(plan, passes))
    budget = int(0.7 * plan.predicted.peak_bytes)
    found = forecaster.fit(plan, budget)
    assert found.recompute and found.predicted.footprint <= budget and not traced
