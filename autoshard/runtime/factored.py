"""Adafactor's step on this process's rows. Source: arXiv 1804.04235; order and form are torch.optim.Adafactor's.

[Note: Factored variances] Of a matrix the squares' means over rows and over columns are kept, not the squares. Rows of a matrix are on
one process, so their means are; a column's mean, what all rows' means come to, and the norms of a parameter and of its update
are sums over processes. So a step has two collectives for all parameters that lie alike, whatever their number: one of
column sums, row sums and the parameters' norms, then one of the updates' norms. Updates are computed again after that:
keeping them would take as much memory as the parameters. On a GPU these passes are Triton kernels over all parameters
(`kernels.adafactor`); on a CPU torch's operations, one parameter after the other.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from autoshard import torch_internals
from autoshard.errors import UnsupportedError
from autoshard.kernels import adafactor, launcher, multi_tensor
from autoshard.kernels.adafactor import Matrix, Numbers, Passes
from autoshard.runtime import fused_step
from autoshard.runtime.dtensors import dtensor_of, local, over_processes

HOW = "on rows, with two collectives"


@dataclass(eq=False)
class Factors:
    """One parameter in a step. state: torch.optim.Adafactor's, DTensors where the parameter is one."""

    parameter: nn.Parameter
    options: Mapping[str, Any]
    state: dict[str, Tensor]
    scale: Tensor | None

    @property
    def factored(self) -> bool:
        """Whether means over rows and columns are kept; else each number's square is."""
        return self.parameter.ndim > 1

    @property
    def precise(self) -> torch.dtype:
        """What is computed in."""
        return torch.float64 if self.parameter.dtype is torch.float64 else torch.float32

    @property
    def across(self) -> bool:
        """Whether a column is on several processes."""
        return _across(self.parameter)

    def rows(self) -> Tensor:
        """This process's, as they are computed with."""
        return local(self.parameter).to(self.precise)  # type: ignore[no-any-return]

    def gradient(self) -> Tensor:
        """Of these, in the direction that the step goes against."""
        grad: Tensor = local(self.parameter.grad).to(self.precise)
        grad = grad if self.scale is None else grad / self.scale
        return -grad if self.options["maximize"] else grad

    def sums(self) -> Tensor:
        """What of the first half of the step is a sum over processes: [1 + matrices * (1 + columns)], float64. In the kernels' order, as
        another process may have them."""
        parts = [_square(self.rows())]
        if self.factored and self.across:
            squares = self.gradient().square()
            rows = self._next("row_var", squares.mean(-1, keepdim=True))
            parts += [rows.sum((-2, -1)).double().reshape(-1), squares.sum(-2).double().reshape(-1)]
        return torch.cat(parts)

    def advance(self, sums: Tensor) -> None:
        """Takes the means one step further; sums: of all processes."""
        squares = self.gradient().square()
        if not self.factored:
            self._put("variance", self._next("variance", squares))
            return
        self._put("row_var", self._next("row_var", squares.mean(-1, keepdim=True)))
        columns = squares.mean(-2, keepdim=True)
        if self.across:
            columns = (sums[1 + self._stack.numel() :] / self.parameter.shape[-2]).reshape(columns.shape).to(self.precise)
        self._put("col_var", self._next("col_var", columns))

    def update(self, sums: Tensor) -> Tensor:
        """The rows' update, not clipped yet."""
        eps = self.numbers.eps
        if self.factored:
            rows, columns = (local(self.state[key]).to(self.precise) for key in ("row_var", "col_var"))
            over = self._mean_of_rows(sums) if self.across else rows.mean(-2, keepdim=True)
            variance = (rows @ columns).div_(over.clamp(min=eps))
        else:
            variance = local(self.state["variance"]).to(self.precise, copy=True)
        return variance.clamp_(min=eps * eps).rsqrt_().mul_(self.gradient())  # type: ignore[no-any-return]

    def _mean_of_rows(self, sums: Tensor) -> Tensor:
        """Of each matrix, what all means over its rows come to."""
        whole = sums[1 : 1 + self._stack.numel()] / self.parameter.shape[-2]
        return whole.reshape(*self._stack, 1, 1).to(self.precise)

    @property
    def _stack(self) -> torch.Size:
        """Of how many matrices it is made."""
        return self.parameter.shape[:-2]

    def write(self, sums: Tensor, square: Tensor) -> None:
        """Steps the parameter. square: [1], of the norm of the whole update."""
        numbers, rows = self.numbers, local(self.parameter)
        size = (sums[0].sqrt() / numbers.root).clamp(min=numbers.least) * numbers.rate
        size = size / (square[0].sqrt() / (numbers.root * numbers.d)).clamp(min=1.0)
        step = self.update(sums).mul_(-size.to(self.precise))
        rows.copy_(step.add_(self.rows(), alpha=numbers.keep))

    @functools.cached_property
    def numbers(self) -> Numbers:
        """What this step is taken with. eps goes by each parameter's own dtype; torch takes the first one's of a group for all."""
        lr, (eps, least), step = float(self.options["lr"]), self.options["eps"], float(self.state["step"])
        return Numbers(
            weight=step ** self.options["beta2_decay"],
            eps=float(torch.finfo(self.parameter.dtype).eps if eps is None else eps),
            least=float(least),
            rate=min(lr, 1 / math.sqrt(step)),
            keep=1 - lr * self.options["weight_decay"],
            d=float(self.options["d"]),
            sign=-1.0 if self.options["maximize"] else 1.0,
            whole=float(self.parameter.shape[-2]) if self.factored else 1.0,
            root=math.sqrt(self.parameter.numel()),
        )

    @property
    def means(self) -> list[Tensor]:
        """This process's: over rows and over columns, or of each number."""
        return [local(self.state[key]) for key in (("row_var", "col_var") if self.factored else ("variance",))]

    @property
    def suits_kernels(self) -> bool:
        """Whether it lies as these need it, and its matrices are not tiny, as a convolution's, each of which would have a program."""
        tensors = [local(self.parameter), *self.means]
        tiny = self.parameter.ndim > 2 and self.parameter.shape[-2:].numel() < adafactor.ROWS * adafactor.COLUMNS
        fit = all(t.is_contiguous() and t.dtype in multi_tensor.TYPES and t.device == tensors[0].device for t in tensors)
        return fit and not tiny and len({t.dtype for t in self.means}) == 1

    def matrix(self) -> Matrix:
        """For the kernels."""
        state, *columns = self.means
        grad = local(self.parameter.grad).contiguous()
        return Matrix(local(self.parameter), grad, state, columns[0] if columns else None, self.across, self.numbers)

    def _next(self, key: str, seen: Tensor) -> Tensor:
        before = local(self.state[key]).to(self.precise)
        return before.lerp(seen, self.numbers.weight)

    def _put(self, key: str, value: Tensor) -> None:
        local(self.state[key]).copy_(value)


class _OneByOne:
    """What `kernels.adafactor.Passes` does, by torch's operations."""

    def __init__(self, entries: Sequence[Factors]) -> None:
        self._entries, self._sums = entries, list[Tensor]()

    def sums(self) -> list[Tensor]:
        return [entry.sums() for entry in self._entries]

    def advance(self, sums: Sequence[Tensor]) -> None:
        self._sums = list(sums)
        for entry, found in zip(self._entries, sums):
            entry.advance(found)

    def squares(self) -> list[Tensor]:
        return [_square(entry.update(found)) for entry, found in zip(self._entries, self._sums)]

    def write(self, squares: Sequence[Tensor]) -> None:
        for entry, found, square in zip(self._entries, self._sums, squares):
            entry.write(found, square)


class Together:
    """Passes of several kinds, each of the entries at its places."""

    def __init__(self, entries: Sequence[Factors], scale: Tensor | None, interpret: bool) -> None:
        places: dict[Any, list[int]] = defaultdict(list)
        for i, entry in enumerate(entries):
            device = local(entry.parameter).device
            by_kernels = (interpret or (device.type == "cuda" and not launcher.lacking())) and entry.suits_kernels
            places[device if by_kernels else None].append(i)
        self._count, self._passes = len(entries), list[tuple[list[int], _OneByOne | Passes]]()
        for key, at in places.items():
            given = [entries[i] for i in at]
            passes = _OneByOne(given) if key is None else Passes([entry.matrix() for entry in given], scale, interpret)
            self._passes.append((at, passes))

    def sums(self) -> list[Tensor]:
        """As `Passes.sums`."""
        return self._in_order(lambda passes: passes.sums())

    def advance(self, sums: Sequence[Tensor]) -> None:
        """As `Passes.advance`."""
        for at, passes in self._passes:
            passes.advance([sums[i] for i in at])

    def squares(self) -> list[Tensor]:
        """As `Passes.squares`."""
        return self._in_order(lambda passes: passes.squares())

    def write(self, squares: Sequence[Tensor]) -> None:
        """As `Passes.write`."""
        for at, passes in self._passes:
            passes.write([squares[i] for i in at])

    def _in_order(self, part: Callable[[_OneByOne | Passes], list[Tensor]]) -> list[Tensor]:
        found = {i: tensor for at, passes in self._passes for i, tensor in zip(at, part(passes))}
        return [found[i] for i in range(self._count)]


@torch_internals.untraced
@torch.no_grad()
def take(optimizer: Optimizer, scale: Tensor | None = None, interpret: bool = False) -> None:
    """One step of all parameters that have a gradient. Every process must come to it.

    scale: what gradients are divided by. interpret: as on a GPU, on the CPU by Triton's interpreter; for tests.
    """
    entries = [
        Factors(p, group, state_of(optimizer, p), scale)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None and not _elsewhere(p)
    ]
    for entry in entries:
        entry.state["step"] += 1
    passes = Together(entries, scale, interpret)
    passes.advance(_over_processes(entries, passes.sums()))
    passes.write(_over_processes(entries, passes.squares()))
    stepped = [e.parameter for e in entries]
    torch.autograd.graph.increment_version([*stepped, *map(local, stepped)])  # a graph may have saved either


def why_not(stepped: Sequence[nn.Parameter]) -> str:
    """Why a step of these cannot be taken, or not now; "" if it can."""
    return fused_step.while_captured() or next(filter(None, map(unfit, stepped)), "")


def can_take_over(optimizer: Optimizer) -> bool:
    """True of exactly torch's own class, whose numbers these are, without hooks."""
    return type(optimizer) is optim.Adafactor and not torch_internals.has_step_hooks(optimizer)


def take_over(optimizer: Optimizer, closure: bool, sharded: bool) -> bool:
    """Takes a step of torch.optim.Adafactor; False where that is torch's to take. Of plain tensors on a CPU it is, on which torch goes
    through memory less often."""
    if closure or not can_take_over(optimizer):
        return False
    stepped = fused_step.stepped_by(optimizer)
    reason = why_not(stepped)
    if sharded and reason:
        raise UnsupportedError(f"torch.optim.Adafactor cannot step {reason}")
    if reason or not (sharded or all(p.is_cuda for p in stepped) and not fused_step.unfusable(optimizer)):
        return False
    take(optimizer)
    return True


def _square(values: Tensor) -> Tensor:
    """[1], of their norm, in float64."""
    return torch.linalg.vector_norm(values, dtype=torch.float64).square().reshape(1)


def _elsewhere(parameter: Tensor) -> bool:
    """Whether it is on processes that this one is not among."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.get_coordinate() is None


def unfit(parameter: Tensor) -> str:
    """Why a parameter cannot be stepped; "" if it can."""
    if not parameter.is_floating_point() or parameter.is_sparse or (parameter.grad is not None and parameter.grad.is_sparse):
        return f"a parameter of shape {tuple(parameter.shape)} that is, or whose gradient is, not dense and real"
    if isinstance(parameter, DTensor) and not _by_rows(parameter):
        return f"a parameter of shape {tuple(parameter.shape)} that lies as {parameter.placements}; legal: whole, or sharded by rows"
    ours, its = (getattr(t, "placements", None) for t in (parameter, parameter.grad))
    return "" if ours == its else f"a parameter of shape {tuple(parameter.shape)} that lies as {ours} and its gradient as {its}"


def _by_rows(parameter: DTensor) -> bool:
    """Whether rows of matrices are on one process each, and it is cut along one dimension if at all."""
    cut = {p.dim for p in parameter.placements if isinstance(p, Shard)}
    whole = all(p.is_replicate() or isinstance(p, Shard) for p in parameter.placements)
    return whole and len(cut) <= 1 and cut <= set(range(max(1, parameter.ndim - 1)))


def _across(parameter: Tensor) -> bool:
    """Whether columns of matrices are on several processes; one matrix's are said to be, wherever they are."""
    lies = parameter.placements if isinstance(parameter, DTensor) else ()
    return parameter.ndim == 2 or (parameter.ndim > 2 and any(p.is_shard(parameter.ndim - 2) for p in lies))


def _over_processes(entries: Sequence[Factors], parts: Sequence[Tensor]) -> list[Tensor]:
    """Each entry's part, summed over those processes that have rows of it; a collective for all that lie alike."""
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, entry in enumerate(entries):
        p = entry.parameter
        alike[(p.device, (p.device_mesh, p.placements) if isinstance(p, DTensor) else None)].append(i)
    found = list(parts)
    for together in alike.values():
        total = over_processes(torch.cat([parts[i] for i in together]), entries[together[0]].parameter)
        for i, whole in zip(together, total.split([parts[i].numel() for i in together])):
            found[i] = whole
    return found


def state_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """What is kept of it, made or put where it belongs."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32, device="cpu")
    shapes = {"variance": tuple(parameter.shape)}
    if parameter.ndim > 1:
        *batch, height, width = parameter.shape
        shapes = {"row_var": (*batch, height, 1), "col_var": (*batch, 1, width)}
    for key, shape in shapes.items():
        lies = _lies(parameter, key)
        state[key] = _zeros(parameter, shape, lies) if key not in state else _placed(state[key], parameter, lies)
    return state


def _lies(parameter: Tensor, key: str) -> tuple[Placement, ...]:
    """Means over columns that are on several processes are whole everywhere; everything else lies as the parameter does."""
    if not isinstance(parameter, DTensor):
        return ()
    whole = key == "col_var" and _across(parameter)
    return tuple(Replicate() if whole else p for p in parameter.placements)


def _zeros(parameter: Tensor, shape: tuple[int, ...], lies: tuple[Placement, ...]) -> Tensor:
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
    whole = torch.empty(shape, dtype=parameter.dtype, device="meta")
    rows = parameter.to_local()
    if not all(p.is_replicate() for p in lies):
        shape = tuple(here if n == all_of_it else n for n, all_of_it, here in zip(shape, parameter.shape, rows.shape))
    return dtensor_of(torch.zeros(shape, dtype=rows.dtype, device=rows.device), whole, parameter.device_mesh, lies)


def _placed(value: Tensor, parameter: Tensor, lies: tuple[Placement, ...]) -> Tensor:
    """State that was loaded whole, or taken over from before the parameter was sharded: rank 0's."""
    if not isinstance(parameter, DTensor):
        return value
    if not isinstance(value, DTensor):
        return distribute_tensor(value, parameter.device_mesh, lies)
    return value if value.placements == lies else value.redistribute(placements=lies)
