"""Optimizer steps over all parameters of a group at once, in place, on this process's rows.

[Note: Fused steps] A step moves a few bytes a number and computes next to nothing, so it should read and write everything
once. On a GPU a Triton kernel that is generated from the optimizer's formulas takes it; on a CPU torch's own fused functions
do. State has torch.optim's keys, and the shapes and places that `fused=True` gives it there, so state dicts are
interchangeable.

[Note: Masters] A step changes a parameter by less than half a unit of its last place in bf16, and is lost. So an optimizer
may keep float32 copies of such parameters, its masters, in its state: it steps these, and the parameters are what they round
to. A parameter that is anything else was written by somebody since (a checkpoint that was loaded, an average that was swapped
in): then it counts, and its master is made of it anew.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autoshard import torch_internals
from autoshard.kernels import launcher, multi_tensor, source
from autoshard.kernels.multi_tensor import Kernel, Tensors
from autoshard.kernels.places import lies
from autoshard.kernels.rule import Rule, evaluate
from autoshard.runtime.counted import Counted
from autoshard.runtime.dtensors import local
from autoshard.runtime.families import FAMILIES, MASTER, Family, Options, Rows, keys_of
from autoshard.runtime.loaded import refuse_strange_state, scatter_loaded, values_of

_GRADIENT = operator.attrgetter("grad")
_HOW = ("dtype", "layout", "device")  # in what a gradient must be as its parameter is


@dataclass(frozen=True)
class Gradients:
    """What happens to gradients in passing: they are divided by `scale`; nothing is done where `infinite` is not 0."""

    scale: Tensor | None = None
    infinite: Tensor | None = None


@dataclass(eq=False)
class Launch:
    """What steps together. first: it is these parameters' first step. places: theirs among all that step. counted: their steps, where
    these are counted at once. plain: rows that are tensors of the loop's own, which `.data` leaves the same objects. order: the strides of
    those, where not all parameters' rows are contiguous."""

    options: dict[str, Any]
    first: bool
    parameters: list[nn.Parameter] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    rows: Rows = field(default_factory=Rows)
    counted: Counted | None = None
    plain: list[Tensor] = field(default_factory=list)
    order: list[tuple[int, ...]] | None = None
    sent: multi_tensor.Sent = field(default_factory=multi_tensor.Sent)

    @property
    def stays(self) -> bool:
        """Whether its rows and counts lie as they did."""
        if self.counted is not None and not self.counted.stays:
            return False
        return all(map(Tensor.is_contiguous, self.plain)) if self.order is None else _strides(self.plain) == self.order


@dataclass(frozen=True)
class Stepped:
    """The parameters that a step changes, group by group and all of them, their gradients, and this process's rows of both. To
    ask for them takes as long as to step hundreds of small parameters, so `take` does it once."""

    groups: list[list[nn.Parameter]]
    parameters: list[nn.Parameter]
    rows: list[Tensor]
    gradients: list[Any]
    gradient_rows: list[Tensor]

    @staticmethod
    def by(optimizer: Optimizer) -> Stepped:
        """Those with a gradient."""
        found = [_with_gradients(group["params"]) for group in optimizer.param_groups]
        groups = [parameters for parameters, _ in found]
        parameters, gradients = list(itertools.chain.from_iterable(groups)), [grad for _, each in found for grad in each]
        rows_of_each = torch_internals.rows_of_each
        return Stepped(groups, parameters, rows_of_each(parameters), gradients, rows_of_each(gradients))


def _with_gradients(parameters: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[Any]]:
    gradients = list(map(_GRADIENT, parameters))
    if all(map(operator.is_not, gradients, itertools.repeat(None))):
        return parameters, gradients
    return [p for p, grad in zip(parameters, gradients) if grad is not None], [grad for grad in gradients if grad is not None]


def stepped_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters that a step changes: those with a gradient."""
    return [p for group in optimizer.param_groups for p in _with_gradients(group["params"])[0]]


@dataclass(frozen=True, eq=False)
class Held:
    """An optimizer's launches, which take longer to lay out than to run. They hold as long as it has the same objects: seen, all of
    them. how: its parameters' rows are. plain: those that are parameters themselves, which a cast leaves the same objects."""

    seen: list[Any]
    how: list[list[Any]]
    plain: tuple[list[Tensor], list[list[Any]]]
    launches: list[Launch]

    @staticmethod
    def of(optimizer: Optimizer, family: Family, stepped: Stepped, launches: list[Launch]) -> Held:
        """Of what was laid out for a step."""
        plain: list[Tensor] = [rows for rows, parameter in zip(stepped.rows, stepped.parameters) if rows is parameter]
        return Held(_seen(optimizer, family, stepped), _how(stepped.rows), (plain, _how(plain)), launches)

    def holds(self, optimizer: Optimizer, family: Family, stepped: Stepped) -> bool:
        """Whether the next step goes by them too."""
        seen, (plain, how) = _seen(optimizer, family, stepped), self.plain
        same = len(seen) == len(self.seen) and all(map(operator.is_, seen, self.seen)) and _how(plain) == how
        return same and all(launch.stays for launch in self.launches)


_held: weakref.WeakKeyDictionary[Optimizer, Held] = weakref.WeakKeyDictionary()


def _seen(optimizer: Optimizer, family: Family, stepped: Stepped) -> list[Any]:
    """All objects that the layout of its step depends on. A rule is one object for the same options; a parameter that is
    moved or cast stays itself and gets other rows; one that goes to another group stands behind that one's."""
    by_group = zip(optimizer.param_groups, stepped.groups)
    groups = [each for group, parameters in by_group for each in (group, family.rule(group), *parameters)]
    values = values_of(optimizer)
    return [*groups, *optimizer.state, *values, *stepped.rows, *torch_internals.rows_of_each(values)]


def _how(rows: Sequence[Tensor]) -> list[list[Any]]:
    """A list for each of these; no tuple of each row, which would have Python collect garbage in each step."""
    return [list(map(operator.attrgetter(name), rows)) for name in _HOW]


def _strides(rows: Iterable[Tensor]) -> list[tuple[int, ...]]:
    return [each.stride() for each in rows]


def _is_dense(rows: Tensor) -> bool:
    """Whether its numbers fill the memory from the first to the last, in any order of dimensions, as channels_last does."""
    return rows.is_contiguous() or rows.permute(sorted(range(rows.dim()), key=rows.stride, reverse=True)).is_contiguous()


def _laid_as(grad: Tensor, rows: Tensor) -> Tensor:
    return grad if lies(grad, rows.stride()) else torch.empty_like(rows, dtype=grad.dtype).copy_(grad)


def _unfit(parameter: nn.Parameter, state: Mapping[str, Any], mastered: bool) -> str:
    rows = local(parameter)
    if rows.device.type not in ("cpu", "cuda") or rows.dtype not in multi_tensor.TYPES:
        return f"a parameter of shape {tuple(parameter.shape)} of {rows.dtype} on {rows.device.type}"
    if rows.is_cuda and launcher.lacking():
        return f"on a GPU without {launcher.lacking()}"
    states = [local(value) for key, value in state.items() if key != "step" and isinstance(value, Tensor)]
    if not all(_is_dense(v) and v.shape == rows.shape for v in (rows, *states)):
        return f"a parameter of shape {tuple(rows.shape)} that, or whose state, has gaps in memory or is not of that shape"
    cast = next((v.dtype for v in states if v.dtype != rows.dtype), rows.dtype)
    if rows.device.type == "cpu" and cast != rows.dtype and not (mastered and rows.dtype in multi_tensor.HALVES):
        return f"a parameter of shape {tuple(rows.shape)} that was cast to {rows.dtype} and its state not, which is {cast}"
    return ""


def while_captured() -> str:
    """Why no step is taken now; "" if none is captured."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "while a CUDA graph is captured, which would step with the learning rate of now at each replay"
    return ""


@torch_internals.untraced
@torch.no_grad()
def take(
    optimizer: Optimizer, family: Family, gradients: Callable[[], Gradients] = Gradients, interpret: bool = False
) -> str:
    """An optimizer's step; or why it was not taken, and no number was changed: what of all that it steps is not of a kind, or
    does not lie, as the kernels need it.

    gradients: asked for what happens to them once that is known. interpret: as on a GPU, on the CPU by Triton's interpreter;
    for tests.
    """
    if reason := while_captured():
        return reason
    stepped = Stepped.by(optimizer)
    held = before = _held.get(optimizer)
    if held is None or not held.holds(optimizer, family, stepped):
        scatter_loaded(optimizer)
        refuse_strange_state(optimizer)
        mastered = getattr(optimizer, "master_weights", False)
        if reason := next((r for p in stepped.parameters if (r := _unfit(p, optimizer.state.get(p, {}), mastered))), ""):
            return reason
        held = Held.of(optimizer, family, stepped, _launches(optimizer, family, stepped))
    if reason := _unfit_gradients(stepped, held.how):
        return reason
    _run(optimizer, family, held.launches, stepped, gradients(), interpret)
    # so that a graph of before the step, which may have saved either, does not go backward unnoticed
    torch.autograd.graph.increment_version([*stepped.parameters, *stepped.rows])
    if held is not before and not any(launch.first for launch in held.launches):
        _hold(optimizer, held)
    return ""


def _hold(optimizer: Optimizer, held: Held) -> None:
    """Until other state is loaded, beside which this would be a second one."""
    _held[optimizer] = held
    torch_internals.before_loading(optimizer, _forget_what_was)


def _unfit_gradients(stepped: Stepped, how: list[list[Any]]) -> str:
    if _how(stepped.gradient_rows) == how and torch_internals.lie_alike(stepped.gradients, stepped.parameters):
        return ""
    ours, given = (zip(*_how(rows)) for rows in (stepped.rows, stepped.gradient_rows))
    placements = (torch_internals.placements_of_each(tensors) for tensors in (stepped.parameters, stepped.gradients))
    for p, one, other, *at in zip(stepped.parameters, ours, given, *placements):
        if (one, at[0]) != (other, at[1]):
            return f"a parameter of shape {tuple(p.shape)}, {(*one, at[0])}, with a gradient that is {(*other, at[1])}"
    return ""


def _run(
    optimizer: Optimizer, family: Family, launches: list[Launch], stepped: Stepped, gradients: Gradients, interpret: bool
) -> None:
    for launch in launches:
        if launch.first and gradients.infinite is not None and bool(gradients.infinite):
            continue  # state begins with the first step that is taken
        rows = _with_state(optimizer, family, launch) if launch.first else launch.rows
        rows.grads = _gradients(stepped, launch)
        options = {**launch.options, **family.first} if launch.first else launch.options
        counts = rows.steps if launch.counted is None else [launch.counted.all]
        if counts:
            torch_internals.add_to_each(counts, 1.0 if gradients.infinite is None else 1.0 - gradients.infinite)
        if rows.params[0].device.type == "cpu" and not interpret:
            _on_cpu(family, options, rows, gradients)
        else:
            _on_gpu(family, options, rows, gradients, interpret, launch.sent)
        rows.grads = []  # which belong to the user


def _gradients(stepped: Stepped, launch: Launch) -> list[Tensor]:
    """Of its parameters, as these lie."""
    if launch.order is None:
        return [stepped.gradient_rows[i].contiguous() for i in launch.places]
    return [_laid_as(stepped.gradient_rows[i], stepped.rows[i]) for i in launch.places]


def _launches(optimizer: Optimizer, family: Family, stepped: Stepped) -> list[Launch]:
    """Of one device and dtypes each."""
    launches: dict[Any, Launch] = {}
    places = itertools.count()
    for i, (options, parameters) in enumerate(zip(optimizer.param_groups, stepped.groups)):
        for parameter in parameters:
            keys, state = keys_of(optimizer, family, options, parameter), optimizer.state.get(parameter, {})
            first = any(state.get(key) is None for key in keys if key != MASTER)
            if MASTER in keys and not first and state.get(MASTER) is None:  # a state that was kept without
                optimizer.state[parameter][MASTER] = _begun(parameter, MASTER, True)
                state = optimizer.state[parameter]
            _lay_out(state, parameter, keys)
            if "step" in state:  # torch counts on the CPU where a step is not fused
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)
            dtypes = () if first else tuple(state[key].dtype for key in keys)
            kind = (i, first, parameter.device, parameter.dtype, dtypes)
            launch = launches.setdefault(kind, Launch(options, first))
            launch.parameters.append(parameter)
            launch.places.append(next(places))
            if not first:
                _add(launch.rows, parameter, state, keys)
    own = {*map(id, stepped.parameters), *map(id, values_of(optimizer))}
    for launch in launches.values():
        rows = itertools.chain(launch.rows.params, launch.rows.copies, *launch.rows.states.values())
        launch.plain = [each for each in rows if id(each) in own]
        if not all(local(p).is_contiguous() for p in launch.parameters):
            launch.order = _strides(launch.plain)
        launch.counted = Counted.of(launch.rows.steps)
    return list(launches.values())


def _lay_out(state: dict[str, Any], parameter: nn.Parameter, keys: Iterable[str]) -> None:
    """As the parameter lies, which what was loaded from a file may not."""
    for key in keys:
        if key != "step" and (value := state.get(key)) is not None and not lies(local(value), local(parameter).stride()):
            state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _with_state(optimizer: Optimizer, family: Family, launch: Launch) -> Rows:
    """What is missing is zeros."""
    rows = Rows()
    for parameter in launch.parameters:
        keys, state = keys_of(optimizer, family, launch.options, parameter), optimizer.state[parameter]
        state.update({key: _begun(parameter, key, MASTER in keys) for key in keys if state.get(key) is None})
        _add(rows, parameter, state, keys)
    return rows


def _add(rows: Rows, parameter: nn.Parameter, state: Mapping[str, Any], keys: Sequence[str]) -> None:
    rows.params.append(local(state[MASTER] if MASTER in keys else parameter))
    if MASTER in keys:
        rows.copies.append(local(parameter))
    for key in keys:
        if key != MASTER:
            (rows.steps if key == "step" else rows.states[key]).append(local(state[key]))


def _begun(parameter: nn.Parameter, key: str, mastered: bool) -> Tensor:
    """What is kept of a parameter before its first step."""
    if key == "step":
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    if key == MASTER:
        return parameter.detach().to(torch.float32)
    return torch.zeros_like(parameter, dtype=torch.float32 if mastered else None)


def _on_cpu(family: Family, options: Options, rows: Rows, gradients: Gradients) -> None:
    if rows.copies:
        rows.grads = [grad.to(torch.float32) for grad in rows.grads]
        for master, copy in zip(rows.params, rows.copies):
            master.copy_(torch.where(master.to(copy.dtype) == copy, master, copy))
    _step_on_cpu(family, options, rows, gradients)
    for master, copy in zip(rows.params, rows.copies):
        copy.copy_(master)


def _step_on_cpu(family: Family, options: Options, rows: Rows, gradients: Gradients) -> None:
    if (step := family.function_for(rows.params[0].dtype)) is not None:
        if gradients.scale is not None:  # torch would leave its quotient in p.grad
            rows.grads = torch_internals.each_divided(rows.grads, gradients.scale)
        step(rows, options, gradients.infinite)
    elif gradients.infinite is None or not bool(gradients.infinite):
        _by_formulas(family.rule(options), family.settings(options), rows, gradients.scale)


def _by_formulas(step: Rule, settings: dict[str, float], rows: Rows, scale: Tensor | None) -> None:
    """Operation by operation, one parameter after the other."""
    for i, param in enumerate(rows.params):
        kept = {"param": param, **{key: values[i] for key, values in rows.states.items()}}
        precise = param.dtype if param.dtype is torch.float64 else torch.float32
        before = {name: value.to(precise) for name, value in kept.items()}
        grad = rows.grads[i].to(precise)
        after = evaluate(step, {**settings, **before, "grad": grad if scale is None else grad / scale})
        for name in step.written:
            kept[name].copy_(after[name])


def _on_gpu(family: Family, options: Options, rows: Rows, gradients: Gradients, interpret: bool, sent: multi_tensor.Sent) -> None:
    step, device = family.rule(options), rows.params[0].device
    scale, infinite = (None if t is None else t.to(device, torch.float32) for t in (gradients.scale, gradients.infinite))
    columns = {"param": rows.params, "grad": rows.grads, **rows.states}
    dtypes = tuple(values[0].dtype for values in columns.values())
    copied = rows.copies[0].dtype if rows.copies else None
    kernel = Kernel(step, dtypes, scale is not None, infinite is not None, copied)
    columns |= {"copy": rows.copies} if rows.copies else {}
    counted = torch.stack(rows.steps) if rows.steps else None
    with source.launching_on(device):
        multi_tensor.launch(kernel, family.settings(options), Tensors(columns, counted, scale, infinite), sent, interpret)


def is_laid_out(optimizer: Optimizer) -> bool:
    """Whether its last step was taken here, and it loaded nothing since."""
    return optimizer in _held


def forget(optimizer: Optimizer) -> None:
    """Lets go of the tensors that the optimizer had."""
    _held.pop(optimizer, None)


def _forget_what_was(optimizer: Optimizer, _: dict[str, Any]) -> None:
    forget(optimizer)


# --- in the place of torch.optim's own step

asked_for: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def steps_itself(optimizer: Optimizer) -> str:
    """How autoshard's own do, in words; "" of others."""
    return str(getattr(optimizer, "steps_rows", ""))


def gradients_of(optimizer: Optimizer) -> Gradients:
    """With what GradScaler left on the optimizer, if it did."""
    return Gradients(_whole(getattr(optimizer, "grad_scale", None)), _whole(getattr(optimizer, "found_inf", None)))


def _whole(number: Tensor | None) -> Tensor | None:
    if number is None:
        return None
    return (number.full_tensor() if isinstance(number, DTensor) else number).reshape(())


def unfusable(optimizer: Optimizer) -> str:
    """Why its steps cannot be taken for it; "" if they can. A subclass of torch's may do anything in its step."""
    if type(optimizer) not in (*FAMILIES, optim.Adafactor):
        return f"legal: {', '.join(sorted(kind.__name__ for kind in (*FAMILIES, optim.Adafactor)))} of torch.optim"
    chosen = [n for n in ("differentiable", "capturable", "foreach") if any(g.get(n) for g in optimizer.param_groups)]
    return f"{chosen[0]}=True says how it steps" if chosen else ""


def take_over(optimizer: Optimizer, closure: bool) -> bool:
    """Takes a step of one of torch.optim's; False if it cannot."""
    if type(optimizer) not in FAMILIES or closure or unfusable(optimizer) or torch_internals.has_step_hooks(optimizer):
        return False
    return not take(optimizer, FAMILIES[type(optimizer)], lambda: gradients_of(optimizer))
