"""The first call: what it takes, and which module it finds."""

from __future__ import annotations

import ctypes
import functools
import gc
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import autoshard
from autoshard import torch_internals
from autoshard.calibration.device import device_here
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.errors import ConfigError
from autoshard.runtime import processes
from autoshard.runtime.presence import Patience, launcher_store
from tests.cluster import Cluster
from tests.small import in_full, what_is_said

CONFIG = autoshard.Config(zero=3, codegen="eager", replicate_below=0, timeout=60, verbose=False)
LAYERS = 4


def called_first(width: int) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
    _compile(model)(torch.ones(1, width))
    gc.collect()  # an autograd graph without a backward goes in cycles
    return model


def peak_of_first_call() -> tuple[int, int, int]:
    """(peak bytes by the allocator's events, bytes after by malloc's, bytes of the whole parameters), of the call with the least peak.

    The profiler misses what another thread lets go of, gloo's say, so by its events too much may seem to be left: in one call of ten
    all that forward gathered. malloc gives to Python too: 4 or 8 MB at once when a process has so many names that their table
    doubles. A parameter here has 38 MB.
    """
    called_first(8)  # what a first compilation keeps is not of parameters
    return min(peak_of_one_first_call() for _ in range(3))


def peak_of_one_first_call() -> tuple[int, int, int]:
    before = allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        model = called_first(3072)
        after = min(map(allocated_in_a_while, range(10))) - before
    sizes = [e.nbytes() for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    return max(accumulate(sizes)), after, sum(p.numel() * 4 for p in model.parameters())


class Malloc(ctypes.Structure):
    """glibc's `struct mallinfo2`, ten sizes; the fifth: in blocks of their own, the eighth: in its heaps."""

    _fields_ = tuple((f"size{i}", ctypes.c_size_t) for i in range(10))


def allocated() -> int:
    """Bytes that this process has of malloc."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Malloc
    found = libc.mallinfo2()
    return int(found.size4 + found.size7)


def allocated_in_a_while(_: int) -> int:
    """When gloo's threads may have let go of what they sent last."""
    time.sleep(0.05)
    return allocated()


def test_whole_parameters_are_gone_once_sharded(two: Cluster) -> None:
    for peak, after, whole in two.run(peak_of_first_call):
        shard, one = whole // 2, whole // LAYERS
        assert whole < peak <= whole + shard + one + whole // 50, (peak, whole)
        assert after <= shard + one // 2 < whole, (after, whole)


# --- which module is found


class Beside(nn.Module):
    """A buffer that lies beside a parameter in one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.arange(72.0)
        self.weight = nn.Parameter(flat[:64].view(8, 8))
        self.register_buffer("bias", flat[64:])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def what_others_hold() -> tuple[bool, bool, bool]:
    """Of a sharded model: whether its buffer is what it was, and a state dict of before the first call; and whether the model goes
    when nobody has it any more."""
    torch.manual_seed(0)
    model = Beside()
    before = model.state_dict()
    expected = {name: value.clone() for name, value in before.items()}
    compiled = _compile(model)
    compiled(torch.ones(1, 8)).sum().backward()
    same = [torch.equal(value, expected[name]) for name, value in before.items()]
    gone = weakref.ref(model)
    bias = torch.equal(model.bias, expected["bias"])
    del model, compiled
    gc.collect()
    return bias, all(same), gone() is None


def test_who_holds_a_part_of_a_model_keeps_it(two: Cluster) -> None:
    assert two.run(what_others_hold) == [(True, True, True)] * 2


def _compile(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend=autoshard.backend(CONFIG))


def _compile_in_place(model: nn.Module) -> Callable[..., Any]:
    model.compile(backend=autoshard.backend(CONFIG))
    return model


def _compile_function(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(lambda x: model(x), backend=autoshard.backend(CONFIG))


def _compile_by_name(model: nn.Module) -> Callable[..., Any]:
    options = {"zero": 3, "codegen": "eager", "replicate_below": 0, "verbose": False}
    return torch.compile(model, backend="autoshard", options=options)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


class Breaks(nn.Module):
    """Graph breaks inside a loop over children: the first graph is a child's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x


WAYS = {f.__name__: f for f in (_compile, _compile_in_place, _compile_function, _compile_by_name)}
MODELS = {"plain": Plain, "breaks": Breaks}


def finds(way: str, name: str) -> tuple[bool, float, float]:
    torch.manual_seed(0)
    model = MODELS[name]()
    whole = [p.detach().clone() for p in model.parameters()]
    compiled = WAYS[way](model)
    loss = compiled(torch.full((2, 6), 1.0 + dist.get_rank())).sum()
    loss.backward()
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    with autoshard.gathered(model):
        error = max((a - b).abs().max().item() for a, b in zip(model.parameters(), whole))
    return sharded, error, autoshard.report(model).compiled


@pytest.mark.parametrize(
    ("name", "way"), [(n, w) if (n == "plain") != (w == "_compile") else in_full(n, w) for n in MODELS for w in WAYS]
)
def test_the_compiled_module_is_found(two: Cluster, way: str, name: str) -> None:
    for sharded, error, compiled in two.run(finds, way, name):
        assert sharded and error == 0.0 and compiled == 1.0


def traced_again(way: str) -> int:
    autoshard.backend()  # a reset of Dynamo, in a test before, forgets what is to be called before traces
    model = Plain()
    with mock.patch.object(torch_internals, "restart_trace", wraps=torch_internals.restart_trace) as restart:
        WAYS[way](model)(torch.ones(2, 6)).sum().backward()
    return int(restart.call_count)


@pytest.mark.parametrize(
    ("way", "times"), [("_compile", 0), in_full("_compile_in_place", 0), ("_compile_function", 1), in_full("_compile_by_name", 0)]
)
def test_a_module_is_traced_on_shards_alone(two: Cluster, way: str, times: int) -> None:
    assert two.run(traced_again, way) == [times, times]


def wrapped(inside: bool) -> None:
    ddp, model = nn.parallel.DistributedDataParallel, Layer()
    compiled = ddp(_compile(model)) if inside else _compile(ddp(model))
    compiled(torch.ones(2, 6))


@pytest.mark.parametrize(
    ("inside", "says"),
    [(False, "the model is wrapped by DistributedDataParallel"), (True, "use autoshard.huggingface")],
)
def test_wrapped_modules_are_refused(two: Cluster, inside: bool, says: str) -> None:
    for text in two.run(what_is_said, wrapped, inside):
        assert says in text


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = Layer(), nn.LSTM(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))[0]


def recurrent() -> None:
    _compile(Recurrent())(torch.ones(3, 2, 6))


def test_recurrent_modules_are_refused_by_name(two: Cluster) -> None:
    for text in two.run(what_is_said, recurrent):
        assert text.startswith("UnsupportedError: module 'inner' is an LSTM: Dynamo leaves it out of every graph")


def pinned(world: int, name: str) -> str:
    group = autoshard.ParameterGroup("all", (f"{name}.weight", "0.bias"), autoshard.Degrees(1, 1, 1))
    plan = autoshard.Plan(world, (("shard", world),), (group,))
    model = nn.Sequential(nn.Linear(4, 4))
    try:
        torch.compile(model, backend=autoshard.backend(autoshard.Config(plan=plan, codegen="eager")))(torch.ones(2, 4))
    except autoshard.AutoshardError as error:
        return str(error)
    found = autoshard.plan_of(model)
    assert found == plan
    return "trained"


@pytest.mark.parametrize(
    ("world", "name", "says"),
    [(2, "0", "trained"), (3, "0", "made for 3 processes; the job has 2"), (2, "1", "not of this model: '0.weight'")],
)
def test_a_pinned_plan_is_used_or_refused(two: Cluster, world: int, name: str, says: str) -> None:
    for text in two.run(pinned, world, name):
        assert says in text


def inside_of_another(zero: int, compiler: str) -> str:
    """What is said of a model that a function calls which another backend compiles."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    compiled = torch.compile(model, backend=autoshard.backend(replace(CONFIG, zero=zero)))
    compiled(torch.ones(2, 6)).sum().backward()
    outer = torch.compile(lambda x: compiled(x).square().sum(), backend=compiler)
    return what_is_said(outer, torch.ones(2, 6))


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", in_full("inductor")])
def test_a_model_inside_of_what_another_backend_compiles_is_refused(two: Cluster, zero: int, compiler: str) -> None:
    """Which would take for weights what nobody wrote."""
    for text in two.run(inside_of_another, zero, compiler):
        assert "called inside of what torch.compile compiled with another backend" in text


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).square()


def sparse_lookup() -> None:
    torch.compile(Lookup(), backend=autoshard.backend(CONFIG))(torch.zeros(4, dtype=torch.long)).sum().backward()


def test_sparse_gradients_are_refused_by_name(two: Cluster) -> None:
    says = "module 'table' is an Embedding with sparse=True"
    for text in two.run(what_is_said, sparse_lookup):
        assert says in text
    with pytest.raises(autoshard.AutoshardError, match=says):
        autoshard.plan(Lookup(), torch.zeros(4, dtype=torch.long), CONFIG, Machines(1, 2, DEVICES["cpu"]))


def one_after_the_other(reset: bool) -> str:
    """More models of a class than Dynamo compiles."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):
            if reset:
                torch.compiler.reset()
            model = Layer()
            compiled, optimizer = torch.compile(model, backend=autoshard.backend(CONFIG)), torch.optim.SGD(model.parameters(), lr=0.1)
            compiled(torch.ones(2, 6)).sum().backward()
            optimizer.step()
    return "all were trained"


def test_more_models_than_dynamo_compiles_do_not_train_apart(two: Cluster) -> None:
    for text in two.run(what_is_said, one_after_the_other, False):
        assert "Layer was compiled" in text and "Of models of one class Dynamo compiles at most 2" in text
    assert two.run(one_after_the_other, True) == ["all were trained"] * 2


@pytest.mark.parametrize("said", [{"mode": "reduce-overhead"}, {"options": {"max_autotune": True}}])
@pytest.mark.parametrize("compile", [torch.compile, lambda model, **given: model.compile(**given) or model])
def test_what_inductor_alone_can_be_told_is_refused(compile: Callable[..., Any], said: dict[str, Any]) -> None:
    torch.compiler.reset()
    name = next(iter(said))
    with pytest.raises(autoshard.AutoshardError, match=f"torch.compile: {name}=.* is for Inductor alone; legal: autoshard.backend"):
        compile(Layer(), backend=autoshard.backend(CONFIG), **said)(torch.ones(2, 6))
    if name == "mode":
        with pytest.raises(autoshard.AutoshardError, match="is for Inductor alone"):
            compile(Layer(), backend="autoshard", **said)(torch.ones(2, 6))


@pytest.mark.parametrize(
    ("name", "value", "least", "ask"),
    [
        ("RANK", "abc", 0, processes.launched_rank),
        ("RANK", "-1", 0, processes.launched_rank),
        ("WORLD_SIZE", "", 1, processes.launched_size),
        ("WORLD_SIZE", "0", 1, processes.launched_size),
        ("LOCAL_WORLD_SIZE", "0", 1, processes.said_of_this_node),
        ("LOCAL_RANK", "1.5", 0, device_here),
        ("MASTER_PORT", "abc", 0, functools.partial(launcher_store, host=True)),
    ],
)
def test_what_is_no_number_in_the_environment_is_refused_by_name(
    name: str, value: str, least: int, ask: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for each, said in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", name: value}.items():
        monkeypatch.setenv(each, said)
    with pytest.raises(ConfigError, match=f"environment: {name} is {value!r}; legal: a number from {least} on, as torchrun sets it"):
        ask()


def test_half_a_launch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its rank each process would train alone."""
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    says = "environment: WORLD_SIZE is '2', and {} is not set; legal: all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
    for missing in ("MASTER_PORT", "MASTER_ADDR", "RANK"):
        for name, value in launched.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv(missing)
        with pytest.raises(ConfigError, match=says.format(missing)):
            processes.join(torch.device("cpu"), Patience(1.0, None, print))
    torch.compiler.reset()
    with pytest.raises(ConfigError, match=says.format("RANK")):
        torch.compile(Layer(), backend=autoshard.backend(CONFIG))(torch.ones(2, 6))


def test_one_process_is_forecast_in_the_dtypes_that_it_trains_in() -> None:
    """Which a precision does not change; what a job says of its step is what a plan beside it says."""
    options, x = autoshard.Config(memory_budget="1GiB", precision="bf16", codegen="eager", verbose=False), torch.randn(256, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    planned = autoshard.plan(model, x, options).predicted
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend=autoshard.backend(options))
    compiled(x).sum().backward()
    plan = autoshard.plan_of(model)
    assert plan is not None and plan.predicted.place and plan.predicted.memory == planned.memory
