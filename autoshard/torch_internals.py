"""Every private torch name that autoshard uses, one small function or alias for each.

Each entry says what it is for and on which versions it was seen. The tests in `tests/test_torch_internals_*.py`
exercise every one of them alone, so that a torch release that moves a name fails there, clearly.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter, is_
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import sympy
import torch
import torch._dynamo.compiled_autograd
import torch._dynamo.config
import torch._functorch.config
import torch.distributed as dist
from torch._C._dynamo.eval_frame import (
    get_eval_frame_callback,  # seen: 2.11, 2.13; None where Dynamo looks at no frame
    reset_code,  # seen: 2.11, 2.13; forgets what Dynamo found out about a function's code
)
from torch._decomp import get_decompositions  # seen: 2.11, 2.13
from torch._dynamo import trace_rules  # seen: 2.11, 2.13
from torch._dynamo.callback import callback_handler  # seen: 2.11, 2.13
from torch._dynamo.eval_frame import (
    OptimizedModule,  # seen: 2.11, 2.13; what torch.compile(module) returns
    skip_code,  # seen: 2.11, 2.13; Dynamo does not compile a function's code, but looks into what that calls
)
from torch._dynamo.exc import (
    ShortenTraceback,  # seen: 2.11, 2.13; its subclasses leave a backend unwrapped
    TensorifyScalarRestartAnalysis,  # seen: 2.11, 2.13; Dynamo lets it through from a backend and traces again
    TorchDynamoException,  # seen: 2.11, 2.13
)
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._library.fake_class_registry import (
    FakeScriptObject,  # seen: 2.11, 2.13; an opaque input while tracing
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # seen: 2.11, 2.13
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module  # seen: 2.11, 2.13
from torch.fx.graph import _BoxedCodeGen
from torch.nn.modules.batchnorm import _NormBase as WithStatistics  # seen: 2.11, 2.13; norms that keep some
from torch.optim import optimizer as optimizers
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode  # seen: 2.11, 2.13

__all__ = [
    "HOLDS_TANGENTS",
    "KEEPS_OPERATORS",
    "SET_GRAD_ENABLED",
    "CompiledCall",
    "CustomPartitionerFn",
    "FakeTensor",
    "FakeTensorMode",
    "OptimizedModule",
    "RandomCall",
    "ThroughDynamo",
    "TorchDispatchMode",
    "Tracing",
    "WithStatistics",
    "add_to_each",
    "assigns",
    "backend_of",
    "backward_here",
    "before_loading",
    "before_traces",
    "behind_a_break",
    "boxed",
    "code_when_called",
    "compile_in_place",
    "compile_with_inductor",
    "compiled_calls",
    "decompositions_of",
    "each_divided",
    "emit_artifact",
    "entering_again",
    "fall_back_in_spite_of",
    "first_cause",
    "forget_assigned",
    "fused_adam",
    "fused_sgd",
    "get_eval_frame_callback",
    "gives_nothing",
    "gloo_in_turn",
    "gradient_places",
    "graph_break",
    "group_named",
    "guard_parameters",
    "has_hooks",
    "has_step_hooks",
    "ignore_messages_given_once",
    "inductor_alone",
    "inner_inductor",
    "input_position",
    "is_backward",
    "is_compiled_in_place",
    "is_forward",
    "is_scaled_step",
    "is_view",
    "job_store",
    "keep_in_order",
    "kept_buffers",
    "leave_as_they_lie",
    "leave_open",
    "leave_undefined",
    "leave_what_is_saved",
    "lie_alike",
    "like_rows",
    "look_again",
    "module_call",
    "module_path",
    "norm_of_each",
    "order_of_strides",
    "original_names",
    "original_of",
    "placements_of_each",
    "put_random_states_first",
    "random_call",
    "random_states",
    "random_states_are_tensors",
    "recompile_limit",
    "register_work",
    "rename",
    "repeats_a_product",
    "repeats_stay",
    "restart_trace",
    "rows_of_each",
    "runs_in_python",
    "saves_by",
    "schema_of",
    "share_memory",
    "sizes_in",
    "step_without_hooks",
    "storage_of",
    "suppressed_errors",
    "surround_steps",
    "takes_scaled_gradients",
    "tangents",
    "times_written",
    "transport_of",
    "untraced",
    "unwrapped",
    "versions_of",
    "with_versions",
    "within_step",
    "without_autograd_cache",
    "without_budgets",
    "without_hooks",
    "without_libraries_of_cpus",
    "without_repeats",
    "wrap_compiled",
    "written_position",
]


SET_GRAD_ENABLED = torch._C._set_grad_enabled  # seen: 2.11, 2.13; what Dynamo's graphs call where gradients go off and on
# Whether autograd holds what it gives a compiled backward until that returns. Seen: 2.11 does; 2.13 hands it over in a box.
HOLDS_TANGENTS = not hasattr(torch.autograd.Function, "boxed_grads_call")


_LARGE = 1 << 20
_ROWS, _SPEC = attrgetter("_local_tensor"), attrgetter("_spec")


class ThroughDynamo(ShortenTraceback):
    """An exception that a backend may raise and the user sees as it is, not as BackendCompilerFailed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, first_useful_frame=None)


def first_cause(error: BaseException) -> BaseException:
    """What made Dynamo raise this, where that is what it did: its own messages say it far below their first line."""
    while isinstance(error, TorchDynamoException) and (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def restart_trace(reason: str) -> None:
    """Makes Dynamo trace the frame that it is compiling again, from its start. Never returns.

    Only legal inside a backend call. The speculation log holds what the first trace found out about
    graph breaks; it belongs to the module as it was, so it is cleared.
    """
    InstructionTranslator.current_tx().speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason=reason)


def fall_back_in_spite_of(function: Callable[..., Any], gm: torch.fx.GraphModule) -> None:
    """Has Dynamo break a graph that a backend cannot compile as it does for any other backend (one that needs a tensor's value, say),
    though `function`, which was allowed in graphs, is in it: of a user's such function it would not know where to break. Only legal inside a
    backend call. Seen: 2.11, 2.13."""
    allowed = {n.target for n in gm.graph.find_nodes(op="call_function", target=function)}
    others = (n.target for n in gm.graph.nodes if n.op == "call_function" and n.target is not function)
    if allowed and not any(trace_rules.is_callable_allowed(other) for other in others):
        InstructionTranslator.current_tx().output.has_user_defined_allowed_in_graph = False


@contextlib.contextmanager
def without_libraries_of_cpus() -> Iterator[None]:
    """Traces convolutions of any batch alike: else torch asks by which of a CPU's libraries each would be computed, for other devices too,
    and a trace holds only for the batches that these take. Public settings of the first one warn of TF32. Seen: 2.11, 2.13."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch.backends.nnpack.flags(enabled=False):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def ignore_messages_given_once() -> None:
    """Makes Dynamo leave out `logger.warning_once(...)`, a method that transformers gives to loggers, instead of breaking
    the graph at it: in GPT-2's loss, for one. Seen: 2.11, 2.13."""
    found = [getattr(logging.Logger, name, None) for name in ("warning_once", "info_once")]
    torch._dynamo.config.ignore_logging_functions |= {method for method in found if method is not None}
    logging.getLogger("torch._dynamo.metrics_context").addFilter(_tells_more)


def _tells_more(record: logging.LogRecord) -> bool:
    """Not that a function among the settings cannot be written into a record of a compilation: 2.11 says so, with a traceback, behind
    each one. Seen: 2.11; 2.13 leaves that setting out of its records."""
    return not (record.exc_info and isinstance(record.exc_info[1], TypeError) and "exception logging" in record.msg)


def before_traces(callback: Callable[[], None]) -> None:
    """Has `callback` called whenever Dynamo begins to compile something, outside of what it compiles already, before it has
    looked at it; until Dynamo is reset. The callback may compile by itself. Seen: 2.11, 2.13."""
    begins = _begins(callback)
    if begins not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(begins)


@functools.cache
def _begins(callback: Callable[[], None]) -> Callable[[Any], None]:
    handler: Any = callback_handler

    def begins(event: Any) -> None:
        if event.callback_trigger.name != "DYNAMO":
            return
        # held around callbacks, which would wait for it forever if they compiled
        lock = handler._CompilationCallbackHandler__pending_callbacks_counter_lock
        lock.release()
        try:
            callback()
        finally:
            lock.acquire()

    return begins


def guard_parameters() -> None:
    """Has the guards of what Dynamo compiles now look at parameters in each call. Torch 2.11's skip tensors while the dict
    that holds them is as it was, so that a parameter that is frozen now never got a gradient once it is thawed (pytorch
    #139476, mended in 2.12). Seen: 2.11; nothing to do on 2.13."""
    mended = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
    if mended or not torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags:
        return
    torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags = False
    _guarding.append(True)
    if _skip_guards_again not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_skip_guards_again)


_guarding: list[bool] = []  # not empty while it was us who changed it


def _skip_guards_again(_: Any) -> None:
    if _guarding:
        _guarding.clear()
        torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags = True


def behind_a_break() -> str | None:
    """"file.py:12", the last line that ran before, if what Dynamo compiles continues a function whose start ran before.
    Reads the frames of `convert_frame.py`, whose `code` that is. Seen: 2.11, 2.13."""
    frames = (f for f in _frames() if f.f_code.co_name == "_compile" and "code" in f.f_locals)
    code = next(frames).f_locals["code"]
    resumed, _, line = code.co_name.rpartition("_at_")
    return f"{code.co_filename}:{line}" if resumed.startswith("torch_dynamo_resume_in") else None


@dataclass(frozen=True)
class CompiledCall:
    """A call of what torch.compile gave, while it runs. backend, said: what torch.compile was given, options and a mode among
    the latter."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    backend: Any
    said: dict[str, Any]

    @property
    def module(self) -> torch.nn.Module | None:
        """The module whose call this is; None if a function, or another method of a module, was compiled."""
        if getattr(self.function, "__name__", "") in ("__call__", "_call_impl", "_wrapped_call_impl"):
            owner = getattr(self.function, "__self__", None)
        else:
            owner = getattr(self.function, "__wrapped__", None)  # of a module that torch itself has written
        return owner if isinstance(owner, torch.nn.Module) else None


def compiled_calls() -> Iterator[CompiledCall]:
    """All that run, innermost first. Reads the frames of `_TorchDynamoContext`'s wrapper, `compile_wrapper(*args,
    **kwargs)`, its `fn` and its `callback`. Seen: 2.11, 2.13."""
    for frame in _frames():
        found = frame.f_locals
        if frame.f_code.co_name == "compile_wrapper" and "fn" in found:
            wrapper = _wrapper_behind(found.get("callback"))
            said = getattr(wrapper, "kwargs", {})
            backend = getattr(wrapper, "compiler_fn", wrapper)
            yield CompiledCall(found["fn"], found.get("args", ()), found.get("kwargs", {}), backend, said)


def _frames_of(code: CodeType) -> list[Any]:
    """Those of `_frames` that run this."""
    return [frame for frame in _frames() if frame.f_code is code]


def _frames() -> Iterator[Any]:
    """Of the Python functions that run, innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def original_of(module: torch.nn.Module) -> torch.nn.Module:
    """The module that torch.compile was given; one that is not compiled, itself."""
    original: torch.nn.Module = getattr(module, "_orig_mod", module)
    return original


def original_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict under the names that it has where nothing is compiled. Seen: 2.11, 2.13."""
    return {".".join(part for part in name.split(".") if part != "_orig_mod"): value for name, value in state.items()}


def versions_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The versions of modules that their state dict has beside their state, by name; none of another dict. Seen: 2.11, 2.13."""
    return getattr(state, "_metadata", {})


def with_versions(state: Mapping[str, Any], versions: dict[str, Any]) -> OrderedDict[str, Any]:
    """A state dict as that of a module of these versions, by which it knows older files. Seen: 2.11, 2.13."""
    whole = OrderedDict(state)
    whole._metadata = versions  # type: ignore[attr-defined]
    return whole


def backend_of(module: Any) -> Any:
    """The backend that torch.compile(module) or module.compile() was given; None if the module is not compiled."""
    if isinstance(module, OptimizedModule):
        callback = getattr(module.dynamo_ctx, "callback", None)
    else:
        cells = getattr(getattr(module, "_compiled_call_impl", None), "__closure__", None) or ()
        contexts = [cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "callback")]
        callback = contexts[0].callback if contexts else None
    wrapper = _wrapper_behind(callback)
    return getattr(wrapper, "compiler_fn", wrapper)


def _wrapper_behind(callback: Any) -> Any:
    """What torch.compile made of the backend that it was given."""
    from torch._dynamo.eval_frame import innermost_backend

    return innermost_backend(callback) if callable(callback) else None


def graph_break(gm: torch.fx.GraphModule) -> tuple[str, str] | None:
    """("file.py:12", why) if Dynamo ended this graph because it could not go on; None if the code just ended.
    Seen: 2.11, 2.13."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    inside = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))
    frames = [f for f in reason.user_stack if not f.filename.startswith(inside)] or reason.user_stack
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"
    return where, str(reason.reason).strip().splitlines()[0]


_own_step_hooks: set[int] = set()


def surround_steps(before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None) -> None:
    """Registers hooks of all optimizers' steps that `has_step_hooks` does not count. Seen: 2.11, 2.13."""
    for hook, register in ((before, register_optimizer_step_pre_hook), (after, register_optimizer_step_post_hook)):
        if hook is not None:
            _own_step_hooks.add(register(untraced(hook)).id)  # type: ignore[attr-defined]


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """What Dynamo does not look into. `torch.compiler.disable` takes longer than a short hook, so it is there only where Dynamo looks: at
    this, or at what a frame calls that it has compiled in parts. Seen: 2.11, 2.13."""
    disabled = torch.compiler.disable(hook)

    @functools.wraps(hook)
    def called(*args: Any, **kwargs: Any) -> Any:
        looks = torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() is not None
        return (disabled if looks else hook)(*args, **kwargs)

    skip_code(called.__code__)  # type: ignore[attr-defined]
    return called


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if somebody else registered hooks around this optimizer's step, or around all. Seen: 2.11, 2.13."""
    around_all = {*optimizers._global_optimizer_pre_hooks, *optimizers._global_optimizer_post_hooks} - _own_step_hooks
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or around_all)


def before_loading(optimizer: torch.optim.Optimizer, hook: Callable[..., Any]) -> None:
    """Registers, once, what an optimizer does to a state dict before it loads it; not of one that wraps another and never was made as an
    optimizer is (Accelerate's), which has no place for hooks. Seen: 2.11, 2.13."""
    there = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
    if there is not None and hook not in there.values():
        optimizer.register_load_state_dict_pre_hook(hook)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """A step as its class has it, without what torch puts around it. Seen: 2.11, 2.13."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


def is_scaled_step() -> bool:
    """True, of a hook before a step, where a GradScaler that is not switched off takes that step. Reads the frame of
    `GradScaler.step`. Seen: 2.11, 2.13."""
    return any(frame.f_locals["self"].is_enabled() for frame in _frames_of(GradScaler.step.__code__))


def without_hooks(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer, for a copy that nobody is to hear of, and whose own hooks are nobody else's. Seen: 2.11, 2.13."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict()
    return optimizer


def kept_buffers(module: torch.nn.Module) -> list[str]:
    """The names of a module's own buffers that are in its state dict. Seen: 2.11, 2.13."""
    names = module._buffers.keys()  # TorchScript's can be gone through in no other way
    return [name for name in names if name not in module._non_persistent_buffers_set]


def within_step(optimizer: torch.optim.Optimizer) -> bool:
    """True, of a hook before or after a step, where that step is a part of another one of the same optimizer: of a subclass whose
    step calls its parent's. Reads the frames of `profile_hook_step`'s `wrapper(*args, **kwargs)`. Seen: 2.11, 2.13."""
    steps = _frames_of(_HOOKED_STEP)
    return len(steps) > 1 and sum(frame.f_locals["args"][0] is optimizer for frame in steps) > 1


_HOOKED_STEP: CodeType = torch.optim.Optimizer.profile_hook_step(torch.optim.Optimizer.step).__code__  # which all of them have


def add_to_each(tensors: list[torch.Tensor], number: float | torch.Tensor) -> None:
    """Adds to many tensors in place, in one launch. Seen: 2.11, 2.13."""
    torch._foreach_add_(tensors, number)


def rows_of_each(tensors: Sequence[Any]) -> list[Any]:
    """This process's part of each of these, as the object that a DTensor holds; anything else as it is. Seen: 2.11, 2.13."""
    kinds = set(map(type, tensors))
    sharded = {kind for kind in kinds if issubclass(kind, DTensor)}  # to ask each for what it is takes four times as long
    if kinds == sharded:
        return list(map(_ROWS, tensors))
    return [t._local_tensor if type(t) in sharded else t for t in tensors] if sharded else list(tensors)


def placements_of_each(tensors: Sequence[Any]) -> list[Any]:
    """How each of these lies on processes; None of what is no DTensor. Seen: 2.11, 2.13."""
    return [t._spec.placements if isinstance(t, DTensor) else None for t in tensors]


def lie_alike(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether each of these lies on processes as its counterpart. Gradients mostly have the very spec of their parameters
    (`like_rows`). Seen: 2.11, 2.13."""
    if {*map(type, some), *map(type, others)} == {DTensor} and all(map(is_, map(_SPEC, some), map(_SPEC, others))):
        return True
    return placements_of_each(some) == placements_of_each(others)


def each_divided(tensors: list[torch.Tensor], by: torch.Tensor) -> list[torch.Tensor]:
    """Many tensors divided by one number, in one launch. Seen: 2.11, 2.13."""
    return list(torch._foreach_div(tensors, by))


def norm_of_each(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norms of many tensors, in one launch, in float32 or better. Seen: 2.11, 2.13."""
    precise = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    return list(torch._foreach_norm(tensors, 2, dtype=precise))


def fused_adam(tensors: tuple[list[torch.Tensor], ...], decoupled: bool, **options: Any) -> None:
    """torch's own fused step of Adam or AdamW: of parameters, gradients, means, squares, largest squares and steps that were
    counted already. Seen: 2.11, 2.13."""
    (torch._fused_adamw_ if decoupled else torch._fused_adam_)(*tensors, **options)


def fused_sgd(tensors: tuple[list[torch.Tensor], ...], **options: Any) -> None:
    """torch's own fused step of SGD: of parameters, gradients and momenta, none without momentum. On a CPU it leaves bf16
    and fp16 as they are, but for the last few numbers. Seen: 2.11, 2.13."""
    torch._fused_sgd_(*tensors, is_first_step=False, **options)


def takes_scaled_gradients(kind: type[torch.optim.Optimizer]) -> None:
    """Has GradScaler leave unscaling and the skipping of a step to optimizers of this class, as it does with torch's fused
    ones: they find both as their attributes. Seen: 2.11, 2.13."""
    kind._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def recompile_limit() -> int:
    """How many graphs Dynamo compiles for one function; what comes after runs as plain Python."""
    return int(torch._dynamo.config.recompile_limit)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def look_again() -> None:
    """Has Dynamo look again at the forwards that run here as Python, from their next call on: what it gave up once, as where a forward
    raises an error, it never looks at again. It forgets what it compiled of them. Seen: 2.11, 2.13."""
    for frame, _ in _forwards_in_python():
        reset_code(frame.f_code)


def runs_in_python(module: torch.nn.Module) -> bool:
    """Whether Dynamo gave up this module's forward, so that it runs here as Python and its parts are graphs of their own. Seen: 2.11, 2.13."""
    return any(running is module for _, running in _forwards_in_python())


def _forwards_in_python() -> Iterator[tuple[Any, torch.nn.Module]]:
    """Of modules: frames that run what forward was written as, not what Dynamo made of it. Of others nothing is asked: a frame whose locals
    were asked for keeps them all, also what it deletes (Python before 3.13)."""
    for frame in (frame for frame in _frames() if frame.f_code.co_name == "forward"):
        module = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        if isinstance(module, torch.nn.Module) and any(code is frame.f_code for kind in type(module).__mro__ for code in _codes_of(kind)):
            yield frame, module


def _codes_of(kind: type) -> Iterator[Any]:
    """Of what a class has as its forward, and of what that wraps."""
    function = kind.__dict__.get("forward")
    while function is not None:
        yield getattr(function, "__code__", None)
        function = getattr(function, "__wrapped__", None)


def suppressed_errors() -> bool:
    """True if the user told Dynamo to run eagerly what fails to compile (never safe once sharded)."""
    return bool(torch._dynamo.config.suppress_errors)


def raising_errors() -> contextlib.AbstractContextManager[None]:
    """Inside, Dynamo raises what it meets, whatever the user told it. Seen: 2.11, 2.13."""
    return torch._dynamo.config.patch(suppress_errors=False)  # type: ignore[no-any-return]


def compiles() -> bool:
    """Whether torch.compile is not told to give back everything as it is. Seen: 2.11, 2.13."""
    return os.environ.get("TORCHDYNAMO_DISABLE") != "1" and not torch._dynamo.config.disable


def inner_inductor(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Inductor's compilation of one graph, after AOTAutograd: what `compile_fx` calls by default. It frees at once what is dead,
    where Inductor would keep it for a result of that size to come, which no allocator needs; and see `_joins_what_pays`."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(allow_buffer_reuse=False))
        if kwargs.get("is_backward"):
            stack.enter_context(_joins_what_pays(patient=not repeats_a_product(gm.graph.nodes)))
        return compile_fx_inner(gm, inputs, **kwargs)


@functools.cache
def keep_in_order(operators: tuple[Any, ...]) -> None:
    """Inductor generates calls of these, and of torch's collectives, in the order of the graph. It moves other operators to where what
    they read is needed, and joins kernels, by their sizes: two processes might send in another order. Seen: 2.11, 2.13."""
    from torch._inductor import ir
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, register_lowering

    for operator in operators:

        def lowered(*args: Any, operator: Any = operator) -> Any:
            made: Any = ir._CollectiveKernel.create_out_of_place(operator, *args)
            return [ir.TensorBox.create(one) for one in made] if isinstance(made, list) else ir.TensorBox.create(made)

        add_layout_constraint(operator, constrain_to_fx_strides)
        register_lowering(operator, type_promotion_kind=None)(lowered)


def _joins_what_pays(patient: bool) -> contextlib.AbstractContextManager[Any]:
    """Inductor joins kernels that read one tensor, however small and however far apart: so a gradient's sum waits for a block's
    whole backward, and what one block needs is computed again for another, and both are held. Here those that repeat what
    forward did join others only if they read as much in common as the later writes; and none waits for what only the other
    needs, unless `patient`. Choices that a user made stay. Seen: 2.11, 2.13."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        @staticmethod
        def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            first, later = sorted((node1, node2), key=lambda node: node.min_order)
            if not patient and _waits(scheduler, first, later):
                return False
            if (_repeats(first) or _repeats(later)) and shared_data_score < _written(scheduler, later):
                return False
            return InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)

    if type(V.choices) is not InductorChoices:
        return contextlib.nullcontext()
    return V.set_choices_handler(Choices())  # type: ignore[no-any-return]


def _repeats(kernel: Any) -> bool:
    """Whether a kernel of a backward graph computes something that forward did."""
    origins = (o for n in kernel.get_nodes() if n.node is not None for o in n.node.get_origins())
    return any(map(is_forward, origins))


def _waits(scheduler: Any, first: Any, later: Any) -> bool:
    """Whether one kernel of both would have to wait for something that only the later needs."""
    return any(scheduler.name_to_fused_node[name].min_order > first.max_order for name in later.ancestors)


def _written(scheduler: Any, kernel: Any) -> int:
    """Bytes that a kernel leaves for others."""
    own = kernel.get_operation_names()
    kept = [d for d in kernel.read_writes.writes if not scheduler.can_buffer_be_removed_through_fusion(d.name, own)]
    return sum(map(scheduler.dep_size_hint, kept))


def wrap_compiled(compiled: Any, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Puts a wrapper around what a graph compiled by `inner_inductor` runs (its cached form is unaffected). One that calls nothing has
    no code, and stays as it is. Seen: 2.13."""
    if hasattr(compiled, "current_callable"):
        compiled.current_callable = wrapper(compiled.current_callable)
    return compiled


# Whether Inductor can be told not to take an operator apart: 2.11 then refuses it, as one that has both.
KEEPS_OPERATORS = torch.__version__ >= (2, 13)  # type: ignore[operator]


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    inner: Callable[..., Any],
    patches: dict[str, Any],
    kept: Iterable[Any] = (),
) -> Callable[..., Any]:
    """Inductor's whole pipeline with our partitioner (in `patches`) and our step before codegen (`inner`). kept: operators that it is
    not to take apart, where `KEEPS_OPERATORS`."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    without = set(kept) if KEEPS_OPERATORS else set()
    table = {op: how for op, how in select_decomp_table().items() if op not in without} if without else None
    run: Any = compile_fx(gm, inputs, inner_compile=inner, config_patches=patches, decompositions=table)
    return run  # type: ignore[no-any-return]


def input_position(placeholder: torch.fx.Node) -> int | None:
    """Which input of the traced graph an input of AOTAutograd's graph is; None for tangents and the insides
    of tensor subclasses (a DTensor is one input before and one or two after, by torch version).
    """
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    described = placeholder.meta.get("desc")
    return described.idx if isinstance(described, PlainAOTInput) else None


def tangents(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The inputs of a joint or backward graph that are gradients of results, in order; not the insides of tensor subclasses. Seen: 2.11,
    2.13."""
    from torch._functorch._aot_autograd.descriptors import TangentAOTInput

    return [n for n in graph.find_nodes(op="placeholder") if isinstance(n.meta.get("desc"), TangentAOTInput)]


def leave_undefined(results: Sequence[Any], given: Sequence[Any], known: type | None = None) -> type | None:
    """Of a compiled graph that gave these results for what it was given: its backward gets None in the place of gradients that nobody
    computes, where autograd would make zeros. Returns the class of its autograd function, to be given as `known` from then on; None where
    that does not show: where nothing is differentiated, all results are views, or one is of a subclass, whose gradient AOTAutograd takes
    apart. A result may be an input, of a function that knows nothing of this. Compiled autograd takes the graph as it is, which
    needs all gradients. Seen: 2.11, 2.13."""
    functions = [r.grad_fn for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None]
    if not functions or torch._dynamo.compiled_autograd.compiled_autograd_enabled:
        return known
    known = known or _own_function(functions, results, given)
    for function in functions:
        if type(function) is known:
            function.set_materialize_grads(False)  # type: ignore[attr-defined]
    return known


def _own_function(functions: Sequence[Any], results: Sequence[Any], given: Sequence[Any]) -> type | None:
    if any(type(r) is not torch.Tensor for r in results if isinstance(r, torch.Tensor)):
        return None
    others: set[Any] = {type(x.grad_fn) for x in given if isinstance(x, torch.Tensor)}
    ours = (type(f) for f in functions if isinstance(f, torch.autograd.function.BackwardCFunction))
    return next((kind for kind in ours if kind not in others), None)


def written_position(placeholder: torch.fx.Node) -> int | None:
    """As `input_position`, of an input that is written to. Of several that share memory, one of which is, AOTAutograd makes one that has
    it all: then the position of one of these. Seen: 2.11, 2.13."""
    from torch._functorch._aot_autograd.descriptors import (
        PlainAOTInput,
        SyntheticBaseAOTInput,
        ViewBaseAOTInput,
    )

    described = placeholder.meta.get("desc")
    while isinstance(described, (SyntheticBaseAOTInput, ViewBaseAOTInput)):
        described = described.base_of
    return described.idx if isinstance(described, PlainAOTInput) else None


def gradient_places(graph: torch.fx.Graph) -> dict[int, int]:
    """Which output of a joint graph of AOTAutograd's is the gradient of which input of the traced graph; inputs as of
    `input_position`. Seen: 2.11, 2.13."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    found = enumerate(graph.output_node().meta.get("desc", ()))
    grads = {i: d.grad_of for i, d in found if isinstance(d, GradAOTOutput)}
    return {of.idx: i for i, of in grads.items() if isinstance(of, PlainAOTInput)}


def like_rows(whole: DTensor) -> Callable[[torch.Tensor], DTensor]:
    """What makes a DTensor of rows, such as a gradient, with the shape, mesh and placements of `whole`: at a tenth of the
    time of `DTensor.from_local`, which traces, checks and views. Seen: 2.11, 2.13."""
    spec = whole._spec
    return lambda rows: DTensor(rows, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def order_of_strides(tensor: torch.Tensor) -> list[int]:
    """Its dimensions as they lie in memory, the outermost first; of open sizes as if each were large. Seen: 2.11, 2.13."""

    def distance(stride: Any) -> int:
        if not isinstance(stride, torch.SymInt):
            return int(stride)
        return int(stride.node.expr.xreplace(dict.fromkeys(stride.node.expr.free_symbols, sympy.Integer(_LARGE))))

    strides = [distance(stride) for stride in tensor.stride()]
    return sorted(range(tensor.dim()), key=lambda d: -strides[d])


def sizes_in(graph: torch.fx.Graph, sizes: Sequence[Any]) -> list[Any]:
    """Sizes as arguments of a call in this graph, computed where it now inserts nodes: a symbolic one, of the symbols that are inputs of
    the graph. Seen: 2.11, 2.13."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    given = [n for n in graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.SymInt)]
    known = {n.meta["val"].node.expr: n for n in given}
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    symbols = {expr: torch.fx.Proxy(n, tracer) for expr, n in known.items() if expr.is_Symbol}

    def argument(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expr = size.node.expr
        return known[expr] if expr in known else sympy_interp(PythonReferenceAnalysis, symbols, expr).node

    return [argument(size) for size in sizes]


def module_path(node: torch.fx.Node) -> str:
    """"model.layers.3.mlp" for an operation that this module called, or that differentiates one; "" without a module. The root is a
    local of its forward's frame, or where a decorator wraps that (transformers 5.24's Llama) the first of the wrapper's arguments.
    Seen: 2.11, 2.13."""
    stack = _module_stack(node)
    return _from_root(list(stack.values())[-1][0]) if stack else ""


def module_call(node: torch.fx.Node, module: str) -> int:
    """In which call of this module ("model.layers.3") in one forward an operation was traced, counted from 0; 0 of one that it was not
    traced in. Seen: 2.11, 2.13."""
    keys = [str(key) for key, (path, _) in _module_stack(node).items() if _from_root(path) == module]
    return int(keys[-1].partition("@")[2] or 0) if keys else 0


def _module_stack(node: torch.fx.Node) -> dict[str, tuple[str, Any]]:
    return node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}


def _from_root(path: str) -> str:
    return re.sub(r"^L\['\w+'\](\[0\])?\.?", "", str(path))


def saves_by(region: torch.fx.GraphModule) -> Any:
    """What an activation-checkpoint region was given to choose what it saves (`context_fn`); None of any other graph. Seen: 2.11, 2.13."""
    return region.meta.get("_checkpoint_context_fn")


def is_backward(node: torch.fx.Node) -> bool:
    """True of a node of a joint graph that AOTAutograd traced while it differentiated, gradients among them; a node that
    Inductor put in the place of others may not say. Seen: 2.11, 2.13."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def is_forward(node: torch.fx.Node) -> bool:
    """True of a node that AOTAutograd traced as forward, wherever it stands now. Seen: 2.11, 2.13."""
    return node.meta.get("partitioner_tag") in ("is_forward", "must_be_in_forward")


def repeats_a_product(nodes: Iterable[torch.fx.Node]) -> bool:
    """Whether a matmul, a convolution or an attention of forward is among these nodes of a backward graph."""
    return any(is_forward(node) and _is_product(node.target) for node in nodes)


def _is_product(target: Any) -> bool:
    packet = getattr(target, "overloadpacket", None)
    return packet in flop_counter.flop_registry or "scaled_dot_product" in str(packet)  # CPU's attention is not registered


def rename(node: torch.fx.Node, name: str) -> None:
    """Gives a node a name, or one like it where that is taken. Seen: 2.11, 2.13."""
    node._rename(name)


def is_view(target: Any) -> bool:
    """True of an op whose result shares memory with its input. Seen: 2.11, 2.13."""
    schema = schema_of(target)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def gives_nothing(target: Any) -> bool:
    """True of an op without a result, such as the check of a size that is not known before. Seen: 2.11, 2.13."""
    schema = schema_of(target)
    return schema is not None and not schema.returns


_ASSIGNS = "assign_to_params_buffers"


def assigns(metadata: dict[str, Any]) -> bool:
    """Whether load_state_dict, which hands a module's hooks this, was given assign=True. Seen: 2.11, 2.13."""
    return bool(metadata.get(_ASSIGNS, False))


def forget_assigned(metadata: dict[str, Any]) -> None:
    """torch leaves it in the state dict, whose next load would assign too. Seen: 2.11, 2.13."""
    metadata.pop(_ASSIGNS, None)


def keep_last(module: torch.nn.Module, hook: int | None) -> None:
    """Calls a hook before load_state_dict (a handle's id) behind those that were registered after it. Seen: 2.11, 2.13."""
    if hook in module._load_state_dict_pre_hooks:
        module._load_state_dict_pre_hooks.move_to_end(hook)  # type: ignore[attr-defined]


def decompositions_of(packets: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """torch's own decompositions of these ops, by overload; what has none is left out. Seen: 2.11, 2.13."""
    return dict(get_decompositions(packets))


def share_memory(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """True if some result lies in the memory of another, or of one of `others`; fake tensors have memory in this
    sense too. Seen: 2.11, 2.13."""
    taken = list(map(storage_of, results))
    return len(set(taken)) < len(taken) or bool(set(taken) & set(map(storage_of, others)))


def leave_open(tensor: torch.Tensor, dimension: int) -> None:
    """Makes Dynamo trace with a symbol for this size, where the traced code lets it. Seen: 2.11, 2.13."""
    torch._dynamo.maybe_mark_dynamic(tensor, dimension)


@dataclass(frozen=True)
class Tracing:
    """A trace that goes on after Dynamo's own: graphs that it gave can be taken through AOTAutograd in it, within the
    backend or when that has returned. Seen: 2.11, 2.13."""

    mode: FakeTensorMode

    @staticmethod
    def here() -> Tracing:
        """Of the trace whose backend this is called in."""
        mode = torch._guards.TracingContext.get().fake_mode
        assert mode is not None
        return Tracing(mode)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, AOTAutograd may compile another graph than the one that Dynamo gave, and tensors made are fake, of the
        kind that it needs."""
        with torch._guards.tracing(torch._guards.TracingContext(self.mode)):
            yield

    def guards(self) -> list[Any]:
        """What the trace took for granted of the sizes that it left open: sympy relations."""
        env = self.mode.shape_env
        return [env.replace(guard.expr) for guard in env.guards] if env is not None else []

    def like(self, example: Any, shape: Sequence[Any] | None = None) -> Any:
        """A fake tensor for AOTAutograd like one of Dynamo's trace, which has a mode of its own; a size stays as it is.
        shape: another, laid out densely."""
        if not isinstance(example, torch.Tensor):
            return example
        with self.mode:
            if shape is not None:
                made = torch.empty(shape, dtype=example.dtype, device=example.device)
            else:
                made = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
            return made.requires_grad_(example.requires_grad)


def entering_again(patches: Mapping[str, Any]) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Gives what enters this compilation once more when it has ended, for code that turns out to be needed then. patches: of Inductor's
    configuration. Seen: 2.11, 2.13."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor import config

    tracing = torch._guards.TracingContext.try_get()

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with compile_lock, torch._guards.tracing(tracing), torch._C._DisableAutocast(), config.patch(dict(patches)):
            yield

    return entered


def inductor_alone(gm: torch.fx.GraphModule, **kwargs: Any) -> Callable[[list[Any]], Any]:
    """Inductor's compilation of a graph that stands alone: all its outputs keep the strides of the graph's fake values,
    where those that one AOTAutograd graph saves for another need not. Seen: 2.11, 2.13."""
    output = gm.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
    examples = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    return inner_inductor(gm, examples, **kwargs)  # type: ignore[no-any-return]


def leave_as_they_lie(graph: torch.fx.Graph, inputs: set[torch.fx.Node]) -> None:
    """Where these inputs are among the results, Inductor gives them as they are, and not a copy laid out for a convolution
    (channels last) that they lead to. Seen: 2.11, 2.13."""
    output = graph.output_node()
    results: Any = output.args[0]
    given = [i for i, node in enumerate(results) if node in inputs]
    output.meta["user_visible_output_idxs"] = [*output.meta.get("user_visible_output_idxs", ()), *given]


def boxed(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The graph as Python code that takes its inputs in a list, which it empties, and lets go of every value after its
    last use. Seen: 2.11, 2.13."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    return gm.forward


@contextlib.contextmanager
def without_autograd_cache() -> Iterator[None]:
    """AOTAutograd's cache would skip our passes on a warm start; Inductor's own cache stays on."""
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def leave_what_is_saved() -> None:
    """In a compilation of a backward: what forward saved is as it was behind it. Else generated code may write in its place, and torch refuses
    a backward that keeps the graph where the first one of that graph did not. Seen: 2.11, 2.13."""
    context: Any = torch._guards.TracingContext.try_get()
    donated = getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None)
    if donated:
        donated.clear()  # in place: AOTAutograd has it under two names


def code_when_called() -> contextlib.AbstractContextManager[None]:
    """Graphs that torch makes in here write their Python code when somebody calls them, which takes a third of the time of a cut. Seen:
    2.11, 2.13."""
    return _use_lazy_graph_module(True)


def without_repeats(joint: torch.fx.Graph) -> torch.fx.Graph:
    """A copy of a joint graph as torch's partitioner makes one before it parts it: what is computed twice is there once. Nodes have the
    names that they had. Seen: 2.11, 2.13."""
    from torch._functorch.compile_utils import fx_graph_cse

    return fx_graph_cse(joint)  # type: ignore[no-any-return]


def repeats_stay() -> contextlib.AbstractContextManager[None]:
    """A partition in here joins nothing that is computed twice. By itself torch leaves only calls of operators that it knows to draw: not
    `randn_like`, `uniform`, `rrelu`, nor operators of the user's own. Seen: 2.11, 2.13."""
    return torch._functorch.config.patch(cse=False)  # type: ignore[no-any-return]


@contextlib.contextmanager
def random_states_are_tensors() -> Iterator[None]:
    """A partition in here saves a GPU's random state as a tensor, where a random op is repeated in backward. As torch does it, as a
    generator that AOTAutograd winds back, a graph has one more input, which only AOTAutograd's own callable gives; and it draws from a
    copy of the generator, so other numbers than without repeating. Seen: 2.11, 2.13; without effect on CPUs."""
    with torch._functorch.config.patch(graphsafe_rng_functionalization=False):
        yield


@contextlib.contextmanager
def without_budgets(joint: torch.fx.GraphModule) -> Iterator[None]:
    """A partition of this joint graph in here saves what it would where nobody has said how much of its activations may be saved: not
    by `activation_memory_budget` or `aggressive_recomputation`, nor around what forward computes (torch 2.13). Seen: 2.11, 2.13."""
    graphs = [inner for inner in joint.modules() if isinstance(inner, torch.fx.GraphModule)]
    for node in (node for inner in graphs for node in inner.graph.nodes):
        node.meta.pop("memory_budget", None)
        if _BUDGET in (custom := node.meta.get("custom", {})):
            node.meta["custom"] = {key: value for key, value in custom.items() if key != _BUDGET}
    with torch._functorch.config.patch(activation_memory_budget=1.0, aggressive_recomputation=False):
        yield


_BUDGET = "_region_activation_memory_budget"  # what `torch.autograd.graph.region_activation_memory_budget` leaves in the meta of nodes


def put_random_states_first(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule) -> None:
    """Mends the order of what a partitioned forward saves. For each random op that backward repeats, the partitioner
    saves the generator's state behind opaque objects (a DTensor's mesh, from torch 2.12 on); AOTAutograd takes all
    tensors first. Seen: 2.13; without effect on 2.11. The state's size, for which a trace has a symbol, is made a number.
    """
    inputs = backward.graph.find_nodes(op="placeholder")
    states = _given_states(backward)
    for state in (*states, *_saved_states(forward)):
        int(state.meta["val"].shape[0])
    objects = [n for n in inputs if isinstance(n.meta["val"], FakeScriptObject)]
    if not states or not objects:
        return
    for node in reversed(objects):
        states[-1].append(node)
    output = forward.graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    end = next(i for i in range(len(values), 0, -1) if isinstance(values[i - 1].meta["val"], torch.Tensor))
    middle, start = end - len(states), end - len(states) - len(objects)
    values[start:end] = values[middle:end] + values[start:middle]
    output.args = (tuple(values),)


def random_states(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    """The random states that a partitioned forward saves, each with the input of backward that it is. Seen: 2.11, 2.13."""
    return list(zip(_saved_states(forward), _given_states(backward)))


def _saved_states(forward: torch.fx.GraphModule) -> list[torch.fx.Node]:
    calls = [n for n in forward.graph.nodes if str(n.target) == "run_and_save_rng_state"]
    return [user for call in calls for user in call.users if user.args[1] == 0]


def _given_states(backward: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [n for n in backward.graph.find_nodes(op="placeholder") if n.name.startswith("rng_state_output")]


class RandomCall(NamedTuple):
    """A call of an operator that may draw numbers. saves: beside what it gives, the state that it began with."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    saves: bool


def random_call(node: torch.fx.Node) -> RandomCall | None:
    """What a partitioned graph calls under a random state that is saved or given again; None of any other call. Where states
    are generators, as for CUDA graphs, they are told apart from outside, and nothing is saved. Seen: 2.11, 2.13."""
    if getattr(node.target, "namespace", "") != "higher_order":  # nearly all: every look at an operation's work asks this
        return None
    from torch._prims import rng_prims

    kwargs = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
    if node.target in (rng_prims.run_and_save_rng_state, rng_prims.graphsafe_run_with_rng_state):
        return RandomCall(node.args[0], node.args[1:], kwargs, node.target is rng_prims.run_and_save_rng_state)
    if node.target is rng_prims.run_with_rng_state:
        return RandomCall(node.args[1], node.args[2:], kwargs, False)
    return None


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What transforms of functions (torch.vmap, torch.func.grad) work on, of a tensor in them; any other, itself. Seen: 2.11, 2.13."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def times_written(tensor: torch.Tensor) -> int:
    """How often something wrote in place to a tensor, or to one that it is a view of. Seen: 2.11, 2.13."""
    return tensor._version


def backward_here() -> int:
    """A number of the backward that runs in this thread, another for each; -1 outside of one, and in compiled autograd. Seen: 2.11, 2.13."""
    return torch._C._current_graph_task_id()


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether something waits for a parameter's gradient, or is called with it. Seen: 2.11, 2.13."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called. Seen: 2.11, 2.13."""
    return getattr(module, "_compiled_call_impl", None) is not None


def compile_in_place(module: torch.nn.Module, backend: Callable[..., Any]) -> None:
    """`module.compile()`, also of one whose forward is torch.nn's, into which Dynamo does not look where nothing is around it; what
    torch.compile(module) puts around that it does not put here. Seen: 2.11, 2.13."""
    module.compile(backend=backend)
    if trace_rules.check(module.forward):

        def call(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        call.__wrapped__ = module  # type: ignore[attr-defined]  # as of what torch.compile(module) has around it
        module._compiled_call_impl = torch.compile(call, backend=backend)


def schema_of(operator: Any) -> Any:
    """What an operator takes and returns; None of what is none of torch's operators. Seen: 2.11, 2.13."""
    return getattr(operator, "_schema", None)


def storage_of(tensor: torch.Tensor) -> int:
    """What tensors have in common that share memory; of fake ones too, which lie nowhere, and of those inside a transform of
    functions. Seen: 2.11, 2.13."""
    return int(unwrapped(tensor).untyped_storage()._cdata)


def job_store(prefix: str) -> Any:
    """The key-value store of the default process group (torch.distributed.Store), keys under `prefix`."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    return PrefixStore(prefix, _get_default_store())


def forget_meshes() -> None:
    """Empties what DTensor remembers of meshes: it finds them by shape, so those of groups that are gone too, and keeps these groups and
    their store. Seen: 2.11, 2.13."""
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    clear_redistribute_planner_cache()
    _clear_sharding_prop_cache()


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that graphs call by this name. Seen: 2.11, 2.13."""
    found: dist.ProcessGroup = torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return found


def register_work(tensor: torch.Tensor, work: Any) -> None:
    """Makes `wait_tensor` of this tensor wait for this too. Seen: 2.11, 2.13."""
    torch._C._distributed_c10d._register_work(tensor, work)


def transport_of(device_type: str) -> str:
    """What carries the messages of tensors on such devices among all processes ("gloo", "nccl"); "" if nothing does. A group may
    have several, and one that was not asked for any has them too. Seen: 2.11, 2.13."""
    everyone: Any = dist.group.WORLD
    try:
        return str(everyone._get_backend(torch.device(device_type)).name())
    except RuntimeError:
        return ""


def gloo_in_turn() -> str:
    """The name of a backend that is gloo with one worker thread, for groups beside torch's own of gloo; sends of even and of odd tags
    go by connections of their own, each served by a thread. Seen: 2.11, 2.13.

    [Note: gloo in turn] With more threads (torch's choice is two) gloo crashes now and then, or stands still, while
    several collectives of a group are on their way: `bench/gloo_race.py` shows it in plain torch. One thread carries
    them out one after the other, still beside the computation, and two would share the same link anyway.
    """
    name = "gloo_in_turn"
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, _gloo_of_one_thread, devices=["cpu"])
    return name


def _gloo_of_one_thread(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """What `Backend.register_backend` takes. timeout: of the group that is made."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]  # as torch reads it
    makes = [functools.partial(gloo.create_device, interface=name) for name in names] or [gloo.create_default_device]
    options._devices = [make() for make in makes for _ in range(2)]  # gloo takes the one whose number is the tag's remainder
    options._threads, options._timeout = 1, timeout
    group: dist.ProcessGroupGloo = gloo(store, rank, size, options)
    return group


def emit_artifact(name: str, payload: Callable[[], str]) -> None:
    """Puts a text into torch's structured trace (TORCH_TRACE, shown by tlparse). Free when that is off."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload
    )
