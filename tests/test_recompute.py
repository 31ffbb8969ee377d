"""Recomputation: results bit by bit, and what a policy makes of graphs."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

import autoshard
from autoshard import Config
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.cost_model.optimizer import NAMED
from autoshard.cost_model.work import op_name
from autoshard.forecast import Forecaster
from autoshard.passes import graphs
from autoshard.passes.choose_unshard import dropped, keeping_of
from autoshard.passes.choose_zero import Circumstances, make_plan
from autoshard.passes.recompute import MARKS
from autoshard.plan import VERBS, Plan
from autoshard.rehearsal import rehearse
from autoshard.runtime.dtensors import local
from autoshard.savings import kept_of
from tests import models
from tests.cluster import Cluster as Processes
from tests.parity import measure
from tests.recomputed import (
    HERE,
    TEXT,
    Checkpointed,
    Codegen,
    Deep,
    Looped,
    LoopedApart,
    Noisy,
    Stack,
    forecaster_of,
    inputs,
    planned,
    trained,
    two_steps,
    with_policies,
)
from tests.small import TOLERANCE, config, in_full, same


class Moving(nn.Linear):
    """Reads a buffer that it then overwrites, and what it has become."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.register_buffer("mean", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).sin() * (self.mean * 2) + (self.mean.view(4, 8).flatten() + 1).cos() * x.exp()
        self.mean.mul_(0.5).add_(x.detach().mean((0, 1)))
        return x + y.tanh() * (self.mean * 3)


class Average(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Moving() for _ in range(2))


class Either(nn.Linear):
    """Draws numbers in one of two graphs."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return x.sin() * torch.cond(x.sum() > -1e9, lambda v: nn.functional.dropout(v.sin(), 0.5), torch.cos, (y,))


class Choice(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Either(32, 32) for _ in range(2))


class Strange(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Noisy(32, 32) for _ in range(2))


POLICIES: list[Any] = [
    "full", "selective", "save addmm#0", "save _scaled_dot_product_flash_attention_for_cpu#0 addmm#1", ("full", "none", "selective")
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "policy"),
    [(Deep, POLICIES[-1]), *(in_full(m, p) for m in (Stack, Deep) for p in POLICIES)],
)
def test_results_are_bitwise_those_without(make: type[nn.Module], policy: Any) -> None:
    x = inputs()
    plan = planned(forecaster_of(make(), x))
    again = with_policies(plan, make, [policy] if isinstance(policy, str) else policy)
    plain = trained(make, x, plan, "eager")
    ours = trained(make, x, again, "eager")
    assert same(plain, ours)


def test_an_operator_that_torch_does_not_have_runs_once() -> None:
    plain = planned(forecaster_of(Strange(), inputs()))
    expected = trained(Strange, inputs(), plain, "eager")
    with pytest.warns(UserWarning, match="recompute: what autoshard_tests.noise gives is saved by every policy"):
        got = trained(Strange, inputs(), with_policies(plain, Strange, ["full"]), "eager")
    assert same(expected, got)
    forward, backward = _targets(Strange(), inputs())
    assert sum("noise" in t for t in forward) == 2 and not any("noise" in t for t in backward)
    assert any("addmm" in t for t in backward)  # and what is around it twice


@pytest.mark.full
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
@pytest.mark.parametrize("policies", [["full"], ["selective", "save addmm#0", "none", "full"]])
@pytest.mark.parametrize("make", [Stack, Deep])
def test_it_composes_with_other_shapes_evaluation_and_accumulation(make: type[nn.Module], policies: list[str], codegen: Codegen) -> None:
    plan = planned(forecaster_of(make(), inputs(), codegen))
    again = with_policies(plan, make, policies)
    plain, ours = (_loop(make, p, codegen) for p in (plan, again))
    if codegen == "eager":
        assert same(plain, ours)
    for a, b in zip(plain, ours, strict=True):
        torch.testing.assert_close(a, b)


def _loop(make: type[nn.Module], plan: Plan, codegen: Codegen) -> list[Tensor]:
    """Losses of steps of two batches of other sizes, each after an evaluation; then parameters and buffers."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = make()
    run = torch.compile(model, backend=autoshard.backend(Config(plan=plan, codegen=codegen, verbose=False)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    losses = []
    for sizes in ((4, 3), (2, 5)):
        model.eval()
        with torch.no_grad():
            losses.append(run(inputs(sizes[0])))
        model.train()
        for size in sizes:
            losses.append(run(inputs(size)))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *model.parameters(), *model.buffers()]


@pytest.mark.full
@pytest.mark.parametrize("make", [Stack, Deep])
def test_results_on_inductor(make: type[nn.Module]) -> None:
    x = inputs()
    plan = planned(forecaster_of(make(), x))
    again = with_policies(plan, make, ["full"])
    plain = trained(make, x, plan, "inductor")
    ours = trained(make, x, again, "inductor")
    for a, b in zip(plain, ours, strict=True):
        torch.testing.assert_close(a, b)


def _targets(model: nn.Module, batch: Any) -> tuple[list[str], list[str]]:
    """What forward and backward call where everything is computed again."""
    captured = capture(model.train(), batch)
    plan = make_plan(captured.inventory, Config(zero=0, recompute="full"), Circumstances(HERE, None))
    graphs = rehearse(captured, plan, inductor=False)
    assert graphs.backward is not None
    forward, backward = (
        [str(n.target) for n in g.graph.nodes if n.op == "call_function"] for g in (graphs.forward, graphs.backward)
    )
    return forward, backward


def test_selective_saves_attention_and_every_second_product() -> None:
    """As torchtitan's policy for each operation does."""
    captured = capture(models.llama(2).train(), TEXT(torch.Generator()))
    plan = make_plan(captured.inventory, Config(zero=0, recompute="selective"), Circumstances(HERE, None))
    cut = rehearse(captured, plan, inductor=False)
    assert cut.backward is not None
    forward = Counter(op_name(n) for n in cut.forward.graph.nodes if graphs.block_of(n, plan.stacks))
    again = Counter(op_name(n) for n in cut.backward.graph.nodes if "_again_" in n.name)
    assert forward["mm"] == 14 and again["mm"] == 6  # of seven in a block the first, the third, the fifth and the last are saved
    assert forward["_scaled_dot_product_flash_attention_for_cpu"] == 2 and not any("attention" in name for name in again)


def test_attention_without_dropout_is_repeated_without_random_states() -> None:
    for targets in _targets(models.llama(2), TEXT(torch.Generator())):
        assert sum("flash_attention_for_cpu.default" in t for t in targets) == 2
        assert not any("rng_state" in t for t in targets)
    for targets in _targets(Stack(), inputs()):
        assert sum("rng_state" in t for t in targets) == 6  # of three attentions and three dropouts


@pytest.mark.parametrize("policy", [in_full("full"), in_full("selective"), "save addmm#0 native_dropout#0"])
def test_a_policy_takes_the_place_of_the_user_s_checkpoints(policy: str) -> None:
    """As many values are saved and repeated as without them; what is repeated is named after its block."""
    found = []
    for make in (Stack, Checkpointed):
        captured = capture(make(), inputs())
        plan = make_plan(captured.inventory, Config(zero=0), Circumstances(HERE, None))
        graphs = rehearse(captured, with_policies(plan, make, [policy]), inductor=False)
        assert graphs.backward is not None
        saved = graphs.forward.graph.output_node().all_input_nodes
        found.append((len(saved), Counter(n.name.partition("_again_")[0] for n in graphs.backward.graph.nodes if "_again_" in n.name)))
    assert found[0] == found[1] and found[0][1].keys() == {f"layers_{i}" for i in range(3)}


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
@pytest.mark.parametrize("policy", ["none", "full", "save addmm#0"])
def test_backward_has_what_a_buffer_was(policy: str, codegen: Codegen) -> None:
    """As the model alone has it; torch.compile by itself, whose backward reads what it has become, does not."""
    found = trained(Average, inputs(), with_policies(planned(forecaster_of(Average(), inputs(), codegen)), Average, [policy]), codegen)
    torch.manual_seed(0)
    alone = Average()
    for one, expected in zip(found, two_steps(alone, alone, inputs()), strict=True):
        torch.testing.assert_close(one, expected)


def test_a_size_that_is_asked_of_a_value_does_not_save_it() -> None:
    """Where sizes are open, as in a sweep and in a job whose batches differ, graphs ask what they are."""
    saved = []
    for open in (False, True):
        torch.compiler.reset()
        forecaster = Forecaster(capture(Deep(), inputs(), open=open), NAMED["adamw"], HERE, "eager")
        plan = make_plan(forecaster.captured.inventory, Config(zero=0), Circumstances(HERE, None))
        again = with_policies(plan, Deep, ["full"])
        saved.append(forecaster(again).predicted.memory["activations"])
    assert saved[0] == saved[1]


class Normed(nn.Module):
    """A block that ends in a norm, as BERT's do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 128), nn.Linear(128, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


class PostNorm(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Normed() for _ in range(3))


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_what_leaves_a_block_is_saved_though_an_operation_of_several_results_gives_it(policy: str) -> None:
    """Else all blocks before one are repeated for it, when backward begins."""
    backward = rehearse(capture(PostNorm(), inputs()), with_policies(planned(forecaster_of(PostNorm(), inputs())), PostNorm, [policy]), False).backward
    assert backward is not None
    repeated = [n.name.partition("_again_")[0] for n in backward.graph.nodes if "_again_" in n.name]
    assert list(dict.fromkeys(repeated)) == ["layers_2", "layers_1", "layers_0"] and repeated == sorted(repeated, reverse=True)


class Viewed(Normed):
    """What leaves it is a view of what the norm gives."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unsqueeze(0)[0]


class PostNormViewed(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Viewed() for _ in range(3))


def test_what_a_view_that_leaves_a_block_is_of_is_saved_too() -> None:
    """The views are made again, nothing that a block computes before its own turn."""
    make = PostNormViewed
    backward = rehearse(capture(make(), inputs()), with_policies(planned(forecaster_of(make(), inputs())), make, ["full"]), False).backward
    assert backward is not None
    repeated = [n.name.partition("_again_")[0] for n in backward.graph.nodes if "_again_addmm" in n.name]
    assert repeated == ["layers_2"] * 2 + ["layers_1"] * 2 + ["layers_0"] * 2


def test_what_takes_graphs_is_saved() -> None:
    plan = planned(forecaster_of(Choice(), inputs()))
    usual, again = (trained(Choice, inputs(), p, "eager") for p in (plan, with_policies(plan, Choice, ["full"])))
    assert same(usual, again)
    backward = rehearse(capture(Choice(), inputs()), with_policies(plan, Choice, ["full"]), inductor=False).backward
    assert backward is not None and sum("cond" in str(node.target) for node in backward.graph.nodes) == 2  # those of backward alone


def test_a_policy_that_finds_nothing_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(Stack(), inputs())
    plan = make_plan(captured.inventory, Config(zero=0, recompute="full"), Circumstances(HERE, None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rehearse(captured, plan, inductor=False)
    monkeypatch.setattr("autoshard.torch_internals.module_path", lambda node: "elsewhere.0")
    with pytest.warns(UserWarning, match="no operation of this graph is known to belong to 'layers.0'"):
        rehearse(captured, plan, inductor=False)


@pytest.mark.parametrize(
    ("policy", "said"),
    [("save addmm#0 addmm#99", "'addmm#99' is no operation of layers.0, so it is not saved; it has .*addmm#0"), ("full", "no block 'layers.7'; it has layers.0")],
)
def test_what_a_plan_s_file_names_and_is_not_there_is_warned_of(policy: str, said: str) -> None:
    captured = capture(Stack(), inputs())
    plan = make_plan(captured.inventory, Config(zero=0), Circumstances(HERE, None))
    named = (("layers.0", policy), *((("layers.7", policy),) if policy == "full" else ()))
    with pytest.warns(UserWarning, match=said):
        rehearse(captured, replace(plan, recompute=named), inductor=False)


def test_another_verb_of_policies_leaves_its_own_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(MARKS) == VERBS
    monkeypatch.setattr(sys.modules[Plan.__module__], "VERBS", ("save", "offload"))
    monkeypatch.setitem(MARKS, "offload", {**MARKS["save"], "should_offload": True})
    captured = capture(Stack(), inputs())
    plan = make_plan(captured.inventory, Config(zero=0), Circumstances(HERE, None))
    cut = rehearse(captured, with_policies(plan, Stack, ["save addmm#0 offload addmm#1"]), inductor=False)
    saved = cut.forward.graph.output_node().args[0][cut.results :]  # type: ignore[index]
    products = [n for n in saved if isinstance(n, Node) and n.target is torch.ops.aten.addmm.default]
    assert [n.meta.get("should_offload", False) for n in products] == 3 * [False, True]


@pytest.mark.parametrize(
    ("name", "zero", "recompute"),
    [("conv", 1, "full"), *(in_full("llama_deep", z, r) for z in range(4) for r in ("full", "selective"))],
)
def test_parity_with_recomputation(two: Processes, name: str, zero: int, recompute: str) -> None:
    for distance in two.run(measure, name, config(zero, recompute=recompute)):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.parametrize("name", ["resnet", in_full("llama"), in_full("llama_deep")])
def test_parity_where_copies_of_some_blocks_are_kept_and_others_computed_again(two: Processes, name: str) -> None:
    """As one budget for both may have it."""
    case = (models.CASES | models.DEEP)[name]
    batch = case.batch(torch.Generator().manual_seed(0))
    plan = autoshard.plan(case.build(), batch, config(3, recompute="full"), Cluster(1, 2, DEVICES["cpu"]))
    blocks = [block for block, _ in plan.recompute]
    mixed = replace(keeping_of(plan, set(blocks[::2])), recompute=tuple((b, "full") for b in blocks[1:]))
    assert 0 < len(dropped(mixed)) < len(dropped(plan))
    for distance in two.run(measure, name, config("auto", plan=mixed, replicate_below="auto")):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.parametrize("make", [Looped, in_full(LoopedApart)])
def test_a_policy_is_about_each_call_of_a_block(make: type[nn.Module]) -> None:
    """Of four calls what enters is saved, and nothing inside; results are bitwise those without."""
    forecaster = forecaster_of(make(), inputs())
    plan = planned(forecaster)
    full = with_policies(plan, make, ["full"])
    usual, kept = (kept_of(rehearse(forecaster.captured, p, inductor=False)) for p in (plan, full))
    within = [len([name for name in names if name.startswith(("native_layer_norm", "addmm", "gelu", "native_dropout"))]) for names in (usual, kept)]
    assert within[0] > 0 and within[1] == 0
    entering = "add" if make is Looped else "tanh"
    assert kept.issuperset({entering, f"{entering}_1", f"{entering}_2"})
    assert same(trained(make, inputs(), plan, "eager"), trained(make, inputs(), full, "eager"))


def _of_two_forwards(model: nn.Module, run: Any) -> list[Tensor]:
    torch.manual_seed(1)
    loss = run(inputs()) + run(inputs(8))
    loss.backward()
    return [loss.detach(), *(local(p.grad) for p in model.parameters() if p.grad is not None), *model.buffers()]


@pytest.mark.parametrize("policy", ["full", in_full("selective")])
def test_statistics_may_change_between_a_forward_and_its_backward(policy: str) -> None:
    """Where BatchNorm is computed again."""
    made = []
    for compiled in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Stack(2)
        backend = autoshard.backend(Config(codegen="eager", recompute=policy, verbose=False))  # type: ignore[arg-type]
        made.append(_of_two_forwards(model, torch.compile(model, backend=backend, dynamic=False) if compiled else model))
    for ours, expected in zip(*made, strict=True):
        torch.testing.assert_close(ours, expected)
