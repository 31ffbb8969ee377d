"""Results that nobody differentiates: what backward does without, what that takes, and that processes need not agree on it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from autoshard import Config, torch_internals
from autoshard.backwards import Backwards
from autoshard.passes.choose_unused import unused
from tests.cluster import Cluster
from tests.peaks import above_held, grown, grown_in_a_step
from tests.recomputed import forecaster_of, inputs, planned
from tests.small import TOLERANCE, compiled_pair, config, in_full, whole


class Many(nn.Module):
    """Results that it goes on with, some of other layouts and sizes, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.up(x)
        keys = hidden.tanh()
        out = self.down(keys)
        heads = out.view(out.shape[0], 2, 4).transpose(1, 2) * 2
        return hidden, keys, out, heads, heads.transpose(1, 2), (out * 2)[1:], out.square().mean()


RESULTS = 7


def _sum_of(results: Sequence[Tensor], which: Sequence[int]) -> Tensor:
    """A loss that differentiates these."""
    weighted = (results[i] * torch.linspace(1, 2, results[i].numel()).view(results[i].shape) for i in which)
    return torch.stack([each.sum() for each in weighted]).sum()


def _apart(model: nn.Module, plain: nn.Module) -> float:
    """How far gradients are from one another, of their largest value. Where one is not there the other is zero: a compiled backward
    gives all."""
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    both = [(whole(p.grad), torch.zeros_like(q) if q.grad is None else q.grad) for p, q in pairs if p.grad is not None]
    return max(float((ours - plains).abs().max() / plains.abs().max().clamp_min(1)) for ours, plains in both)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("codegen", "most"), [("eager", 2), in_full("eager", RESULTS), in_full("inductor", 2)])
def test_any_results_may_be_differentiated(codegen: Any, most: int, dynamic: bool | None) -> None:
    """Of more sets of them than there are programs."""
    torch.manual_seed(0)
    model, plain = Many(), Many()
    plain.load_state_dict(model.state_dict())
    backend = autoshard.backend(config(0, codegen=codegen))
    step = torch.compile(model, backend=backend, dynamic=dynamic)
    sets = [s for n in (*range(1, most + 1), RESULTS) for s in itertools.combinations(range(RESULTS), n)]
    assert len(sets) > Backwards.LIMIT
    for which in sets:
        for rows in (4, 6) if dynamic else (4,):
            x = torch.randn(rows, 8)
            model.zero_grad(), plain.zero_grad()
            _sum_of(step(x), which).backward()
            _sum_of(plain(x), which).backward()
            assert _apart(model, plain) <= TOLERANCE, (which, rows)


class Splits(torch.autograd.Function):
    """Its gradient goes through operators that give several."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.cat([2 * part for part in gradient.split(2, -1)], -1)


def _turned(y: Tensor) -> tuple[Tensor, ...]:
    return y, y.transpose(0, 1).contiguous().view(-1).sin().sum()


def _split(y: Tensor) -> tuple[Tensor, ...]:
    return Splits.apply(y), y.sin().sum()  # type: ignore[no-untyped-call]


def _scaled(y: Tensor) -> tuple[Tensor, ...]:
    return y, torch.sub(y.exp(), y, alpha=3).sum()


def _repeated(y: Tensor) -> tuple[Tensor, ...]:
    return y.view(8, 4), y.view(8, 4).permute(1, 0).exp().sum(), y


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
@pytest.mark.parametrize("goes_on", [_turned, _split, _scaled, _repeated])
def test_what_is_left_lies_as_the_sum_did(goes_on: Any, codegen: Any) -> None:
    """Where a gradient is summed with one that lies in another way, and where operators give several tensors."""

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return goes_on(super().forward(x))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, plain, x = Model(8, 8), Model(8, 8), torch.randn(4, 8)
    plain.load_state_dict(model.state_dict())
    step = torch.compile(model, backend=autoshard.backend(config(0, codegen=codegen)))
    for which in ([1], [0], [0, 1]):
        model.zero_grad(), plain.zero_grad()
        _sum_of(step(x), which).backward()
        _sum_of(plain(x), which).backward()
        assert _apart(model, plain) <= TOLERANCE, which


class Nothing(torch.autograd.Function):
    """Gives no gradient."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        return torch.stack([each.sum() for each in given]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_may_all_be_missing(count: int) -> None:
    model = nn.Linear(8, 8)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        y = model(x)
        return (y.exp(), y)[:count]

    torch.compiler.reset()
    results = torch.compile(step, backend=autoshard.backend(config(0)))(torch.ones(2, 8))
    Nothing.apply(*results).backward()  # type: ignore[no-untyped-call]
    assert model.weight.grad is None or not model.weight.grad.any()


def _backward_of(function: Any, *inputs: Tensor) -> torch.fx.GraphModule:
    """The backward that torch makes of a function."""
    from functorch.compile import aot_module_simplified, make_boxed_func

    found: list[torch.fx.GraphModule] = []

    def backend(gm: Any, given: Any) -> Any:
        return aot_module_simplified(
            gm, given, fw_compiler=lambda gm, _: make_boxed_func(gm), bw_compiler=lambda gm, _: found.append(gm) or make_boxed_func(gm)
        )

    torch.compiler.reset()
    torch.stack([r.sum() for r in torch.compile(function, backend=backend)(*inputs)]).sum().backward()
    return found[0]


def _ops(gm: torch.fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def _generated(gm: torch.fx.GraphModule, absent: Sequence[int]) -> list[str]:
    """The operations of a backward without these of its tangents."""
    made: list[torch.fx.GraphModule] = []
    tangents = torch_internals.tangents(gm.graph)
    inputs = gm.graph.find_nodes(op="placeholder")
    backwards = Backwards(gm, lambda graph, _: made.append(graph) or (lambda given: None))
    given: list[Any] = [torch.ones(()) for _ in inputs]
    for i in absent:
        given[inputs.index(tangents[i])] = None
    backwards(given)
    return _ops(made[0])


def test_a_sum_with_what_is_not_there_is_its_other_summand() -> None:
    backward = _backward_of(lambda x: ((y := x.exp()), y.square()), torch.ones(3, requires_grad=True))
    before = _ops(backward)
    assert before.count("aten.add.Tensor") == 1
    assert _generated(backward, [0]) == [op for op in before if op != "aten.add.Tensor"]
    assert "aten.full.default" not in _generated(backward, [0])
    assert "aten.full.default" in _generated(backward, [1])  # which a product takes
    assert _generated(backward, []) == before


def _no_blocks(node: torch.fx.Node) -> torch.fx.GraphModule:
    raise AssertionError("there is none")


def test_what_a_model_goes_on_with_is_expected_to_be_unused() -> None:
    x = torch.ones(4, 4, requires_grad=True)

    def places(function: Any) -> list[int]:
        graph = _backward_of(function, x).graph
        return [torch_internals.tangents(graph).index(n) for n in unused(graph, _no_blocks)]

    assert places(lambda x: ((y := x.exp()).square().mean(), y)) == [1]
    assert places(lambda x: ((y := x.exp()), y.tanh(), y.t().clone().sin())) == [0]
    assert places(lambda x: (x.exp(), x.tanh())) == []  # two heads
    assert places(lambda x: (x.exp(),)) == []


def test_zeros_that_nobody_needs_are_not_made() -> None:
    """Of logits beside a loss: a step of torch's own compilation has them at its peak, and reads them."""

    def most(backend: Any) -> int:
        torch.manual_seed(0)
        model, x = nn.Linear(16, 4096), torch.randn(64, 16)

        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            logits = model(x)
            return nn.functional.cross_entropy(logits, torch.zeros(64, dtype=torch.int64)), logits

        torch.compiler.reset()
        compiled = torch.compile(step, backend=backend)
        compiled(x)[0].backward()
        model.zero_grad()
        return grown(lambda: compiled(x)[0].backward())

    logits = 64 * 4096 * 4
    assert most("aot_eager") - most(autoshard.backend(config(0))) >= 0.9 * logits


class Layer(nn.Module):
    """Draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Shown(nn.Module):
    """Blocks that are graphs of their own, as what is behind them is, which gives the loss and what that is computed of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(9)), nn.Linear(32, 400)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits.log_softmax(-1).square().mean(), logits


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
def test_a_block_does_without_them_too(codegen: Any) -> None:
    """Which a forecast foresees."""
    torch.manual_seed(0)
    model, plain, x = Shown(), Shown(), inputs(16)
    plain.load_state_dict(model.state_dict())
    plan = planned(forecaster_of(Shown(), x, codegen))
    assert plan.predicted is not None
    torch.compiler.reset()
    step = torch.compile(model, backend=autoshard.backend(Config(plan=plan, codegen=codegen, verbose=False)))
    for which in ([0], [0, 1], [1]):
        model.zero_grad(), plain.zero_grad()
        _sum_of(step(x), which).backward()
        _sum_of(plain(x), which).backward()
        assert _apart(model, plain) <= TOLERANCE, which
    found = grown_in_a_step(lambda: step(x)[0], torch.optim.AdamW(model.parameters()))
    assert above_held(plan.predicted) == pytest.approx(found, rel=0.03)


def _differentiated_apart(zero: int, codegen: str, views: bool) -> float:
    """Gradients of processes, each of which differentiates other results."""
    model, plain, step = compiled_pair(config(zero, codegen=codegen), Many)
    sets = [[6], [4]] if views else [[6], [1, 6]]
    xs = torch.randn(len(sets), 4, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        model.zero_grad(), plain.zero_grad()
        _sum_of(step(xs[dist.get_rank()]), sets[dist.get_rank()]).backward()
        for x, which in zip(xs, sets):
            (_sum_of(plain(x), which) / len(sets)).backward()
    return _apart(model, plain)


@pytest.mark.parametrize(
    ("zero", "codegen", "views"),
    [(3, "eager", False), (0, "eager", True), in_full(0, "inductor", False), in_full(3, "inductor", True)],
)
def test_processes_may_differentiate_other_results(two: Cluster, zero: int, codegen: str, views: bool) -> None:
    """What they communicate is the same. views: one differentiates nothing but a view, which has a function of its own in front of the
    graph's."""
    assert max(two.run(_differentiated_apart, zero, codegen, views)) <= TOLERANCE
