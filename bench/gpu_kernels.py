"""Generated kernels beside torch's own on a GPU, and beside what its memory allows.

    python bench/gpu_kernels.py [--numbers 1000000000]        # writes bench/results/triton_optimizers.md and triton_regions.md
    python bench/gpu_kernels.py --only regions                # or optimizers
    python bench/gpu_kernels.py --predicted                   # needs no GPU; writes bench/results/triton_predicted.md

Each figure is the median of a kernel's runs, caches cleared between them, on a GPU that has other work first: so what Python takes to
launch it, which differs from run to run, is not in it. The floor is the bytes that must be read and written over the bandwidth of a
plain copy in the same run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import autoshard
from autoshard.codegen import call_directly
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.kernels.multi_tensor import TILES
from autoshard.kernels.tuning import LAUNCHES
from autoshard.passes.base import Context
from autoshard.passes.fuse_elementwise import FuseElementwise
from autoshard.passes.seed_dropout import SeedDropout
from autoshard.plan import Plan

RESULTS = Path(__file__).parent / "results"
CONTEXT = Context(Plan(1, (("shard", 1),), ()), fuses=DEVICES["h100"])


FIRST = len(TILES) * LAUNCHES + 5  # runs until tiles are chosen: see [Note: Measured at work] in autoshard/kernels/tuning.py
CACHE = 256 << 20  # bytes that are written between two runs
ROUNDS, SECONDS = 30, 0.2  # runs, and how long they may take in all


def milliseconds(run: Callable[[], Any]) -> float:
    """The median, of what a job has in the end."""
    cache = torch.empty(CACHE, dtype=torch.uint8, device="cuda")
    for _ in range(FIRST):  # as they are timed, since tiles are chosen by how long these take
        cache.zero_()
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    rounds = max(5, min(ROUNDS, int(SECONDS / (time.perf_counter() - start))))
    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(rounds)]
    for _ in range(3 * rounds):  # work that is there before the rest is
        cache.zero_()
    for begun, ended in pairs:
        cache.zero_()
        begun.record()
        run()
        ended.record()
    torch.cuda.synchronize()
    return statistics.median(begun.elapsed_time(ended) for begun, ended in pairs)


def bandwidth() -> float:
    """Bytes a second of a copy, read and written, by a GPU that is awake."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    milliseconds(lambda: target.copy_(source))
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3


# --- the optimizer


def parameters(numbers: int, dtype: torch.dtype) -> list[nn.Parameter]:
    """As of a large model, with gradients."""
    made = []
    while numbers > 0:
        size = min(numbers, 1 << 26)
        made.append(nn.Parameter(torch.randn(size, device="cuda", dtype=dtype)))
        made[-1].grad = torch.randn_like(made[-1])
        numbers -= size
    return made


def adamw(numbers: int, rate: float) -> Iterator[Row]:
    yield from _rows("AdamW, fp32", 28 * numbers, rate, {
        "torch, fused=True": torch.optim.AdamW(parameters(numbers, torch.float32), fused=True).step,
    })  # fmt: skip
    torch.cuda.empty_cache()
    yield from _rows("AdamW, fp32", 28 * numbers, rate, {
        "autoshard": autoshard.optim.AdamW(parameters(numbers, torch.float32)).step,
    })  # fmt: skip
    torch.cuda.empty_cache()
    half = numbers // 2
    yield from _rows("AdamW of bf16 with masters, clipped", 32 * half, rate, {"separate operations": _separately(half)})
    torch.cuda.empty_cache()
    ours = autoshard.optim.AdamW(parameters(half, torch.bfloat16), max_norm=1.0, master_weights=True)
    yield from _rows("AdamW of bf16 with masters, clipped", 32 * half, rate, {"autoshard": ours.step})


def adafactor(numbers: int, rate: float) -> Iterator[Row]:
    """Of matrices. The floor is that of three passes, see [Note: Adafactor's passes]."""
    for who, kind in (("torch", torch.optim.Adafactor), ("autoshard", autoshard.optim.Adafactor)):
        torch.cuda.empty_cache()
        matrices = []
        for p in parameters(numbers // 8192 * 8192, torch.float32):
            matrices.append(nn.Parameter(p.detach().view(-1, 8192)))
            matrices[-1].grad = p.grad.view(-1, 8192)
        yield from _rows("Adafactor, fp32", 24 * numbers, rate, {who: kind(matrices).step})


def _separately(numbers: int) -> Callable[[], None]:
    """Clipping, a step of float32 masters, and the copy back."""
    halves = parameters(numbers, torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in halves]
    optimizer = torch.optim.AdamW(masters, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(halves, 1.0)
        for master, half in zip(masters, halves):
            master.grad = half.grad.float()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(halves, masters)

    return step


# --- regions


def rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
    x = x + residual
    wide = x.float()
    return [x, weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)]


def rotary(q: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    half = q.shape[-1] // 2
    return [q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin]


REGIONS: dict[str, tuple[Callable[..., list[Tensor]], tuple[tuple[int, ...], ...]]] = {
    "residual and RMS norm": (rms_norm, ((8192, 4096), (8192, 4096), (4096,))),
    "residual and layer norm": (lambda x, y: [z := x + y, F.layer_norm(z, (4096,))], ((8192, 4096), (8192, 4096))),
    "SiLU gate": (lambda x, y: [F.silu(x) * y], ((8192, 11008), (8192, 11008))),
    "SiLU gate's gradient": (
        lambda g, x, y: [torch.ops.aten.silu_backward(g * y, x), g * F.silu(x)],
        ((8192, 11008),) * 3,
    ),
    "rotary": (rotary, ((4, 32, 2048, 128), (1, 1, 2048, 128), (1, 1, 2048, 128))),
    "softmax": (lambda x: [F.softmax(x * 0.125, -1)], ((32, 1024, 1024),)),
    "dropout and residual": (lambda x, y: [torch.ops.aten.native_dropout(x, 0.1, True)[0] + y], ((8192, 4096), (8192, 4096))),
    "log softmax of a vocabulary": (lambda x: [F.log_softmax(x.float(), -1)], ((4096, 32000),)),
}


def region(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """The function with its kernels, as `codegen="triton"` has them."""
    mode = FakeTensorMode()
    with mode:
        gm = make_fx(lambda *tensors: function(*tensors))(*(mode.from_tensor(x) for x in inputs))
    gm = FuseElementwise().run(SeedDropout().run(gm, CONTEXT), CONTEXT)
    call_directly(gm.graph)
    gm.recompile()
    return gm


def regions(rate: float) -> Iterator[Row]:
    for name, (function, shapes) in REGIONS.items():
        torch.compiler.reset()
        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        ours, inductor = region(function, inputs), torch.compile(function)
        moved = sum(t.numel() * t.element_size() for t in [*inputs, *function(*inputs)])
        contenders = {"op by op": function, "Inductor": inductor, "autoshard": ours}
        yield from _rows(name, moved, rate, {k: functools.partial(f, *inputs) for k, f in contenders.items()})


# --- what is measured, and what of it was asked for


@dataclass(frozen=True)
class Row:
    """took, floor: in milliseconds."""

    what: str
    who: str
    took: float
    floor: float


@dataclass(frozen=True)
class Asked:
    """What a kernel was to reach: so many times another one's speed, and this part of the floor's rate."""

    times: float
    other: str
    part: float = 0.0

    def beside(self, ours: Row, took: Mapping[tuple[str, str], float]) -> str:
        """What ours reached of it, in words."""
        times = f"{took[ours.what, self.other] / ours.took:.2f} × {self.other} (asked: {self.times:.1f})"
        return times + (f", {ours.floor / ours.took:.0%} of a copy's rate (asked: {self.part:.0%})" if self.part else "")


ASKED = {
    "AdamW, fp32": Asked(1.0, "torch, fused=True", 0.9),
    "AdamW of bf16 with masters, clipped": Asked(1.5, "separate operations", 0.9),
    **dict.fromkeys(REGIONS, Asked(1.0, "Inductor")),
}


def _rows(name: str, moved: float, rate: float, contenders: dict[str, Callable[[], Any]]) -> Iterator[Row]:
    for who, run in contenders.items():
        yield Row(name, who, milliseconds(run), moved / rate * 1e3)


def lines_of(rows: Iterable[Row]) -> Iterator[str]:
    """As a table's, each when it was measured. Ours come last."""
    took: dict[tuple[str, str], float] = {}
    for row in rows:
        took[row.what, row.who] = row.took
        beside = ASKED[row.what].beside(row, took) if row.who == "autoshard" and row.what in ASKED else ""
        yield f"| {row.what} | {row.who} | {row.took:.3f} | {row.floor:.3f} | {row.floor / row.took:.0%} | {beside} |"


# --- predictions


def predicted() -> str:
    """Of a whole model's step with each way to generate code."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16,
                                             vocab_size=32000, use_cache=False))  # fmt: skip
        tokens = torch.zeros(8, 1024, dtype=torch.int64)
    lines = [
        "# A step with and without generated kernels, predicted",
        "",
        "A Llama of 12 layers of 1024, 8 × 1024 tokens a process, bf16, 8 H100 by their data sheet. Nothing was measured.",
        "Written by `python bench/gpu_kernels.py --predicted`.",
        "",
        "| codegen | step, ms | peak, GiB |",
        "|---|---:|---:|",
    ]
    for codegen in ("eager", "triton", "inductor"):
        config = autoshard.Config(codegen=codegen, precision="bf16", verbose=False)  # type: ignore[arg-type]
        found = autoshard.plan(model, {"input_ids": tokens, "labels": tokens}, config, Cluster(1, 8, DEVICES["h100"])).predicted
        assert found.step_seconds is not None
        lines.append(f"| {codegen} | {found.step_seconds * 1e3:.1f} | {found.peak_bytes / 2**30:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=1_000_000_000, help="that AdamW steps")
    parser.add_argument("--only", choices=("optimizers", "regions"))
    parser.add_argument("--predicted", action="store_true")
    said = parser.parse_args()
    if said.predicted:
        (RESULTS / "triton_predicted.md").write_text(text := predicted())
        print(text)
        return
    if not torch.cuda.is_available():
        raise SystemExit("bench/gpu_kernels.py needs a GPU for all but --predicted")
    rate = bandwidth()
    numbers = said.numbers
    of = (
        f"AdamW over {numbers / 1e9:g} billion numbers, half as many where there are masters, a quarter with Adafactor.",
        "Operations between matmuls, in bf16.",
    )
    if said.only != "regions":
        write("optimizers", of[0], rate, itertools.chain(adamw(numbers, rate), adafactor(numbers // 4, rate)))
    if said.only != "optimizers":
        write("regions", of[1], rate, regions(rate))


def write(which: str, of: str, rate: float, measured: Iterable[Row]) -> None:
    """Measures, and keeps what was found."""
    lines = [
        f"# Generated kernels on a GPU: {which}",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a copy reaches {rate / 1e9:.0f} GB/s. Medians of one run, in ms.",
        of,
        "Written by `python bench/gpu_kernels.py`.",
        "",
        "| | | took | floor | of the floor's rate | beside what was asked |",
        "|---|---|---:|---:|---:|---|",
    ]
    print("\n".join(lines), flush=True)
    for line in lines_of(measured):
        print(line, flush=True)
        lines.append(line)
    (RESULTS / f"triton_{which}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
