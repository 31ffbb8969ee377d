"""Models for tests: name → builder, and builder of one process's batch. Small, no dropout, every odd shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model and its data. loss: takes the model's output to a scalar."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any], Tensor] = lambda out: out.loss
    replicate_below: int = 0


def tokens(vocab: int, batch: int = 2, seq: int = 12) -> Callable[[torch.Generator], Batch]:
    def make(g: torch.Generator) -> Batch:
        ids = torch.randint(0, vocab, (batch, seq), generator=g)
        return {"input_ids": ids, "labels": ids}

    return make


def features(*shape: int) -> Callable[[torch.Generator], Batch]:
    return lambda g: {"x": torch.randn(*shape, generator=g)}


def llama(layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=44, num_hidden_layers=layers, num_attention_heads=4,
                    num_key_value_heads=2, vocab_size=67, use_cache=False)
    )  # fmt: skip


def gpt2(layers: int = 1) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=layers, n_head=4, vocab_size=67, n_positions=32, use_cache=False,
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip


def bert(layers: int = 1) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=44, vocab_size=67,
                   max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )  # fmt: skip


def vit(layers: int = 1) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=44, image_size=16,
                  patch_size=8, num_labels=7, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )  # fmt: skip


def t5(layers: int = 1, feed_forward: str = "relu") -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(d_model=32, d_kv=8, d_ff=44, num_layers=layers, num_heads=4, vocab_size=67, dropout_rate=0.0,
                 feed_forward_proj=feed_forward, use_cache=False, decoder_start_token_id=0)
    )  # fmt: skip


def llama_regions(layers: int = 2) -> nn.Module:
    """Activation checkpointing as Hugging Face does it."""
    model = llama(layers)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def lora() -> nn.Module:
    """A frozen base with adapters that train; checkpointing on top, which then needs inputs that have gradients."""
    from peft import LoraConfig, get_peft_model

    base = llama_regions()
    base.enable_input_require_grads()  # type: ignore[operator]
    return get_peft_model(base, LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))  # type: ignore[arg-type]


def resized() -> nn.Module:
    """A tied embedding that was made larger for more tokens."""
    model = gpt2()
    model.resize_token_embeddings(73, mean_resizing=False)  # type: ignore[operator]
    return model


class Residual(nn.Module):
    """A block of a residual network; its BatchNorm changes buffers."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.nn.functional.gelu(self.norm(self.conv(x)))  # smooth: see t5_deep


class ResNet(nn.Module):
    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Residual(channels) for _ in range(3))), nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.head(self.blocks(x).mean((2, 3)))
        return y, y.pow(2).mean()


class ConvNet(nn.Module):
    """BatchNorm buffers, odd channels, a tuple as output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.ReLU(), nn.Conv2d(7, 15, 3), nn.BatchNorm2d(15), nn.ReLU()
        )
        self.head = nn.Linear(15, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.head(self.body(x).mean((2, 3)))
        return y, y.pow(2).mean()


class Attention(nn.Module):
    """MultiheadAttention and weight_norm; a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.project = weight_norm(nn.Linear(16, 7))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y, _ = self.attention(x, x, x, need_weights=False)
        return {"loss": self.project(x + y).pow(2).mean()}


class Odd(nn.Module):
    """Frozen, unused, used twice, in lists and dicts, smaller than the world, experts that are few, empty, without dimensions, read without
    gradients, given back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 7)
        self.frozen = nn.Linear(7, 15)
        self.frozen.requires_grad_(False)
        self.shared = nn.Linear(15, 15)
        self.again = self.shared
        self.unused = nn.Linear(3, 5)
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(15)), nn.Parameter(torch.randn(1, 15))])
        self.named = nn.ParameterDict({"gain": nn.Parameter(torch.ones(15)), "odd": nn.Parameter(torch.randn(3, 15))})
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.expert, self.experts = nn.Parameter(torch.randn(1, 5, 15)), nn.Parameter(torch.randn(2, 5, 15))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.given = nn.Parameter(torch.randn(7, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.again(torch.tanh(self.shared(self.frozen(self.first(x)))))
        with torch.no_grad():
            offset = self.shared.weight.mean() + self.named["gain"].mean()
        y = y * self.named["gain"] + self.rows[0] + self.rows[1] - offset
        loss = ((y @ self.named["odd"].T).pow(2).mean() * self.scale) + self.empty.sum() + sum((y @ experts.mT).pow(2).mean() for experts in (self.expert, self.experts))
        return loss, self.given, self.named["gain"]


CASES = {
    "llama": Case(llama, tokens(67)),
    "gpt2": Case(gpt2, tokens(67)),
    "bert": Case(bert, tokens(67)),
    "vit": Case(
        vit,
        lambda g: {
            "pixel_values": torch.randn(2, 3, 16, 16, generator=g),
            "labels": torch.randint(0, 7, (2,), generator=g),
        },
    ),
    "t5": Case(t5, tokens(67)),
    "conv": Case(ConvNet, features(4, 3, 10, 10), lambda out: out[1]),
    "attention": Case(Attention, features(2, 5, 16), lambda out: out["loss"]),
    "odd": Case(Odd, features(4, 8), lambda out: out[0] + out[1].sum() + out[2].pow(2).mean()),
}

# Fine-tuning: not in the matrix.
TUNED = {
    "llama_regions": Case(llama_regions, tokens(67)),
    "lora": Case(lora, tokens(67)),
    "resized": Case(resized, tokens(73)),
}

# With blocks that repeat: not in the matrix.
DEEP = {
    **{f"{build.__name__}_deep": Case(functools.partial(build, 3), tokens(67)) for build in (llama, llama_regions, gpt2, bert)},
    # Smooth: where a relu's input is zero but for rounding, the gradient is one thing or another.
    "t5_deep": Case(functools.partial(t5, 3, "gated-gelu"), tokens(67)),
    "vit_deep": Case(functools.partial(vit, 3), CASES["vit"].batch),
    "resnet": Case(ResNet, CASES["conv"].batch, CASES["conv"].loss),
}
