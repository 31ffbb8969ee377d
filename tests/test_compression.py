"""Gradients that travel in fewer bits, or are summed in more: what is rounded, and how often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.dtypes import dtype_named
from autoshard.errors import ConfigError, PlanError
from autoshard.plan import Plan
from autoshard.planning import first_look
from tests.cluster import Cluster
from tests.parity import whole
from tests.small import Sum, compiled_pair, config, gradients_of_sum, in_full, residues


class Turned(nn.Module):
    """The gradient of its parameter is complex: its input, and as much of i."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.turn * x).sum()


def turned(options: dict[str, Any]) -> Tensor:
    """The gradient of a complex parameter."""
    model, _, compiled = compiled_pair(config(options.pop("zero", 0), **options), Turned)
    compiled(torch.full((5,), dist.get_rank() + 1.0)).backward()
    return whole(model.turn.grad)


@pytest.mark.parametrize("direct", [False, True])
def test_what_is_complex_is_summed_as_it_is(two: Cluster, direct: bool) -> None:
    plan = replace(first_look(Turned(), config(0), Machines(1, 2, DEVICES["cpu"])), direct_sums=direct)
    for found in two.run(turned, {"zero": "auto", "plan": plan, "replicate_below": "auto"}):
        assert torch.equal(found, torch.full((5,), 1.5 + 1.5j))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize(("zero", "codegen"), [(0, "eager"), (3, "eager"), in_full(0, "inductor"), in_full(2, "inductor")])
def test_gradients_are_rounded_and_then_summed(two: Cluster, zero: int, codegen: str, name: str) -> None:
    dtype = dtype_named(name)
    for found, own in two.run(gradients_of_sum, zero, {"compression": name, "codegen": codegen}):
        mean = sum(g.to(dtype).float() for g in own) / 2
        expected = mean if zero else mean.to(dtype).float()
        assert found.dtype == torch.float32 and torch.equal(found, expected)
        assert not torch.equal(found, sum(own) / 2)


def test_on_two_axes_sums_of_nodes_are_rounded_again(four: Cluster) -> None:
    options = {"compression": "bf16", "mesh": {"replicate": 2, "shard": 2}}
    for found, own in four.run(gradients_of_sum, 3, options):
        first, second = (sum(g.bfloat16().float() for g in node) for node in (own[:2], own[2:]))
        mean = (first.bfloat16().float() + second.bfloat16().float()) / 4
        torch.testing.assert_close(found, mean.bfloat16().float(), rtol=1e-6, atol=0)


def test_sums_of_nodes_fit_where_every_gradient_does(four: Cluster) -> None:
    """The largest number of fp16 is 65504."""
    options = {"compression": "fp16", "mesh": {"replicate": 2, "shard": 2}}
    for found, own in four.run(gradients_of_sum, 3, options, 2.3e4):
        assert max((own[0] + own[1]).abs().max(), (own[2] + own[3]).abs().max()) > 65504 > torch.stack(own).abs().max()
        torch.testing.assert_close(found, sum(own) / 4, rtol=2e-3, atol=20)


@pytest.mark.parametrize("zero", [0, in_full(1), in_full(2)])
def test_what_waited_is_added_before_it_is_rounded(two: Cluster, zero: int) -> None:
    for found, own in two.run(accumulated, zero):
        mean = sum((2 * g).bfloat16().float() for g in own) / 2
        expected = mean if zero else mean.bfloat16().float()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def accumulated(zero: int) -> tuple[Tensor, list[Tensor]]:
    """As `gradients_of_sum`, of two backwards, the first of which does not communicate at stages 0 and 1."""
    model, _, compiled = compiled_pair(config(zero, compression="bf16"), Sum)
    inputs = torch.randn(dist.get_world_size(), 8, generator=torch.Generator().manual_seed(5))
    with autoshard.no_sync(model):
        compiled(inputs[dist.get_rank()]).backward()
    compiled(inputs[dist.get_rank()]).backward()
    return whole(model.layer.weight.grad), [x.expand(15, 8) for x in inputs]


class Sums(Sum):
    """Of two weights, which travel together."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 15, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.other(x).sum()


def waited(zero: int, kept: list[bool], options: dict[str, Any]) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
    """The gradients of three backwards in bf16, two of which do not communicate; by parameter what each process has of them all, which
    bf16 has no numbers for; and what this process has not sent. kept: by rank, whether what waited of the second weight is."""
    model, _, compiled = compiled_pair(config(zero, **options), Sums)
    rank, world = dist.get_rank(), dist.get_world_size()
    first = torch.randint(128, 256, (world, 8), generator=torch.Generator().manual_seed(5)).float()
    inputs = [first, torch.full_like(first, 0.5), torch.full_like(first, 0.25)]
    with autoshard.no_sync(model):
        for x in inputs[:2]:
            compiled(x[rank]).backward()
    if not kept[rank]:
        model.other.weight.grad = None
    compiled(inputs[2][rank]).backward()
    other = [sum(x[i] for x in (inputs if kept[i] else inputs[2:])) for i in range(world)]
    own = [[x.expand(15, 8) for x in each] for each in (sum(inputs), other)]  # type: ignore[union-attr]
    return [whole(p.grad) for p in model.parameters()], own, [r.error.detach() for r in residues(model)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("zero", "kept"), [(0, [True, True]), (1, [True, False]), in_full(1, [True, True]), in_full(0, [True, False])])
def test_what_waited_is_added_in_the_dtype_of_the_sum(two: Cluster, zero: int, kept: list[bool]) -> None:
    """Though gradients are narrower; also where of a group something waited on one process, and nothing on another."""
    for found, grads, _ in two.run(waited, zero, kept, {"precision": "bf16"}):
        for gradient, own in zip(found, grads):
            assert torch.equal(gradient, sum(own) / 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", [[True, False], in_full([True, True])])
def test_so_it_is_where_matrices_travel_in_its_place(two: Cluster, kept: list[bool]) -> None:
    """Of gradients of rank 1, so that what is missing of the mean is its rounding: to the dtype of copies, on all processes."""
    answers = two.run(waited, 0, kept, {"precision": "bf16", "compression": "powersgd", "compression_rank": 1})
    for i, own in enumerate(answers[0][1]):
        one, other = (found[i] for found, *_ in answers)
        missing = sum(errors[i] for *_, errors in answers) / 2
        assert torch.equal(one, other) and torch.equal(one, one.bfloat16().float())
        torch.testing.assert_close(one + missing, sum(own) / 2, rtol=1e-5, atol=0)


def test_where_gradients_are_summed_in_bf16_what_waited_is_rounded_once(two: Cluster) -> None:
    options = {"precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
    for found, grads, _ in two.run(waited, 0, [True, True], options):
        for gradient, own in zip(found, grads):
            assert torch.equal(gradient, sum(g.bfloat16() / 2 for g in own).float())  # type: ignore[union-attr]


def summed(options: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """As `gradients_of_sum`, of a model in bf16 whose gradients are reduced in fp32."""
    inputs = torch.randn(dist.get_world_size(), 8, generator=torch.Generator().manual_seed(5)).bfloat16()
    settings = config(2, precision=MixedPrecisionPolicy(reduce_dtype=torch.float32), **options)
    model, _, compiled = compiled_pair(settings, lambda: Sum().bfloat16())
    compiled(inputs[dist.get_rank()]).backward()
    return whole(model.layer.weight.grad), [x.float().expand(15, 8) for x in inputs]


def test_what_is_reduced_in_fp32_is_rounded_to_a_narrower_parameter_once(three: Cluster) -> None:
    """Where each process sums by itself; of two numbers a sum is rounded once anyway."""
    for found, own in three.run(summed, {"cluster": Machines(1, 3, DEVICES["cpu"])}):
        assert torch.equal(found, (sum(own) / 3).bfloat16())


def scaled(zero: int) -> tuple[bool, float]:
    """Of a step in which one process's gradients are too large for fp16: whether parameters changed, and the scale after it."""
    model, _, compiled = compiled_pair(config(zero, compression="fp16", replicate_below="auto"), Sum)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = model.layer.weight.detach().clone()
    scaler.scale(compiled(torch.full((8,), 1e3 if dist.get_rank() else 1.0))).backward()
    scaler.step(optimizer)
    scaler.update()
    return not torch.equal(whole(model.layer.weight.detach()), before), scaler.get_scale()


@pytest.mark.parametrize("zero", [2, in_full(0), in_full(3)])
def test_a_gradient_too_large_for_its_bits_skips_the_step_on_all(two: Cluster, zero: int) -> None:
    assert two.run(scaled, zero) == [(False, 512.0)] * 2


def test_what_travels_in_as_few_bits_anyway_is_left_alone(two: Cluster) -> None:
    for found, own in two.run(gradients_of_sum, 2, {"compression": "bf16", "precision": "bf16"}):
        torch.testing.assert_close(found, sum(g.bfloat16().float() for g in own) / 2, rtol=1e-6, atol=0)


def test_compression_is_said_where_it_changes_something() -> None:
    plan = first_look(Sum(), config(0, compression="bf16"), Machines(2, 1, DEVICES["cpu"]))
    assert any("numbers change" in why for why in plan.why) and Plan.from_json(plan.to_json()) == plan
    plain = first_look(Sum(), config(0), Machines(2, 1, DEVICES["cpu"]))
    sent = {p.compression: sum(t.bytes for t in p.predicted.traffic) for p in (plan, plain)}
    assert 2 * sent["bf16"] == sent[""]
    alone = first_look(Sum(), config(0, compression="bf16"), Machines(1, 1, DEVICES["cpu"]))
    assert not alone.compression and any("no gradients travel in more bits" in why for why in alone.why)
    for without in ({"disable_passes": ("compress",)}, {"passes": "name_parameters,lower,compress"}):
        with pytest.raises(ConfigError, match="compression: no pass 'compress' before 'lower'"):
            config(0, compression="bf16", **without)
    with pytest.raises(ConfigError, match="compression: 'fp32' is not legal; .*'bf16'"):
        config(0, compression="fp32")
    with pytest.raises(PlanError, match="compression: 'int8' is not legal"):
        replace(plain, compression="int8")
    with pytest.raises(PlanError, match="compute: 'bfloat16' is not legal; .* bf16"):
        replace(plain, compute="bfloat16")
    with pytest.raises(PlanError, match="message: -1 is not legal"):
        replace(plain, message=-1)
    with pytest.raises(PlanError, match="bucket: -1 is not legal"):
        replace(plain, bucket=-1)
