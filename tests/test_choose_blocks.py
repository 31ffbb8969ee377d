"""Which modules under a number are the blocks of a model, by the names and shapes of its parameters; what a plan makes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autoshard
from autoshard import Config, Plan
from autoshard.capture import capture
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.cluster import measured_here
from autoshard.errors import PlanError
from autoshard.inventory import Inventory, ParameterInfo, take_inventory
from autoshard.passes.choose_blocks import block_of, blocks_of, choose_stacks
from autoshard.passes.choose_zero import Circumstances, make_plan
from autoshard.passes.group_parameters import group_parameters
from autoshard.rehearsal import prepare
from tests.cluster import Cluster
from tests.models import CASES, DEEP, TUNED
from tests.parity import Distance, see_gradients, see_state
from tests.small import TOLERANCE, compiled_pair, config, in_full, inputs_of, step_each

Tree = Mapping[str, Any]  # modules by name, and shapes of parameters


def _flat(tree: Tree, prefix: str = "") -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, inner in tree.items():
        found |= _flat(inner, f"{prefix}{name}.") if isinstance(inner, Mapping) else {prefix + name: inner}
    return found


def _inventory(tree: Tree) -> Inventory:
    return Inventory("Net", tuple(ParameterInfo(n, s, "float32", 4, True, True) for n, s in _flat(tree).items()))


def _blocks(inventory: Inventory) -> list[str]:
    return blocks_of((p.name for p in inventory.parameters), choose_stacks(inventory))


def _listed(*modules: Tree) -> Tree:
    return {str(i): module for i, module in enumerate(modules)}


def _line(width: int, out: int) -> Tree:
    return {"weight": (out, width), "bias": (out,)}


def _norm(width: int) -> Tree:
    return {"weight": (width,), "bias": (width,)}


def _layer(d: int, **more: Tree) -> Tree:
    return {"norm": _norm(d), "qkv": _line(d, 3 * d), "out": _line(d, d), "up": _line(d, 4 * d), "down": _line(4 * d, d), **more}


def _sparse(d: int = 8, experts: int = 4) -> Tree:
    return _layer(d, gate=_line(d, experts), experts=_listed(*[{"up": _line(d, 4 * d), "down": _line(4 * d, d)}] * experts))


def _encoder(d: int = 8, layers: int = 3, **more: Tree) -> Tree:
    return {"embed": {"weight": (99, d)}, "layers": _listed(*[_layer(d, **more)] * layers), "norm": _norm(d)}


def _convolution(width: int, out: int, size: int = 3) -> Tree:
    return {"convolution": {"weight": (out, width, size, size)}, "normalization": _norm(out)}


def _residual(width: int, out: int) -> Tree:
    """As those of transformers' ResNet."""
    inner = {"layer": _listed(_convolution(width, out), _convolution(out, out))}
    return inner if width == out else {"shortcut": _convolution(width, out, 1), **inner}


def _t5(decoder: bool, d: int = 8) -> Tree:
    """The first block has what all share."""
    attention = {name: {"weight": (d, d)} for name in "qkvo"}
    first = {"SelfAttention": {**attention, "relative_attention_bias": {"weight": (32, 4)}}, "layer_norm": {"weight": (d,)}}
    other = {"SelfAttention": attention, "layer_norm": {"weight": (d,)}}
    cross = [{"EncDecAttention": attention, "layer_norm": {"weight": (d,)}}] if decoder else []
    dense = {"DenseReluDense": {"wi": {"weight": (4 * d, d)}, "wo": {"weight": (d, 4 * d)}}, "layer_norm": {"weight": (d,)}}
    return {"block": _listed(*({"layer": _listed(one, *cross, dense)} for one in (first, other)))}


def _swin(*depths: int) -> Tree:
    """Each stage is twice as wide as the one before it, and all but the last end in a downsampling."""
    widths = [8 << i for i in range(len(depths))]
    stages = [{"blocks": _listed(*[_layer(d)] * n), "downsample": _line(4 * d, 2 * d)} for d, n in zip(widths, depths)]
    return {"stages": _listed(*stages[:-1], {"blocks": stages[-1]["blocks"]})}


ENCODED = [f"0.layers.{i}" for i in range(3)]
MODELS: dict[str, tuple[Tree, list[str]]] = {
    "layers": ({"model": _encoder()}, [f"model.layers.{i}" for i in range(3)]),
    "encoder and head": (_listed(_encoder(), _line(8, 3)), [*ENCODED, "1"]),
    "encoder alone": (_listed(_encoder()), ENCODED),
    "encoder between layers that are alike": (
        _listed(_line(8, 8), _encoder(), _line(8, 8), _line(8, 8)), ["0", "1.layers.0", "1.layers.1", "1.layers.2", "2", "3"]
    ),
    "encoder in two lists": (_listed(_listed(_encoder(), _norm(8)), _line(8, 3)), [*(f"0.{b}" for b in ENCODED), "0.1", "1"]),
    "encoder and decoder": (
        {"stacks": _listed(_encoder(), _encoder(cross=_line(8, 8)))}, [f"stacks.{i}.layers.{k}" for i in range(2) for k in range(3)]
    ),
    "encoder, and blocks that are alike": (
        _listed(_encoder(), _layer(8), _layer(8), _line(8, 3)), [*ENCODED, "1", "2", "3"]
    ),
    "stages": (_swin(2, 2, 6, 2), [f"stages.{i}.blocks.{k}" for i, n in enumerate((2, 2, 6, 2)) for k in range(n)]),
    "stages of one width": (
        {"stages": _listed(*[_listed(*[_layer(8)] * 4)] * 3)}, [f"stages.{i}.{k}" for i in range(3) for k in range(4)]
    ),
    "stages of one width, some longer": (
        {"stages": _listed(*(_listed(*[_layer(8)] * n) for n in (2, 2, 6, 2)))},
        [f"stages.{i}.{k}" for i, n in enumerate((2, 2, 6, 2)) for k in range(n)],
    ),
    "stages whose first block has a shortcut": (
        {"stages": _listed(*({"layers": _listed(_residual(i, o), _residual(o, o))} for i, o in ((8, 8), (8, 16), (16, 32))))},
        [f"stages.{i}.layers.{k}" for i in range(3) for k in range(2)],
    ),
    "stages with names": (
        {f"layer{i}": _listed({**_residual(8, 8), "downsample": _listed(_norm(8))}, _residual(8, 8)) for i in (1, 2)},
        ["layer1.0", "layer1.1", "layer2.0", "layer2.1"],
    ),
    "T5": ({"encoder": _t5(False), "decoder": _t5(True)}, [f"{c}.block.{i}" for c in ("encoder", "decoder") for i in range(2)]),
    "experts": ({"layers": _listed(_sparse(), _sparse())}, ["layers.0", "layers.1"]),
    "experts behind a dense layer": ({"layers": _listed(_layer(8), _sparse(), _sparse())}, [f"layers.{i}" for i in range(3)]),
    "experts in one layer of many": ({"layers": _listed(_layer(8), _sparse(), _layer(8), _layer(8))}, [f"layers.{i}" for i in range(4)]),
    "experts in an encoder": (_listed({"layers": _listed(_sparse(), _sparse())}, _line(8, 3)), ["0.layers.0", "0.layers.1", "1"]),
    "an MLP": ({"0": _line(8, 16), "2": _line(16, 16), "4": _line(16, 3)}, ["0", "2", "4"]),
    "MLPs": ({"blocks": _listed(*[{"0": _line(8, 8), "2": _line(8, 8)}] * 3)}, [f"blocks.{i}" for i in range(3)]),
    "an MLP and a head": (_listed({"0": _line(8, 8), "2": _line(8, 8)}, _line(8, 3)), ["0", "1"]),
    "a tower of layers and a head": (
        _listed({str(2 * i): _line(8, 8) for i in range(6)}, _line(8, 3)), [*(f"0.{2 * i}" for i in range(6)), "1"]
    ),
    "parts of a block in a list": (
        {"layers": _listed(*[_listed(_layer(8), _layer(8), _line(8, 8))] * 3)}, [f"layers.{i}" for i in range(3)]
    ),
    "a block whose parts are in lists": (
        {"layers": _listed(_listed({"norm": _norm(8), "qkv": _line(8, 24)}, {"net": _listed(_norm(8), _line(8, 8), _line(8, 8))}))},
        ["layers.0"],
    ),
    "one module in the place of three": ({"layers": {"0": _layer(8)}}, ["layers.0"]),  # a shared parameter has its first name only
    "two towers that are alike": ({"towers": _listed(_encoder(), _encoder())}, ["towers.0", "towers.1"]),
    "parameters under a number": ({"rows": {"0": (8, 8), "1": (8, 8)}}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_what_repeats(name: str) -> None:
    tree, expected = MODELS[name]
    assert _blocks(_inventory(tree)) == expected


@pytest.mark.parametrize("name", [*CASES, *DEEP, *TUNED])
def test_the_first_number_is_a_block_s_in_these_models(name: str) -> None:
    assert choose_stacks(take_inventory((CASES | DEEP | TUNED)[name].build(), ())) == ()


def test_blocks_of_models_of_others() -> None:
    from transformers import BertConfig, BertModel, SwinConfig, SwinModel

    swin = SwinModel(SwinConfig(image_size=32, patch_size=2, window_size=2, embed_dim=8, depths=[1, 2, 3], num_heads=[1, 2, 4]))
    bert = BertModel(BertConfig(vocab_size=67, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64))
    text = nn.Sequential(bert, nn.Linear(32, 8))
    assert [b.rpartition("layers.")[2] for b in _blocks(take_inventory(swin, ()))] == [
        "0", "1.blocks.0", "1.blocks.1", "2.blocks.0", "2.blocks.1", "2.blocks.2"
    ]  # fmt: skip
    assert _blocks(take_inventory(text, ())) == [*(f"0.encoder.layer.{i}" for i in range(3)), "1"]


_shapes = st.sampled_from([(8,), (8, 8), (16, 8)])
_trees = st.recursive(
    st.dictionaries(st.sampled_from(["weight", "bias"]), _shapes, min_size=1),
    lambda inner: st.dictionaries(st.sampled_from("ab0123"), inner, min_size=1)
    | st.tuples(inner, st.integers(2, 4)).map(lambda both: _listed(*[both[0]] * both[1])),
    max_leaves=12,
)


@given(_trees, st.randoms())
def test_no_block_is_in_another_and_each_stack_has_some(tree: Tree, random: Any) -> None:
    """Whatever the order in which a process saw the parameters."""
    inventory = _inventory(tree)
    stacks, blocks = choose_stacks(inventory), _blocks(inventory)
    assert not any(b.startswith(f"{a}.") for a in blocks for b in blocks)
    assert all(sum(b.startswith(f"{stack}.") for b in blocks) > 1 for stack in stacks)
    mixed = list(inventory.parameters)
    random.shuffle(mixed)
    assert set(choose_stacks(replace(inventory, parameters=tuple(mixed)))) == set(stacks)


@given(_trees)
def test_a_model_in_a_list_keeps_its_blocks(tree: Tree) -> None:
    """Unless nothing repeats in it: then it is one."""
    inside = choose_stacks(_inventory(tree))
    found = choose_stacks(_inventory(_listed(tree, _line(8, 3))))
    assert found == ("0", *(f"0.{stack}" for stack in inside)) or not (found or inside)


@given(_trees)
def test_a_block_is_one_group(tree: Tree) -> None:
    inventory = _inventory(tree)
    stacks = choose_stacks(inventory)
    groups = group_parameters(inventory, 0, stacks)
    assert sorted(p.name for _, members, _ in groups for p in members) == sorted(p.name for p in inventory.parameters)
    assert len({name for name, _, _ in groups}) == len(groups)
    for name, members, _ in groups:
        assert {block_of(p.name, stacks) for p in members} in ({name}, {None})


# --- a plan


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Encoder(nn.Module):
    def __init__(self, layers: int = 3, width: int = 15) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(8, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Head(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).pow(2).mean()


def encoded(layers: int = 3, width: int = 15) -> nn.Module:
    return nn.Sequential(Encoder(layers, width), Head(width, 7))


class Stages(nn.Module):
    """As many stages as blocks have to be to be graphs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.stages = nn.ModuleList(nn.Sequential(*(Layer(8) for _ in range(3))) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for stage in self.stages:
            x = stage(x)
        return x.pow(2).mean()


def _planned(model: nn.Module, rows: int = 4, world: int = 2, **options: Any) -> Plan:
    options = {"codegen": "eager", "replicate_below": 0, **options}
    return autoshard.plan(model, torch.randn(rows, 8), Config(**options), Machines(1, world, measured_here("cpu")))


def test_a_stack_is_gathered_block_by_block() -> None:
    plan = _planned(encoded(), zero=3)
    assert [g.name for g in plan.groups] == ["0.embed", *ENCODED, "0.norm", "1"] and plan.stacks == ("0",)
    assert Plan.from_json(plan.to_json()) == plan


def _by_the_first_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.passes.choose_zero.choose_stacks", lambda inventory: ())


def test_the_peak_falls_where_a_stack_is_gathered_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    by_block = _planned(encoded(6, 64), zero=3, recompute="none").predicted
    _by_the_first_number(monkeypatch)
    at_once = _planned(encoded(6, 64), zero=3, recompute="none").predicted
    assert by_block.peak_bytes < 0.8 * at_once.peak_bytes


def test_the_peak_falls_where_a_stack_is_computed_again_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole it saves nothing at the peak, which is in the midst of it."""

    def peak(recompute: str) -> int:
        return _planned(encoded(6, 64), 4096, 1, zero=0, recompute=recompute).predicted.peak_bytes

    saved, by_block = peak("none"), peak("full")
    _by_the_first_number(monkeypatch)
    assert by_block < 0.5 * saved and peak("full") > 0.9 * saved


def _outlined(model: nn.Module) -> list[tuple[str, ...]]:
    """The blocks that are graphs of their own, those that share one together."""
    captured = capture(model, torch.randn(4, 8))
    plan = make_plan(captured.inventory, Config(zero=0), Circumstances(Machines(1, 1, measured_here("cpu")), None))
    return [kind.names for kind in prepare(captured, plan, inductor=False).kinds if kind.names]


def test_blocks_of_a_stack_are_graphs_of_their_own() -> None:
    assert _outlined(encoded(9)) == [tuple(f"0.layers.{i}" for i in range(9))]


def test_blocks_are_found_in_stages() -> None:
    assert _outlined(Stages()) == [tuple(f"stages.{i}.{k}" for i in range(8) for k in range(3))]


def test_what_a_plan_file_says_of_stacks() -> None:
    data = json.loads(_planned(encoded(), zero=3).to_json())
    older = {key: value for key, value in data.items() if key != "stacks"}
    assert Plan.from_json(json.dumps(older)).stacks == ()
    with pytest.raises(PlanError, match="plan: stacks: 'encoder' is not legal; legal: names of modules that end in a number"):
        Plan.from_json(json.dumps({**data, "stacks": ["encoder"]}))
    with pytest.raises(PlanError, match="plan: stacks: '5' is not legal; legal: modules of this model, with parameters in them"):
        _planned(encoded(), replicate_below="auto", plan=Plan.from_json(json.dumps({**data, "stacks": ["5"]})))


def trained(layers: int, zero: int, recompute: str) -> tuple[Distance, list[str]]:
    model, plain, compiled = compiled_pair(config(zero, recompute=recompute), lambda: encoded(layers))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, plain)]
    distance = Distance()
    for inputs in inputs_of(4):
        ours, losses = compiled(inputs[dist.get_rank()]), [plain(x) for x in inputs]
        distance.see("loss", ours.detach(), losses[dist.get_rank()].detach())
        ours.backward()
        torch.stack(losses).mean().backward()
        see_gradients(distance, model, plain)
        step_each(*optimizers)
    see_state(distance, model, plain)
    return distance, [g.name for g in autoshard.plan_of(compiled).groups]


@pytest.mark.parametrize(
    ("layers", "zero", "recompute"),
    [(3, 3, "none"), in_full(9, 3, "full"), *(in_full(9, z, "none") for z in range(4))],
)
def test_an_encoder_and_a_head_stay_the_unsharded_model(two: Cluster, layers: int, zero: int, recompute: str) -> None:
    for distance, groups in two.run(trained, layers, zero, recompute):
        assert distance.worst <= TOLERANCE, distance
        assert groups == ["0.embed", *(f"0.layers.{i}" for i in range(layers)), "0.norm", "1"]
