"""Which module is being compiled, and which others with it: the backend is only given a graph and its inputs."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from autoshard import torch_internals
from autoshard.closures import held_by, reached_by
from autoshard.errors import UnsupportedError
from autoshard.family import Family, Several
from autoshard.heap import alive
from autoshard.runtime.state import state_of


def find_owner(inputs: Sequence[Any]) -> nn.Module | None:
    """The module that is being compiled: the innermost one on the stack that was given to torch.compile or
    called `.compile()` and owns a parameter of the graph; for a compiled function, the largest such module that
    the function can reach, or else the smallest anywhere that owns all of them, or else several that it reaches.

    A graph without parameters, such as one that makes a mask before a graph break, belongs to the compiled module on
    the stack, if it has parameters and had no first call: what comes after the break may not be in any graph, and must
    not run on whole parameters. None otherwise.
    """
    wanted = {id(x) for x in inputs if isinstance(x, nn.Parameter)}
    if not wanted:
        module = next(_compiled_modules_on_the_stack(), None)
        new = module is not None and state_of(module) is None and next(module.parameters(), None) is not None
        return module if new else None
    for module in _compiled_modules_on_the_stack():
        if wanted & {id(p) for p in module.parameters()}:
            return module
    owner = _reached_by_function(wanted) or _smallest_owner(wanted) or _together(wanted)
    if owner is None:
        raise UnsupportedError(
            "the compiled function uses parameters that no single nn.Module owns; legal: modules that it names or is called with, of which "
            "none had a first call by itself, or one nn.ModuleList of them"
        )
    return owner


def _reached_by_function(wanted: set[int]) -> nn.Module | None:
    """After a graph break the graph may be a child's."""
    owners = []
    for module in _modules_that_functions_reach():
        owned = {id(p) for p in module.parameters()}
        if wanted <= owned:
            owners.append((len(owned), module))
    return max(owners, key=lambda entry: entry[0])[1] if owners else None


def _modules_that_functions_reach() -> Iterator[nn.Module]:
    """Those that were compiled and run: what is around them, and their arguments, with what those hold."""
    for call in torch_internals.compiled_calls():
        arguments = (*call.arguments, *call.keywords.values())
        for value in (*reached_by(call.function), *arguments, *itertools.chain.from_iterable(map(held_by, arguments))):
            if isinstance(value, nn.Module):
                yield torch_internals.original_of(value)
            elif isinstance(value, list | tuple | dict):
                each = value.values() if isinstance(value, dict) else value
                yield from (torch_internals.original_of(one) for one in each if isinstance(one, nn.Module))


def _together(wanted: set[int]) -> nn.Module | None:
    """One that holds several which functions reach, and which own all together; None where one was sharded by itself."""
    found = dict.fromkeys(_modules_that_functions_reach())
    owners = [m for m in found if not wanted.isdisjoint(map(id, m.parameters()))]
    outermost = [m for m in owners if not any(m is not other and m in other.modules() for other in owners)]
    owned = {id(p) for m in outermost for p in m.parameters()}
    sharded = any((state := state_of(m)) is not None and not state.plan.leaves_alone for m in outermost)
    return Several(outermost) if wanted <= owned and not sharded else None


def call_of(module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What a compiled module that is running was called with; None if a function or another module was compiled."""
    for call in torch_internals.compiled_calls():
        if call.module is module:
            return call.arguments, call.keywords
    return None


def _compiled_modules_on_the_stack() -> Iterator[nn.Module]:
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, torch_internals.OptimizedModule):
            yield torch_internals.original_of(module)
        elif isinstance(module, nn.Module) and torch_internals.is_compiled_in_place(module):
            yield module
        frame = frame.f_back  # type: ignore[assignment]


def _smallest_owner(wanted: set[int]) -> nn.Module | None:
    owners = []
    for module in _modules():
        owned = {id(p) for p in module.parameters()}
        if wanted <= owned and not isinstance(module, torch_internals.OptimizedModule):
            owners.append((len(owned), module))
    return min(owners, key=lambda entry: entry[0])[1] if owners else None


def with_family(module: nn.Module) -> nn.Module:
    """`module`, or a Family of it and all others of its class in the same model that were compiled with the same
    backend and had no first call yet.

    With a backend each, each would have a graph of its own, and Dynamo keeps only so many for one function before it
    runs the rest uncompiled; UnsupportedError then.
    """
    everywhere = _modules()
    twins = {
        id(original): backend
        for original, backend in _compiled(everywhere)
        if type(original) is type(module) and state_of(original) is None
    }
    together = {key for key, backend in twins.items() if backend is twins.get(id(module))}
    limit = torch_internals.recompile_limit()
    if len(twins) > limit and len(together) < 2:
        raise UnsupportedError(
            f"{len(twins)} modules of class {type(module).__name__} were compiled with a backend each, of which Dynamo "
            f"compiles at most {limit}: make one `backend = autoshard.backend(config)` and give it to all of them"
        )
    root = _root_of(module, together, everywhere)
    members = [m for m in root.modules() if id(m) in together]
    return Family(members) if len(members) > 1 else module


def compiled_modules() -> Iterator[tuple[nn.Module, Any]]:
    """Each module that was given to torch.compile, or called `.compile()`, and its backend."""
    return _compiled(_modules())


def _compiled(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Any]]:
    for module in modules:
        backend = torch_internals.backend_of(module)
        if backend is not None:
            yield torch_internals.original_of(module), backend


def _root_of(module: nn.Module, wanted: set[int], everywhere: Sequence[nn.Module]) -> nn.Module:
    """Of `everywhere`, the module that holds `module` and the most of `wanted`."""

    def held(root: nn.Module) -> int:
        ids = {id(m) for m in root.modules()}
        return len(wanted & ids) if id(module) in ids else 0

    return max(everywhere, key=held) if len(wanted) > 1 else module


def _modules() -> list[nn.Module]:
    """Every module that there is, save those whose `__init__` is not there yet."""
    return [module for module in alive(nn.Module) if "_modules" in module.__dict__]
