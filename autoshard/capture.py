"""Reading a model without running it: what `plan` and the command line do instead of a first call.

[Note: What is captured] A copy without values is traced, whose modules show their parameters as sharded ones do, so the
graph has the logical ops that a job's second trace would have, and what a compute dtype casts. The layouts in it stand
for any plan's; a rehearsal writes a plan's own into them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from autoshard import torch_internals
from autoshard.console import doing
from autoshard.cost_model.sizes import Open
from autoshard.errors import AutoshardError, UnsupportedError, first_line
from autoshard.inventory import (
    Inventory,
    in_order_of_last_use,
    names_of,
    refuse_lazy,
    rows_looked_up,
    take_inventory,
)
from autoshard.open_sizes import Opened, leave_open, what_stayed_open
from autoshard.ops.layout import Layout
from autoshard.passes.expand_unshards import expand_unshards
from autoshard.passes.hoist_unshards import hoist_unshards
from autoshard.passes.inline_regions import inline_regions
from autoshard.runtime.accumulation import Accumulation
from autoshard.runtime.shard import show_as_sharded
from autoshard.torch_internals import FakeTensorMode, ThroughDynamo, Tracing


@dataclass(frozen=True)
class Capture:
    """A model's first graph, of fake tensors.

    parameters, buffers: the names of graph inputs that are these, by position. tracing: where more can be traced of it.
    open: the sizes that the graph leaves open.
    """

    inventory: Inventory
    graph: GraphModule
    inputs: tuple[Any, ...]
    parameters: dict[int, str]
    buffers: dict[int, str]
    tracing: Tracing
    open: Open = field(default_factory=Open)

    @property
    def named_inputs(self) -> dict[Node, str]:
        """The graph's inputs that are parameters, with their names."""
        places = self.graph.graph.find_nodes(op="placeholder")
        return {place: self.parameters[i] for i, place in enumerate(places) if i in self.parameters}


class _Captured(ThroughDynamo):
    """Ends the trace: what it gave is here."""

    def __init__(self, graph: GraphModule, inputs: Sequence[Any], tracing: Tracing, broken: bool) -> None:
        super().__init__("captured")
        self.graph, self.inputs, self.tracing, self.broken = graph, inputs, tracing, broken


def capture(model: nn.Module, example_inputs: Any, compute: torch.dtype | None = None, open: bool = False) -> Capture:
    """The graph of `model` called on `example_inputs`: a tensor, a tuple of arguments, or a dict of keywords. open: for
    any batch, and any number of tokens, where it lets them be open."""
    model, (args, kwargs) = torch_internals.original_of(model), as_call(example_inputs)
    try:
        found = capture_call(model, args, kwargs, compute, open)
        if not open and found.inventory.covered < 1 and torch_internals.graph_break(found.graph) is None:
            _call_without_values(model, args, kwargs)
        return found
    except AutoshardError:
        raise
    except Exception as error:
        cause = torch_internals.first_cause(error)
        legal = "a tensor, a tuple of arguments, or a dict of keywords" if isinstance(cause, TypeError) else "those that its forward takes"
        raise UnsupportedError(f"{type(model).__name__} cannot be called with these example inputs: {first_line(cause)}; legal: {legal}") from error


def capture_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    compute: torch.dtype | None = None,
    open: bool = False,
) -> Capture:
    """The graph of this call of `model`.

    compute: the dtype of gathered parameters; None: their own. open: see `open_sizes.leave_open`. The model may be on any
    device, meta too; neither it nor the inputs are changed or run, and nothing is allocated. UnsupportedError if
    torch.compile finds no graph in it, or first one without parameters.
    """
    doing(f"tracing {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise UnsupportedError(f"{type(model).__name__} has no parameters; there is nothing to plan")
    for named in model.named_parameters():
        refuse_lazy(*named)
    with FakeTensorMode(allow_non_fake_inputs=True):
        shadow = _without_values(model)
        args, kwargs = tree_map_only(Tensor, _empty_like, (args, kwargs))
        (args, kwargs), opened = leave_open((args, kwargs)) if open else ((args, kwargs), [])
        show_as_sharded(shadow, Layout("shard", 2, (), "", 2, compute), Accumulation())
        found = _trace(shadow, args, kwargs, opened)
    if found is None:
        raise UnsupportedError(
            f"torch.compile found no graph in {type(model).__name__}; is its forward skipped by Dynamo (nn.LSTM)?"
        )
    if not found.parameters:
        raise UnsupportedError(
            f"{type(model).__name__}: its graph breaks before it uses any parameter, so there is no step to predict; "
            "TORCH_LOGS=graph_breaks says where it breaks"
        )
    return found


def _call_without_values(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Where forward raises, Dynamo gives the graph of what was called before that. Forward's own exception comes from calling it; what asks
    for values says so by a RuntimeError or a TypeError, of a model that may be right. On CPUs alone: a user's kernel takes addresses."""
    if any(p.device.type not in ("cpu", "meta") for p in model.parameters()):
        return
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(RuntimeError, TypeError), torch.compiler.set_stance("force_eager"):
        args, kwargs = tree_map_only(Tensor, _empty_like, (args, kwargs))
        _without_values(model)(*args, **kwargs)


def _trace(shadow: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], opened: Sequence[Opened]) -> Capture | None:
    """The first graph that Dynamo gives."""

    def read(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        broken = torch_internals.graph_break(gm) is not None or torch_internals.runs_in_python(shadow)
        raise _Captured(gm, inputs, Tracing.here(), broken)

    torch_internals.ignore_messages_given_once()
    try:
        # other sizes as they are: Dynamo would take for open what differs from an earlier trace of the same code
        with torch_internals.raising_errors():  # of which the capture is one
            torch.compile(shadow, backend=read, dynamic=False)(*args, **kwargs)
    except _Captured as captured:
        return _captured(shadow, captured, opened)
    return None


def _captured(shadow: nn.Module, captured: _Captured, opened: Sequence[Opened]) -> Capture:
    parameters, buffers = names_of(shadow), {id(b): name for name, b in shadow.named_buffers()}
    inputs = captured.inputs
    expand_unshards(captured.graph)
    inline_regions(captured.graph)
    hoist_unshards(captured.graph)  # where everybody looks for them
    places = captured.graph.graph.find_nodes(op="placeholder")
    shown = {id(each.tensor) for each in opened}
    return Capture(
        inventory=take_inventory(
            shadow,
            [x for x in inputs if isinstance(x, nn.Parameter)],
            in_order_of_last_use(captured.graph, inputs),
            rows_looked_up(captured.graph, inputs),
            captured.broken,
        ),
        graph=captured.graph,
        inputs=tuple(p.meta["example_value"] if id(x) in shown else x for x, p in zip(inputs, places)),
        parameters={i: parameters[id(x)] for i, x in enumerate(inputs) if id(x) in parameters},
        buffers={i: buffers[id(x)] for i, x in enumerate(inputs) if id(x) in buffers},
        tracing=captured.tracing,
        open=what_stayed_open(opened, inputs, places),
    )


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from the forms that example inputs may have."""
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def _empty_like(tensor: Tensor) -> Tensor:
    device = "cpu" if tensor.is_meta else tensor.device
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


class _WithoutValues(TorchFunctionMode):
    """Copies of tensors have none: buffers, and what a module holds beside them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        return _empty_like(args[0]).requires_grad_(args[0].requires_grad)


def _without_values(model: nn.Module) -> nn.Module:
    """A copy whose tensors are fake: shapes, dtypes and ties, no memory."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_empty_like(parameter), requires_grad=parameter.requires_grad)
    try:
        with _WithoutValues():
            return copy.deepcopy(model, memo)
    except Exception as error:  # of whatever the user's modules hold
        raise UnsupportedError(
            f"{type(model).__name__} cannot be planned, since copy.deepcopy fails of it "
            f"({first_line(error)}); legal: modules whose attributes can be copied"
        ) from error
