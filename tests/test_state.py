"""Checkpoints: whole and sharded, before the first step and after, onto other worlds and stages."""

from __future__ import annotations

import copy
import gc
import io
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import autoshard
from autoshard.runtime.dtensors import local
from tests.cluster import Cluster
from tests.parity import Distance, rank0_copy, see_gradients, see_state, whole
from tests.small import (
    TOLERANCE,
    Experts,
    Net,
    backward_beside,
    compiled_pair,
    config,
    in_full,
    inputs_of,
    what_is_said,
)

NAMES = ["up.weight", "up.bias", "down.weight", "down.bias"]


def batch() -> Tensor:
    """The same for every world size: gradients are those of one process."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(5))


def train(model: Any, optimizer: optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(batch()).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(folder: str, zero: int) -> None:
    model, _, compiled = compiled_pair(config(zero), Experts)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    train(compiled, optimizer, 3)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def go_on(folder: str, zero: int, early: bool) -> tuple[Distance, list[str]]:
    """Loads, before the first call or after one, and takes two more steps; beside five unsharded ones."""
    torch.manual_seed(0)
    plain: Any = Experts()
    reference = optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, reference, 5)
    torch.manual_seed(1)
    model = Experts()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(zero)))
    if not early:
        train(compiled, optimizer, 1)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    train(compiled, optimizer, 2)
    distance = Distance()
    see_state(distance, model, plain)
    for a, b in zip(optimizer.state.values(), reference.state.values(), strict=True):
        distance.see("parameter", whole(a["exp_avg_sq"]), b["exp_avg_sq"])
    return distance, sorted(weights)


@pytest.mark.parametrize("early", [True, in_full(False)])
@pytest.mark.parametrize(("before", "after"), [(3, 1), in_full(0, 3), in_full(2, 0)])
def test_a_sharded_checkpoint_goes_to_another_world_and_stage(
    two: Cluster, three: Cluster, tmp_path: Path, before: int, after: int, early: bool
) -> None:
    two.run(save, str(tmp_path), before)
    for distance, names in three.run(go_on, str(tmp_path), after, early):
        assert distance.worst <= TOLERANCE, distance
        assert names == sorted([*NAMES, "expert", "experts"])


def load_whole(zero: int, early: bool, prefixed: bool) -> Distance:
    """torch.save of an unsharded run's model and optimizer, loaded into a sharded one."""
    torch.manual_seed(0)
    plain: Any = Experts()
    reference = optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, reference, 3)
    file = io.BytesIO()
    prefix = "_orig_mod." if prefixed else ""
    weights = {prefix + name: value for name, value in plain.state_dict().items()}
    torch.save({"model": weights, "optimizer": reference.state_dict()}, file)
    file.seek(0)
    torch.manual_seed(dist.get_rank() + 1)
    model = Experts()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(zero)))
    if not early:
        train(compiled, optimizer, 1)
    loaded = torch.load(file)
    (compiled if prefixed else model).load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    for m, o in ((compiled, optimizer), (plain, reference)):
        train(m, o, 2)
    distance = Distance()
    see_state(distance, model, plain)
    assert zero == 0 or isinstance(optimizer.state[model.up.weight]["exp_avg"], DTensor)
    assert zero == 0 or local(model.expert).shape[1] < 5 and local(optimizer.state[model.expert]["exp_avg"]).shape == local(model.expert).shape
    return distance


@pytest.mark.parametrize(
    ("early", "prefixed"), [(True, True), (False, False), in_full(True, False), in_full(False, True)]
)
@pytest.mark.parametrize("zero", [in_full(0), 3])
def test_a_whole_checkpoint_loads(two: Cluster, zero: int, early: bool, prefixed: bool) -> None:
    for distance in two.run(load_whole, zero, early, prefixed):
        assert distance.worst <= TOLERANCE, distance


def rows_at_loading(early: bool, kind: str) -> tuple[Distance, int, bool]:
    """(distance after more steps, tensors of the loaded state that are still there before them, whether rows keep no more than
    rows). early: the optimizer is there at the first call, else it has stepped when it loads."""
    made = {"torch": optim.AdamW, "ours": autoshard.optim.AdamW, "by torch": lambda ps, lr: optim.AdamW(ps, lr, foreach=True)}[kind]
    model, plain, compiled = compiled_pair(config(3))
    optimizer = made(model.parameters(), lr=0.01) if early else None
    compiled(batch()).backward()
    optimizer = optimizer or made(model.parameters(), lr=0.01)
    if not early:
        optimizer.step()
        model.load_state_dict(plain.state_dict())
    optimizer.zero_grad()
    reference = optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, reference, 3)
    model.load_state_dict(plain.state_dict())
    loaded: Any = copy.deepcopy(reference.state_dict())
    refs = [weakref.ref(t) for t in tree_leaves(loaded) if isinstance(t, Tensor) and t.ndim]
    optimizer.load_state_dict(loaded)
    del loaded
    gc.collect()
    rows = [local(v) for state in optimizer.state.values() for v in state.values() if v.ndim]
    kept, small = sum(ref() is not None for ref in refs), all(r.untyped_storage().nbytes() == r.nbytes for r in rows)
    for m, o in ((compiled, optimizer), (plain, reference)):
        train(m, o, 2)
    distance = Distance()
    see_state(distance, model, plain)
    return distance, kept, small and len(refs) == len(rows) == 8


@pytest.mark.parametrize(("early", "kind"), [(True, "torch"), in_full(False, "ours"), in_full(False, "torch"), in_full(True, "by torch")])
def test_whole_state_of_an_optimizer_is_rows_when_it_is_loaded(two: Cluster, early: bool, kind: str) -> None:
    for distance, kept, small in two.run(rows_at_loading, early, kind):
        assert distance.worst <= TOLERANCE, distance
        assert kept == 0 and small


def whole_state() -> tuple[list[str], bool]:
    model, plain, compiled = compiled_pair(config(3))
    compiled(inputs_of(1)[0, dist.get_rank()]).backward()
    found = autoshard.state_dict(compiled)
    return list(found), all(torch.equal(v, plain.state_dict()[k]) for k, v in found.items())


def test_the_whole_state_is_on_rank_0_under_original_names(two: Cluster) -> None:
    assert two.run(whole_state) == [(NAMES, True), ([], True)]


class Upgraded(nn.Linear):
    """Whose old files had the weight halved."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] * 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def loaded_by_version(zero: int) -> bool:
    model = nn.Sequential(Upgraded(8, 8))
    compiled = torch.compile(model, backend=autoshard.backend(config(zero)))
    compiled(torch.ones(2, 8)).sum().backward()
    found = autoshard.state_dict(compiled, keep=True)
    weight = found["0.weight"].clone()
    model.load_state_dict(found)
    return torch.equal(autoshard.state_dict(compiled, keep=True)["0.weight"], weight)


@pytest.mark.parametrize("zero", [0, 3])
def test_modules_know_the_version_of_a_whole_state(two: Cluster, zero: int) -> None:
    assert two.run(loaded_by_version, zero) == [True, True]


class Tied(nn.Module):
    """Whose state has more than parameters and buffers, as modules do that count their versions."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down.weight = self.up.weight

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "version"] = torch.tensor(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def whole_state_of_more(zero: int) -> tuple[list[str], bool, bool]:
    torch.manual_seed(0)
    model = nn.Sequential(Tied())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model[0].compile(backend=autoshard.backend(config(zero)))
    model(torch.ones(2, 8)).sum().backward()
    found = autoshard.state_dict(model, keep=True)
    tied = found["0.up.weight"].data_ptr() == found["0.down.weight"].data_ptr()
    return list(found), all(torch.equal(found[name], value) for name, value in before.items()), tied


@pytest.mark.parametrize("zero", [0, 3])
def test_the_whole_state_has_what_a_module_puts_there_and_what_is_tied_once(two: Cluster, zero: int) -> None:
    for names, equal, tied in two.run(whole_state_of_more, zero):
        assert names == ["0.version", "0.up.weight", "0.up.bias", "0.down.weight", "0.down.bias"] and equal and tied


def kept_by(rank: int | None) -> list[int]:
    """How many tensors this process has of a model and of its optimizer, those of the model as they were and of nobody else."""
    model, plain, compiled = compiled_pair(config(3, replicate_below=20))
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    train(compiled, optimizer, 1)
    plain_optimizer = optim.AdamW(plain.parameters(), lr=0.1)
    train(plain, plain_optimizer, 1)
    keep = None if rank is None else dist.get_rank() == rank
    found, state = autoshard.state_dict(model, keep), autoshard.state_dict(optimizer, keep)
    torch.testing.assert_close(found, dict(plain.state_dict()) if found else {})
    tensors = [t for t in tree_leaves((found, state)) if isinstance(t, Tensor)]
    return [len(found), len(tensors), len({t.data_ptr() for t in tensors} - {p.data_ptr() for p in map(local, model.parameters())})]


@pytest.mark.parametrize("rank", [in_full(None), 1])
def test_the_whole_state_is_where_it_is_to_be_kept(two: Cluster, rank: int | None) -> None:
    expected = [[4, 16, 16], [0, 0, 0]]
    assert two.run(kept_by, rank) == (expected[::-1] if rank else expected)


def kept_while_training(zero: int) -> list[bool]:
    """Whether the whole state is after a step what it was before."""
    model, _, compiled = compiled_pair(config(zero, replicate_below=20))
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    train(compiled, optimizer, 1)
    kept = autoshard.state_dict(model), autoshard.state_dict(optimizer)
    before = [t.clone() for t in tree_leaves(kept) if isinstance(t, Tensor)]
    train(compiled, optimizer, 1)
    return [torch.equal(was, t) for was, t in zip(before, (t for t in tree_leaves(kept) if isinstance(t, Tensor)))]


@pytest.mark.parametrize("zero", [0, 3])
def test_a_whole_state_stays_what_it_was(two: Cluster, zero: int) -> None:
    first, second = two.run(kept_while_training, zero)
    assert len(first) == 4 + 3 * 4 and all(first) and not second


def whole_state_alone() -> None:
    _, _, compiled = compiled_pair(config(3, timeout=4))
    compiled(batch()).backward()
    if dist.get_rank() == 0:
        autoshard.state_dict(compiled)
    compiled(batch()).backward()
    compiled(batch()).backward()


def test_a_whole_state_for_one_process_is_refused_by_name(two: Cluster) -> None:
    (_, (kind, text, _)), (other, _) = two.answers(whole_state_alone)
    assert kind == "DisagreementError" and "autoshard.state_dict" in text and other == "error"


def one_buffer_in_two_dtypes() -> list[torch.dtype]:
    model = Net()
    model.register_buffer("seconds", torch.ones(4))
    model.register_buffer("bits", model.seconds.view(torch.int32))
    compiled: Any = torch.compile(model, backend=autoshard.backend(config(3)))
    compiled(batch()).backward()
    state = autoshard.state_dict(model, keep=True)
    return [state["seconds"].dtype, state["bits"].dtype]


def test_what_lies_in_one_place_in_two_dtypes_is_saved_as_both(two: Cluster) -> None:
    assert two.run(one_buffer_in_two_dtypes) == [[torch.float32, torch.int32]] * 2


def load_alone(part: str) -> None:
    model, plain, compiled = compiled_pair(config(3, timeout=4))
    compiled(batch()).backward()
    if dist.get_rank() == 0:
        model.get_submodule(part).load_state_dict(plain.get_submodule(part).state_dict())
    compiled(batch()).backward()


@pytest.mark.parametrize(("part", "named"), [("", "'down.bias' to 'up.weight' (code "), ("up", "'up.bias' to 'up.weight' (code ")])
def test_a_load_by_one_process_is_refused_by_name(two: Cluster, part: str, named: str) -> None:
    for said in two.run(what_is_said, load_alone, part):
        assert said.startswith("DisagreementError: rank 1 disagrees with rank 0 about its call"), said
        assert f'where rank 0 has "load_state_dict, of {named}' in said
        assert re.search(r"\(code \w{8} of [24] names\), no step since the training call before\"", said)


def load_other_names() -> str:
    """What is said to it, and of values that were not loaded."""
    model, plain, compiled = compiled_pair(config(3))
    compiled(batch()).backward()
    optim.SGD(model.parameters(), lr=0.0).step()
    before = autoshard.state_dict(model, keep=True)
    left_out = ["up.weight", "down.weight"][dist.get_rank()]
    said = what_is_said(model.load_state_dict, {k: v + 1 for k, v in plain.state_dict().items() if k != left_out}, False)
    after = autoshard.state_dict(model, keep=True)
    return f"{said} {all(torch.equal(after[k], before[k]) for k in before)}"


def test_a_load_of_other_names_than_others_have_is_refused_and_loads_nothing(two: Cluster) -> None:
    for said in two.run(load_other_names):
        assert "rank 1 disagrees with rank 0 about its call: \"load_state_dict, of 'down.bias' to 'up.weight' (code " in said
        assert said.endswith(" True")


def renamed_by_a_hook() -> Distance:
    """Which was registered after the first call."""
    model, plain, compiled = compiled_pair(config(3))
    compiled(batch()).backward()
    optim.SGD(model.parameters(), lr=0.0).step()

    def rename(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    model.up.register_load_state_dict_pre_hook(rename)
    with torch.no_grad():
        plain.up.weight.add_(1)
    loaded = {("up.kernel" if k == "up.weight" else k): v for k, v in plain.state_dict().items()}
    model.load_state_dict(loaded)
    distance = Distance()
    see_state(distance, model, plain)
    return distance


def test_hooks_of_a_user_s_own_come_before_rows_are_made(two: Cluster) -> None:
    for distance in two.run(renamed_by_a_hook):
        assert distance.worst == 0, distance


def numbers_that_are_no_tensors() -> None:
    model, plain, compiled = compiled_pair(config(3))
    compiled(batch()).backward()
    optim.SGD(model.parameters(), lr=0.0).step()
    model.load_state_dict({k: v.numpy() for k, v in plain.state_dict().items()})


def test_what_is_no_tensor_is_named_by_torch(two: Cluster) -> None:
    for said in two.run(what_is_said, numbers_that_are_no_tensors):
        assert 'While copying the parameter named "up.weight", expected torch.Tensor' in said


def a_copy() -> tuple[Distance, bool]:
    """A deep copy of a sharded model has rows of its own."""
    model, plain, compiled = compiled_pair(config(3))
    compiled(inputs_of(1)[0, dist.get_rank()]).backward()
    other: nn.Module = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    distance = Distance()
    see_state(distance, other, rank0_copy(plain))
    return distance, isinstance(other.up.weight, DTensor)


def test_a_deep_copy_is_sharded_and_apart(two: Cluster) -> None:
    for distance, sharded in two.run(a_copy):
        assert distance.worst == 0 and sharded


def a_copy_beside_another() -> Distance:
    """The last one that each process has; rank 0 has one more, for itself."""
    model, plain, compiled = compiled_pair(config(3, timeout=10))
    inputs = inputs_of(1)[0]
    backward_beside(compiled, plain, inputs)
    copies = [copy.deepcopy(model) for _ in range(2 - dist.get_rank())]
    plain.zero_grad()
    backward_beside(torch.compile(copies[-1], backend=autoshard.backend(config(3, timeout=10))), plain, inputs)
    distance = Distance()
    see_gradients(distance, copies[-1], plain)
    return distance


def test_a_process_may_copy_a_model_for_itself(two: Cluster) -> None:
    for distance in two.run(a_copy_beside_another):
        assert distance.worst <= TOLERANCE, distance


def load_rows_of_rank_0(folder: str, what: str) -> str:
    """What loops do that were written for DDP: rank 0 saves its state dicts, everyone loads them."""
    _, _, compiled = compiled_pair(config(3, timeout=4))
    optimizer = optim.AdamW(compiled.parameters(), lr=0.01)
    train(compiled, optimizer, 1)
    if dist.get_rank() == 0:
        torch.save({"model": compiled.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/rows.pt")
    dist.barrier()
    loaded = torch.load(f"{folder}/rows.pt", weights_only=False)
    try:
        if what == "model":
            compiled.load_state_dict(loaded["model"])
        else:
            optimizer.load_state_dict(loaded["optimizer"])
    except autoshard.AutoshardError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_rows_of_another_process_are_refused(two: Cluster, tmp_path: Path, what: str) -> None:
    texts = [text for kind, text in two.answers(load_rows_of_rank_0, str(tmp_path), what) if kind == "value"]
    assert any("rows that another process saved (its place in the mesh is [0] of [2], ours is [1] of [2])" in t for t in texts)


def assigned(zero: int) -> tuple[str, bool]:
    """What a load says that assigns, and whether the parameters are those that the optimizer has."""
    model, plain, compiled = compiled_pair(config(zero))
    compiled(batch()).backward()
    kept = list(model.parameters())
    state = plain.state_dict()
    said = what_is_said(lambda: model.load_state_dict(state, assign=True))
    model.load_state_dict(state, assign=False)
    return said, all(a is b for a, b in zip(kept, model.parameters(), strict=True))


@pytest.mark.parametrize("zero", [0, 3])
def test_a_load_that_assigns_is_refused_at_once(two: Cluster, zero: int) -> None:
    for said, kept in two.run(assigned, zero):
        assert kept and "(assign=True) would put another in the place of parameter 'up.weight'" in said, said
