"""What forward asks of a module's exact type: a sharded module's is a subclass, so what was decided by that would be another, silently."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

from torch import nn

from autoshard.closures import named_around
from autoshard.errors import UnsupportedError


def refuse_exact_types(model: nn.Module) -> None:
    """UnsupportedError where a forward of the model compares a type with a class of modules with parameters, or looks it up in a table of
    the file. Not seen: two types that are compared, what functions do that forward calls, and tables that it makes itself."""
    owners = {type(module) for module in model.modules() if next(module.parameters(recurse=False), None) is not None}
    kinds: list[type[nn.Module]] = list(dict.fromkeys(map(type, model.modules())))
    for cls in kinds:
        if cls.__module__.partition(".")[0] == "torch" or not inspect.isfunction(forward := inspect.unwrap(cls.forward)):
            continue
        for line, asked in _asked(forward):
            if found := owners.intersection(asked):
                raise UnsupportedError(
                    f"{cls.__name__}.forward asks for the exact type of a module ({inspect.getsourcefile(cls)}:{line}), which of a sharded "
                    f"{found.pop().__name__} is a subclass of it; legal: isinstance"
                )


def _asked(forward: Callable[..., Any]) -> Iterator[tuple[int, list[Any]]]:
    """The lines where a type is compared or looked up, each with what it is compared with."""
    if not {"type", "__class__"}.intersection(_names(forward.__code__)):
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError):  # of no file, or a lambda in the middle of a line
        return
    for node in ast.walk(tree):
        sides = _beside_a_type(node)
        if sides:
            line = forward.__code__.co_firstlineno + node.lineno - 1  # type: ignore[attr-defined]
            yield line, [kind for side in sides for kind in _kinds(_value(side, forward))]


def _names(code: CodeType) -> Iterator[str]:
    """What it asks for, and what is inside of it (a comprehension, a lambda)."""
    yield from code.co_names
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            yield from _names(inside)


def _beside_a_type(node: ast.AST) -> list[ast.expr]:
    """What a type stands beside in a comparison, or the table that it is looked up in."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return [side for side in sides if not _is_type(side)] if any(map(_is_type, sides)) else []
    if isinstance(node, ast.Subscript) and _is_type(node.slice):
        return [node.value]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        return [node.func.value] if any(map(_is_type, node.args[:1])) else []
    return []


def _is_type(node: ast.expr) -> bool:
    """Whether it is `type(x)` or `x.__class__`."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1
    return called or (isinstance(node, ast.Attribute) and node.attr == "__class__")


def _value(node: ast.expr, forward: Callable[..., Any]) -> Any:
    """What a name, or a name in a module, stands for in the file of `forward`; None where that is not known before it runs."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return [_value(each, forward) for each in node.elts]
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, forward), node.attr, None)
    if isinstance(node, ast.Name):
        return named_around(forward).get(node.id, forward.__globals__.get(node.id))
    return None


def _kinds(value: Any) -> list[Any]:
    """The types in it: itself, or a table's keys."""
    inside = value if isinstance(value, list | tuple | set | frozenset | Mapping) else [value]
    return [kind for kind in inside if isinstance(kind, type)]
