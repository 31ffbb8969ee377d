"""One test for each private torch name: a torch release that moves one fails here, by name."""

from __future__ import annotations

import copy
import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import aot_module_simplified, make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autoshard import torch_internals
from autoshard.runtime import processes
from autoshard.runtime.presence import Patience
from tests.cluster import Cluster as Processes
from tests.launch import launch
from tests.small import compiled_pair, config, in_full, what_is_said


def test_through_dynamo_leaves_a_backend_unwrapped() -> None:
    class Named(torch_internals.ThroughDynamo):
        pass

    def backend(gm: Any, inputs: Any) -> Any:
        raise Named("as it is")

    with pytest.raises(Named, match="as it is"):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))


def test_restart_trace_traces_again() -> None:
    calls = []

    def backend(gm: Any, inputs: Any) -> Any:
        calls.append(gm)
        if len(calls) == 1:
            torch_internals.restart_trace("a test")
        return gm.forward

    assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist() == [2, 2]
    assert len(calls) == 2


def test_optimized_module_is_what_compile_returns() -> None:
    assert isinstance(torch.compile(nn.Linear(2, 2)), torch_internals.OptimizedModule)


def test_suppressed_errors_follows_the_config() -> None:
    assert torch_internals.suppressed_errors() is False
    with torch._dynamo.config.patch(suppress_errors=True):
        assert torch_internals.suppressed_errors() is True


def test_messages_given_once_do_not_break_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.Logger, "warning_once", lambda self, text: said.append(text), raising=False)
    torch_internals.ignore_messages_given_once()
    logger = logging.getLogger("a.library")

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        logger.warning_once("unusual")  # type: ignore[attr-defined]
        return y * 2

    assert torch.compile(step, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [4, 4] and not said


def test_rename_finds_a_free_name() -> None:
    graph = torch.fx.Graph()
    first, second = (graph.call_function(torch.relu, ()) for _ in range(2))
    torch_internals.rename(first, "again")
    torch_internals.rename(second, "again")
    assert (first.name, second.name) == ("again", "again_1")


def test_fake_tensors_have_no_values() -> None:
    with torch_internals.FakeTensorMode():
        assert isinstance(torch.ones(2), torch_internals.FakeTensor)


def test_input_position_names_plain_inputs() -> None:
    seen: list[int | None] = []

    def compiler(gm: Any, inputs: Any) -> Any:
        seen.extend(torch_internals.input_position(n) for n in gm.graph.find_nodes(op="placeholder"))
        return make_boxed_func(gm)

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=compiler)

    torch.compile(lambda x, y: x * y, backend=backend)(torch.ones(2), torch.ones(2))
    assert seen == [0, 1]


def test_gradient_places_name_the_inputs() -> None:
    seen: list[dict[int, int]] = []

    def partition(joint: Any, inputs: Any, **keywords: Any) -> Any:
        seen.append(torch_internals.gradient_places(joint.graph))
        return min_cut_rematerialization_partition(joint, inputs, **keywords)

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=lambda gm, _: make_boxed_func(gm), partition_fn=partition)

    x, y, z = torch.ones(2, requires_grad=True), torch.ones(2), torch.ones(2, requires_grad=True)
    torch.compile(lambda x, y, z: x * y + z, backend=backend)(x, y, z)
    assert seen == [{0: 1, 2: 3}]  # behind the result, one for each input


def test_an_input_among_the_results_is_left_as_it_lies() -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.conv2d(x, w.relu()), w

    def strides(left: bool) -> tuple[int, ...]:
        given = [torch.randn(32, 16, 3, 3), torch.randn(4, 16, 8, 8)]
        gm = make_fx(step, tracing_mode="fake")(*given)
        examples = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
        if left:
            torch_internals.leave_as_they_lie(gm.graph, {gm.graph.find_nodes(op="placeholder")[0]})
        return torch_internals.inner_inductor(gm, examples)(given)[1].stride()  # type: ignore[no-any-return]

    assert strides(left=True) == (144, 9, 3, 1) and strides(left=False) == (144, 1, 48, 16)


@pytest.mark.parametrize(("repeats", "size", "loops"), [("", 64, 1), ("mm", 48, 2), ("mul", 32, 2)])
def test_what_backward_repeats_says_what_inductor_joins(repeats: str, size: int, loops: int) -> None:
    """A sum and what waits for a matmul read one small tensor. Sizes differ since a cache knows graphs by their operations only."""

    def backward(x: torch.Tensor, w: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + row, (x @ w) * row

    given = [torch.randn(size, size), torch.randn(size, size), torch.randn(size)]
    gm = make_fx(backward, tracing_mode="fake")(*given)
    for node in gm.graph.nodes:
        node.meta["partitioner_tag"] = "is_forward" if node.name == repeats else "is_backward"
    examples = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    compiled = torch_internals.inner_inductor(gm, examples, is_backward=True)
    assert compiled.source_code.count("for(int64_t x0=") == loops
    torch.testing.assert_close(list(compiled(list(given))), list(backward(*given)))


def test_inductor_takes_our_partitioner_and_inner_step() -> None:
    seen = []

    class Partitioner(torch_internals.CustomPartitionerFn):  # type: ignore[misc]
        def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
            from functorch.compile import min_cut_rematerialization_partition

            seen.append("partition")
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> str:
            return "a test"

    def wrapper(run: Any) -> Any:
        return lambda inputs: seen.append("run") or run(inputs)

    def inner(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        seen.append("backward" if kwargs.get("is_backward") else "forward")
        return torch_internals.wrap_compiled(torch_internals.inner_inductor(gm, inputs, **kwargs), wrapper)

    def backend(gm: Any, inputs: Any) -> Any:
        patches = {"custom_partitioner_fn": Partitioner()}
        with torch_internals.without_autograd_cache():
            return torch_internals.compile_with_inductor(gm, inputs, inner, patches)

    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend=backend)(x).backward()
    assert seen == ["partition", "forward", "run", "backward", "run"] or set(seen) == {
        "partition", "forward", "backward", "run",
    }  # fmt: skip
    torch.testing.assert_close(x.grad, torch.ones(3).cos())


def _meet(key: str) -> bool:
    store = torch_internals.job_store(key)
    store.set(str(dist.get_rank()), "x")
    store.wait(["0", "1"])
    return not torch_internals.job_store("elsewhere").check(["0"])


def test_job_store_is_shared(two: Processes) -> None:
    assert two.run(_meet, "here") == [True, True]


@pytest.mark.full
def test_emit_artifact_reaches_the_structured_trace(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCH_TRACE", str(tmp_path))
    launch(1, "from autoshard.torch_internals import emit_artifact; emit_artifact('here', lambda: 'text 42')")
    assert any("text 42" in log.read_text() for log in tmp_path.iterdir())


class Written(nn.Linear):
    """Not torch's own, which Dynamo wraps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_compiled_calls_are_seen_while_they_run() -> None:
    found: list[torch_internals.CompiledCall] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(next(torch_internals.compiled_calls()))
        return gm.forward

    def function(x: Any) -> Any:
        return x + 1

    x, model, in_place = torch.ones(2), Written(2, 2), Written(2, 2)
    torch.compile(function, backend=backend)(x)
    assert found[-1].function is function and found[-1].arguments[0] is x and found[-1].module is None
    torch.compile(model, backend=backend)(x)
    assert found[-1].module is model and found[-1].backend is backend
    in_place.compile(backend=backend)
    torch.compiler.reset()  # the two share their code
    in_place(x=x)
    assert found[-1].module is in_place and found[-1].keywords["x"] is x
    of_torch = nn.Sequential(nn.Linear(2, 2))
    torch.compile(of_torch, backend=backend)(x)
    assert found[-1].module is of_torch
    torch.compiler.reset()
    torch.compile(model.forward, backend=backend)(x)
    assert found[-1].module is None and found[-1].function == model.forward


def test_before_traces_comes_first_and_may_compile() -> None:
    seen: list[str] = []

    def inner(gm: Any, inputs: Any) -> Any:
        seen.append("inner")
        return gm.forward

    def begins() -> None:
        seen.append("begins")
        torch.compile(lambda x: x * 3, backend=inner)(torch.ones(2))

    def backend(gm: Any, inputs: Any) -> Any:
        seen.append("backend")
        return gm.forward

    torch_internals.before_traces(begins)
    torch_internals.before_traces(begins)
    try:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    finally:
        torch.compiler.reset()
    torch.compile(lambda x: x + 2, backend=backend)(torch.ones(2))
    assert seen == ["begins", "inner", "backend", "backend"]


def test_guarded_parameters_are_seen_to_be_thawed() -> None:
    def backend(gm: Any, inputs: Any) -> Any:
        torch_internals.guard_parameters()
        seen.append(model.weight.requires_grad)
        return gm.forward

    seen: list[bool] = []
    before = torch.compiler.config.skip_tensor_guards_with_matching_dict_tags
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend=backend)
    for trained in (False, False, True):
        model.weight.requires_grad_(trained)
        compiled(torch.ones(1, 2))
    torch.compiler.reset()
    assert seen == [False, True]
    assert torch.compiler.config.skip_tensor_guards_with_matching_dict_tags == before


def test_backend_of_names_what_compile_was_given() -> None:
    def backend(gm: Any, inputs: Any) -> Any:
        return gm.forward

    plain, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
    in_place.compile(backend=backend)
    assert torch_internals.backend_of(torch.compile(nn.Linear(2, 2), backend=backend)) is backend
    assert torch_internals.backend_of(in_place) is backend
    assert torch_internals.backend_of(plain) is None


def test_step_hooks_of_one_optimizer_are_seen() -> None:
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        assert not torch_internals.has_step_hooks(optimizer)
        getattr(optimizer, register)(lambda *_: None)
        assert torch_internals.has_step_hooks(optimizer)


def test_buffers_of_no_state_dict_are_told() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("cached", torch.ones(2), persistent=False)
    assert torch_internals.kept_buffers(module) == [n for n in module.state_dict() if n not in ("weight", "bias")]


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by its class alone."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_a_hook_sees_what_an_optimizer_loads() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    state = optimizer.state_dict()
    torch_internals.before_loading(Wrapper(optimizer), lambda *_: None)
    torch_internals.before_loading(optimizer, lambda _, given: {**given, "param_groups": [{**given["param_groups"][0], "lr": 0.2}]})
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_hooks_around_all_steps_are_seen() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    torch_internals.surround_steps(lambda *_: None, lambda *_: None)
    assert not torch_internals.has_step_hooks(optimizer)
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *_: None)
        assert torch_internals.has_step_hooks(optimizer)
        handle.remove()


def test_a_step_is_taken_without_hooks() -> None:
    parameter, seen = nn.Parameter(torch.ones(2)), []
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append("hook"))
    parameter.grad = torch.ones(2)
    torch_internals.step_without_hooks(optimizer)
    assert not seen and bool((parameter < 1).all())


@pytest.mark.parametrize("enabled", [True, False])
def test_a_step_of_a_scaler_is_seen(enabled: bool) -> None:
    parameter, seen = nn.Parameter(torch.ones(2)), []
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), torch.amp.GradScaler("cpu", enabled=enabled)
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch_internals.is_scaled_step()))
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    optimizer.step()
    assert seen == [enabled, False]


def test_a_step_within_a_step_is_seen() -> None:
    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            other.step()
            super().step(closure)

    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)  # whose making surrounds SGD.step with hooks
    outer = Outer([nn.Parameter(torch.ones(2))], lr=0.1)
    seen: list[tuple[str, bool]] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append((type(optimizer).__name__, torch_internals.within_step(optimizer)))

    for optimizer in (outer, other):
        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(note)
    outer.step()
    assert seen == [("Outer", False), *[("SGD", False)] * 2, *[("Outer", True)] * 2, ("Outer", False)]


def test_a_graph_break_has_the_user_s_line() -> None:
    found = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(torch_internals.graph_break(gm))
        return gm.forward

    def inner(x: Any) -> Any:
        torch._dynamo.graph_break()
        return x + 1

    torch.compile(lambda x: inner(x * 2) * 3, backend=backend)(torch.ones(2))
    where, why = found[0]
    line = inner.__code__.co_firstlineno + 1
    assert where == f"{__file__}:{line}" and why
    assert found[-1] is None


def test_what_continues_behind_a_break_is_seen() -> None:
    found = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(torch_internals.behind_a_break())
        return gm.forward

    def function(x: Any) -> Any:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    torch.compile(function, backend=backend)(torch.ones(2))
    assert found == [False, True]


def test_original_of_is_what_compile_was_given() -> None:
    model = nn.Linear(2, 2)
    assert torch_internals.original_of(torch.compile(model)) is model
    assert torch_internals.original_of(model) is model


def _saving(names: list[str], **values: Any) -> torch.fx.GraphModule:
    """A graph of inputs alone that gives back the last of them, each with its fake value."""
    graph = torch.fx.Graph()
    for name in names:
        graph.placeholder(name).meta["val"] = values.get(name, torch.ones(2))
    graph.output(tuple(graph.nodes))
    return torch.fx.GraphModule({}, graph)


def test_random_states_are_saved_among_the_tensors() -> None:
    """That torch's own order needs it: test_checkpointing.py's dropout, on torch 2.13."""
    values = {"mesh": FakeScriptObject(None, "DeviceMesh", None), "n": 3}
    forward = _saving(["loss", "x", "mesh", "state", "n"], **values)
    backward = _saving(["n", "x", "mesh", "rng_state_output_0", "tangent"], **values)
    torch_internals.put_random_states_first(forward, backward)
    assert [n.name for n in forward.graph.output_node().args[0]] == ["loss", "x", "state", "mesh", "n"]
    inputs = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    assert inputs == ["n", "x", "rng_state_output_0", "mesh", "tangent"]


def test_a_random_call_is_seen_through_what_keeps_its_state() -> None:
    from torch._prims import rng_prims

    graph, dropout = torch.fx.Graph(), torch.ops.aten.native_dropout.default
    x, state = graph.placeholder("x"), graph.placeholder("state")
    given = (x, 0.1, True)
    saves = graph.call_function(rng_prims.run_and_save_rng_state, (dropout, *given))
    takes = graph.call_function(rng_prims.run_with_rng_state, (state, dropout, *given))
    safe = graph.call_function(rng_prims.graphsafe_run_with_rng_state, (dropout, *given), {"rng_state": state})
    plain = graph.call_function(dropout, given)
    found = [torch_internals.random_call(node) for node in (saves, takes, safe, plain)]
    assert found == [torch_internals.RandomCall(dropout, given, {}, saved) for saved in (True, False, False)] + [None]


def test_what_comes_after_the_recompile_limit_is_not_compiled() -> None:
    graphs = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    def function(x: Any, n: int) -> Any:
        return x + n if n % 2 else x - n

    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, dynamic=False)
    for n in range(torch_internals.recompile_limit() + 3):
        compiled(torch.ones(2), n)
    assert len(graphs) == torch_internals.recompile_limit()


def test_is_view_tells_views_from_copies_and_writes() -> None:
    aten = torch.ops.aten
    assert torch_internals.is_view(aten.t.default)
    assert not any(torch_internals.is_view(op) for op in (aten.add.Tensor, aten.add_.Tensor, len))


def test_share_memory_sees_views() -> None:
    x, y = torch.ones(2, 2), torch.ones(2, 2)
    assert torch_internals.share_memory([x.t()], [x]) and torch_internals.share_memory([x, x[0]], [])
    assert not torch_internals.share_memory([x], [y])


def test_a_tensor_in_transforms_of_functions_is_unwrapped() -> None:
    seen: list[torch.Tensor] = []

    def look(row: torch.Tensor) -> torch.Tensor:
        seen.append(row)
        assert torch_internals.unwrapped(row) is not row and torch_internals.storage_of(row) == torch_internals.storage_of(x)
        return row.sum()

    x = torch.ones(2, 3)
    torch.vmap(torch.func.grad(look))(x)
    assert len(seen) == 1 and torch_internals.unwrapped(x) is x


def test_a_region_knows_what_chooses_what_it_saves() -> None:
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        found.extend(torch_internals.saves_by(inner) for inner in (gm, *gm.children()))
        return gm

    choice = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])

    def step(x: torch.Tensor) -> Any:
        return checkpoint(torch.sin, x, use_reentrant=False, context_fn=choice)

    torch.compile(step, backend=backend)(torch.ones(2, requires_grad=True))
    assert found[0] is None and found[1].func is create_selective_checkpoint_contexts


def test_a_trace_that_goes_on_serves_a_graph_inside_a_backend() -> None:
    found = []

    def backend(gm: Any, inputs: Any) -> Any:
        tracing = torch_internals.Tracing.here()
        examples = [tracing.like(n.meta["example_value"]) for n in gm.graph.find_nodes(op="placeholder")]
        with tracing.entered():
            aot_module_simplified(gm, examples, fw_compiler=lambda graph, _: found.append(graph) or make_boxed_func(graph))
        return gm

    assert torch.compile(lambda x: x.permute(1, 0) + 1, backend=backend)(torch.ones(2, 3)).shape == (3, 2)
    (graph,) = found
    run: Any = torch_internals.inductor_alone(graph, is_inference=True)
    (out,) = run([torch.ones(2, 3)])
    assert out.stride() == graph.graph.output_node().args[0][0].meta["val"].stride()


def test_a_copy_without_hooks_leaves_the_original_its_own() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    optimizer.register_step_pre_hook(lambda *_: None)
    assert not torch_internals.has_step_hooks(torch_internals.without_step_hooks(copy.copy(optimizer)))
    assert torch_internals.has_step_hooks(optimizer)


def test_boxed_code_empties_the_list_of_inputs() -> None:
    gm = torch.fx.symbolic_trace(lambda x, y: x + y)
    given = [torch.ones(2), torch.ones(2)]
    assert torch_internals.boxed(gm)(given).tolist() == [2, 2]
    assert given == []


def _many_at_once() -> str:
    turns = {"shard": torch_internals.gloo_in_turn()}
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",), backend_override=turns).get_group()
    whole, works = torch.ones(8), []
    for _ in range(200):
        works.append(dist.all_reduce(whole.clone(), group=group, async_op=True))
        rows = torch.empty(16)
        dist.all_gather_into_tensor(rows, whole, group=group)
        assert rows.sum() == 16
    for work in works:
        work.wait()
    return str(dist.get_backend(group))


def _sent_to_the_other() -> float:
    group = torch_internals.group_named(dist.new_group(backend=torch_internals.gloo_in_turn()).group_name)
    brought, other = torch.zeros(2), 1 - dist.get_rank()
    torch_internals.register_work(brought, group.recv([brought], other, 0))
    torch_internals.register_work(brought, group.send([torch.full((2,), float(dist.get_rank()))], other, 0))
    return float(torch.ops._c10d_functional.wait_tensor(brought).sum())


def test_wait_tensor_waits_for_work_that_was_registered(two: Processes) -> None:
    assert two.run(_sent_to_the_other) == [2.0, 0.0]


def test_gloo_in_turn_bears_collectives_that_run_at_once(two: Processes) -> None:
    """On the interface that torch's own gloo would take; without one worker thread some ten thousand rounds crash."""
    assert two.run(_many_at_once) == ["gloo_in_turn"] * 2


def _transports() -> tuple[list[str], str]:
    join = functools.partial(processes.join, torch.device("cuda"), Patience(5.0, None, print))
    return [torch_internals.transport_of(kind) for kind in ("cpu", "cuda")], what_is_said(join)


def test_what_carries_the_tensors_of_a_device_is_known(two: Processes) -> None:
    """gloo carries those of GPUs too, which no plan is made for."""
    for found, said in two.run(_transports):
        assert found == ["gloo", "gloo"] and said.startswith("UnsupportedError: process group: tensors on GPUs go by gloo"), said


def _groups(mesh: dict[str, int] | None, folder: Path) -> tuple[set[str], set[float]]:
    """The backends that a job's collectives go by, and their timeouts."""
    _, _, compiled = compiled_pair(config(3, mesh=mesh, dump_dir=folder))
    compiled(torch.ones(4, 8)).backward()
    graphs = (folder / f"rank{dist.get_rank()}").glob("*_lower_*_after.py")
    text = " ".join(graph.read_text() for graph in graphs)
    groups = [g for g in dist.distributed_c10d._world.pg_map if f"'{g.group_name}')" in text]
    backends: list[Any] = [g._get_backend(torch.device("cpu")) for g in groups]
    return {dist.get_backend(g) for g in groups}, {b.options._timeout.total_seconds() for b in backends}


@pytest.mark.parametrize("mesh", [None, in_full({"replicate": 2, "shard": 1})])
def test_a_job_s_collectives_go_in_turn(two: Processes, tmp_path: Path, mesh: dict[str, int] | None) -> None:
    usual = dist.distributed_c10d.default_pg_timeout.total_seconds()
    assert two.run(_groups, mesh, tmp_path) == [({"gloo_in_turn"}, {usual})] * 2


@pytest.mark.skipif(torch_internals.traced_once(nn.Linear.forward) is None, reason="this torch traces every call")
def test_alike_modules_are_traced_once() -> None:
    cls = type("Marked", (nn.Linear,), {"forward": torch_internals.traced_once(nn.Linear.forward)})
    layers = [cls(4, 4) for _ in range(3)]
    graphs = []

    def read(gm: torch.fx.GraphModule, _: object) -> object:
        graphs.append(gm)
        return gm.forward

    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    torch.compiler.reset()
    x = torch.randn(2, 4, requires_grad=True)
    torch.testing.assert_close(torch.compile(run, backend=read, fullgraph=True)(x), run(x))
    bodies = {id(body) for _, body in graphs[0].named_children()}
    assert len(graphs[0].graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)) == 3
    assert len(bodies) == 1


class Wrapped(nn.Sequential):
    """Its forward is called with all arguments in a tuple, the module among them."""

    def forward(*arguments: Any) -> Any:
        return nn.Sequential.forward(*arguments)


@pytest.mark.parametrize("kind", [nn.Sequential, Wrapped])
def test_nodes_of_a_joint_graph_say_whose_they_are(kind: type[nn.Sequential]) -> None:
    found = []

    def read(joint: torch.fx.GraphModule, inputs: object, **keywords: object) -> object:
        found.extend(n for n in joint.graph.nodes if n.op == "call_function")
        return min_cut_rematerialization_partition(joint, inputs, **keywords)

    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        return aot_module_simplified(gm, inputs, fw_compiler=lambda graph, _: graph, partition_fn=read)

    torch.compiler.reset()
    torch.compile(kind(nn.Linear(4, 4), nn.Tanh()), backend=backend)(torch.randn(2, 4))
    (tanh,) = (n for n in found if n.target is torch.ops.aten.tanh.default)
    (grad,) = (n for n in found if n.target is torch.ops.aten.mm.default and torch_internals.is_backward(n))
    assert torch_internals.module_path(tanh) == "1" and not torch_internals.is_backward(tanh)
    assert torch_internals.module_path(grad) == "0"


def test_a_trace_leaves_sizes_open_and_says_what_it_took_for_granted() -> None:
    found = []

    def read(gm: torch.fx.GraphModule, _: object) -> object:
        found.append((gm, torch_internals.Tracing.here()))
        return gm.forward

    def run(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x

    x = torch.randn(6, 3)
    torch_internals.leave_open(x, 0)
    torch.compiler.reset()
    torch.compile(run, backend=read, dynamic=False)(x)
    ((gm, tracing),) = found
    (size, place) = gm.graph.find_nodes(op="placeholder")
    assert str(place.meta["example_value"].shape[0]) == str(size.meta["example_value"])
    assert place.meta["example_value"].shape[1] == 3
    (guard,) = tracing.guards()
    assert guard.subs(dict.fromkeys(guard.free_symbols, 8)) and not guard.subs(dict.fromkeys(guard.free_symbols, 7))


def test_rows_become_a_dtensor_like_another() -> None:
    dist.init_process_group("fake", rank=1, world_size=3)
    try:
        mesh = init_device_mesh("cpu", (3,))
        whole = distribute_tensor(torch.zeros(7, 2), mesh, [Shard(0)], src_data_rank=None)
        made = torch_internals.like_rows(whole)(torch.ones_like(whole.to_local()))
        assert isinstance(made, DTensor) and made.placements == whole.placements and made.device_mesh is mesh
        assert made.shape == (7, 2) and made.to_local().sum() == whole.to_local().numel()
    finally:
        dist.destroy_process_group()


def test_fused_steps_are_torchs() -> None:
    theirs = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    ours = [p.detach().clone() for p in theirs]
    for p in theirs:
        p.grad = torch.full_like(p, 0.5)
    torch.optim.AdamW(theirs[:1], fused=True).step()
    torch.optim.Adam(theirs[1:2], fused=True).step()
    torch.optim.SGD(theirs[2:], lr=0.1, momentum=0.9, fused=True).step()
    grads, common = [torch.full_like(p, 0.5) for p in ours], {"lr": 1e-3, "maximize": False}
    adam = {**common, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False}
    for i, decay in ((0, 0.01), (1, 0.0)):
        steps = [torch.zeros(())]
        torch_internals.add_to_each(steps, 1.0)
        lists = ([ours[i]], [grads[i]], [torch.zeros(4)], [torch.zeros(4)], [], steps)
        torch_internals.fused_adam(lists, decoupled=i == 0, weight_decay=decay, **adam)
    momentum = {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
    torch_internals.fused_sgd(([ours[2]], [grads[2]], [torch.zeros(4)]), **{**common, "lr": 0.1}, **momentum)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_lists_of_tensors_are_gone_through_at_once() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([6.0])]
    assert [t.tolist() for t in torch_internals.each_divided(tensors, torch.tensor(2.0))] == [[1.5, 2.0], [3.0]]
    assert [float(n) for n in torch_internals.norm_of_each(tensors)] == [5.0, 6.0]
    assert torch_internals.norm_of_each([t.bfloat16() for t in tensors])[0].dtype is torch.float32
    assert all(ours is t for ours, t in zip(torch_internals.rows_of_each(tensors), tensors))


def test_decompositions_of_what_has_one() -> None:
    aten = torch.ops.aten
    found = torch_internals.decompositions_of([aten.silu_backward, aten.mm])
    assert aten.silu_backward.default in found and aten.mm.default not in found


def test_what_dynamo_cannot_trace_is_its_exception() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch_internals.TorchDynamoException):
        torch.compile(breaks, backend="eager", fullgraph=True)(torch.ones(2))


def test_gradients_that_go_off_are_a_call() -> None:
    seen: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        seen.extend(node.args for node in gm.graph.nodes if node.target is torch_internals.SET_GRAD_ENABLED)
        return gm.forward

    def half(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        return x + y

    torch.compile(half, backend=backend)(torch.ones(2, requires_grad=True))
    torch.compiler.reset()
    assert seen == [(False,), (True,)]


class Recording(torch.optim.Optimizer):
    def __init__(self, parameter: torch.nn.Parameter) -> None:
        super().__init__([parameter], {})
        self.found: list[tuple[float, float]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.found.append((float(self.grad_scale), float(self.found_inf)))  # type: ignore[attr-defined]


def test_a_scaler_leaves_scaled_gradients_to_an_optimizer_that_takes_them() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = Recording(parameter), torch.amp.GradScaler("cpu", init_scale=8.0)
    torch_internals.takes_scaled_gradients(Recording)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert optimizer.found == [(8.0, 0.0)]
    assert parameter.grad is not None and parameter.grad.tolist() == [8.0, 8.0]
