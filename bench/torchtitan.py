"""A prediction beside a table that others published: Llama 3.1 8B on 8 H100, torchtitan, December 2024.

    python bench/torchtitan.py

No GPU is needed. Writes bench/results/torchtitan.md.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import DEVICES, GIB, Link

RESULT = Path(__file__).parent / "results" / "torchtitan.md"
PUBLISHED = {"eager": (5762, 82.4), "inductor": (6667, 77.0)}  # tokens a second a GPU, GiB
BATCH, LENGTH = 2, 8192


def cluster() -> Cluster:
    """H100 of 96 GB HBM2e at 2.4 TB/s, NVLink inside, 400 Gbit/s a GPU outside."""
    h100 = DEVICES["h100"]
    device = replace(h100, memory=96 * 10**9, bandwidth=2.4e12, across=Link(h100.across.latency, 50e9))
    return Cluster(1, 8, device)


def model() -> torch.nn.Module:
    """Llama 3.1 8B, without values."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=LENGTH, rope_theta=500000.0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def row(codegen: str) -> str:
    """One line of the table."""
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    config = autoshard.Config(zero=3, recompute="selective", precision="bf16", codegen=codegen)  # type: ignore[arg-type]
    torch.compiler.reset()
    begin = time.perf_counter()
    plan = autoshard.plan(model(), {"input_ids": ids, "labels": ids}, config, cluster())
    spent = time.perf_counter() - begin
    assert plan.predicted.step_seconds is not None
    assert plan.predicted.reserved is not None
    tokens, gib = BATCH * LENGTH / plan.predicted.step_seconds, plan.predicted.reserved / GIB
    allocated = plan.predicted.peak_bytes / GIB
    print(f"{codegen}: {tokens:.0f} tokens/s, {gib:.1f} GiB reserved, {allocated:.1f} at {plan.predicted.place}; planned in {spent:.0f} s", flush=True)
    published, held = PUBLISHED[codegen]
    return (
        f"| {codegen} | {published} | {tokens:.0f} | {tokens / published - 1:+.0%} | {held} | {gib:.1f} "
        f"| {gib / held - 1:+.0%} | {allocated:.1f} | {plan.predicted.place} |"
    )


HEAD = """# Beside a published table

torchtitan, December 2024: Llama 3.1 8B, 8192 tokens, local batch 2, selective activation checkpointing, fp32 master
weights with bf16 compute, FSDP over 8 H100 of 96 GB HBM2e (2.4 TB/s, 400 Gbit/s a GPU). Written by
`python bench/torchtitan.py`; predicted from data sheets, nothing measured, on a machine without a GPU.

| codegen | published tokens/s a GPU | predicted | off | published GiB | predicted | off | of it allocated | at |
|---|---:|---:|---:|---:|---:|---:|---:|---|
"""

TAIL = """
What the prediction does not know:

- The published memory is what CUDA's caching allocator had reserved at most, and so is what is predicted, by the allocator's
  own rules for one stream. FSDP2 gathers on streams of their own, whose blocks are not shared; NCCL's buffers are not modelled.
- torchtitan compiled each block by itself and left the loss as it was; predicted is the whole model compiled, where the
  loss keeps fewer copies of the logits, 8.4 GB each in fp32.
- The attention kernel is the CPU's in the trace: flash attention too, but with another workspace.
- The published GPUs were limited to 500 W, which lowers their clocks; data sheets say 989 TFLOP/s at 700 W.
- torchtitan's model is its own (complex rotary embedding, a loss of its own); predicted is the one of transformers.
- Kernels of matmuls are taken to reach a fixed share of the data sheet's rate, whatever their shape.
"""


def main() -> None:
    RESULT.write_text(HEAD + "\n".join(map(row, PUBLISHED)) + "\n" + TAIL)
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
