"""A GPT in plain PyTorch, trained on as many processes as torchrun starts.

    torchrun --nproc-per-node 2 examples/train_gpt.py     # sharded over two processes
    python examples/train_gpt.py                          # the same file on one process

The model and the loop are ordinary PyTorch; the line marked below is all that autoshard asks for.
`build()` at the end lets `autoshard plan examples/train_gpt.py` predict memory and traffic without training.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from text import VOCABULARY, batches, standard_library
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import autoshard

LENGTH = 128


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers: int = 4, width: int = 256, heads: int = 8, length: int = LENGTH) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(steps: int, batch: int, lr: float, config: autoshard.Config) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)
    model = GPT().to(device)
    model = torch.compile(model, backend=autoshard.backend(config))  # <- the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    # One token more than the model sees: inputs are all but the last, targets all but the first.
    reader = batches(standard_library(), LENGTH + 1, batch, rank, world, seed=0)
    for step, tokens in enumerate(islice(reader, steps), start=1):
        start = time.perf_counter()
        tokens = tokens.to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)  # only for printing; the gradients are averaged already
        if rank == 0:
            print(f"step {step:3}  loss {mean.item():.4f}  {time.perf_counter() - start:6.3f} s")

    if rank == 0:
        print(autoshard.report(model))


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """What to plan for: the model and an example of its inputs. Only shapes matter; meta tensors will do."""
    return GPT(), (torch.zeros(4, LENGTH, dtype=torch.long),)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A GPT in plain PyTorch, sharded by autoshard.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step, of each process")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--memory-budget", help='of each process, such as "60MiB"; default: what is free')
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse()
    config = autoshard.Config(memory_budget=args.memory_budget, codegen=args.codegen)
    train(args.steps, args.batch, args.lr, config)
