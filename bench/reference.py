"""The models that are compared on, and their data: the same in every process, batches that differ by rank.

BENCH_MODEL in the environment says which one a job trains.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 2048
BATCH = 4
SEQUENCE = 128
LEARNING_RATE = 1e-4
CLIP = 1.0


def _llama(hidden: int, inner: int, layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": inner, "max_position_embeddings": SEQUENCE}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, num_attention_heads=4, use_cache=False))


def _gpt2() -> nn.Module:
    """Without dropout, so that all contenders train the same."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": SEQUENCE, "n_embd": 256, "n_layer": 4, "n_head": 4}
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **without, use_cache=False))


class Product(nn.Module):
    """A weight that is made of two factors at each call, as by a small network that writes weights."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(rows, rank) / rank), nn.Parameter(torch.randn(rank, columns) / 4)

    def forward(self) -> Tensor:
        return torch.tanh(self.left @ self.right)


class Pair(nn.Module):
    """A block of two products."""

    def __init__(self, hidden: int, inner: int, rank: int) -> None:
        super().__init__()
        self.up, self.down = Product(hidden, inner, rank), Product(inner, hidden, rank)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(x @ self.up()) @ self.down()


class Factored(nn.Module):
    """Such blocks between an embedding and a head."""

    def __init__(self, hidden: int, inner: int, rank: int, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, hidden), nn.Linear(hidden, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Pair(hidden, inner, rank) for _ in range(layers))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(nn.functional.layer_norm(x, x.shape[-1:]))
        return CausalLMOutput(loss=nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


@dataclass(frozen=True)
class Reference:
    """A model. words: what it is. parameters: about how many. inside: share of them in blocks; the rest need not be gathered
    twice. blocks: the list of them, of such a model."""

    words: str
    parameters: float
    inside: float
    build: Callable[[], nn.Module]
    blocks: Callable[[Any], nn.ModuleList]


MODELS = {
    "llama": Reference(
        "a Llama of 4.2 M fp32 parameters (4 layers, hidden 256)", 4.2e6, 0.75, lambda: _llama(256, 688, 4), lambda m: m.model.layers
    ),
    "gpt2": Reference(
        "a GPT-2 of 3.7 M fp32 parameters (4 layers, hidden 256)", 3.72e6, 0.85, _gpt2, lambda m: m.transformer.h
    ),
    "llama27m": Reference(
        "a Llama of 27 M fp32 parameters (8 layers, hidden 512)", 27.3e6, 0.92, lambda: _llama(512, 1376, 8), lambda m: m.model.layers
    ),
    "factored": Reference(
        "a model of 2.5 M fp32 parameters, 6 blocks of two weights of 256 x 1024 that are products of factors of rank 96", 2.52e6, 0.58,
        lambda: Factored(256, 1024, 96, 6), lambda m: m.layers,
    ),
}
CHOSEN = MODELS[os.environ.get("BENCH_MODEL", "llama")]


def build_model(seed: int = 0) -> nn.Module:
    """The model in fp32, equal for equal seeds; fails if it is not of the size that results quote."""
    torch.manual_seed(seed)
    model = CHOSEN.build().float().train()
    count = sum(p.numel() for p in model.parameters())
    if abs(count / CHOSEN.parameters - 1) > 0.02:
        raise RuntimeError(f"the reference model has {count} parameters, not about {CHOSEN.parameters:.0f}")
    return model


def batch(step: int, rank: int) -> Tensor:
    """The tokens that a rank trains on in a step."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + step)
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
