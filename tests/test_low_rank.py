"""PowerSGD: what arrives is of low rank, what is missing comes later, and all processes have the same."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import autoshard
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.errors import BudgetError, ConfigError, PlanError
from autoshard.first_call import warned_of_rounding
from autoshard.passes import graphs
from autoshard.plan import Plan
from autoshard.planning import first_look
from autoshard.rehearsal import rehearse
from autoshard.runtime.residue import Residue
from tests.cluster import Cluster
from tests.parity import rank0_copy
from tests.small import compiled_pair, config, in_full, residues, same, what_is_said


class Net(nn.Module):
    """Two matrices (one of them used twice), and vectors that go as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(24, 32), nn.LayerNorm(32), nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(torch.tanh(self.norm(self.up(x))))
        return x.square().mean()


class Deep(nn.Module):
    """Blocks enough to be compiled once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Reference:
    """The algorithm for all processes at once, of one matrix, in float64."""

    def __init__(self, factor: Tensor, world: int) -> None:
        self.factor, self.errors = factor.double(), [0.0] * world

    def step(self, grads: list[Tensor]) -> Tensor:
        matrices = [g.double().flatten(1) + e for g, e in zip(grads, self.errors)]
        left = torch.linalg.qr(sum(m @ self.factor for m in matrices)).Q  # type: ignore[union-attr]
        self.factor = sum(m.T @ left for m in matrices) / len(matrices)  # type: ignore[assignment]
        mean = left @ self.factor.T
        self.errors = [m - mean for m in matrices]  # type: ignore[misc]
        return mean.view(grads[0].shape)


def batches(steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(8, 24, generator=generator) for _ in range(dist.get_world_size())] for _ in range(steps)]


def factors(model: nn.Module) -> dict[str, Tensor]:
    return {residue.name: residue.factor.detach().clone() for residue in residues(model)}


def own_gradients(plain: nn.Module, inputs: list[Tensor]) -> dict[str, list[Tensor]]:
    """Of each process, by parameter, as the model has them by itself."""
    found: dict[str, list[Tensor]] = {name: [] for name, _ in plain.named_parameters()}
    for x in inputs:
        plain.zero_grad()
        plain(x).backward()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            found[name].append(parameter.grad.clone())
    return found


class Compared:
    """A compiled model beside the algorithm."""

    def __init__(self, make: type[nn.Module], **options: Any) -> None:
        self.plain = rank0_copy(make())
        self.model = copy.deepcopy(self.plain)
        settings = config(0, **{"compression": "powersgd", "compression_rank": 2, **options})
        self.compiled: Any = torch.compile(self.model, backend=autoshard.backend(settings))
        self.references: dict[str, Reference] = {}

    def loss(self, inputs: list[Tensor]) -> Tensor:
        loss = self.compiled(inputs[dist.get_rank()])
        self.references = self.references or {n: Reference(f, len(inputs)) for n, f in factors(self.model).items()}
        return loss  # type: ignore[no-any-return]

    def expected(self, inputs: list[Tensor], *more: list[Tensor]) -> dict[str, Tensor]:
        """The gradients of one reduction of all of these."""
        own = own_gradients(self.plain, inputs)
        for others in more:
            for name, grads in own_gradients(self.plain, others).items():
                own[name] = [a + b for a, b in zip(own[name], grads)]
        return {n: self.references[n].step(g) if n in self.references else sum(g) / len(g) for n, g in own.items()}  # type: ignore[misc]

    def distance(self, expected: dict[str, Tensor]) -> float:
        """Of the gradients that the model has, which go."""
        worst = 0.0
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            worst = max(worst, float((parameter.grad - expected[name]).abs().max() / expected[name].abs().max()))
            parameter.grad = None
        return worst


def steps(make: type[nn.Module], options: dict[str, Any], count: int) -> tuple[int, float]:
    """How many parameters go in low rank, and the largest difference from the algorithm's gradients over some steps."""
    compared, worst = Compared(make, **options), 0.0
    for inputs in batches(count):
        compared.loss(inputs).backward()
        worst = max(worst, compared.distance(compared.expected(inputs)))
    return len(compared.references), worst


@pytest.mark.parametrize("codegen", ["eager", in_full("inductor")])
def test_gradients_are_those_of_the_algorithm(two: Cluster, codegen: str) -> None:
    for count, worst in two.run(steps, Net, {"codegen": codegen}, 4):
        assert count == 2 and worst < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_of_blocks_that_share_a_graph_each_has_its_own(two: Cluster, codegen: str) -> None:
    for count, worst in two.run(steps, Deep, {"codegen": codegen}, 3):
        assert count == 8 and worst < 1e-4


@pytest.mark.full
def test_over_two_axes(four: Cluster) -> None:
    for count, worst in four.run(steps, Net, {"mesh": {"replicate": 2, "shard": 2}}, 2):
        assert count == 2 and worst < 1e-4


def accumulated() -> float:
    compared, worst = Compared(Net), 0.0
    for first, second, third in zip(*[iter(batches(6))] * 3):
        with autoshard.no_sync(compared.model):
            compared.loss(first).backward()
            compared.loss(second).backward()
        compared.loss(third).backward()
        worst = max(worst, compared.distance(compared.expected(first, second, third)))
    return worst


def test_what_waited_since_no_sync_goes_too(two: Cluster) -> None:
    assert max(two.run(accumulated)) < 1e-4


def two_forwards() -> float:
    """Whose backwards come after both: each finds what the other left."""
    compared, worst = Compared(Net), 0.0
    for first, second in zip(*[iter(batches(6))] * 2):
        (compared.loss(first) + compared.loss(second)).backward()
        found = [compared.expected(inputs) for inputs in (second, first)]
        worst = max(worst, compared.distance({name: found[0][name] + found[1][name] for name in found[0]}))
        compared.loss(first)  # without a backward: nothing of it is left
    return worst


def test_two_forwards_for_one_backward(two: Cluster) -> None:
    assert max(two.run(two_forwards)) < 1e-4


def with_infinity() -> list[bool]:
    """Whether all gradients are finite in a step, one in which a process's input is not, and the next."""
    compared, found = Compared(Net), []
    for i, inputs in enumerate(batches(3)):
        inputs[1][0, 0] = torch.inf if i == 1 else 1.0
        compared.loss(inputs).backward()
        found.append(all(bool(p.grad.isfinite().all()) for p in compared.model.parameters() if p.grad is not None))
        compared.model.zero_grad()
    return found


def test_what_is_not_finite_is_not_kept(two: Cluster) -> None:
    assert two.run(with_infinity) == [[True, False, True]] * 2


def thawed() -> tuple[bool, float]:
    """Of a matrix that was frozen in the first call: whether it got a gradient then, and how far the later one is from the mean."""
    model, plain, compiled = compiled_pair(config(0, compression="powersgd"), Net)
    model.up.weight.requires_grad_(False)
    first, second = batches(2)
    compiled(first[dist.get_rank()]).backward()
    frozen = model.up.weight.grad is None
    model.up.weight.requires_grad_()
    compiled(second[dist.get_rank()]).backward()
    own = own_gradients(plain, second)["up.weight"]
    assert model.up.weight.grad is not None
    return frozen, float((model.up.weight.grad - sum(own) / len(own)).abs().max())


def test_a_matrix_that_was_frozen_goes_whole(two: Cluster) -> None:
    for frozen, distance in two.run(thawed):
        assert frozen and distance < 1e-6


def trained(precision: str | None) -> tuple[list[float], list[Tensor], set[str]]:
    """Losses of some steps on one batch, the parameters after them, and what a checkpoint has."""
    model, _, compiled = compiled_pair(config("auto", compression="powersgd", precision=precision), Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    inputs, losses = batches(1)[0][dist.get_rank()], []
    for _ in range(12):
        loss = compiled(inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    averaged = copy.deepcopy(model)  # as AveragedModel makes one
    assert not any(torch.equal(a, b) and a.any() for a, b in zip(errors(averaged), errors(model)))
    return losses, [p.detach() for p in model.parameters()], set(model.state_dict())


def errors(model: nn.Module) -> list[Tensor]:
    return [r.error.detach() for r in residues(model)]


@pytest.mark.parametrize("precision", [None, in_full("bf16")])
def test_it_trains_and_all_processes_stay_alike(two: Cluster, precision: str | None) -> None:
    (losses, first, names), (_, second, _) = two.run(trained, precision)
    assert losses[-1] < 0.7 * losses[0] and same(first, second)
    assert names == set(Net().state_dict())


class Slow(nn.Module):
    """Whose first gradient of the embedding is zero, and whose first rows are never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 16)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.embedding(ids)), ids % 16)


def moved(scale: float) -> float:
    """How far the embedding went in some steps."""
    model, _, compiled = compiled_pair(config(0, compression="powersgd"), Slow)
    before = model.embedding.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / scale)
    ids = torch.randint(8, 64, (128,), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(20):
        (scale * compiled(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float((model.embedding.weight - before).abs().max())


@pytest.mark.parametrize("scale", [1.0, in_full(1e-12), in_full(1e12)])
def test_a_first_gradient_of_zero_or_a_tiny_one_does_not_end_it(two: Cluster, scale: float) -> None:
    assert min(two.run(moved, scale)) > 0.01


class Convolved(nn.Module):
    """In another dtype, and a weight of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.double().view(4, 3, 4, 4)))).square().mean()


@pytest.mark.full
def test_convolutions_and_float64(two: Cluster) -> None:
    for count, worst in two.run(steps, Convolved, {"compression_rank": 2}, 3):
        assert count == 2 and worst < 1e-4


def by_grad() -> str:
    model, _, compiled = compiled_pair(config(0, compression="powersgd"), Net)
    optimizer = torch.optim.SGD(model.parameters())
    parameters = list(model.parameters())
    compiled(batches(1)[0][dist.get_rank()]).backward(inputs=parameters)
    return what_is_said(optimizer.step)


def test_gradients_of_which_nothing_is_kept_are_refused(two: Cluster) -> None:
    for said in two.run(by_grad):
        assert said.startswith("UnsupportedError: parameter 'up.weight' got its gradient by torch.autograd.grad")


def state_before_a_backward() -> list[str]:
    """The parameters of which there is state to load into, after a first call that had no backward."""
    model, _, compiled = compiled_pair(config(0, compression="powersgd"), Net)
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        compiled(batches(1)[0][dist.get_rank()])
    return sorted(get_state_dict(model, optimizer)[1]["state"])


def test_state_to_load_into_is_made_before_a_first_backward(two: Cluster) -> None:
    assert two.run(state_before_a_backward) == [sorted(name for name, _ in Net().named_parameters())] * 2


def loaded() -> list[bool]:
    """Whether something was kept: after a step, and once its model's own state was loaded."""
    model, _, compiled = compiled_pair(config(0, compression="powersgd"), Net)
    compiled(batches(1)[0][dist.get_rank()]).backward()
    found = [any(bool(e.any()) for e in errors(model))]
    model.load_state_dict(model.state_dict())
    return [*found, any(bool(e.any()) for e in errors(model))]


def test_what_was_not_sent_ends_with_what_it_was_of(two: Cluster) -> None:
    assert two.run(loaded) == [[True, False]] * 2


def _plan(**options: Any) -> Plan:
    machines = Machines(4, 1, DEVICES["cpu"])
    return autoshard.plan(Net(), torch.randn(8, 24), config("auto", compression="powersgd", **options), machines)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_a_plan_knows_what_travels_and_what_is_kept(codegen: str) -> None:
    plan = _plan(compression_rank=3, codegen=codegen)
    assert plan.low_rank == 3 and {g.degrees.stage for g in plan.groups} == {0} and Plan.from_json(plan.to_json()) == plan
    matrices, thin, vectors = 2 * 24 * 32, 2 * 3 * (24 + 32), 32 + 32 + 32 + 24
    sent = {t.collective: (t.messages, t.bytes) for t in plan.predicted.traffic}
    plain = [t.bytes for t in first_look(Net(), config(0), Machines(4, 1, DEVICES["cpu"])).predicted.traffic]
    assert sent["all_reduce"][1] * (matrices + vectors) == sum(plain) * (thin + vectors)
    kept = first_look(Net(), config("auto", compression="powersgd", compression_rank=3), Machines(4, 1, DEVICES["cpu"]))
    assert plan.predicted.memory["compression"] == kept.predicted.memory["compression"] == 4 * (matrices + 2 * 3 * 28)
    made = rehearse(capture(Net(), torch.randn(8, 24)), plan, inductor=codegen == "inductor").backward
    assert made is not None and sum(map(graphs.reduces, made.graph.nodes)) == sent["all_reduce"][0]


def test_what_is_kept_is_float32_on_its_device_whatever_the_defaults() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            residue = Residue("up.weight", (4, 6), 2, torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    assert {(t.dtype, t.device.type) for t in (residue.error, residue.factor)} == {(torch.float32, "cpu")}


def test_processes_that_round_differently_are_told() -> None:
    plan = _plan()
    assert warned_of_rounding(plan, ["AVX2"] * 4) is plan
    assert "on AVX2, AVX512: processes will round differently" in warned_of_rounding(plan, ["AVX512", "AVX2"]).why[-1]
    assert warned_of_rounding(replace(plan, low_rank=0), ["AVX512", "AVX2"]).why == plan.why


def test_said_wrong_or_in_vain() -> None:
    for alone in (first_look(Net(), config(0, compression="powersgd"), Machines(1, 1, DEVICES["cpu"])), _plan(compression_rank=20)):
        assert not alone.low_rank and any("compression='powersgd': " in why for why in alone.why)
    with pytest.raises(BudgetError, match="Cheapest fix: another compression"):
        _plan(memory_budget="20kB")
    with pytest.raises(ConfigError, match="zero: 2 with compression='powersgd'"):
        config(2, compression="powersgd")
    with pytest.raises(ConfigError, match="compression_rank: 0 is not legal"):
        config(0, compression="powersgd", compression_rank=0)
    with pytest.raises(PlanError, match="low_rank: 3 beside compression 'bf16'"):
        replace(_plan(compression_rank=3), compression="bf16")
    with pytest.raises(PlanError, match="low_rank: 3 is not legal where rows are sharded"):
        replace(first_look(Net(), config(2), Machines(2, 1, DEVICES["cpu"])), low_rank=3)
