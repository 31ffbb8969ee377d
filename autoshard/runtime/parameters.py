"""Parameters at rest, and how a trace sees them.

[Note: What a module shows]
A module whose parameters are sharded gets a subclass of its class with one property a parameter. While
torch.compile traces, the property is `unshard_parameter(parameter)`, of which the graph then gets `unshard(local rows)`; at any
other time it is the parameter itself, so optimizers, nn.init, printing and state_dict see what is there.
There is one subclass for each (class, names and layouts): a class of its own for each module would make
Dynamo's guards several times slower. Where a model is compiled in pieces, modules of one class share graphs, and for which of
them one was compiled differs between processes, as the sizes that they meet do. So those have classes apart of which the plan
says other things by the names of their parameters: which copies backward gathers again, which gradients travel as rows.

[Note: Forward outside of a graph]
Where a graph break leaves a frame to Python, Dynamo compiles what that frame calls. The subclass's `forward` is
such a frame, so the module becomes a graph of its own, with its gathers and reductions. If it is not compiled
even so (a recompile limit was hit, or the module that torch.compile was given is called and not what it
returned), `forward` refuses to run: on rows it would be wrong, and on whole parameters nothing would average
their gradients. What forward itself raises while Dynamo traces it has the same look: Dynamo leaves that frame to Python, to raise it
there. So it runs there, until it asks for a parameter: what it raises before that is its own, and Dynamo is made to look at it again.
The functions of each subclass have code objects of their own, since Dynamo counts compilations by them.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Collection, Sequence
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from autoshard import torch_internals
from autoshard.errors import AutoshardError, StaleParameterError, UnsupportedError
from autoshard.ops import logical  # noqa: F401  (registers the logical ops)
from autoshard.ops.unshard_parameter import unshard_parameter
from autoshard.runtime.accumulation import Accumulation
from autoshard.runtime.holder import takes_part
from autoshard.runtime.residue import RESIDUES
from autoshard.torch_internals import WithStatistics

LOADING = "_autoshard_loading"  # of a module: the id of the hook by which rows are made of what is loaded


def _as_traced(
    module: nn.Module, name: str, layout: str, accumulation: Accumulation
) -> Tensor:
    """The expression that a trace finds in the place of a parameter, of which more than its layout counts."""
    parameter = module._parameters[name]
    assert isinstance(parameter, nn.Parameter)
    holders = module.__dict__["_autoshard_holders"]
    holds = name in holders and parameter.requires_grad
    if holds and accumulation.mode == "hold":
        full = torch.ops.autoshard.unshard(_rows(module, name, parameter).detach(), list(parameter.shape), layout, "")
        return torch.ops.autoshard.hold(full, holders[name])  # type: ignore[no-any-return]
    full = _whole(module, name, parameter, layout)
    residues = module.__dict__[RESIDUES]
    if name in residues and parameter.requires_grad:
        full = torch.ops.autoshard.low_rank(full, residues[name].error, residues[name].factor, layout, "")
    if holds and accumulation.mode == "flush" and takes_part(parameter):
        held = parameter.grad
        held = held.to_local() if isinstance(held, DTensor) else held
        return torch.ops.autoshard.add_held(full, held)  # type: ignore[no-any-return]
    return full


def _whole(module: nn.Module, name: str, parameter: nn.Parameter, layout: str) -> Tensor:
    """The parameter, gathered; its gradient goes to the rows."""
    if name in module.__dict__["_autoshard_absent"]:
        return torch.ops.autoshard.unshard(_rows(module, name, parameter), list(parameter.shape), layout, "")  # type: ignore[no-any-return]
    return unshard_parameter(parameter, layout)


def _rows(module: nn.Module, name: str, parameter: nn.Parameter) -> Tensor:
    """This process's rows. Where a mesh excludes this process, a leaf without rows stands in: the process takes
    part in the collectives, and the gradient of nothing must have somewhere to go (DTensor has no place for it).
    """
    absent = module.__dict__["_autoshard_absent"]
    if name in absent:
        return absent[name]
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _as_it_is(module: nn.Module, name: str, accumulation: Accumulation) -> nn.Parameter | None:
    if threading.get_ident() in accumulation.outside:
        raise _Used
    if name not in module._parameters:  # it is about to become something else, of which `hasattr` may be asked
        raise AttributeError(name)
    return module._parameters[name]


def _refuse_change(module: nn.Module, name: str) -> NoReturn:
    raise UnsupportedError(
        f"parameter {name!r} of a {type(module).__name__} cannot become something else after the first call; legal: prune, parametrize "
        "and the like before it (PEFT's target_parameters do so in each forward), and their removal in a plain model that loads "
        "autoshard.state_dict"
    )


def _property(name: str, layout: str, alone: bool, accumulation: Accumulation, own_dtype: bool = False) -> property:
    """alone: its layout says all of the parameter. own_dtype: it is used beside statistics. Dynamo follows what is asked of each, so no more
    is asked than that takes."""

    def get(module: nn.Module) -> Tensor | None:
        if not torch.compiler.is_compiling():
            return _as_it_is(module, name, accumulation)
        parameter = module._parameters[name]
        if accumulation.gathered or not isinstance(parameter, nn.Parameter):
            return parameter  # it may be None, or what torch.func.functional_call puts there for a call: whole, and nobody's rows
        whole = unshard_parameter(parameter, layout) if alone else _as_traced(module, name, layout, accumulation)
        return whole.to(parameter.dtype) if own_dtype else whole

    return property(_with_own_code(get), lambda module, _: _refuse_change(module, name))


def _forward(cls: Any, compute: torch.dtype | None, accumulation: Accumulation) -> Callable[..., Any]:
    """See [Note: Forward outside of a graph]. With a compute dtype, in which gathered parameters then are, floating
    inputs are taken to it."""
    inner = cls.forward
    as_python = _untraced(inner)

    def cast(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(compute) if floating else value

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if compute is not None and not accumulation.gathered:
            args, kwargs = tree_map(cast, (args, kwargs))
        if not torch.compiler.is_compiling() and not accumulation.gathered and _stands_outside(self):
            _outside(self, functools.partial(as_python, self, *args, **kwargs), accumulation)
        return inner(self, *args, **kwargs)

    return _with_own_code(forward)


def _untraced(function: Any) -> Any:
    """A copy into which Dynamo does not look, while it does into what that calls."""
    if not isinstance(function, FunctionType):
        return function
    copied = FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return torch.compiler.disable(copied, recursive=False)


def _with_own_code(function: Any) -> Any:
    """The function; what Dynamo keeps of its code is of no other's."""
    function.__code__ = function.__code__.replace()
    return function


class _Used(BaseException):
    """A parameter was asked for outside of any graph; no user's `except Exception` is meant."""


def _stands_outside(module: nn.Module) -> bool:
    parameters = [p for p in module._parameters.values() if p is not None]
    return any(isinstance(p, DTensor) for p in parameters) or _is_trained(parameters)


def _is_trained(parameters: Sequence[nn.Parameter]) -> bool:
    return torch.is_grad_enabled() and any(p.requires_grad for p in parameters)


@functools.partial(torch.compiler.disable, recursive=False)  # type: ignore[untyped-decorator]
def _outside(module: nn.Module, forward: Callable[..., Any], accumulation: Accumulation) -> NoReturn:
    """Forward, as Python runs it: raises what it raises before it asks for a parameter, or else UnsupportedError."""
    within, here = accumulation.outside, threading.get_ident()
    accumulation.outside = within | {here}
    try:
        forward()
    except _Used:
        pass  # which is what UnsupportedError says
    except AutoshardError:
        raise
    except Exception:
        torch_internals.look_again()
        raise
    finally:
        accumulation.outside -= {here} - within
    trained = _is_trained([p for p in module._parameters.values() if p is not None])
    raise UnsupportedError(
        f"{type(module).__name__}, which autoshard {'trains' if trained else 'sharded'}, was called outside of any "
        "compiled graph. Call what torch.compile returned, or compile in place with model.compile(backend=...); for "
        "generate or evaluation in eager enter `with autoshard.gathered(model):` on all processes. If Dynamo gave up "
        "compiling it (at its recompile_limit, at torch.compiler.disable or set_stance, under a TorchDispatchMode such as FlopCounterMode, at an "
        "error that forward raises, or at a graph break inside of torch.utils.checkpoint, all of which torch then runs without Dynamo), see "
        "TORCH_LOGS=recompiles,graph_breaks"
    )


def sharded_class(
    cls: type,
    layouts: tuple[tuple[str, str, bool], ...],
    compute: torch.dtype | None,
    accumulation: Accumulation,
    planned: tuple[object, ...] = (),
) -> type:
    """The subclass of `cls` whose parameters, (name, layout, whether that says all) each, a trace sees as `unshard`; one for all
    modules of a model that are alike. planned: what the plan says of each parameter that no layout does."""
    key = (cls, layouts, planned)
    if key not in accumulation.classes:
        accumulation.classes[key] = _make_class(cls, layouts, compute, accumulation, planned)
    return accumulation.classes[key]


def _make_class(
    cls: type,
    layouts: tuple[tuple[str, str, bool], ...],
    compute: torch.dtype | None,
    accumulation: Accumulation,
    planned: tuple[object, ...],
) -> type:
    # statistics are buffers, which stay in their dtype, and torch takes no weight of another one beside them (seen: CPUs)
    own_dtype = compute is not None and issubclass(cls, WithStatistics)
    body: dict[str, Any] = {
        name: _property(name, layout, alone, accumulation, own_dtype)
        for name, layout, alone in layouts
    }
    body["__reduce_ex__"] = _refuse_pickle
    body["_register_load_state_dict_pre_hook"] = _registering(cls)
    body["__delattr__"] = _deleting(cls, {name for name, *_ in layouts})
    body["__deepcopy__"] = _copying(lambda other: sharded_class(cls, layouts, compute, other, planned), accumulation)
    if callable(getattr(cls, "forward", None)):
        body["forward"] = _forward(cls, compute, accumulation)
    return _named_alike(cls, body)


def _registering(cls: Any) -> Callable[..., Any]:
    """Hooks of a user's own (which give keys other names, say) come before the one that makes rows of what is loaded."""

    def register(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handle = cls._register_load_state_dict_pre_hook(module, *args, **kwargs)
        torch_internals.keep_last(module, module.__dict__.get(LOADING))
        return handle

    return register


class _Quiet:
    """A first base of subclasses of which no class of the user's is told."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Nothing: those of a user's classes register what is made of them, or ask for keywords."""


def _named_alike(cls: type, body: dict[str, Any]) -> type:
    """A subclass that goes by the name of `cls`, which may be one already."""
    bases = (cls,) if issubclass(cls, _Quiet) else (_Quiet, cls)
    return type(cls.__name__, bases, {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **body})


def _deleting(cls: Any, names: Collection[str]) -> Callable[[nn.Module, str], None]:
    """`del module.weight`, as parametrizations do before they put themselves there."""

    def delete(module: nn.Module, name: str) -> None:
        if name in names and name in module._parameters:
            _refuse_change(module, name)
        cls.__delattr__(module, name)

    return delete


def _refuse_pickle(module: nn.Module, protocol: int) -> Any:
    raise UnsupportedError(
        f"a sharded {type(module).__name__} cannot be pickled: its parameters are rows of a job that is running. "
        "Save autoshard.state_dict(model) instead, which all processes call"
    )


def _copying(class_for: Callable[[Accumulation], type], accumulation: Accumulation) -> Callable[..., nn.Module]:
    """copy.deepcopy of a module: rows of its own, such as an average of the model keeps. No gradient waits there."""

    def deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        made: nn.Module = object.__new__(class_for(copy.deepcopy(accumulation, memo)))
        memo[id(module)] = made
        for parameter in module._parameters.values():
            _copy_parameter(parameter, memo)
        for key, value in module.__dict__.items():
            made.__dict__[key] = {} if key == "_autoshard_holders" else copy.deepcopy(value, memo)
        return made

    return deepcopy


def _copy_parameter(parameter: nn.Parameter | None, memo: dict[int, Any]) -> None:
    """Without its gradient, as torch copies a plain parameter; copy.deepcopy finds the copy in `memo`."""
    if parameter is not None and id(parameter) not in memo:
        made = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        memo[id(parameter)] = made


_HOW_IT_LIES = frozenset(
    ["__get__", "__set__", "size", "dim", "numel", "nelement", "stride", "storage_offset", "element_size", "untyped_storage", "data_ptr", "get_device", "is_contiguous", "is_floating_point", "is_complex"]
)


class StaleParameter(nn.Parameter):
    """What is left of a full parameter after sharding: empty, and loud when a loop still uses it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises: whatever is computed of it would be of nothing. How it lies may be asked, as those do who count memory."""
        if getattr(func, "__name__", "") not in _HOW_IT_LIES:
            raise _stale()
        return super(nn.Parameter, cls).__torch_function__(func, types, args, kwargs or {})

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """Raises: nothing ever arrives here."""
        raise _stale()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "StaleParameter(sharded by autoshard)"


def _stale() -> StaleParameterError:
    return StaleParameterError(
        "this parameter was sharded by autoshard and is empty now; a list made before the first call, or another module "
        "that shares it, still holds it. Take the parameters from model.parameters() again after the first call"
    )


def retire(parameter: nn.Parameter) -> None:
    """Marks a full parameter whose rows live elsewhere now; its storage has been freed."""
    parameter.__class__ = StaleParameter
