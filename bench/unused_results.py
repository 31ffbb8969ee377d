"""Results that a loop does not differentiate, logits beside a loss: what a step takes, compiled by torch's Inductor and by autoshard with it.

    python bench/unused_results.py [--rounds 24]

One process, a Llama with a vocabulary of 16,384 on 512 tokens. Peaks are what torch's profiler saw asked for above what was there before
a step; steps are forward and backward, without an optimizer. Contenders take turns in an order drawn for each round, the first once more
as a control. Writes bench/results/unused_results.md.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import report  # noqa: E402

import autoshard  # noqa: E402
from tests.peaks import grown  # noqa: E402

RESULT = HERE / "results" / "unused_results.md"
SIZES = {"vocab_size": 16384, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4}
BATCH, LENGTH = 4, 128
WHAT = {False: "loss and logits", True: "loss, logits, keys and values"}
HEAD = """# Results that a loop does not differentiate

A Llama of 2 layers, a vocabulary of 16,384, 512 tokens, fp32, one process; its logits are {logits:.1f} MB. Forward and backward of the loss. "of
torch's": the median of the rounds' ratios, with their middle half. Written by `python bench/unused_results.py` on {machine}, torch {torch},
one thread, {rounds} rounds.

| the model gives | compiled by | peak, MB | step, ms | of torch's |
|---|---|---:|---:|---:|
"""


def contenders(cache: bool) -> dict[str, Callable[[], Tensor]]:
    """A step of each, on the same numbers; returns the loss."""
    return {name: _step(cache, backend) for name, backend in (
        ("torch", "inductor"),
        ("autoshard", autoshard.backend(autoshard.Config(verbose=False))),
        ("torch, once more", "inductor"),
    )}


def _step(cache: bool, backend: object) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=cache))
    tokens = torch.randint(SIZES["vocab_size"], (BATCH, LENGTH))
    compiled = torch.compile(model, backend=backend)

    def step() -> Tensor:
        model.zero_grad()
        loss: Tensor = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    return step


def timed(steps: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, by round."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name in random.sample(list(steps), len(steps)):
            start = time.perf_counter()
            steps[name]()
            found[name].append(time.perf_counter() - start)
    return found


def rows(cache: bool, rounds: int) -> list[str]:
    """Lines of the table. RuntimeError if losses differ."""
    steps = contenders(cache)
    losses = [float(step()) for step in steps.values() for _ in range(2)]
    if max(losses) - min(losses) > 1e-4:
        raise RuntimeError(f"losses differ: {losses}")
    peaks = {name: grown(step) / 1e6 for name, step in steps.items()}
    seconds = timed(steps, rounds)
    return [_row(WHAT[cache], name, peaks[name], mine, seconds["torch"]) for name, mine in seconds.items()]


def _row(what: str, name: str, peak: float, seconds: Sequence[float], base: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles([a / b for a, b in zip(seconds, base, strict=True)], n=4)
    return f"| {what} | {name} | {peak:.1f} | {1e3 * statistics.median(seconds):.0f} | {middle:.2f} ({low:.2f} to {high:.2f}) |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    lines = [line for cache in WHAT for line in rows(cache, asked.rounds)]
    machine = f"{report.cpu_name()} with {os.cpu_count()} cores"
    logits = 4 * BATCH * LENGTH * SIZES["vocab_size"] / 1e6
    RESULT.write_text(HEAD.format(logits=logits, machine=machine, torch=torch.__version__, rounds=asked.rounds) + "\n".join(lines) + "\n")
    print(RESULT.read_text())
