"""One process on a GPU: training beside the plain model, what is computed again, optimizers beside torch's, peaks beside budgets."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn, optim

import autoshard
from autoshard import Cluster, Config
from autoshard.cost_model.hardware import Device, device_named_like
from autoshard.plan import Plan
from tests.models import CASES, Batch
from tests.parity import Distance, adamw, clipped_step, see_gradients, see_state
from tests.peaks import above_held
from tests.recomputed import Deep, Stack, forecaster_of, inputs, planned, trained, with_policies
from tests.small import same

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.usefixtures("own_cache", "as_at_first")]


@pytest.fixture
def as_at_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.compiler.reset()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # or convolutions would be as near as ten bits
    yield
    gc.collect()
    torch.cuda.empty_cache()


def on_gpu(batch: Batch) -> Batch:
    return {name: x.cuda() for name, x in batch.items()}


def here() -> Device:
    found = torch.cuda.get_device_properties(0)
    return device_named_like(found.name, found.total_memory)


# --- training


@pytest.mark.parametrize("codegen", ["eager", "triton", "inductor"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "t5", "conv"])
def test_training_is_the_plain_model_s(name: str, codegen: Any) -> None:
    case, drawn = CASES[name], torch.Generator().manual_seed(7)
    torch.manual_seed(0)
    model = case.build().cuda().train()
    plain = copy.deepcopy(model)
    optimizer, reference = adamw(model.parameters()), adamw(plain.parameters())
    compiled: Any = torch.compile(model, backend=autoshard.backend(Config(codegen=codegen, verbose=False)))
    distance = Distance()
    for _ in range(5):
        batch = on_gpu(case.batch(drawn))
        losses = [case.loss(m(**batch)) for m in (compiled, plain)]
        for loss in losses:
            loss.backward()
        distance.see("loss", losses[0].detach(), losses[1].detach())
        see_gradients(distance, model, plain)
        distance.see("norm", clipped_step(model, optimizer), clipped_step(plain, reference))
    see_state(distance, model, plain)
    assert distance.worst <= 1e-3, distance


@pytest.mark.parametrize("codegen", ["eager", "triton", "inductor"])
def test_under_autocast_it_learns_as_the_plain_model(codegen: Any) -> None:
    """A batch that is shown again and again."""
    case, losses = CASES["llama"], {}
    batch = on_gpu(case.batch(torch.Generator().manual_seed(7)))
    for ours in (True, False):
        torch.manual_seed(0)
        model = case.build().cuda().train()
        run: Any = torch.compile(model, backend=autoshard.backend(Config(codegen=codegen, verbose=False))) if ours else model
        optimizer, seen = optim.AdamW(model.parameters(), lr=1e-3), []
        for _ in range(20):
            with torch.autocast("cuda", torch.bfloat16):
                loss = case.loss(run(**batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        losses[ours] = seen
    assert losses[True][-1] < losses[True][0] / 1.2
    assert losses[True] == pytest.approx(losses[False], rel=0.05)


# --- what is computed again


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("make", [Stack, Deep])
def test_what_is_computed_again_draws_what_it_drew(make: type[nn.Module], policy: str) -> None:
    """Attention with dropout, dropout, statistics: bitwise."""
    x = inputs().cuda()
    plan = planned(forecaster_of(make(), inputs()))
    plain, ours = (trained(make, x, p, "eager") for p in (plan, with_policies(plan, make, [policy])))
    assert same(plain, ours)


def test_what_is_computed_again_on_inductor() -> None:
    x = inputs().cuda()
    plan = planned(forecaster_of(Deep(), inputs()))
    plain, ours = (trained(Deep, x, p, "inductor") for p in (plan, with_policies(plan, Deep, ["full"])))
    for a, b in zip(plain, ours):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_attention_without_dropout_is_repeated_as_it_was(codegen: Any) -> None:
    """In few blocks, which are in the model's own graph."""
    case, given = CASES["llama"], on_gpu(CASES["llama"].batch(torch.Generator().manual_seed(7)))
    found = []
    for recompute in ("none", "full"):
        torch.manual_seed(0)
        model = case.build(3).cuda().train()  # type: ignore[call-arg]
        config = Config(codegen=codegen, recompute=recompute, verbose=False)  # type: ignore[arg-type]
        loss = case.loss(torch.compile(model, backend=autoshard.backend(config))(**given))
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(512), nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


class Wide(nn.Module):
    """Whose blocks hold more than libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Part() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def grown_on_gpu(plan: Plan, codegen: Any, x: Tensor) -> int:
    """By how much a step goes above what is there between steps."""
    model = Wide().cuda().train()
    optimizer = optim.AdamW(model.parameters())
    run: Any = torch.compile(model, backend=autoshard.backend(Config(plan=plan, codegen=codegen, verbose=False)))

    def step() -> None:
        run(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_budget_holds(codegen: Any) -> None:
    cluster, shown = Cluster(1, 1, here()), torch.randn(4096, 512)
    free = autoshard.plan(Wide(), {"x": shown}, Config(codegen=codegen), cluster).predicted
    held = free.peak_bytes - above_held(free)
    budget = held + int(0.6 * above_held(free))
    plan = autoshard.plan(Wide(), {"x": shown}, Config(codegen=codegen, memory_budget=budget), cluster)
    assert plan.recompute and plan.predicted.peak_bytes <= budget
    grown = grown_on_gpu(plan, codegen, shown.cuda())
    assert held + grown <= budget
    assert grown == pytest.approx(above_held(plan.predicted), rel=0.03)


# --- optimizers

SHAPES = [(300, 257), (128, 64), (1000,), (7,), ()]  # some of them lie so that 16 bytes cannot be moved at once


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    drawn = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=drawn).to("cuda", dtype)) for shape in SHAPES]


def stepped(made: list[nn.Parameter], optimizer: optim.Optimizer, steps: int = 100) -> list[nn.Parameter]:
    """On gradients that do not depend on the parameters, so that only steps differ."""
    drawn = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for p in made:
            p.grad = torch.randn(p.shape, generator=drawn).bfloat16().to("cuda", p.dtype)
        optimizer.step()
    return made


Make = Callable[[Iterable[Tensor]], optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Make, Make]] = {
    "AdamW": (autoshard.optim.AdamW, optim.AdamW),
    "AdamW amsgrad": (lambda ps: autoshard.optim.AdamW(ps, amsgrad=True), lambda ps: optim.AdamW(ps, amsgrad=True)),
    "Adam": (lambda ps: autoshard.optim.Adam(ps, weight_decay=0.1), lambda ps: optim.Adam(ps, weight_decay=0.1)),
    "SGD": (
        lambda ps: autoshard.optim.SGD(ps, lr=1e-3, momentum=0.9, nesterov=True),
        lambda ps: optim.SGD(ps, lr=1e-3, momentum=0.9, nesterov=True),
    ),
    "Adafactor": (autoshard.optim.Adafactor, optim.Adafactor),
    "fuse(AdamW)": (lambda ps: autoshard.fuse(optim.AdamW(ps)), optim.AdamW),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hundred_steps_are_torch_s(name: str) -> None:
    """To 1e-6, or nearer to those in float64 than torch's are: where torch rounds twice, a kernel's fused products round once."""
    ours, theirs = (stepped(made := parameters(), make(made)) for make in OPTIMIZERS[name])
    exact = stepped(made := parameters(torch.float64), OPTIMIZERS[name][1](made))
    for p, q, r in zip(ours, theirs, exact):
        off, torch_s = (((x - r).abs() / (1 + r.abs())).max().item() for x in (p, q))
        assert off <= max(1e-6, torch_s), (off, torch_s)
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_lion_steps_as_on_a_cpu() -> None:
    """torch has none."""
    ours = parameters()
    theirs = [nn.Parameter(p.detach().cpu()) for p in ours]
    stepped(ours, autoshard.optim.Lion(ours, lr=1e-3))
    optimizer, drawn = autoshard.optim.Lion(theirs, lr=1e-3), torch.Generator().manual_seed(5)
    for _ in range(100):
        for p in theirs:
            p.grad = torch.randn(p.shape, generator=drawn).bfloat16().float()
        optimizer.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p.cpu(), q, rtol=1e-6, atol=2e-3)  # a sign of next to nothing may be another


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_masters_bring_bf16_nearer_to_fp32(name: str) -> None:
    make = getattr(autoshard.optim, name)
    exact = stepped(made := parameters(), make(made, lr=1e-3))
    plain = stepped(made := parameters(torch.bfloat16), getattr(optim, name, make)(made, lr=1e-3))
    ours = stepped(made := parameters(torch.bfloat16), make(made, lr=1e-3, master_weights=True))
    off = [sum((p.float() - q).abs().sum().item() for p, q in zip(some, exact)) for some in (plain, ours)]
    assert off[1] < off[0] / 2, off


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_scaler_s_infinite_gradients_are_skipped(name: str) -> None:
    """And clipping in the step is clipping before it."""
    made, plain = parameters(), parameters()
    options = {"lr": 1e-2} | ({"momentum": 0.9} if name == "SGD" else {})
    optimizer, reference = getattr(autoshard.optim, name)(made, max_norm=0.5, **options), getattr(optim, name)(plain, **options)
    scaler, drawn = torch.amp.GradScaler("cuda", init_scale=2.0**10), torch.Generator().manual_seed(5)
    for step in range(4):
        scaler.scale(torch.zeros((), device="cuda"))  # begins its scale
        for p, q in zip(made, plain):
            q.grad = torch.randn(p.shape, generator=drawn).cuda()
            p.grad = q.grad * scaler.get_scale()
        if step == 1:
            made[0].grad[0, 0] = float("inf")  # type: ignore[index]
        before = made[0].detach().clone()
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert torch.equal(before, made[0])
            continue
        norm = nn.utils.clip_grad_norm_(plain, 0.5)
        torch.testing.assert_close(optimizer.norm.reshape(()), norm.reshape(()))
        reference.step()
    assert scaler.get_scale() == 2.0**9
    for p, q in zip(made, plain):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
