"""The models of the accuracy bench: small ones of six families, each with a batch, the same in every process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import contenders
import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]


class WithLoss(nn.Module):
    """A model of one input and its loss: returns the loss, as models of transformers do with labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(x), labels)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(y)))


def llama(layers: int = 4) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 688, "max_position_embeddings": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, num_attention_heads=4, use_cache=False))


def wide() -> nn.Module:
    """A Llama that keeps a GPU busy, of which one kernel takes longer than its launch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 2048, "hidden_size": 2048, "intermediate_size": 5504, "max_position_embeddings": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=16, use_cache=False))


def half() -> nn.Module:
    """The same in bf16."""
    return wide().bfloat16()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=2048, n_positions=512, n_embd=256, n_layer=4, n_head=4, use_cache=False))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    return BertForMaskedLM(BertConfig(**sizes, num_attention_heads=4))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=64, patch_size=8, num_labels=100))


def conv() -> nn.Module:
    body = [Residual(128) for _ in range(6)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100)]
    return WithLoss(nn.Sequential(nn.Conv2d(3, 128, 3, padding=1), *body, *head))


def mlp() -> nn.Module:
    widths = [1024] * 6
    layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.GELU())]
    return WithLoss(nn.Sequential(*layers, nn.Linear(1024, 100)))


def _tokens(batch: int, generator: torch.Generator | None) -> Inputs:
    ids = torch.randint(2048, (batch, 128), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _images(batch: int, generator: torch.Generator | None) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, 64, 64, generator=generator), "labels": _classes(batch, generator)}


def _small_images(batch: int, generator: torch.Generator | None) -> Inputs:
    return {"x": torch.randn(batch, 3, 16, 16, generator=generator), "labels": _classes(batch, generator)}


def _vectors(batch: int, generator: torch.Generator | None) -> Inputs:
    return {"x": torch.randn(batch, 1024, generator=generator), "labels": _classes(batch, generator)}


def _classes(batch: int, generator: torch.Generator | None) -> Tensor:
    return torch.randint(100, (batch,), generator=generator)


Batch = Callable[[int, "torch.Generator | None"], Inputs]
MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "llama": (llama, _tokens),
    "gpt2": (gpt2, _tokens),
    "bert": (bert, _tokens),
    "vit": (vit, _images),
    "conv": (conv, _small_images),
    "mlp": (mlp, _vectors),
    "wide": (wide, _tokens),
    "half": (half, _tokens),
}


def contender(
    model: nn.Module, optimizer: torch.optim.Optimizer, backend: Any, between: Callable[[], object] = lambda: None
) -> contenders.Contender:
    """A step of a compiled model without clipping, as predictions have it. between: called when forward is done."""
    compiled = torch.compile(model, backend=backend)

    def step(batch: Any) -> Tensor:
        loss = loss_of(compiled(**batch))
        between()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return contenders.Contender(model, optimizer, step)


def loss_of(output: Any) -> Tensor:
    """The loss of what a model returned."""
    return output if isinstance(output, Tensor) else output.loss
