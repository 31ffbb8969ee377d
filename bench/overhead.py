"""What sharding costs beside the computation: a model of many small blocks, where a step is almost all overhead.

    python bench/overhead.py                       # every contender in fresh processes; writes docs/overhead.md
    torchrun --nproc-per-node 2 bench/overhead.py --contender autoshard3

Seconds from nothing compiled to the end of the first step, with Inductor's cache cold and then warm, and the median
step after that. All contenders are ZeRO-3 of the same model: FSDP2 with compiled blocks is what one would write by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

import autoshard

WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 64, 4, 256, 32, 2
WARM_UP, STEPS = 4, 15
RESULT = Path(__file__).parent.parent / "docs" / "overhead.md"


class Block(nn.Module):
    """A decoder block of twelve parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.between(x))))


class Ends(nn.Module):
    """What is in front of the blocks and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, x: Tensor | None = None) -> Tensor:
        if x is None:
            return self.embed(tokens)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Deep(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks, self.ends = nn.ModuleList(Block() for _ in range(blocks)), Ends()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.ends(tokens)
        for block in self.blocks:
            x = block(x)
        return self.ends(tokens, x)


def fsdp2_compiled(model: Deep) -> Any:
    """fully_shard on each block and the rest; blocks compiled one by one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        block.compile()
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2(model: Deep) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _config(codegen: str) -> autoshard.Config:
    return autoshard.Config(zero=3, codegen=codegen, verbose=False, replicate_below=0)  # type: ignore[arg-type]


def autoshard3(model: Deep) -> Any:
    """The one line."""
    return torch.compile(model, backend=autoshard.backend(_config("inductor")))


def autoshard3_eager(model: Deep) -> Any:
    """The rewritten graph, operator by operator."""
    return torch.compile(model, backend=autoshard.backend(_config("eager")))


def autoshard3_blocks(model: Deep) -> Any:
    """Blocks compiled one by one and the ends operator by operator, as for FSDP2."""
    backend = autoshard.backend(_config("inductor"))
    for block in model.blocks:
        block.compile(backend=backend)
    model.ends.compile(backend=autoshard.backend(_config("eager")))
    return model


def compiled_alone(model: Deep) -> Any:
    """torch.compile of the whole model on each process by itself: nothing sharded, nothing reduced."""
    return torch.compile(model)


CONTENDERS: dict[str, Callable[[Deep], Any]] = {
    f.__name__: f for f in (fsdp2_compiled, fsdp2, autoshard3_blocks, autoshard3, autoshard3_eager, compiled_alone)
}


def measure(name: str, blocks: int) -> dict[str, float]:
    """Seconds of the first step and of the median step, on the slowest process."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    plain = Deep(blocks)
    start = time.perf_counter()
    model = CONTENDERS[name](plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))
    seconds = []
    for _ in range(WARM_UP + STEPS):
        model(tokens).backward()
        clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        dist.barrier()
        start = time.perf_counter()
    worst = torch.tensor([seconds[0], statistics.median(seconds[WARM_UP:])])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return {"first": worst[0].item(), "step": worst[1].item()}


def _run(name: str, blocks: int, cache: str) -> dict[str, float]:
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", __file__, "--contender", name, "--blocks", str(blocks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
    command[0] = str(Path(sys.executable).with_name("torchrun"))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _row(name: str, blocks: int) -> tuple[float, float, float]:
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = _run(name, blocks, cache), _run(name, blocks, cache)
    print(f"{name}: first step {cold['first']:.1f} s cold, {warm['first']:.1f} s warm; a step {warm['step']:.3f} s", flush=True)
    return cold["first"], warm["first"], min(cold["step"], warm["step"])


def _report(rows: dict[str, tuple[float, float, float]], blocks: int) -> str:
    base = rows["fsdp2_compiled"]
    lines = [
        "# Overhead",
        "",
        f"A model of {blocks} small blocks (width {WIDTH}, {LENGTH} tokens), ZeRO-3 on 2 gloo processes, so that a step is",
        "almost all overhead. Seconds on the slower process; in brackets the ratio to FSDP2 with compiled blocks of the same",
        f"run. Written by `python bench/overhead.py` on {platform.processor() or platform.machine()} with {os.cpu_count()} "
        f"cores, torch {torch.__version__}.",
        "",
        "| | first step, cold cache | first step, warm cache | a step |",
        "|---|---:|---:|---:|",
    ]
    for name, row in rows.items():
        cells = [f"{value:.3g} ({value / of:.2f})" for value, of in zip(row, base)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contender", choices=CONTENDERS)
    parser.add_argument("--blocks", type=int, default=80)
    args = parser.parse_args()
    if args.contender:
        found = measure(args.contender, args.blocks)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
        return
    rows = {name: _row(name, args.blocks) for name in CONTENDERS}
    RESULT.write_text(_report(rows, args.blocks))
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
