"""Measures the machine that it runs on: `autoshard calibrate`, alone or, for collectives, under torchrun.

Each figure is the median of repeated runs over buffers that together are larger than the caches, as a step's are. Results are
kept for a while: one that took the place of the one before would be written into the caches, and a step's are not. All rows are
measured several times, one after the other, and the median counts: a machine that others use too is slow for seconds at a time, and
rows that were measured then would not go with the rest.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from autoshard.calibrate_calls import small_step
from autoshard.codegen import has_compiler
from autoshard.compiler import Backend
from autoshard.config import Config
from autoshard.cost_model.cluster import Cluster, measured_by
from autoshard.cost_model.collectives import Group, measured, table_name
from autoshard.cost_model.hardware import DEVICES, Device, Table, device_named_like
from autoshard.cost_model.kernels import look_up, numbers_of_a_cube, passing
from autoshard.cost_model.timeline import MOST, Sharing
from autoshard.dtypes import dtype_named
from autoshard.errors import ConfigError
from autoshard.kernels.launcher import lacking
from autoshard.ops import wire
from autoshard.ops.direct import EXCHANGE_DIRECT, GATHER_DIRECT, SWAP_DIRECT
from autoshard.ops.layout import Layout
from autoshard.runtime import processes
from autoshard.runtime.freed_memory import keep_freed_memory
from autoshard.runtime.presence import Patience
from autoshard.units import counted

PASSES = 3
SECONDS_EACH = 0.08  # of one row of a table in a pass, at most
IN_A_ROW = 3  # collectives
BEGIN_WHERE_ASKED = ("gather_direct", "exchange_direct", "swap_direct")  # whose sends begin in the thread that asks for them
PACKED = 8  # parameters
MANY = (16, 96)  # parameters of models that do nothing else
TOGETHER = 0.05  # seconds of a message beside which compute is measured, at most
SHARINGS = 5  # times that is measured how compute and collectives get on beside each other: it depends on where threads were put
POOL = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}  # bytes of buffers that are taken in turn: some times what the largest caches hold
DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "bf16", "fp16")}  # of matmuls
SIDES = {"cpu": (16, 64, 128, 256, 512, 1024), "cuda": (16, 64, 256, 1024, 2048, 4096, 8192)}
FEW, WIDE = 16, 1024  # rows and columns of a matmul whose weight is read for little
TOKENS = {"cpu": ((1, 32), (1, 64), (4, 128), (2, 512)), "cuda": ((1, 64), (4, 128), (2, 512), (4, 2048), (2, 8192))}  # batch, sequence
IMAGES = {  # batch, channels, height and width
    "cpu": ((4, 4, 16), (4, 32, 16), (4, 128, 16)), "cuda": ((4, 4, 16), (4, 128, 16), (32, 128, 32), (128, 128, 32), (128, 256, 32))
}  # fmt: skip
NUMBERS = {"cpu": (2**8, 2**12, 2**15, 2**18, 2**20, 2**22), "cuda": (2**8, 2**12, 2**16, 2**20, 2**22, 2**24, 2**26)}
Run = Callable[[], object]
Shapes = Sequence[tuple[int, ...]]
_functional = torch.ops._c10d_functional


@dataclass(frozen=True)
class Row:
    """One row to measure: its table and size, what makes the runs of it, and how many kernels of that size a run has. A run that gives
    seconds says itself how long it took."""

    table: str
    size: float
    make: Callable[[], Iterator[Run]]
    kernels: int = 1


def calibrate(timeout: float = 60.0) -> Cluster:
    """The cluster that this process is part of, measured. A collective call under a launcher."""
    device = _device_here()
    if device.type == "cpu":
        keep_freed_memory()  # as in a job
    world = processes.join(device, Patience(timeout, None, Console(stderr=True).print))
    group = processes.build_mesh(device.type, (("shard", world.size),), timeout).get_group().group_name if world.size > 1 else ""
    serial = _one_by_one() if device.type == "cpu" and not _together(not has_compiler()) else ()
    where = Group(world.size, world.size // int(_together(processes.per_node([platform.node()] * world.size))))
    together = [*_packs(device), *_collectives(device, where, group)] if group else []
    rows = [*_kernels(device), *serial, *together, *_beside_kernels(device, world.size)]
    shown = track(rows * PASSES, "measuring", console=Console(stderr=True), disable=world.rank != 0, transient=True)
    tables: dict[str, dict[float, list[float]]] = {}
    for row in shown:
        tables.setdefault(row.table, {}).setdefault(row.size, []).append(_median(row, device))
    middle = {name: {size: statistics.median(found) for size, found in rows.items()} for name, rows in tables.items()}
    made = _device(device, _on_top({name: _rising(points.items()) for name, points in middle.items()}))
    if group:
        shared = [asdict(_sharing(device, group)) for _ in range(SHARINGS)]
        made = replace(measured(made, where), **{name: statistics.median(s[name] for s in shared) for name in shared[0]})
    return Cluster(where.nodes, where.per_node, made)


def _device_here() -> torch.device:
    """The launcher's choice of this host's GPUs, or the first; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"environment: LOCAL_RANK is {index}, and this host has {counted(count, 'GPU', 'GPUs')}; legal: one process a GPU")
    return torch.device("cuda", index)


def _sharing(device: torch.device, group: str) -> Sharing:
    """How compute and collectives get on beside each other: matmuls, and an all-gather that takes twice as long."""
    a, message, little = torch.randn(256, 256, device=device), torch.zeros(2**21, device=device), torch.zeros(2**10, device=device)
    size = dist.get_world_size()
    collective: Callable[..., Tensor] = GATHER_DIRECT if device.type == "cpu" else _functional.all_gather_into_tensor

    def gather(part: Tensor | None = None) -> Tensor:
        return collective(message if part is None else part, size, group)

    def compute(count: int) -> float:
        return _timed_batch(itertools.repeat(lambda: a @ a), count, device) * count

    def wait(flying: Tensor) -> float:
        return _timed(lambda: _functional.wait_tensor(flying), device)

    def link() -> float:
        dist.barrier()
        return _timed(lambda: _functional.wait_tensor(gather()), device)

    compute(100)
    link()  # the first ones warm up
    taken = float("inf")
    while taken > TOGETHER and message.numel() > little.numel():
        message = message[: message.numel() // 2]
        taken = _together(statistics.median([link() for _ in range(5)]))
    count = max(1, int(_together(taken / compute(100)) * 100 / 2))
    skew = _skew(lambda: compute(4 * count), device)
    wake = _wake(lambda: compute(count), lambda: gather(little), device)
    return Sharing(*_beside(lambda: compute(count), link, gather, wait), skew, wake)


def _beside(
    compute: Callable[[], float], link: Callable[[], float], start: Callable[[], Tensor], wait: Callable[[Tensor], float]
) -> tuple[float, float]:
    """(interference, drag): of both at once, and each of them alone, by turns."""
    found = []
    for _ in range(15):
        alone = link()
        dist.barrier()
        computing = compute()
        dist.barrier()
        asked = time.perf_counter()
        flying = start()
        asking = time.perf_counter() - asked
        both = compute()
        found.append((1 - computing / both, 1 - max(alone - asking - wait(flying), 0.0) / both))
    interference, drag = (min(max(_together(statistics.median(lost)), 0.0), MOST) for lost in zip(*found))
    return interference, drag


def _skew(compute: Callable[[], float], device: torch.device) -> float:
    """How much later than each usually is through the slowest is, as a share of what each computes."""
    number = torch.zeros(1, device=device)
    own, until = [], []
    for _ in range(30):
        _timed(lambda: dist.all_reduce(number), device)
        meeting = _timed(lambda: dist.all_reduce(number), device)
        own.append(compute())
        until.append(own[-1] + _timed(lambda: dist.all_reduce(number), device) - meeting)
    return min(max(_together(_several(until)) / _together(statistics.median(own)) - 1, 0.0), 1.0)


def _wake(compute: Callable[[], float], gather: Callable[[], Tensor], device: torch.device) -> float:
    """How much longer a small gather takes from asking for it to having it, after some computing, than one of several in a row."""
    found = []
    for _ in range(60):
        compute()
        found.append(_timed(lambda: _functional.wait_tensor(gather()), device))
    in_a_row = statistics.median(_timed(lambda: _in_a_row(gather), device) for _ in range(20)) / IN_A_ROW
    return min(max(_together(_several(found)) - _together(in_a_row), 0.0), 1.0)


def _several(found: Sequence[float]) -> float:
    """What one of several in a step takes: of means, since a step waits several times and each may be late; of these the median, since
    a machine that others use stands still now and then."""
    return statistics.median(statistics.mean(found[at : at + 10]) for at in range(0, len(found), 10))


def _median(row: Row, device: torch.device) -> float:
    runs = row.make()
    if dist.is_initialized():
        dist.barrier()
    _timed(next(runs), device)  # the first one warms up
    start = time.perf_counter()
    own = _timed(next(runs), device)
    once = _together(time.perf_counter() - start)
    if once > SECONDS_EACH:
        return _mean(own) / row.kernels
    count = max(3, min(200, int(SECONDS_EACH / max(once, 1e-6))))
    batch = max(1, int(1e-3 / max(once, 1e-6)))  # short ones are timed several at once
    found = [_timed_batch(runs, batch, device) for _ in range(-(-count // batch) if batch > 1 else count)]
    return _mean(statistics.median(found)) / row.kernels


def _timed(run: Run, device: torch.device) -> float:
    return _timed_batch(iter([run]), 1, device)


def _timed_batch(runs: Iterator[Run], batch: int, device: torch.device) -> float:
    chosen = list(itertools.islice(runs, batch))
    start = time.perf_counter()
    given = [run() for run in chosen]
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # not what a collective has of its own
    spent = [seconds for seconds in given if isinstance(seconds, float)] or [time.perf_counter() - start]
    return sum(spent) / batch


def _together(seconds: float) -> float:
    """The slowest process's, so that all of them repeat equally often."""
    return _of_all(seconds, dist.ReduceOp.MAX)


def _mean(seconds: float) -> float:
    """Over processes: which of them is the slowest changes, and by how much the slowest of a step comes later is `Sharing.skew`."""
    return _of_all(seconds, dist.ReduceOp.SUM) / (dist.get_world_size() if dist.is_initialized() else 1)


def _of_all(seconds: float, operation: dist.ReduceOp.RedOpType) -> float:
    if not dist.is_initialized():
        return seconds
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, operation)
    return float(value)


def _rising(points: Iterable[tuple[float, float]]) -> Table:
    """By size, no row faster than a smaller one (noise of small sizes)."""
    out: list[tuple[float, float]] = []
    for size, seconds in sorted(points):
        out.append((size, max(seconds, out[-1][1] if out else 0.0)))
    return tuple(out)


def _on_top(tables: dict[str, Table]) -> dict[str, Table]:
    """Of "thin", the numbers beyond those of a cube, and what is taken beyond the seconds of as many FLOPs."""
    numbers = WIDE * (WIDE + 2 * FEW) - numbers_of_a_cube(2 * FEW * WIDE**2)
    found = dict(tables)
    for name in filter(lambda name: name.startswith("thin."), tables):
        ((flops, seconds),) = tables[name]
        found[name] = ((numbers, max(seconds - float(look_up(tables[f"matmul.{name[5:]}"], flops)), 1e-12)),)
    return found


def _kernels(device: torch.device) -> Iterable[Row]:
    if device.type == "cpu":  # where nothing runs ahead of what it asks for
        yield Row("view", 1, _turns(lambda x: torch.ops.aten.view.default(x, [256]), [(16, 16)], torch.float32, device))
    for name in DTYPES[device.type]:
        dtype = dtype_named(name)
        for n in SIDES[device.type]:
            yield Row(f"matmul.{name}", 2 * n**3, _turns(_linear, [(n, n)] * 3, dtype, device), 3)
        if device.type == "cpu":
            yield Row(f"thin.{name}", 2 * FEW * WIDE**2, _turns(_linear, [(FEW, WIDE), (WIDE, WIDE), (FEW, WIDE)], dtype, device), 3)
        for b, s in TOKENS[device.type]:
            yield _attention(b, s, dtype, name, device)
        for b, c, side in IMAGES[device.type]:
            shapes = [(b, c, side, side), (c, c, 3, 3)]
            yield Row(f"convolution.{name}", 2 * b * side**2 * c * c * 9, _training(_convolve, shapes, dtype, device), 3)
    bytes = functools.partial(passing, on_cpu=device.type == "cpu")
    for n in NUMBERS[device.type]:
        wide = [(max(n // 256, 1), 256)]
        yield Row("pointwise", bytes(8 * n, 4 * n), _chain(torch.ops.aten.add.Tensor, wide[0], device))
        yield Row("hard", n, _turns(F.gelu, wide, torch.float32, device))
        yield Row("reduction", bytes(4 * n, 0), _turns(lambda x: x.mean(-1), wide, torch.float32, device))
        yield Row("random", bytes(4 * n, 5 * n), _turns(lambda x: torch.native_dropout(x, 0.1, True), wide, torch.float32, device))
        yield Row("masked", bytes(5 * n, 4 * n), _turns(_masked(wide[0], device), wide, torch.float32, device))
        yield Row("copy", bytes(4 * n, 4 * n), _turns(lambda x: x.t().contiguous(), wide, torch.float32, device))
        yield Row("lookup", bytes(4 * n, 4 * n), _turns(lambda x: x.index_select(0, torch.arange(x.shape[0] - 1, -1, -1, device=x.device)), wide, torch.float32, device))


def _packs(device: torch.device) -> Iterable[Row]:
    """Rows of several parameters copied into what is sent, as they are and as bf16."""
    for table, dtype in (("pack", torch.float32), ("pack_cast", torch.bfloat16)):
        layout = Layout("", 2, (), "", 2, dtype)
        for n in (2**8, 2**12, 2**15, 2**18):

            def pack(*rows: Tensor, n: int = n, layout: Layout = layout) -> object:
                return wire.pack_shards(rows, ((2 * n,),) * PACKED, layout)

            size = passing(PACKED * n * 4, PACKED * n * dtype.itemsize, device.type == "cpu")
            yield Row(table, size, _turns(pack, [(n,)] * PACKED, torch.float32, device))


def _beside_kernels(device: torch.device, world: int) -> Iterable[Row]:
    """What a step takes of the processor: on a CPU for each parameter; where kernels run behind it, for each operation of one process."""
    if device.type == "cpu":
        yield from _parameters(world)
    elif world == 1:
        codegens: tuple[Literal["eager", "inductor"], ...] = ("eager",) if lacking() else ("eager", "inductor")
        for codegen in codegens:
            step, count = small_step(codegen, device, _device(device, {}))
            yield Row("call" if codegen == "eager" else "call.generated", 1, lambda step=step: itertools.repeat(step), count)  # type: ignore[misc]


class _Many(nn.Module):
    """So little is computed of its parameters that a step takes what it does for each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(16) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat(list(self.weights)) * x).sum()


def _parameters(world: int) -> Iterable[Row]:
    """What a step does for parameters beside kernels and messages: guards, their rows, what autograd adds up, the optimizer's loop."""
    tables: dict[str, Literal[0, 3]] = {"parameter": 0, "sharded": 3} if world > 1 else {"parameter": 0}
    for table, zero in tables.items():
        for count in MANY:
            yield Row(table, count, lambda count=count, zero=zero: itertools.repeat(_step_of_many(count, zero)))  # type: ignore[misc]


@functools.cache
def _step_of_many(count: int, zero: Literal[0, 3]) -> Callable[[], float]:
    """A step by the backend itself, which says how many seconds this thread did not wait."""
    model, x = _Many(count), torch.ones(16 * count)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend=Backend(Config(zero=zero, codegen="eager", replicate_below=0, verbose=False)))

    def step() -> float:
        start = time.thread_time()
        compiled(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.thread_time() - start

    return step


def _one_by_one() -> Iterable[Row]:
    """What Inductor's code on a CPU does not vectorize: it draws random numbers and stores booleans one by one."""
    draw = torch.compile(lambda x: torch.rand_like(x) > x, dynamic=True)
    for n in (2**8, 2**12, 2**16, 2**20):
        yield Row("serial", 2 * n, _turns(draw, [(n // 256, 256)], torch.float32, torch.device("cpu")))


def _attention(batch: int, length: int, dtype: torch.dtype, name: str, device: torch.device) -> Row:
    """Forward has 4, backward 10 operations for each of batch x heads x length x length x width: two kernels of 7."""
    shape = (batch, 4, length, 64)
    flops = 7 * batch * 4 * length * length * 64

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Row(f"attention.{name}", flops, _training(attend, [shape] * 3, dtype, device), 2)


def _masked(shape: tuple[int, ...], device: torch.device) -> Callable[[Tensor], Tensor]:
    """The backward of dropout."""
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    return lambda grad: torch.ops.aten.native_dropout_backward(grad, mask, 1.1)


def _linear(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """A linear layer's forward and its two gradients, as they lie in memory."""
    return x @ weight.t(), grad @ weight, grad.t() @ x


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1)


def _turns(
    function: Callable[..., object], shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> Callable[[], Iterator[Run]]:
    """Runs of `function` on buffers of these shapes, taken in turn."""

    def make() -> Iterator[Run]:
        count = _count(shapes, dtype, device)
        sets = [[_filled(s, dtype, device) for s in shapes] for _ in range(count)]
        kept: deque[object] = deque((function(*buffers) for buffers in sets), maxlen=count)
        for buffers in itertools.cycle(sets):
            yield lambda buffers=buffers: kept.append(function(*buffers))  # type: ignore[misc]

    return make


def _filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a GPU with numbers that differ: it draws less power for equal ones, and is faster than in a step."""
    return torch.full(shape, 0.5, dtype=dtype) if device.type == "cpu" else torch.randn(shape, dtype=dtype, device=device)


def _count(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> int:
    """How many sets of buffers of these shapes fill the pool."""
    return max(1, min(256, POOL[device.type] // sum(torch.Size(s).numel() * dtype.itemsize for s in shapes)))


def _chain(function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], device: torch.device) -> Callable[[], Iterator[Run]]:
    """Runs of `function` on what the run before gave and a buffer, as operations of a step follow each other."""

    def make() -> Iterator[Run]:
        count = _count([shape] * 2, torch.float32, device)
        sets = [torch.full(shape, 0.5, device=device) for _ in range(count)]
        kept = deque((function(buffer, buffer) for buffer in sets), maxlen=count)
        for buffer in itertools.cycle(sets):
            yield lambda buffer=buffer: kept.append(function(kept[-1], buffer))  # type: ignore[misc]

    return make


def _training(
    function: Callable[..., Tensor], shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> Callable[[], Iterator[Run]]:
    """Runs of forward and backward."""

    def both(*leaves: Tensor) -> None:
        out = function(*leaves)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    def make() -> Iterator[Run]:
        leaves = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]
        return itertools.repeat(lambda: both(*leaves))

    return make


def _collectives(device: torch.device, where: Group, group: str) -> Iterable[Row]:
    """Each collective over sizes of the whole tensor, in bytes; several in a row, as in a step, where the next is there when one is
    through."""
    size = where.size
    for n in (2**10, 2**14, 2**16, 2**17, 2**18, 2**20, 2**21):
        whole, rows, each = torch.zeros(n * size, device=device), torch.zeros(n, device=device), [n] * size
        calls: dict[str, Callable[[], Tensor]] = {
            "all_gather": lambda rows=rows: _functional.all_gather_into_tensor(rows, size, group),  # type: ignore[misc]
            "reduce_scatter": lambda whole=whole: _functional.reduce_scatter_tensor(whole, "sum", size, group),  # type: ignore[misc]
            "all_to_all": lambda whole=whole, each=each: _functional.all_to_all_single(whole, each, each, group),  # type: ignore[misc]
            "all_reduce": lambda whole=whole: _functional.all_reduce(whole, "sum", group),  # type: ignore[misc]
        }
        if device.type == "cpu":
            calls["gather_direct"] = lambda rows=rows: GATHER_DIRECT(rows, size, group)  # type: ignore[misc]
            calls["exchange_direct"] = lambda whole=whole: EXCHANGE_DIRECT(whole, size, group)  # type: ignore[misc]
        if device.type == "cpu" and size == 2:
            calls["swap_direct"] = lambda whole=whole: SWAP_DIRECT(whole, group)  # type: ignore[misc]
        for name, call in calls.items():
            if name in BEGIN_WHERE_ASKED:
                yield Row(table_name(f"{name}.issue", where), 4 * n * size, lambda call=call: itertools.repeat(lambda: _issued(call)), IN_A_ROW)  # type: ignore[misc]
            yield Row(table_name(name, where), 4 * n * size, lambda call=call: itertools.repeat(lambda: _in_a_row(call)), IN_A_ROW)  # type: ignore[misc]


def _in_a_row(call: Callable[[], Tensor]) -> None:
    _issued(call)


def _issued(call: Callable[[], Tensor]) -> float:
    """Several, and the seconds until they have been asked for."""
    start = time.perf_counter()
    flying = [call() for _ in range(IN_A_ROW)]
    spent = time.perf_counter() - start
    for one in flying:
        _functional.wait_tensor(one)
    return spent


def _device(device: torch.device, tables: dict[str, Table]) -> Device:
    source = measured_by(torch.__version__)
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return replace(device_named_like(found.name, found.total_memory), tables=tables, source=source)
    flops = {name: tables[f"matmul.{name}"][-1] for name in ("fp32", "bf16")}
    size, seconds = tables["pointwise"][-1]
    size *= 12 / passing(8, 4, device.type == "cpu")  # as operations count what they read and write
    rates = {name: point[0] / point[1] for name, point in flops.items()}
    return replace(DEVICES["cpu"], flops=rates, bandwidth=size / seconds, launch=2e-6, tables=tables, source=source)
