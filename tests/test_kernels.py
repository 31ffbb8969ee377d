"""Formulas of optimizers and the kernels that are generated from them, run by Triton's interpreter and compiled for GPUs."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from autoshard.kernels import adafactor, multi_tensor, rule
from autoshard.kernels.multi_tensor import TILES, Kernel
from autoshard.kernels.rule import Rule
from autoshard.kernels.source import load
from autoshard.kernels.tuning import Tile
from autoshard.optim import Lion
from autoshard.runtime import fused_step
from autoshard.runtime.families import FAMILIES, LION, Family
from autoshard.runtime.fused_step import Gradients
from tests.kernels import EPSILON, apart, compiled_as, spilled
from tests.small import in_full, same

pytestmark = pytest.mark.usefixtures("own_cache")


# --- against torch


OPTIONS: dict[type[optim.Optimizer], dict[str, st.SearchStrategy[Any]]] = {
    optim.AdamW: {"weight_decay": st.sampled_from([0.0, 0.1]), "amsgrad": st.booleans(), "maximize": st.booleans()},
    optim.Adam: {"weight_decay": st.sampled_from([0.0, 0.1]), "amsgrad": st.booleans(), "maximize": st.booleans()},
    optim.SGD: {
        "momentum": st.sampled_from([0.0, 0.9]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "dampening": st.sampled_from([0.0, 0.5]),
        "maximize": st.booleans(),
    },
}
LENGTHS = st.lists(st.sampled_from([0, 1, 7, 16, 48, TILES[0]["BLOCK"], TILES[0]["CHUNK"] + 3]), min_size=1, max_size=4)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def parameters(lengths: list[int], dtype: torch.dtype) -> list[nn.Parameter]:
    """The last lies where no 16 bytes begin; one of no dimensions where the length is 1."""
    drawn = torch.Generator().manual_seed(sum(lengths))
    values = [torch.randn(n + 1, generator=drawn, dtype=torch.float64).to(dtype)[1:] for n in lengths]
    return [nn.Parameter(v.reshape(()) if len(v) == 1 else v) for v in values]


def gradients(ps: list[nn.Parameter], step: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=drawn, dtype=torch.float64).to(p.dtype) for p in ps]


def double_of(ps: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().double().clone()) for p in ps]


def steps(optimizer: optim.Optimizer, ps: list[nn.Parameter], at: int, family: Family | None, scale: float = 1.0) -> None:
    """One step of `optimizer`; by our kernel where a family is given."""
    for p, grad in zip(ps, gradients(ps, at)):
        p.grad = grad * scale
    if family is None:
        optimizer.step()
    else:
        scaled = Gradients(torch.tensor(scale)) if scale != 1.0 else Gradients()
        assert not fused_step.take(optimizer, family, lambda: scaled, interpret=True)


def worst(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> float:
    return max((apart(a.detach(), b.detach()) for a, b in zip(ours, theirs)), default=0.0)


@pytest.mark.parametrize("kind", OPTIONS)
@settings(max_examples=12)
@given(data=st.data(), lengths=LENGTHS, dtype=DTYPES, scale=st.sampled_from([1.0, 8.0]))
def test_kernels_step_as_torch_does_in_float64(
    kind: type[optim.Optimizer], data: st.DataObject, lengths: list[int], dtype: torch.dtype, scale: float
) -> None:
    options = {name: data.draw(values, name) for name, values in OPTIONS[kind].items()}
    if options.get("momentum") and not options["dampening"]:
        options["nesterov"] = data.draw(st.booleans(), "nesterov")
    ours = parameters(lengths, dtype)
    optimizer = kind(ours, lr=0.01, **options)  # type: ignore[call-arg]
    for at in range(3):
        theirs = double_of(ours)
        reference = kind(theirs, lr=0.01, **options)  # type: ignore[call-arg]
        reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # as float64
        steps(optimizer, ours, at, FAMILIES[kind], scale)
        for p, grad in zip(theirs, gradients(ours, at)):
            p.grad = grad.double()
        reference.step()
        assert worst(ours, theirs) <= EPSILON[dtype]
        for p, whole in zip(ours, theirs):
            for key, value in optimizer.state[p].items():
                assert apart(value, reference.state[whole][key]) <= EPSILON[dtype], key


@pytest.mark.parametrize("kind", [optim.AdamW, in_full(optim.Adam), in_full(optim.SGD)])
def test_a_hundred_steps_are_torchs(kind: type[optim.Optimizer]) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if kind is optim.SGD else {}
    ours = parameters([40, 33], torch.float32)
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizer, reference = (kind(ps, lr=0.01, weight_decay=0.1, **options) for ps in (ours, theirs))  # type: ignore[call-arg]
    for at in range(100):
        steps(optimizer, ours, at, FAMILIES[kind])
        steps(reference, theirs, at, None)
    assert worst(ours, theirs) <= 1e-6
    states = zip(optimizer.state.values(), reference.state.values(), strict=True)
    assert all(a.keys() == b.keys() for a, b in states)


@pytest.mark.parametrize("kind", [optim.Adam, Lion])
def test_a_small_gradient_with_all_the_weight_is_the_mean(kind: type[optim.Optimizer]) -> None:
    """As in torch: nothing of a mean that was large stays in it."""
    ours = parameters([40], torch.float32)
    optimizer = kind(ours, lr=0.1, betas=(0.0, 0.0))  # type: ignore[call-arg]
    for gradient in (1e4, 1e-12):
        ours[0].grad = torch.full_like(ours[0], gradient)
        fused_step.take(optimizer, LION if kind is Lion else FAMILIES[kind], interpret=True)
    assert torch.equal(optimizer.state[ours[0]]["exp_avg"], torch.full_like(ours[0], 1e-12))


def lion_by_hand(p: Tensor, mean: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's algorithm 2."""
    towards = (0.9 * mean + 0.1 * grad).sign()
    return p - 0.01 * (towards + 0.1 * p), 0.99 * mean + 0.01 * grad


@pytest.mark.parametrize("interpret", [True, False])
def test_lion(interpret: bool) -> None:
    ours = parameters([40, 1, 33], torch.float32)
    optimizer = Lion(ours, lr=0.01, weight_decay=0.1)
    expected = [(p.detach().double(), torch.zeros_like(p, dtype=torch.float64)) for p in ours]
    for at in range(5):
        for p, grad in zip(ours, gradients(ours, at)):
            p.grad = grad
        assert not fused_step.take(optimizer, LION, interpret=interpret)
        expected = [lion_by_hand(p, m, g.double()) for (p, m), g in zip(expected, gradients(ours, at))]
    assert worst(ours, [nn.Parameter(p) for p, _ in expected]) <= 1e-6


def test_every_tile_takes_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for tile in TILES:
        monkeypatch.setattr(multi_tensor, "TILES", (tile,))
        ours = parameters([40, 1, (1 << 16) + 5], torch.float32)
        steps(optim.AdamW(ours, lr=0.01), ours, 0, FAMILIES[optim.AdamW])
        taken.append(ours)
    for others in taken[1:]:
        assert same(taken[0], others)


def test_tables_are_made_again_when_something_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient elsewhere, another rate; and not otherwise."""
    made: list[Any] = []
    monkeypatch.setattr(multi_tensor, "on_device", lambda table, device: made.append(table.shape) or table)
    ours, theirs = parameters([40, 33], torch.float32), parameters([40, 33], torch.float32)
    optimizer, reference = optim.AdamW(ours, lr=0.01), optim.AdamW(theirs, lr=0.01)
    counts = []
    for at in range(5):
        grads = gradients(ours, 0) if at != 3 else [g.clone() for g in gradients(ours, 0)]
        if at < 2 or at == 3:
            kept = grads
        for some in (ours, theirs):
            for p, grad in zip(some, kept):
                p.grad = grad
        for each in (optimizer, reference):
            each.param_groups[0]["lr"] = 0.02 if at == 4 else 0.01
        made.clear()
        assert not fused_step.take(optimizer, FAMILIES[optim.AdamW], interpret=True)
        reference.step()
        counts.append(len(made))
    assert counts[2] == 0 and counts[3] == counts[4] == 1, counts  # the rows', and the settings'
    assert worst(ours, theirs) <= 1e-6


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_infinite_gradient_leaves_everything(kind: type[optim.Optimizer]) -> None:
    ours = parameters([40], torch.float32)
    optimizer = kind(ours, lr=0.01)  # type: ignore[call-arg]
    for begun in (False, True):
        before, state = ours[0].detach().clone(), {k: v.clone() for k, v in optimizer.state[ours[0]].items()}
        ours[0].grad = torch.full_like(ours[0], torch.inf)
        assert not fused_step.take(optimizer, FAMILIES[kind], lambda: Gradients(torch.tensor(2.0), torch.tensor(1.0)), interpret=True)
        assert torch.equal(ours[0], before)
        assert all(torch.equal(v, state[k]) for k, v in optimizer.state[ours[0]].items()), begun
        steps(optimizer, ours, 0, FAMILIES[kind])


def test_a_gradient_that_is_no_number_shows() -> None:
    ours = parameters([40], torch.float32)
    ours[0].grad = torch.full_like(ours[0], torch.nan)
    assert not fused_step.take(optim.AdamW(ours), FAMILIES[optim.AdamW], interpret=True)
    assert bool(ours[0].isnan().all())


# --- on GPUs


RULES: dict[str, Rule] = {
    "adamw": rule.adam(decoupled=True, weight_decay=True, amsgrad=False, maximize=False),
    "amsgrad": rule.adam(decoupled=False, weight_decay=True, amsgrad=True, maximize=True),
    "quick": rule.adam(decoupled=True, weight_decay=False, amsgrad=False, maximize=False, quick=True),
    "sgd": rule.sgd(weight_decay=True, momentum=True, nesterov=True, maximize=False),
    "lion": rule.lion(weight_decay=True, maximize=False),
}


def compiled(kernel: Kernel, capability: int, tile: Tile, aligned: bool = True) -> Any:
    function = load(kernel.rule.name, kernel.source())
    signature = {"settings": "*fp64", "once": "*fp64" if kernel.precise else "*fp32", "scale": "*fp32", "infinite": "*fp32", "rows": "*i64", "chunks": "*i64"}
    constants = {"CHUNK": tile["CHUNK"], "BLOCK": tile["BLOCK"], "ALIGNED": aligned}
    divisible = {(i,): [["tt.divisibility", 16]] for i in range(6)}
    return compiled_as(function, signature, constants, capability, divisible, num_warps=tile["num_warps"])


@pytest.mark.parametrize("name", ["adamw", in_full("sgd"), in_full("lion")])
@pytest.mark.parametrize("capability", [80, in_full(90)])
def test_what_is_once_a_tensor_compiles_for_gpus(name: str, capability: int, tmp_path: Path) -> None:
    kernel = Kernel(RULES[name], (torch.float32,) * (2 + len(RULES[name].states)))
    signature = {"settings": "*fp64", "steps": "*fp32", "once": "*fp32", "count": "i32"}
    assert spilled(compiled_as(load(f"{name}_once", kernel.source()), signature, {}, capability), tmp_path) == 0


CASES = [(name, capability) for name in RULES for capability in (80, 90)]
ALWAYS = {("adamw", 80), ("amsgrad", 90)}


@pytest.mark.parametrize(("name", "capability"), [case if case in ALWAYS else in_full(*case) for case in CASES])
@pytest.mark.parametrize("dtype", [torch.float32, in_full(torch.bfloat16), in_full(torch.float64)])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_kernels_compile_for_gpus_and_stay_in_registers(
    name: str, capability: int, dtype: torch.dtype, tile: Tile, tmp_path: Path
) -> None:
    dtypes = (dtype,) * (2 + len(RULES[name].states))
    made = compiled(Kernel(RULES[name], dtypes, scaled=True, checked=True, copied=torch.bfloat16), capability, tile)
    assert "cubin" in made.asm
    assert spilled(made, tmp_path) == 0
    assert re.search(r"ld\.global\.v[24]", made.asm["ptx"])  # 16 bytes at once


@pytest.mark.parametrize("name", [name if name == "adamw" else in_full(name) for name in RULES])
@pytest.mark.parametrize("capability", [80, in_full(90)])
@pytest.mark.parametrize("dtype", [torch.float32, in_full(torch.bfloat16), in_full(torch.float16), in_full(torch.float64)])
@pytest.mark.parametrize("plain", [False, True])
def test_kernels_compile_for_tensors_of_no_alignment(
    name: str, capability: int, dtype: torch.dtype, plain: bool, tmp_path: Path
) -> None:
    """plain: gradients are neither scaled nor checked, and there are no masters."""
    dtypes = (dtype,) * (2 + len(RULES[name].states))
    more: dict[str, Any] = {} if plain else {"scaled": True, "checked": True, "copied": torch.float16}
    kernel = Kernel(RULES[name], dtypes, **more)
    for aligned in (False, True) if plain else (False,):
        assert spilled(compiled(kernel, capability, TILES[0], aligned), tmp_path) == 0


@pytest.mark.parametrize("name", ["look", "total", "squares", "advance", "update"])
@pytest.mark.parametrize("capability", [80, in_full(90)])
@pytest.mark.parametrize("dtype", [torch.float32, in_full(torch.bfloat16), in_full(torch.float64)])
@pytest.mark.parametrize("factored", [True, in_full(False)])
def test_adafactors_kernels_compile_for_gpus_and_stay_in_registers(
    name: str, capability: int, dtype: torch.dtype, factored: bool, tmp_path: Path
) -> None:
    function = load(name, adafactor.text_of((dtype, torch.float32, dtype)))
    kinds = {"table": "*i64", "places": "*i64", "scale": "*fp32", "parts": "*fp64" if dtype is torch.float64 else "*fp32"}
    flags = {"FACTORED": factored, "ALIGNED": True, "SCALED": True, "ROWS": adafactor.ROWS, "COLUMNS": adafactor.COLUMNS, "WRITE": False, "OWN": True}
    constants = {flag: value for flag, value in flags.items() if flag in function.arg_names}
    signature = {arg: kinds.get(arg, "*fp64") for arg in function.arg_names if arg not in flags}
    for write in (False, True) if name == "update" else (False,):
        chosen = {**constants, "WRITE": write} if name == "update" else constants
        made = compiled_as(function, signature, chosen, capability, num_warps=adafactor.WARPS)
        assert spilled(made, tmp_path) == 0
        assert name not in ("look", "update") or re.search(r"ld\.global\.v[24]", made.asm["ptx"])  # 16 bytes at once


def test_the_source_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel = Kernel(RULES["lion"], (torch.float32,) * 3)
    load.__wrapped__("lion", kernel.source())
    (file,) = (tmp_path / "autoshard" / "kernels").glob("*.py")
    assert file.read_text() == kernel.source() and "tl.where(towards > 0" in kernel.source()
