"""One test for each private name of Dynamo: a torch release that moves one fails here, by name."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import aot_module_simplified
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autoshard import torch_internals


def test_through_dynamo_leaves_a_backend_unwrapped() -> None:
    class Named(torch_internals.ThroughDynamo):
        pass

    def backend(gm: Any, inputs: Any) -> Any:
        raise Named("as it is")

    with pytest.raises(Named, match="as it is"):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))


def test_first_cause_is_what_the_user_s_code_did_wrong() -> None:
    with pytest.raises(RuntimeError) as found:
        torch.compile(lambda x: x.view(-1, 3) + 1, backend="eager", fullgraph=True)(torch.ones(4))
    assert str(torch_internals.first_cause(found.value)) == "shape '[-1, 3]' is invalid for input of size 4"
    own = KeyError("not Dynamo's")
    assert torch_internals.first_cause(own) is own


def test_restart_trace_traces_again() -> None:
    calls = []

    def backend(gm: Any, inputs: Any) -> Any:
        calls.append(gm)
        if len(calls) == 1:
            torch_internals.restart_trace("a test")
        return gm.forward

    assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist() == [2, 2]
    assert len(calls) == 2


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def allowed(x: Tensor) -> Tensor:
    return x + 1


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def users(x: Tensor) -> Tensor:
    return x + 1


@pytest.mark.parametrize("function", [allowed, users])
def test_a_graph_is_broken_in_spite_of_a_function_that_was_allowed_in_it(function: Any) -> None:
    """Of a user's own it is an error, as with any backend."""

    def backend(gm: Any, inputs: Any) -> Any:
        torch_internals.fall_back_in_spite_of(allowed, gm)
        return aot_module_simplified(gm, inputs, fw_compiler=lambda graph, _: graph.forward)

    def sized(x: Tensor, size: Tensor) -> Tensor:
        return allowed(function(x).new_ones(size))

    torch.compiler.reset()
    compiled: Any = torch.compile(sized, backend=backend)
    if function is allowed:
        assert compiled(torch.ones(3), torch.tensor(3)).tolist() == [2, 2, 2]
    else:
        with pytest.raises(RuntimeError, match="DataDependentOutputException"):
            compiled(torch.ones(3), torch.tensor(3))


def test_convolutions_are_traced_without_the_libraries_of_a_cpu() -> None:
    before = torch.backends.mkldnn.enabled
    with torch_internals.without_libraries_of_cpus():
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled == before


def test_norms_with_statistics_have_one_base() -> None:
    for norm in (nn.BatchNorm2d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, track_running_stats=True)):
        assert isinstance(norm, torch_internals.WithStatistics) and norm.running_mean is not None
    assert not issubclass(nn.LayerNorm, torch_internals.WithStatistics)


def test_optimized_module_is_what_compile_returns() -> None:
    assert isinstance(torch.compile(nn.Linear(2, 2)), torch_internals.OptimizedModule)


def test_suppressed_errors_follows_the_config() -> None:
    assert torch_internals.suppressed_errors() is False
    with torch._dynamo.config.patch(suppress_errors=True):
        assert torch_internals.suppressed_errors() is True


def test_errors_are_raised_inside_whatever_the_user_said() -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        with torch_internals.raising_errors():
            assert torch_internals.suppressed_errors() is False
        assert torch_internals.suppressed_errors() is True


def test_torch_compile_may_be_told_to_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_internals.compiles()
    with torch._dynamo.config.patch(disable=True):
        assert not torch_internals.compiles()
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    model = nn.Linear(2, 2)
    assert not torch_internals.compiles() and torch.compile(model) is model


def test_a_hook_before_loading_is_kept_last() -> None:
    model, called = nn.Linear(2, 2), list[str]()
    ours = model.register_load_state_dict_pre_hook(lambda *_: called.append("ours"))
    model.register_load_state_dict_pre_hook(lambda *_: called.append("theirs"))
    torch_internals.keep_last(model, ours.id)
    torch_internals.keep_last(model, None)
    model.load_state_dict(model.state_dict())
    assert called == ["theirs", "ours"]


@pytest.mark.parametrize("is_looked_into", [True, False])
def test_hooks_can_be_left_out_where_a_compiled_function_goes_backward(is_looked_into: bool) -> None:
    """Dynamo looks at the Python that backward calls, if a frame around it was compiled in parts."""
    called, compiled = list[Tensor](), list[torch.fx.GraphModule]()

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(gm)
        return gm

    def hook(gradients: Any) -> None:
        called.append(gradients[0] + 1)

    def step(x: Tensor) -> Tensor:
        loss = x.exp().sum()
        torch._dynamo.graph_break()
        loss.grad_fn.register_prehook(hook if is_looked_into else torch_internals.untraced(hook))  # type: ignore[union-attr]
        loss.backward()
        return loss

    torch.compile(step, backend=backend)(torch.ones(3, requires_grad=True))
    assert len(called) == 1 and len(compiled) == 1 + is_looked_into


def test_messages_given_once_do_not_break_a_graph(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nor does torch say that it cannot write these methods down, which 2.11 does of two and more."""
    said: list[str] = []
    for name in ("warning_once", "info_once"):
        monkeypatch.setattr(logging.Logger, name, lambda self, text: said.append(text), raising=False)
    torch_internals.ignore_messages_given_once()
    logger = logging.getLogger("a.library")

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        logger.warning_once("unusual")  # type: ignore[attr-defined]
        return y * 2

    assert torch.compile(step, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [4, 4] and not said
    assert not [r for r in caplog.records if r.name == "torch._dynamo.metrics_context"]


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
    assert found[-1].module is model and found[-1].backend is backend and found[-1].said == {}
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


def test_names_of_what_is_compiled_are_the_module_s_own() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(2, 2)))  # type: ignore[arg-type]
    assert list(torch_internals.original_names(model.state_dict())) == ["0.weight", "0.bias"]


def test_a_graph_break_is_not_in_a_file_of_our_own() -> None:
    """A sharded module's forward stands there, between torch's and the user's."""
    files = ("/home/user/train.py", torch_internals.__file__, torch.__file__)
    stack = [SimpleNamespace(filename=name, lineno=line) for line, name in enumerate(files)]
    gm = SimpleNamespace(compile_subgraph_reason=SimpleNamespace(graph_break=True, user_stack=stack, reason="item"))
    assert torch_internals.graph_break(gm) == ("/home/user/train.py:0", "item")  # type: ignore[arg-type]


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
    assert found == [None, f"{__file__}:{function.__code__.co_firstlineno + 2}"]


def test_original_of_is_what_compile_was_given() -> None:
    model = nn.Linear(2, 2)
    assert torch_internals.original_of(torch.compile(model)) is model
    assert torch_internals.original_of(model) is model


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


@pytest.mark.parametrize("how", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_parameter_are_seen(how: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not torch_internals.has_hooks(parameter)
    hook = getattr(parameter, how)(lambda _: None)
    assert torch_internals.has_hooks(parameter)
    hook.remove()
    assert not torch_internals.has_hooks(parameter)


def test_a_mode_sees_what_is_dispatched() -> None:
    seen = []

    class See(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with See():
        torch.ones(2) + 1
    assert torch.ops.aten.add.Tensor in seen
