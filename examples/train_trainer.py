"""transformers.Trainer, sharded: one import differs from a script that would use DDP.

    torchrun --nproc-per-node 2 examples/train_trainer.py --memory-budget 72MiB

A small Llama learns the source of Python's standard library, with accumulation, evaluation and checkpoints, all of
which are the Trainer's own. `--resume` goes on from the last checkpoint, on any number of processes.
"""

from __future__ import annotations

import argparse

import torch
from text import VOCABULARY, Sequences, standard_library
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import autoshard
from autoshard.huggingface import Trainer  # <- the import


class Examples(Dataset[dict[str, Tensor]]):
    """What the Trainer takes: a dict for each sequence."""

    def __init__(self, length: int) -> None:
        self.sequences = Sequences(standard_library(), length)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.sequences[index]
        return {"input_ids": tokens, "labels": tokens}


def make_llama(width: int, layers: int) -> LlamaForCausalLM:
    """From a config, so nothing is downloaded; from_pretrained would do as well."""
    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def arguments_of(args: argparse.Namespace) -> TrainingArguments:
    return TrainingArguments(
        output_dir=args.output, max_steps=args.steps, per_device_train_batch_size=args.batch, learning_rate=1e-3,
        gradient_accumulation_steps=2, logging_steps=5, eval_strategy="steps", eval_steps=args.steps,
        save_steps=args.steps, report_to="none", use_cpu=not torch.cuda.is_available(), seed=0,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="sequences on each process")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--memory-budget", default=None, help="for each process, such as 72MiB")
    parser.add_argument("--codegen", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--output", default="trained", help="folder of checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in that folder")
    args = parser.parse_args()

    torch.manual_seed(0)
    model, data = make_llama(args.width, args.layers), Examples(args.seq)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    trainer = Trainer(
        model, arguments_of(args), train_dataset=data, eval_dataset=Subset(data, range(32)),
        autoshard=autoshard.Config(memory_budget=args.memory_budget, codegen=args.codegen),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=args.resume)
    if trainer.is_world_process_zero():
        print(autoshard.report(trainer.model))


if __name__ == "__main__":
    main()
