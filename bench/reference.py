"""The reference model and its data: a small Llama, the same in every process, batches that differ by rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 2048
BATCH = 4
SEQUENCE = 128
LEARNING_RATE = 1e-4
CLIP = 1.0
PARAMETERS = 4.2e6


def build_model(seed: int = 0) -> nn.Module:
    """The model in fp32, equal for equal seeds; fails if it is not of the size that results quote."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).float().train()
    count = sum(p.numel() for p in model.parameters())
    if abs(count / PARAMETERS - 1) > 0.02:
        raise RuntimeError(f"the reference model has {count} parameters, not about {PARAMETERS:.0f}")
    return model


def batch(step: int, rank: int) -> Tensor:
    """The tokens that a rank trains on in a step."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + step)
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
