"""Recomputation: the choice against brute force, results bit by bit, peaks against budgets."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard import Config
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster, measured_here
from autoshard.cost_model.optimizer import NAMED
from autoshard.errors import BudgetError, ConfigError, PlanError
from autoshard.forecast import Forecaster
from autoshard.passes.choose_recompute import CLOSE, Aim, Block, Option, choose, least
from autoshard.passes.choose_zero import Circumstances, make_plan
from autoshard.plan import Plan
from autoshard.rehearsal import rehearse
from autoshard.report import plan_tables, rendered
from autoshard.savings import LEVELS, LITTLE, levels
from tests import models
from tests.cluster import Cluster as Processes
from tests.parity import measure
from tests.small import TOLERANCE, config, in_full
from tests.peaks import grown

HERE = Cluster(1, 1, measured_here("cpu"))
Codegen = Literal["eager", "inductor"]


@st.composite
def blocks(draw: st.DrawFn) -> list[Block]:
    def option(number: int) -> Option:
        saved, more = draw(st.integers(0, 20)), draw(st.integers(0, 20))
        return Option(str(number), saved, saved + more, float(draw(st.integers(1, 20))))

    return [Block(str(i), tuple(option(k) for k in range(draw(st.integers(1, 3))))) for i in range(draw(st.integers(1, 4)))]


def _peak(taken: tuple[Option, ...]) -> int:
    before = itertools.accumulate((o.saved for o in taken), initial=0)
    return max(b + o.peak for b, o in zip(before, taken))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(0, 100), st.integers(1, 1000))
def test_aims_end_at_the_highest_that_is_met(peaks: list[int], more: int, budget: int) -> None:
    """Of choices by their peaks, each simulated a little higher than it was taken to be."""
    peaks = sorted({*peaks, 1})

    def simulated(aim: Aim) -> int:
        return max([p for p in peaks if p <= aim.at], default=peaks[0]) + more

    aim, found = Aim(budget), []
    for _ in range(40):
        found.append(simulated(aim))
        aim = aim.after(found[-1] - budget)
        if aim.settled:
            break
    fitting = [p + more for p in peaks if p + more <= budget]
    assert aim.settled == bool(fitting)
    if fitting:
        assert max(p for p in found if p <= budget) >= max(fitting) * (1 - 2 * CLOSE) - more - 1


@given(st.lists(st.integers(1, 1 << 20), max_size=3 * LEVELS))
def test_levels_save_one_value_more_each_where_they_can(sizes: list[int]) -> None:
    found = levels(sizes)
    large = [i for i, size in enumerate(sizes, 1) if size >= LITTLE * sum(sizes)]
    assert found == sorted(set(found)) and len(found) <= LEVELS and found[-1:] == ([len(sizes)] if sizes else [])
    if len(large) < LEVELS:
        assert found[: len(large)] == large


@given(blocks(), st.integers(0, 80))
def test_the_choice_is_that_of_brute_force(blocks: list[Block], budget: int) -> None:
    every = list(itertools.product(*(b.options for b in blocks)))
    assert _peak(least(blocks)) == min(map(_peak, every))
    fitting = [sum(o.seconds for o in taken) for taken in every if _peak(taken) <= budget]
    taken = choose(blocks, budget)
    assert (taken is None) == (not fitting)
    if taken is not None:
        assert _peak(taken) <= budget and sum(o.seconds for o in taken) == min(fitting)


class Layer(nn.Module):
    """Attention, dropout, a norm that keeps statistics, and a view that leaves the block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.BatchNorm1d(32), nn.Linear(32, 96)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x.flatten(0, 1)).view_as(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        x = x + nn.functional.dropout(y.transpose(1, 2).flatten(-2), 0.1)
        return (x + self.down(nn.functional.gelu(self.up(x)))).unsqueeze(0)[0]


class Stack(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(layers)), nn.Linear(32, 50)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).log_softmax(-1).square().mean()


class Plain(nn.Module):
    """Of a block that can be a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.1)


class Deep(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Plain() for _ in range(9))


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


@torch.library.custom_op("autoshard_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """Draws numbers, and does not say so."""
    return torch.rand_like(x)


@noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Noisy(nn.Linear):
    """Has an operator of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(super().forward(x)) * noise(x.detach())


class Strange(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(Noisy(32, 32) for _ in range(2))


def _x(batch: int = 4) -> Tensor:
    return torch.randn(batch, 16, 32, generator=torch.Generator().manual_seed(0))


def _forecaster(model: nn.Module, x: Any, codegen: Codegen = "eager") -> Forecaster:
    return Forecaster(capture(model, x), NAMED["adamw"], HERE, codegen)


def _plan(forecaster: Forecaster, **options: Any) -> Plan:
    return make_plan(forecaster.captured.inventory, Config(zero=0, **options), Circumstances(HERE, None), forecaster)


def _trained(make: type[nn.Module], x: Tensor, plan: Plan, codegen: str) -> tuple[list[Tensor], nn.Module]:
    """Losses and gradients of two steps, and buffers after them."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = make()
    run = torch.compile(model, backend=autoshard.backend(Config(plan=plan, codegen=codegen, verbose=False)))  # type: ignore[arg-type]
    torch.manual_seed(1)
    return _two_steps(run, model, x), model


def _two_steps(run: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    losses = []
    for _ in range(2):
        losses.append(run(x))
        losses[-1].backward()
    return [*losses, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def _again(plan: Plan, make: type[nn.Module], policies: Sequence[str]) -> Plan:
    """The plan with these policies for the layers, in turn."""
    names = [f"layers.{i}" for i in range(len(make().layers))]  # type: ignore[arg-type]
    return replace(plan, recompute=tuple(zip(names, itertools.cycle(policies))))


POLICIES: list[Any] = [
    "full", "selective", "save addmm#0", "save _scaled_dot_product_flash_attention_for_cpu#0 addmm#1", ("full", "none", "selective")
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "policy"),
    [(Deep, POLICIES[-1]), *(in_full(m, p) for m in (Stack, Deep) for p in POLICIES)],
)
def test_results_are_bitwise_those_without(make: type[nn.Module], policy: Any) -> None:
    x = _x()
    plan = _plan(_forecaster(make(), x))
    again = _again(plan, make, [policy] if isinstance(policy, str) else policy)
    plain, _ = _trained(make, x, plan, "eager")
    ours, _ = _trained(make, x, again, "eager")
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_an_operator_that_torch_does_not_have_runs_once() -> None:
    plain = _plan(_forecaster(Strange(), _x()))
    expected, _ = _trained(Strange, _x(), plain, "eager")
    got, _ = _trained(Strange, _x(), _again(plain, Strange, ["full"]), "eager")
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("make", [Stack, Deep])
def test_it_composes_with_other_shapes_evaluation_and_accumulation(make: type[nn.Module]) -> None:
    plan = _plan(_forecaster(make(), _x()))
    again = _again(plan, make, ["full"])
    plain, ours = (_loop(make, p) for p in (plan, again))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def _loop(make: type[nn.Module], plan: Plan) -> list[Tensor]:
    """Losses of steps of two batches of other sizes, each after an evaluation; then parameters and buffers."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = make()
    run = torch.compile(model, backend=autoshard.backend(Config(plan=plan, codegen="eager", verbose=False)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    losses = []
    for sizes in ((4, 3), (2, 5)):
        model.eval()
        with torch.no_grad():
            losses.append(run(_x(sizes[0])))
        model.train()
        for size in sizes:
            losses.append(run(_x(size)))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *model.parameters(), *model.buffers()]


@pytest.mark.full
@pytest.mark.parametrize("make", [Stack, Deep])
def test_results_on_inductor(make: type[nn.Module]) -> None:
    x = _x()
    plan = _plan(_forecaster(make(), x))
    again = _again(plan, make, ["full"])
    plain, _ = _trained(make, x, plan, "inductor")
    ours, _ = _trained(make, x, again, "inductor")
    for a, b in zip(plain, ours, strict=True):
        torch.testing.assert_close(a, b)


def _pictures(g: torch.Generator) -> models.Batch:
    return {"pixel_values": torch.randn(64, 3, 16, 16, generator=g), "labels": torch.zeros(64, dtype=torch.long)}


TEXT = models.tokens(67, 32, 24)
FAMILIES = {
    "stack": models.Case(Stack, lambda g: {"x": _x(64)}, lambda loss: loss),
    "deep": models.Case(Deep, lambda g: {"x": _x(64)}, lambda loss: loss),
    "llama": models.Case(partial(models.llama, 4), TEXT),
    "gpt2": models.Case(partial(models.gpt2, 4), TEXT),
    "bert": models.Case(partial(models.bert, 4), TEXT),
    "vit": models.Case(partial(models.vit, 4), _pictures),
    "conv": models.Case(partial(models.ResNet, 16), models.features(32, 16, 10, 10), lambda out: out[1]),
}


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


def test_attention_without_dropout_is_repeated_without_random_states() -> None:
    for targets in _targets(models.llama(2), TEXT(torch.Generator())):
        assert sum("flash_attention_for_cpu.default" in t for t in targets) == 2
        assert not any("rng_state" in t for t in targets)
    for targets in _targets(Stack(), _x()):
        assert sum("rng_state" in t for t in targets) == 6  # of three attentions and three dropouts


class Checkpointed(Stack):
    """Whose user repeats its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x).log_softmax(-1).square().mean()


@pytest.mark.parametrize("policy", ["full", "selective", "save addmm#0 native_dropout#0"])
def test_a_policy_takes_the_place_of_the_user_s_checkpoints(policy: str) -> None:
    """As many values are saved and repeated as without them; what is repeated is named after its block."""
    found = []
    for make in (Stack, Checkpointed):
        captured = capture(make(), _x())
        plan = make_plan(captured.inventory, Config(zero=0), Circumstances(HERE, None))
        graphs = rehearse(captured, _again(plan, make, [policy]), inductor=False)
        assert graphs.backward is not None
        saved = graphs.forward.graph.output_node().all_input_nodes
        found.append((len(saved), Counter(n.name.partition("_again_")[0] for n in graphs.backward.graph.nodes if "_again_" in n.name)))
    assert found[0] == found[1] and found[0][1].keys() == {f"layers_{i}" for i in range(3)}


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
@pytest.mark.parametrize("policy", ["none", "full", "save addmm#0"])
def test_backward_has_what_a_buffer_was(policy: str, codegen: Codegen) -> None:
    """As the model alone has it; torch.compile by itself, whose backward reads what it has become, does not."""
    found, _ = _trained(Average, _x(), _again(_plan(_forecaster(Average(), _x(), codegen)), Average, [policy]), codegen)
    torch.manual_seed(0)
    alone = Average()
    for one, expected in zip(found, _two_steps(alone, alone, _x()), strict=True):
        torch.testing.assert_close(one, expected)


def test_what_takes_graphs_is_saved() -> None:
    plan = _plan(_forecaster(Choice(), _x()))
    usual, again = (_trained(Choice, _x(), p, "eager")[0] for p in (plan, _again(plan, Choice, ["full"])))
    assert all(map(torch.equal, usual, again))
    backward = rehearse(capture(Choice(), _x()), _again(plan, Choice, ["full"]), inductor=False).backward
    assert backward is not None and sum("cond" in str(node.target) for node in backward.graph.nodes) == 2  # those of backward alone


def test_dropout_of_generated_code_in_blocks_that_are_graphs_of_their_own() -> None:
    """The seeds that Inductor draws belong to no block."""
    forecaster = _forecaster(Deep(), _x(64), "inductor")
    plan = _plan(forecaster)
    fitted = forecaster.fit(plan, int(0.8 * plan.predicted.peak_bytes))
    assert fitted.recompute and fitted.predicted.peak_bytes <= 0.8 * plan.predicted.peak_bytes


def test_a_policy_that_finds_nothing_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(models.llama(2).train(), TEXT(torch.Generator()))
    plan = make_plan(captured.inventory, Config(zero=0, recompute="full"), Circumstances(HERE, None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rehearse(captured, plan, inductor=False)
    monkeypatch.setattr("autoshard.torch_internals.module_path", lambda node: "elsewhere.0")
    with pytest.warns(UserWarning, match="no operation of this graph is known to belong to 'model.layers.0'"):
        rehearse(captured, plan, inductor=False)


@pytest.mark.parametrize(
    ("policy", "said"),
    [("save addmm#0 addmm#99", "'addmm#99' is no operation of layers.0, so it is not saved; it has .*addmm#0"), ("full", "no block 'layers.7'; it has layers.0")],
)
def test_what_a_plan_s_file_names_and_is_not_there_is_warned_of(policy: str, said: str) -> None:
    captured = capture(Stack(), _x())
    plan = make_plan(captured.inventory, Config(zero=0), Circumstances(HERE, None))
    named = (("layers.0", policy), *((("layers.7", policy),) if policy == "full" else ()))
    with pytest.warns(UserWarning, match=said):
        rehearse(captured, replace(plan, recompute=named), inductor=False)


@pytest.mark.parametrize(
    ("name", "codegen"),
    [*(in_full(name, "eager") for name in FAMILIES), *(in_full(name, "inductor") for name in ("llama", "gpt2", "bert", "vit"))],
)
def test_the_peak_follows_the_budget(name: str, codegen: Codegen) -> None:
    """Predicted and measured, from all that torch saves down to the least that is possible."""
    if codegen == "inductor" and torch.__version__ < (2, 13):
        pytest.skip("how Inductor fuses is foreseen as torch 2.13 does")
    case = FAMILIES[name]
    batch = case.batch(torch.Generator().manual_seed(0))
    forecaster = _forecaster(case.build().train(), batch, codegen)
    plan = _plan(forecaster)
    floor = forecaster.fit(plan, 0).predicted.peak_bytes
    top, seconds, measured = plan.predicted.peak_bytes, 0.0, math.inf
    assert floor < 0.8 * top
    for eighth in range(8, -1, -2 if name == "deep" or codegen == "inductor" else -1):
        budget = floor + eighth * (top - floor) // 8
        found = forecaster.fit(plan, budget)
        predicted, before = found.predicted, measured
        assert predicted.peak_bytes <= budget
        assert (predicted.step_seconds or 0) >= seconds * (1 - 1e-6)
        seconds = predicted.step_seconds or 0.0
        held = sum(predicted.memory.get(c, 0) for c in ("parameters", "optimizer", "buffers", "inputs"))
        measured = held + _measured(case, batch, found, codegen)
        assert measured - held == pytest.approx(predicted.peak_bytes - held, rel=0.03)
        assert measured <= budget * 1.001 and measured <= before * 1.001


def _measured(case: models.Case, batch: models.Batch, plan: Plan, codegen: Codegen) -> int:
    torch.compiler.reset()
    model = case.build().train()
    optimizer = torch.optim.AdamW(model.parameters())
    run = torch.compile(model, backend=autoshard.backend(Config(plan=plan, codegen=codegen, verbose=False)))

    def step() -> None:
        case.loss(run(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return grown(step)


@pytest.mark.parametrize(
    ("name", "zero", "recompute"),
    [("conv", 1, "full"), *(in_full("llama_deep", z, r) for z in range(4) for r in ("full", "selective"))],
)
def test_parity_with_recomputation(two: Processes, name: str, zero: int, recompute: str) -> None:
    for distance in two.run(measure, name, config(zero, recompute=recompute)):
        assert distance.worst <= TOLERANCE, distance


@pytest.mark.full
def test_a_budget_decides_and_says_so() -> None:
    x = _x(64)
    plain = autoshard.plan(Stack(), x, Config(codegen="eager", recompute="none"))
    top = plain.predicted.peak_bytes
    made = autoshard.plan(Stack(), x, Config(codegen="eager", memory_budget=round(top * 0.8)))
    assert not plain.recompute and made.recompute and made.predicted.peak_bytes <= top * 0.8
    text = rendered(plan_tables(made))
    assert "recomputed in backward" in text and any("recompute: " in reason for reason in made.why), text
    assert Plan.from_json(made.to_json()).hash == made.hash
    with pytest.raises(BudgetError, match="with recomputation, a step takes .* \\(at "):
        autoshard.plan(Stack(), x, Config(codegen="eager", memory_budget=round(top * 0.1)))


def test_bad_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="recompute: 'some' is not legal"):
        Config(recompute="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Linear has none"):
        autoshard.plan(nn.Linear(2, 2), torch.ones(1, 2), Config(recompute="full"))
    text = autoshard.plan(Stack(), _x(), Config(recompute="full")).to_json()
    with pytest.raises(PlanError, match="recompute: 'most' is not legal"):
        Plan.from_json(text.replace('"full"', '"most"'))
    with pytest.raises(PlanError, match="recompute: 7 is not legal; legal: none, selective, full, or 'save' and operations"):
        Plan.from_json(text.replace('"full"', "7"))
    with pytest.raises(PlanError, match="recompute: 'layers.0' has two policies; legal: one a block"):
        Plan.from_json(text.replace('"layers.1"', '"layers.0"'))
