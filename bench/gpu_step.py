"""A training step on one GPU beside what one would write by hand: torch.compile with a fused AdamW under autocast.

    python bench/gpu_step.py [--layers 8] [--rounds 20]        # writes bench/results/gpu_step.md

Each way is a process of its own; they compile beside each other and step one after the other. Times are medians by the GPU's clock; a
peak is the most that CUDA's allocator had given out in a step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from gpu_clock import seconds_of  # noqa: E402
from told import Told, until_told  # noqa: E402

import autoshard  # noqa: E402
from autoshard.kernels.multi_tensor import TILES  # noqa: E402
from autoshard.kernels.tuning import LAUNCHES  # noqa: E402

RESULT = Path(__file__).parent / "results" / "gpu_step.md"
BATCH, LENGTH = 8, 1024
WARM_UP = len(TILES) * LAUNCHES + 5  # steps until tiles are chosen: see [Note: Measured at work] in autoshard/kernels/tuning.py
AWAKE = 8  # steps until a GPU that slept is fast again


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": layers, "num_attention_heads": 16, "vocab_size": 32000}
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))


def _ours(model: nn.Module, codegen: Any) -> nn.Module:
    return torch.compile(model, backend=autoshard.backend(autoshard.Config(codegen=codegen, verbose=False)))  # type: ignore[return-value]


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "torch, eager": lambda model: model,
    "torch.compile": torch.compile,
    "autoshard, eager": lambda model: _ours(model, "eager"),
    "autoshard, triton": lambda model: _ours(model, "triton"),
    "autoshard, inductor": lambda model: _ours(model, "inductor"),
}


def measured(way: str, layers: int, rounds: int) -> dict[str, float]:
    """Seconds of a step, bytes at its peak, and losses, of one way."""
    torch.manual_seed(0)
    model = llama(layers).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if way.startswith("autoshard"):
        autoshard.fuse(optimizer)
    run, tokens = WAYS[way](model), torch.randint(32000, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)).cuda()

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [step().item() for _ in range(WARM_UP)]
    until_told()
    for _ in range(AWAKE):
        step()
    torch.cuda.reset_peak_memory_stats()
    times = [seconds_of(step) for _ in range(rounds)]
    return {"seconds": statistics.median(times), "peak": torch.cuda.max_memory_allocated(), "first": losses[0], "last": losses[-1]}


def compared(layers: int, rounds: int) -> dict[str, dict[str, float]]:
    """What each way measured."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ended:
        workers = {}
        for i, way in enumerate(WAYS):
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/{i}"}
            program = [__file__, "--way", way, "--layers", str(layers), "--rounds", str(rounds)]
            workers[way] = Told(program, environment, Path(folder) / f"errors{i}")
            ended.callback(workers[way].stop)
        for worker in workers.values():
            worker.wait_until_ready()
        return {way: json.loads(worker.measure()) for way, worker in workers.items()}


def report(found: dict[str, dict[str, float]], layers: int) -> str:
    base = found["torch.compile"]
    lines = [
        "# A training step on one GPU",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a Llama of {layers} layers of 1024, {BATCH} × {LENGTH} tokens, under autocast to "
        "bf16, AdamW in one launch, torch's or autoshard's. Written by `python bench/gpu_step.py`.",
        "",
        "| | step, ms | beside torch.compile | peak, GiB | loss at first, and after some steps |",
        "|---|---:|---:|---:|---|",
    ]
    for way, row in found.items():
        ratio, peak = row["seconds"] / base["seconds"], row["peak"] / 2**30
        lines.append(f"| {way} | {row['seconds'] * 1e3:.1f} | {ratio:.3f} | {peak:.2f} | {row['first']:.4f}, {row['last']:.4f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.way:
        print(json.dumps(measured(said.way, said.layers, said.rounds)))
        return
    if not torch.cuda.is_available():
        raise SystemExit("bench/gpu_step.py needs a GPU")
    RESULT.write_text(text := report(compared(said.layers, said.rounds), said.layers))
    print(text)


if __name__ == "__main__":
    main()
