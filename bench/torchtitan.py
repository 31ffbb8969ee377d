"""A prediction beside a table that others published: Llama 3.1 8B on 8 H100, torchtitan, December 2024.

    python bench/torchtitan.py

No GPU is needed. Writes bench/results/torchtitan.md.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.fx import Node
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard.cost_model import allocator
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.fusion import fuse
from autoshard.cost_model.hardware import DEVICES, GIB, Link
from autoshard.cost_model.program import Piece, Program
from autoshard.cost_model.step_memory import Held, Listed, program_of
from autoshard.cost_model.workspace import add_workspaces
from autoshard.forecast import Forecaster
from autoshard.passes.choose_zero import make_plan
from autoshard.planning import circumstances, forecaster
from autoshard.prediction import Prediction
from autoshard.rehearsal import body_of

RESULT = Path(__file__).parent / "results" / "torchtitan.md"
PUBLISHED = {"eager": (5762, 82.4), "compiled": (6667, 77.0)}  # tokens a second a GPU, GiB
BATCH, LENGTH, LAYERS = 2, 8192, 32
OWN_STREAMS = "gathered", "communication"  # categories of pieces
LAST_MATMUL, KEPT = "mm_6", "mm_4"  # of a layer: the seventh, which nothing in backward needs, and the fifth, which it does


def cluster() -> Cluster:
    """H100 of 96 GB HBM2e at 2.4 TB/s, NVLink inside, 400 Gbit/s a GPU outside."""
    h100 = DEVICES["h100"]
    device = replace(h100, memory=96 * 10**9, bandwidth=2.4e12, across=Link(h100.across.latency, 50e9))
    return Cluster(1, 8, device)


def model() -> torch.nn.Module:
    """Llama 3.1 8B, without values."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=LAYERS, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=LENGTH, rope_theta=500000.0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@dataclass
class Titan(Forecaster):
    """Forecasts a model as torchtitan ran it, eager or (compiled) with each layer compiled by itself, and nothing else."""

    compiled: bool = False

    def _program(self, listed: Listed, held: Held) -> Program:
        if not self.compiled:
            program = super()._program(listed, held)
            _keep_what_was_asked_for(program)
            return program
        device = self.cluster.device
        program = program_of(listed, held, body_of, device.inside.scatters, self.captured.open)
        layers = _layers(program)
        program.operations = [replace(o, code=o.code if o.call in layers else None) for o in program.operations]
        program = fuse(program, False)
        add_workspaces(program, device, False)
        return program


def _layers(program: Program) -> set[Node]:
    """The calls of what is called once a layer, forward and backward; the head is a block too."""
    calls = dict.fromkeys((o.half, o.call) for o in program.operations if o.call is not None)
    counts = Counter((half, _key(call)) for half, call in calls)
    found = {call for half, call in calls if counts[half, _key(call)] == LAYERS}
    assert len(found) == 2 * LAYERS, counts
    return found


def _key(call: Node) -> str:
    """The name of the block that is called."""
    return next(str(arg) for arg in call.args if isinstance(arg, str))


def _keep_what_was_asked_for(program: Program) -> None:
    """Eager selective checkpointing keeps all that its policy names until backward comes there, needed or not: the first, third, fifth
    and seventh matmul of a layer. The last one's result is only added to what went around it."""

    def made_in_forward(maker: str) -> list[Piece]:
        found = [piece for piece in program.pieces if piece.maker == maker and program.operations[piece.made].half == "forward"]
        return sorted(found, key=lambda piece: piece.made)

    kept, dropped = made_in_forward(KEPT), made_in_forward(LAST_MATMUL)
    assert len(kept) == len(dropped) == LAYERS, (len(kept), len(dropped))
    for piece, beside in zip(dropped, kept):
        piece.last = max(piece.last, beside.last)


def reserved(program: Program) -> float:
    """GiB that CUDA's allocator has reserved at most, where gathers and reductions have streams of their own: what is freed
    there goes to nothing else."""
    pools: dict[str, list[Piece]] = defaultdict(list)
    for piece in program.pieces:
        pools[piece.category if piece.category in OWN_STREAMS else "compute"].append(piece)
    return sum(allocator.reserved(replace(program, pieces=pool)) for pool in pools.values()) / GIB


def settings(codegen: str) -> autoshard.Config:
    """Stage 3 as it was published."""
    return autoshard.Config(zero=3, recompute="selective", precision="bf16", codegen=codegen)  # type: ignore[arg-type]


def example() -> dict[str, torch.Tensor]:
    """A batch without values."""
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def tokens_a_second(predicted: Prediction) -> float:
    """Of each GPU."""
    assert predicted.step_seconds is not None
    return BATCH * LENGTH / predicted.step_seconds


def row(name: str, compiled: bool) -> str:
    """One line of the table."""
    config, machines = settings("eager"), cluster()
    torch.compiler.reset()
    begin = time.perf_counter()
    usual = forecaster(model(), example(), config, machines, None)
    titan = Titan(usual.captured, usual.make_optimizers, machines, "eager", usual.passes, compiled=compiled)
    plan = make_plan(usual.captured.inventory, config, circumstances(config, machines), titan)
    spent = time.perf_counter() - begin
    tokens, gib = tokens_a_second(plan.predicted), reserved(titan.simulated(plan)[0])
    allocated = plan.predicted.peak_bytes / GIB
    print(f"{name}: {tokens:.0f} tokens/s, {gib:.1f} GiB reserved, {allocated:.1f} at {plan.predicted.place}; planned in {spent:.0f} s", flush=True)
    published, held = PUBLISHED[name]
    return (
        f"| {name} | {published} | {tokens:.0f} | {tokens / published - 1:+.0%} | {held} | {gib:.1f} "
        f"| {gib / held - 1:+.0%} | {allocated:.1f} | {plan.predicted.place} |"
    )


def ours(codegen: str) -> str:
    """One line of what autoshard would take of the same."""
    torch.compiler.reset()
    predicted = autoshard.plan(model(), example(), settings(codegen), cluster()).predicted
    assert predicted.reserved is not None
    return (
        f"| {codegen} | {tokens_a_second(predicted):.0f} | {predicted.reserved / GIB:.1f} | {predicted.peak_bytes / GIB:.1f} "
        f"| {predicted.place} |"
    )


HEAD = """# Beside a published table

torchtitan, December 2024: Llama 3.1 8B, 8192 tokens, local batch 2, selective activation checkpointing, fp32 master
weights with bf16 compute, FSDP over 8 H100 of 96 GB HBM2e (2.4 TB/s, 400 Gbit/s a GPU). Written by
`python bench/torchtitan.py`; predicted from data sheets, nothing measured, on a machine without a GPU.

| | published tokens/s a GPU | predicted | off | published GiB | predicted | off | of it allocated | at |
|---|---:|---:|---:|---:|---:|---:|---:|---|
"""

BETWEEN = """
The graphs, sizes and times are those that autoshard foresees for itself at stage 3. Three things are torchtitan's own, and are predicted as it
has them. None of them has a figure that was fitted, but they were found behind a first comparison, as autoshard itself would run the step
(below), which had 14 and 34 % less memory than was published:

- Compiled, each layer is compiled by itself; embedding, head and loss run as they are, with three copies of the logits in fp32, 8.4 GB each.
- Eager, torch's selective checkpointing keeps what its policy names, whether backward needs it or not: of a layer the last matmul's
  result too, 134 MB. A compiled layer does not keep it.
- FSDP2 gathers and reduces on streams of their own. The published memory is what CUDA's caching allocator had reserved at most, and what is
  freed on one stream goes to no other, so it is predicted as the sum of three pools.

The same step as autoshard itself would run it, on one stream, compiled as a whole where code is generated:

| codegen | predicted tokens/s a GPU | reserved GiB | allocated | at |
|---|---:|---:|---:|---|
"""

TAIL = """
What the prediction does not know:

- FSDP2 copies out of what it gathered; autoshard uses it where it lies. NCCL's buffers are not among what an allocator reserves.
- transformers gives attention a mask, for which torch takes its memory-efficient kernel; torchtitan's is flash attention.
- The published GPUs were limited to 500 W, which lowers their clocks; data sheets say 989 TFLOP/s at 700 W.
- torchtitan's model is its own (complex rotary embedding, a loss of its own); predicted is the one of transformers.
- Kernels of matmuls are taken to reach a fixed share of the data sheet's rate, whatever their shape.
"""


def main() -> None:
    published = "\n".join(row(name, name == "compiled") for name in PUBLISHED)
    RESULT.write_text(HEAD + published + "\n" + BETWEEN + "\n".join(map(ours, ("eager", "inductor"))) + "\n" + TAIL)
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
