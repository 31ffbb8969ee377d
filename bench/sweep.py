"""What one trace of a 7B model answers, and how fast; writes bench/results/sweep.md.

    python bench/sweep.py

No GPU is needed: Llama of 7 billion parameters on 8 to 64 H100, bf16, its batch and sequence left open; each stage of ZeRO that may fit, as
it is and with all blocks recomputed.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES
from autoshard.planning import forecaster
from autoshard.report import rendered
from autoshard.sweep_report import sweep_tables

RESULT = Path(__file__).parent / "results" / "sweep.md"
EVALUATIONS, TIMES = 100_000, 5
CLUSTERS = [Cluster(nodes, 8, DEVICES["h100"]) for nodes in (1, 2, 8)]
CONFIG = autoshard.Config(precision="bf16")
POINTS = ((CLUSTERS[0], 4, 2048), (CLUSTERS[0], 64, 2048), (CLUSTERS[1], 2, 4096), (CLUSTERS[2], 8, 2048))


def model() -> torch.nn.Module:
    """Llama 7B, without values."""
    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
                         vocab_size=32000, max_position_embeddings=4096, use_cache=False)  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Tokens, without values."""
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few tries."""
    spent = []
    for _ in range(TIMES):
        begin = time.perf_counter()
        work()
        spent.append(time.perf_counter() - begin)
    return min(spent)


def evaluations(sweep: autoshard.Sweep) -> tuple[float, float]:
    """Seconds for the peaks, and for the times, of 100,000 random batches, sequences and ways."""
    draw, each = np.random.default_rng(0), -(-EVALUATIONS // len(sweep.ways))
    some = [{"batch": draw.integers(1, 65, each) * 1.0, "sequence": draw.integers(1, 4097, each) * 1.0} for _ in sweep.ways]
    drawn = list(zip(sweep.ways, some))
    peaks = fastest(lambda: [way.curve.peaks(values) for way, values in drawn])
    return peaks, fastest(lambda: [way.schedule.seconds(values) for way, values in drawn])


def beside_a_trace(sweep: autoshard.Sweep, batch: int, length: int, cluster: Cluster) -> str:
    """One line: what the sweep says of these sizes, and what a trace with them does."""
    swept = sweep.at(batch=batch, sequence=length, processes=cluster.world)
    plan = sweep.ways[int(swept.way)].plan
    torch.compiler.reset()
    predicted = forecaster(model(), inputs(batch, length), CONFIG, cluster, None)(plan).predicted
    assert predicted.step_seconds is not None
    peak, seconds = float(swept.peak) / predicted.peak_bytes - 1, float(swept.seconds) / predicted.step_seconds - 1
    recomputed = "all" if plan.recompute else "none"
    return f"| {cluster.world} | {batch} x {length} | {plan.stage} | {recomputed} | {peak:+.2%} | {seconds:+.2%} |"


def main() -> None:
    gc.disable()
    begin = time.perf_counter()
    sweep = autoshard.sweep(model(), inputs(2, 2048), CONFIG, CLUSTERS)
    traced = time.perf_counter() - begin
    peaks, seconds = evaluations(sweep)
    lines = [
        "# One trace for all sizes",
        "",
        f"Llama 7B on 8, 16 and 64 H100, bf16, Inductor; traced once, at 2 x 2048, and rehearsed once for each of {len(sweep.ways)} ways "
        "(stages of",
        f"ZeRO that may fit, as they are and with all blocks recomputed, on each number of processes), in {traced:.0f} s. Written by",
        f"`python bench/sweep.py` on {platform.processor() or platform.machine()} with {os.cpu_count()} cores, "
        f"torch {torch.__version__}.",
        "",
        f"{EVALUATIONS:,} evaluations (random batches, sequences and ways), the fastest of {TIMES}: peaks {peaks:.3f} s, "
        f"times {seconds:.3f} s.",
        "",
        "Off what a trace of these sizes alone predicts:",
        "",
        "| processes | batch x sequence | ZeRO | recomputed | peak | step |",
        "|---:|---|---:|---|---:|---:|",
        *(beside_a_trace(sweep, batch, length, cluster) for cluster, batch, length in POINTS),
        "",
        "What `autoshard sweep` prints of it:",
        "",
        "```",
        rendered(sweep_tables(sweep)),
        "```",
    ]
    RESULT.write_text("\n".join(lines) + "\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
