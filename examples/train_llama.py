"""A small Hugging Face Llama, trained on as many processes as torchrun starts.

    torchrun --nproc-per-node 2 examples/train_llama.py --check --memory-budget 60MiB

The model, the optimizer and the loop are ordinary PyTorch; the line marked below is all that autoshard asks
for. With a budget of 60MiB for each process, whole copies of the parameters, gradients and AdamW's state
do not fit beside the activations, so autoshard shards them. `--check` then trains the same model again on one process, unsharded
and without autoshard, and compares the losses.

autoshard's own default is to compile with Inductor (`--codegen inductor`). For a run of 60 steps that takes
longer than it saves, so the default here is "eager": the rewritten graph, operator by operator.

`build()` at the end lets `autoshard plan examples/train_llama.py` predict memory and traffic without training.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from check import compare, losses_of_one_process
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from text import VOCABULARY, batches, standard_library
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard

# What torchrun tells a process; without torchrun there is one.
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))

console = Console(highlight=False, quiet=RANK != 0)


def train(args: argparse.Namespace) -> list[float]:
    """The loop, and the losses that it saw: the mean over all processes, step by step."""
    device = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
    config = autoshard.Config(memory_budget=args.memory_budget, zero=args.zero, codegen=args.codegen)
    reader = batches(standard_library(), args.seq, args.batch, RANK, WORLD, args.seed)

    model = make_llama(args).to(device)
    model = torch.compile(model, backend=autoshard.backend(config))  # <- the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    losses = []
    with progress_bar() as progress:
        task = progress.add_task("train", total=args.steps)
        for tokens in islice(reader, args.steps):
            start = time.perf_counter()
            loss = loss_of(model, tokens.to(device))
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

            losses.append(mean_over_processes(loss))
            rate = WORLD * tokens.numel() / (time.perf_counter() - start)
            progress.console.print(step_line(len(losses), losses[-1], whole(norm), rate, device))
            progress.advance(task)
    if RANK == 0:
        print(autoshard.report(model))
    return losses


def make_llama(args: argparse.Namespace) -> nn.Module:
    """The same weights on every process and in every run, from the seed."""
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=args.hidden,
            intermediate_size=args.hidden * 8 // 3,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 32,
            max_position_embeddings=args.seq,
            use_cache=False,
        )
    )


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    # Hugging Face shifts the labels by one token itself.
    return model(input_ids=tokens, labels=tokens).loss


def mean_over_processes(loss: Tensor) -> float:
    """For printing only: the gradients are averaged by autoshard. Each process has the loss of its own batch."""
    mean = loss.detach() / WORLD
    if WORLD > 1:
        dist.all_reduce(mean)  # the process group is there since the first compiled call
    return mean.item()


def whole(norm: Tensor) -> float:
    """The norm of sharded gradients comes as a DTensor; every process must ask for its whole value."""
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def step_line(step: int, loss: float, norm: float, rate: float, device: torch.device) -> str:
    return f"step {step:3}  loss {loss:.4f}  norm {norm:6.3f}  {rate:8,.0f} tokens/s  {peak_memory(device)}"


def peak_memory(device: torch.device) -> str:
    """The most that this process held so far: of the GPU, or of the machine (with Python and PyTorch itself)."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**20:,.0f} MiB"
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is bytes on macOS, KiB elsewhere
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:,.0f} MiB"


def check(losses: list[float], args: argparse.Namespace) -> bool:
    """Trains once more, on this process only, with what every process read, and compares."""
    console.print("\ntraining the same model on one process, without autoshard ...")
    text = standard_library()
    model = make_llama(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    readers = [batches(text, args.seq, args.batch, rank, WORLD, args.seed) for rank in range(WORLD)]
    reference = losses_of_one_process(model, optimizer, loss_of, readers, args.steps)
    return compare(losses, reference, WORLD, console)


@contextmanager
def others_waiting_for_rank_0() -> Iterator[None]:
    """Rank 0 may take its time inside, for what has no collectives; the others wait for it at the end.

    The wait has a group of its own, because that of the training takes minutes of silence for a failure.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(hours=1)) if WORLD > 1 else None
    yield
    if group is not None:
        dist.barrier(group)


Inputs = dict[str, Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def build() -> tuple[nn.Module, Inputs, OptimizerFactory]:
    """What to plan for: the model, an example of its inputs, and what makes its optimizer.

    Only shapes matter; meta tensors will do.
    """
    args = parse([])
    tokens = torch.zeros(args.batch, args.seq, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens}
    return make_llama(args), inputs, lambda parameters: torch.optim.AdamW(parameters, lr=args.lr)


def zero_stage(text: str) -> str | int:
    return text if text == "auto" else int(text)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small Hugging Face Llama, sharded by autoshard.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--memory-budget", help='of each process, such as "60MiB"; default: what is free')
    parser.add_argument("--zero", type=zero_stage, default="auto", help="ZeRO stage 0 to 3, or auto")
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="eager")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step, of each process")
    parser.add_argument("--seq", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="compare with one process without autoshard")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse()
    losses = train(args)
    if not args.check:
        return 0
    with others_waiting_for_rank_0():
        passed = RANK != 0 or check(losses, args)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
