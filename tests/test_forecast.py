"""A step as it is forecast: against what runs, and against what must be so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autoshard
from autoshard import Config
from autoshard.calibration.calls import small_step
from autoshard.calibration.processor import parameters
from autoshard.capture import Capture, capture
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.cost_model.liveness import CATEGORIES
from autoshard.cost_model.optimizer import NAMED
from autoshard.cost_model.program import IN_PLACE
from autoshard.cost_model.work import flops_of, work_of
from autoshard.forecast import Forecaster
from autoshard.passes.choose_zero import Circumstances, make_plan
from autoshard.passes.costs import costs_of
from autoshard.plan import Plan
from autoshard.prediction import Prediction
from autoshard.report import plan_tables, rendered
from tests.peaks import above_held, grown_in_a_step
from tests.small import in_full


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 512), nn.GELU())
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x)), torch.zeros(len(x), dtype=torch.long))


def _forecaster(model: nn.Module, x: torch.Tensor, world: int, codegen: str = "eager") -> Forecaster:
    torch.compiler.reset()
    return Forecaster(capture(model, x), NAMED["adamw"], Cluster(1, world, DEVICES["cpu"]), codegen)


def _plan(forecaster: Forecaster, zero: Any) -> Plan:
    where = Circumstances(forecaster.cluster, None)
    config = Config(zero=zero, replicate_below=0)
    return make_plan(forecaster.captured.inventory, config, where, forecaster)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    """Blocks enough to be compiled apart from what is around them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(192, 64), nn.ModuleList(Layer() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.flatten(1))
        for layer in self.layers:
            x = layer(x)
        return x.log_softmax(-1).square().mean()


@pytest.mark.parametrize(
    "make, batch, codegen",
    [(Net, 64, "eager"), (Net, 512, "eager"), (Net, 64, "inductor"), in_full(Net, 512, "inductor"), in_full(Deep, 512, "inductor")],
)
def test_the_peak_is_the_measured_one(make: type[nn.Module], batch: int, codegen: str) -> None:
    model, x = make(), torch.randn(batch, 3, 8, 8)
    predicted = _plan(_forecaster(model, x, 1, codegen), 0).predicted
    optimizer = torch.optim.AdamW(model.parameters())
    torch.compiler.reset()
    compiled = torch.compile(model, backend=autoshard.backend(Config(codegen=codegen, verbose=False)))  # type: ignore[arg-type]
    assert above_held(predicted) == pytest.approx(grown_in_a_step(lambda: compiled(x), optimizer), rel=0.03)
    state = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    assert predicted.memory["optimizer"] == state
    assert predicted.memory["parameters"] == sum(p.numel() * p.element_size() for p in model.parameters())


class Shown(nn.Module):
    """Gives what a loss is computed of, far in front of its peak in backward. own: and a loss of its own."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(192, 2048), nn.Linear(2048, 64), nn.Linear(64, 1024)
        self.own = own

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.head(self.down(torch.tanh(self.up(x.flatten(1)))))
        return (logits, logits.square().mean()) if self.own else (logits,)


@pytest.mark.parametrize("own", [False, True])
def test_what_autograd_gives_backward_is_there_until_it_returns(own: bool) -> None:
    """Of a model with a loss of its own that is the loss's gradient alone."""
    model, x = Shown(own), torch.randn(512, 3, 8, 8)
    predicted = _plan(_forecaster(model, x, 1), 0).predicted
    torch.compiler.reset()
    compiled = torch.compile(model, backend=autoshard.backend(Config(codegen="eager", verbose=False)))

    def loss() -> torch.Tensor:
        *logits, last = compiled(x)
        return last if logits else (2 * last).sum()

    grown = grown_in_a_step(loss, torch.optim.AdamW(model.parameters()))
    assert above_held(predicted) == pytest.approx(grown, rel=0.01)


def test_flops_are_those_of_torchs_counter() -> None:
    model, x = Net(), torch.randn(16, 3, 8, 8)
    forecaster = _forecaster(model, x, 1)
    program, *_ = forecaster.simulated(_plan(forecaster, 0))
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    assert sum(flops_of(o.node) for o in program.operations) == counter.get_total_flops()
    assert not any(work_of(o).guessed for o in program.operations)


def test_more_sharding_never_raises_state() -> None:
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 8)
    state = []
    for zero in range(4):
        _, curve, *_ = forecaster.simulated(_plan(forecaster, zero))
        last = dict(zip(CATEGORIES, curve.at({})[-1]))
        state.append(last["parameters"] + last["optimizer"] + last["gradients"])
    assert state == sorted(state, reverse=True) and state[0] > 7 * state[-1]


def test_what_no_sync_leaves_is_of_the_stage_whatever_was_asked_before() -> None:
    """Stages 1 to 3 show the graphs the same rows; only at the first gradients wait whole."""
    forecaster = replace(_forecaster(Net(), torch.randn(4, 3, 8, 8), 2), accumulation="no_sync")
    peaks = {stage: _plan(forecaster, stage).predicted.peak_bytes for stage in (2, 1, 3)}
    alone = {stage: _plan(replace(forecaster, _holds={}, _simulated={}, _predicted={}), stage).predicted.peak_bytes for stage in peaks}
    assert peaks == alone and peaks[1] > peaks[2]


def test_what_is_packed_to_travel_is_communication_and_what_comes_of_it_gathered() -> None:
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 4)
    program, *_ = forecaster.simulated(replace(_plan(forecaster, 3), message=4096))
    by_maker = {kind: {p.category for p in program.pieces if kind in p.maker} for kind in ("pack_shards", "gather_direct", "unpack_full")}
    assert by_maker["pack_shards"] == {"communication"} and by_maker["unpack_full"] == {"gathered"}, by_maker
    assert len([o for o in program.operations if "gather_direct" in o.name]) > 2


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_what_is_summed_in_place_is_there_once(codegen: str) -> None:
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 2, codegen)
    program, _, took, _ = forecaster.simulated(replace(_plan(forecaster, 0), direct_sums=False))
    sums = [(at, o) for at, o in enumerate(program.operations) if o.name == IN_PLACE]
    assert sums and took.timeline.communication > 0
    for at, operation in sums:
        (packed,), (summed,) = operation.reads, operation.makes
        assert program.pieces[packed].last < at == program.pieces[summed].made, (at, program.pieces[packed])


def test_a_step_packs_uneven_gradients_where_they_travel() -> None:
    """The head's, of 10 rows, are 3 for each of 4 processes there, and nowhere else."""
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 4)
    plan = _plan(forecaster, 2)
    program, *_ = forecaster.simulated(plan)
    packed = [p for p in program.pieces if "pack_grads" in p.maker]
    sent = sum(cost.reduced for cost in costs_of(plan, forecaster.captured.inventory))
    assert sum(p.bytes for p in packed) == sent and {p.category for p in packed} == {"communication"}
    assert all(work_of(o).kind == "pack" for o in program.operations if "pack_grads" in o.name)


def test_the_same_input_gives_the_same_plan_byte_by_byte() -> None:
    texts = [_plan(_forecaster(Net(), torch.randn(4, 3, 8, 8), 4), "auto").to_json() for _ in range(2)]
    assert texts[0] == texts[1] and '"place": "' in texts[0]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_we_put_into_a_step_has_rules(zero: int) -> None:
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 4)
    plan = _plan(forecaster, zero)
    assert plan.direct == (zero > 0) and not any("a rule for" in unknown for unknown in plan.predicted.unknown)


@pytest.mark.parametrize(("codegen", "calls"), [("eager", True), ("inductor", False)])
def test_a_view_takes_a_call_where_no_code_is_generated(codegen: str, calls: bool) -> None:
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 1, codegen)
    plan = _plan(forecaster, 0)
    program, _, took, _ = forecaster.simulated(plan)
    views = sum(o.views for o in program.operations)
    assert (views > 4) == calls  # its flatten and the weights' transposes, in both directions
    slow = replace(forecaster.cluster, device=replace(DEVICES["cpu"], tables={"view": ((1.0, 1.0),)}))
    _, _, slower, _ = Forecaster(forecaster.captured, NAMED["adamw"], slow, codegen).simulated(plan)
    assert slower.seconds - took.seconds == pytest.approx(views, abs=1e-6)


@pytest.mark.parametrize(("zero", "table"), [(0, "parameter"), (3, "sharded")])
def test_what_a_step_does_for_each_parameter_takes_time_where_that_was_measured(zero: int, table: str) -> None:
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 2)
    plan = make_plan(
        forecaster.captured.inventory, Config(zero=zero, replicate_below=0), Circumstances(forecaster.cluster, None), forecaster
    )
    trained = sum(p.requires_grad for p in Net().parameters())
    measured = replace(forecaster.cluster, device=replace(DEVICES["cpu"], tables={table: ((1.0, 0.5), (100.0, 50.0))}))
    predicted = Forecaster(forecaster.captured, NAMED["adamw"], measured, "eager")(plan).predicted
    assert "overhead" not in plan.predicted.seconds and predicted.seconds["overhead"] == pytest.approx(trained / 2)
    assert predicted.step_seconds == pytest.approx((plan.predicted.step_seconds or 0.0) + trained / 2)


@pytest.mark.parametrize(("codegen", "table"), [("eager", "call"), ("inductor", "call.generated")])
def test_a_step_takes_as_long_as_launching_it(codegen: str, table: str) -> None:
    """On a GPU that was measured: the longer of what it takes and what the processor does."""
    captured, gpu = _forecaster(Net(), torch.randn(4, 3, 8, 8), 1).captured, DEVICES["h100"]
    found = {}
    for seconds in (1e-12, 1e-9, 1.0):
        device = replace(gpu, tables={table: ((1.0, seconds),)})
        forecaster = Forecaster(captured, NAMED["adamw"], Cluster(1, 1, device), codegen)
        program, *_ = forecaster.simulated(_plan(forecaster, 0))
        predicted = _plan(forecaster, 0).predicted
        found[seconds] = predicted.step_seconds
        assert predicted.seconds.get("launching", 0.0) == pytest.approx(max(0.0, len(program.operations) * seconds - found[1e-12]))
    assert found[1e-9] == found[1e-12] and found[1.0] == pytest.approx(len(program.operations))


def test_what_an_optimizer_has_for_a_while_lies_in_as_many_pieces() -> None:
    captured = _forecaster(Net(), torch.randn(4, 3, 8, 8), 1).captured
    forecaster = Forecaster(captured, NAMED["adamw"], Cluster(1, 1, DEVICES["h100"]), "eager")
    program, *_ = forecaster.simulated(_plan(forecaster, 0))
    found = [piece.bytes for piece in program.pieces if piece.maker == "optimizer step"]
    assert {p.numel() * 4 for p in Net().parameters()} <= set(found)


@pytest.mark.full
def test_a_calibration_counts_what_a_small_step_calls() -> None:
    step, count = small_step("eager", torch.device("cpu"), DEVICES["h100"])
    step()
    assert 6 * 60 < count < 6 * 160  # of each block, forward and backward


def test_a_calibration_steps_models_of_little_but_parameters() -> None:
    few, many = parameters(world=1)
    assert few.table == many.table == "parameter" and few.size < many.size
    assert all(isinstance(seconds := next(row.make())(), float) and seconds > 0 for row in (few, many))


def test_how_far_times_were_off_is_said_only_where_tables_were_measured() -> None:
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 1)
    measured = replace(forecaster.cluster, device=replace(DEVICES["cpu"], tables={"pointwise": ((1.0, 1e-6),)}))
    for cluster, said in ((forecaster.cluster, False), (measured, True)):
        predicted = _plan(Forecaster(forecaster.captured, NAMED["adamw"], cluster, "eager"), 0).predicted
        assert predicted.error is not None and (predicted.seconds_error is not None) == said
        assert ("Measured steps took" in rendered(plan_tables(Plan(1, (("shard", 1),), (), predicted=predicted)))) == said


def test_how_far_reserved_bytes_were_off_is_said_of_devices_that_were_compared() -> None:
    captured = _forecaster(Net(), torch.randn(4, 3, 8, 8), 1).captured
    for name, said in (("h100", True), ("a100", False), ("cpu", False)):
        predicted = _plan(Forecaster(captured, NAMED["adamw"], Cluster(1, 1, DEVICES[name]), "eager"), 0).predicted
        assert (predicted.reserved is not None) == (name != "cpu") and (predicted.reserved_error is not None) == said
        text = rendered(plan_tables(Plan(1, (("shard", 1),), (), predicted=predicted)))
        assert ("Reserved were between" in text) == said and "reserved so was never compared" not in text


def test_what_is_reserved_goes_by_the_settings_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, cluster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 1).captured, Cluster(1, 1, DEVICES["h100"])
    usual, text = _reserved(captured, cluster)
    assert usual.reserved is not None and usual.expanding is not None and usual.reserved_error and not usual.expandable
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    expanding, other_text = _reserved(captured, cluster)
    assert expanding.reserved == usual.expanding == expanding.expanding and expanding.expandable and expanding.reserved_error is None
    assert "whose segments expand" in other_text and "whose segments expand" not in text and "Reserved were" in text
    assert "Reserved were" not in other_text and "What is reserved so was never compared" in other_text


def test_of_other_settings_it_is_not_known_how_far_predictions_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, cluster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 1).captured, Cluster(1, 1, DEVICES["h100"])
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    predicted, _ = _reserved(captured, cluster)
    assert not predicted.expandable and predicted.reserved_error is None


def test_states_are_there_at_every_peak() -> None:
    """Of the optimizer at hand, which may keep less than another of its name."""
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 4)
    for zero in (0, 3):
        plan = _plan(forecaster, zero)
        memory = plan.predicted.memory
        assert forecaster.states(plan) == memory["parameters"] + memory["optimizer"]
        assert forecaster.at_least(plan) - forecaster.states(plan) > 0


def _reserved(captured: Capture, cluster: Cluster) -> tuple[Prediction, str]:
    predicted = _plan(Forecaster(captured, NAMED["adamw"], cluster, "eager"), 0).predicted
    return predicted, rendered(plan_tables(Plan(1, (("shard", 1),), (), predicted=predicted)))


def test_what_other_settings_of_the_allocator_spare_is_said_where_it_is_much() -> None:
    predicted = Prediction({"parameters": 70 * 2**20}, place="mm", reserved=100 * 2**20, expanding=80 * 2**20)
    for found, said in ((predicted, True), (replace(predicted, expanding=99 * 2**20), False), (replace(predicted, reserved=80 * 2**20), False)):
        text = " ".join(rendered(plan_tables(Plan(1, (("shard", 1),), (), predicted=found))).split())
        assert ("With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True set it would reserve 80.00 MiB" in text) == said


def test_complex_parameters_are_trained() -> None:
    captured = _forecaster(nn.Linear(512, 512, dtype=torch.complex64), torch.randn(4, 512, dtype=torch.complex64), 2)
    memory = _plan(captured, 0).predicted.memory
    assert memory["gradients"] >= 8 * 512 * 512 and memory["optimizer"] >= 16 * 512 * 512


def test_nothing_reserved_is_less_than_what_is_held() -> None:
    """Though the bands are of comparisons apart."""
    predicted = Prediction({"parameters": 100 * 2**20}, place="mm", error=(-0.01, 0.0), reserved=102 * 2**20, reserved_error=(-0.2, 0.1))
    text = " ".join(rendered(plan_tables(Plan(1, (("shard", 1),), (), predicted=predicted))).split())
    assert "peaks were between 99.00 MiB and 100.00 MiB" in text and "Reserved were between 99.00 MiB and 112.20 MiB" in text


def test_what_was_forecast_once_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    forecaster = _forecaster(Net(), torch.randn(4, 3, 8, 8), 4)
    plan = _plan(forecaster, 3)
    monkeypatch.setattr(autoshard.forecast, "traffic", None)
    again = forecaster(replace(plan, predicted=type(plan.predicted)()))
    assert again.predicted.traffic == plan.predicted.traffic and again.predicted.memory == plan.predicted.memory
