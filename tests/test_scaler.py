"""GradScaler: what is infinite on one process leaves everything on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.errors import UnsupportedError
from tests.cluster import Cluster
from tests.parity import Distance, see_state, whole
from tests.small import (
    TOLERANCE,
    Net,
    backward_of_all,
    compiled_pair,
    config,
    in_full,
    inputs_of,
    step_each,
    what_is_said,
)


def scaled(zero: int) -> tuple[Distance, list[float], list[bool]]:
    """GradScaler; in the second step one process's gradient is infinite, so none may step."""
    model, plain, compiled = compiled_pair(config(zero))
    optimizer, reference = (optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    distance, rank = Distance(), dist.get_rank()
    scales, skipped = [], []
    for step, inputs in enumerate(inputs_of(4)):
        scaler.scale(compiled(inputs[rank])).backward()
        if step == 1 and (zero == 0 or rank == 1):  # of rows, one process has the infinite one
            local = model.down.weight.grad
            (local.to_local() if isinstance(local, DTensor) else local)[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = whole(model.up.weight).detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(torch.equal(before, whole(model.up.weight)))
        scales.append(scaler.get_scale())
        if step != 1:
            backward_of_all(plain, inputs)
            distance.see("norm", whole(norm), nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
            step_each(reference)
    see_state(distance, model, plain)
    return distance, scales, skipped


def scaled_late(kind: str) -> tuple[list[bool], float, str]:
    """(what was left as it was, the scale, what was refused): by default small parameters stay whole, and the first of all is. kind:
    the optimizer's; of one that is refused since the scaler comes late, whether it stepped before."""
    torch.manual_seed(0)
    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if "late" not in kind else None
    below: Any = "auto" if "late" not in kind else 10
    compiled = torch.compile(model, backend=autoshard.backend(config(3, replicate_below=below)))
    compiled(inputs_of(1)[0, dist.get_rank()])
    parameters = sorted(model.parameters(), key=lambda p: p.numel())
    make = autoshard.optim.Adafactor if kind == "Adafactor" else optim.RMSprop if "late" in kind else getattr(optim, kind)
    optimizer = make(parameters, lr=1e-2)
    if kind == "later":
        compiled(inputs_of(1)[0, dist.get_rank()]).backward()
        step_each(optimizer)
    scaler = scaler or torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(compiled(inputs_of(1)[0, dist.get_rank()])).backward()
    if dist.get_rank() == 1 and "late" not in kind:
        model.up.weight.grad.to_local()[0, 0] = float("inf")  # type: ignore[union-attr, operator]
    before = [whole(p).detach().clone() for p in parameters]
    try:
        scaler.step(optimizer)
    except UnsupportedError as error:
        return [], 0.0, str(error)
    scaler.update()
    return [torch.equal(b, whole(p)) for b, p in zip(before, parameters)], scaler.get_scale(), ""


@pytest.mark.parametrize("kind", ["Adafactor", in_full("AdamW"), in_full("RMSprop")])
def test_an_infinite_gradient_is_seen_where_the_first_is_small(two: Cluster, kind: str) -> None:
    for same, scale, _ in two.run(scaled_late, kind):
        assert all(same) and scale == 512.0


class Scale(Net):
    """Whose first parameter has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def scaled_without_rows(zero: int, behind: bool) -> tuple[str, float]:
    """(what was refused, the scale behind a step whose infinite gradient is in one process's rows)."""
    model, _, compiled = compiled_pair(config(zero), Scale)
    optimizer = optim.SGD(sorted(model.parameters(), key=lambda p: -p.ndim) if behind else model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(compiled(inputs_of(1)[0, dist.get_rank()])).backward()
    if dist.get_rank() == 1:
        model.up.weight.grad.to_local()[0, 0] = float("inf")  # type: ignore[union-attr, operator]
    said = what_is_said(scaler.step, optimizer)
    scaler.update()
    return said, scaler.get_scale()


@pytest.mark.parametrize("zero", [in_full(1), 3])
def test_a_parameter_without_rows_goes_behind_others(two: Cluster, zero: int) -> None:
    assert two.run(scaled_without_rows, zero, True) == [("nothing", 512.0)] * 2
    (said, _), (other, _) = two.run(scaled_without_rows, zero, False)
    assert "parameters without dimensions behind others in the optimizer" in said + other


@pytest.mark.parametrize("kind", ["late", "later"])
def test_a_scaler_that_comes_late_is_refused(two: Cluster, kind: str) -> None:
    assert all("legal: a GradScaler that is made before the model's first call" in text for *_, text in two.run(scaled_late, kind))


@pytest.mark.parametrize("zero", [in_full(0), in_full(1), 3])
def test_an_infinite_gradient_on_one_process_skips_the_step_on_all(two: Cluster, zero: int) -> None:
    for distance, scales, skipped in two.run(scaled, zero):
        assert distance.worst <= TOLERANCE, distance
        assert skipped == [False, True, False, False] and scales == [1024.0, 512.0, 512.0, 512.0]
