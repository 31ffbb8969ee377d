"""Accelerate and transformers.Trainer, with models compiled by autoshard where they would wrap them in DDP.

    from autoshard.huggingface import Trainer                        trainer = Trainer(model, args, ...)
    from autoshard.huggingface import Accelerator                    accelerator = Accelerator()

Checkpoints are theirs: whole weights and whole optimizer state, written by rank 0, or, with their `save_on_each_node`, by the first
process of each node (weights where transformers writes them, which 5.24 does on rank 0 alone); any number of processes and stages can
resume from them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import accelerate
import torch
import transformers
from accelerate.utils import OPTIMIZER_NAME
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard import gathered, no_sync, state_dict, torch_internals
from autoshard.compiler import Backend
from autoshard.config import Config
from autoshard.errors import UnsupportedError
from autoshard.runtime.state import accumulations_in, states_in


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate.Accelerator, all of whose arguments it takes; `autoshard` is the config of every model."""

    def __init__(self, *args: Any, autoshard: Config | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._compile_with(autoshard)

    @classmethod
    def in_place_of(cls, plain: accelerate.Accelerator, config: Config | None, batches: int = 1) -> Accelerator:
        """The accelerator that somebody else made, as one of these: it is the same object. batches: of a step, if that one counts them
        itself."""
        plain.__class__ = cls
        plain._compile_with(plain._adding_up(config, batches))
        return plain

    def _compile_with(self, config: Config | None) -> None:
        others = {"DEEPSPEED", "FSDP", "MEGATRON_LM"}
        if self.distributed_type.value in others or self.state.dynamo_plugin.backend.value != "NO":
            raise UnsupportedError(
                f"accelerate is set to {self.distributed_type.value} and compiles with "
                f"{self.state.dynamo_plugin.backend.value}; autoshard shards and compiles itself: choose plain "
                "multi-process training and no torch compile there"
            )
        self._autoshard = config
        self.register_load_state_pre_hook(_refuse_safetensors)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The same module, on its device, compiled in place: nothing wraps it, and its names stay."""
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        if not evaluation_mode and not any(m is prepared for m in self._models):
            self._models.append(prepared)
        if not torch_internals.is_compiled_in_place(prepared):
            torch_internals.compile_in_place(prepared, Backend(self._adding_up(self._autoshard, self.gradient_state.num_steps)))
            if callable(getattr(prepared, "generate", None)):
                prepared.generate = MethodType(_generate_whole, prepared)  # type: ignore[assignment]
        return prepared

    def _adding_up(self, config: Config | None, batches: int) -> Config | None:
        """The config, which says how gradients of so many batches add up, where it does not yet: budgets hold beside them."""
        if batches < 2 or (config and config.accumulation):
            return config
        each = self.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        return replace(config or Config(), accumulation="reduced" if each else "no_sync")

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """See `autoshard.no_sync`."""
        return no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """Refused where gradients wait: of a forward inside `no_sync` it is decided by then that nothing is reduced."""
        if any(accumulation.waiting() for accumulation in accumulations_in(model)):
            raise UnsupportedError(
                "trigger_sync_in_backward: a backward of a forward inside no_sync reduces nothing at stages 0 and 1; legal: the last "
                "forward outside of no_sync"
            )
        return accelerate.Accelerator.trigger_sync_in_backward(model)  # type: ignore[no-any-return]

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Tensor:
        """The norm over all processes, as a plain tensor."""
        norm = super().clip_grad_norm_(*args, **kwargs)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @property
    def _writes(self) -> bool:
        """Whether this process writes checkpoints."""
        each: bool = self.project_configuration.save_on_each_node
        return self.is_local_main_process if each else self.is_main_process

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """See `autoshard.state_dict`: whole where checkpoints are written, empty elsewhere. A collective."""
        return state_dict(model, keep=self._writes)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = False, **kwargs: Any) -> str:
        """As ever, with the optimizers' state whole, and weights by torch.save. A collective."""
        folder: str = super().save_state(output_dir, safe_serialization, **kwargs)
        for i, optimizer in enumerate(self._optimizers):
            name = f"{OPTIMIZER_NAME}{f'_{i}' if i else ''}.bin"
            _save_whole(optimizer, Path(folder) / name, self._writes)
        return folder


class Sharded:
    """What makes a trainer a sharded one; put it in front: `class Mine(Sharded, SFTTrainer)`."""

    accelerator: Any
    args: Any
    model: Any
    optimizer: Any
    _whole: dict[str, Any] | None = None

    def __init__(self, *args: Any, autoshard: Config | None = None, **kwargs: Any) -> None:
        self._autoshard = autoshard
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """The trainer's accelerator becomes an `Accelerator` of this file."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator = Accelerator.in_place_of(self.accelerator, self._autoshard, self.args.gradient_accumulation_steps)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Whole weights, written where the trainer writes: by rank 0, or the first process of each node. A collective: all processes
        must call it."""
        before, self._whole = self._whole, state_dict(self.model, keep=self.args.should_save)
        try:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        finally:
            self._whole = before  # a push saves once more, within this

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """What `save_model` gathered, which this process may write alone."""
        if state_dict is None and self._whole is None:
            raise RuntimeError("_save writes what save_model gathers from all processes; call save_model, on each of them")
        super()._save(output_dir, self._whole if state_dict is None else state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        _save_whole(self.optimizer, Path(output_dir) / "optimizer.pt", self.args.should_save)


class Trainer(Sharded, transformers.Trainer):  # type: ignore[misc]
    """transformers.Trainer, all of whose arguments it takes; `autoshard` is the config of its model.

    Evaluation, saving and `generate` run on all processes, as the Trainer does by itself; `generate` has the whole model on each of them.
    """


def _generate_whole(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` of a prepared model, on whole parameters: it calls parts of the model by themselves, as an encoder, and as often as its own
    texts are long. A collective where the model is sharded; before its first call, without torch.compile."""
    with gathered(model) if states_in(model) else torch.compiler.set_stance("force_eager"):
        return type(model).generate(model, *args, **kwargs)


_generate_whole.__name__ = "generate"  # by which a model that is saved before it is sharded finds its own again


def _refuse_safetensors(models: list[nn.Module], folder: str) -> None:
    """safetensors cannot load into a module that is sharded; before its first call it can."""
    files = list(Path(folder).glob("model*.safetensors"))
    if files and any(isinstance(p, DTensor) for model in models for p in model.parameters()):
        raise UnsupportedError(
            f"{files[0]} cannot be loaded into a model that is sharded already; load it before the first step, or save "
            "with safe_serialization=False"
        )


def _save_whole(optimizer: torch.optim.Optimizer, path: Path, writes: bool) -> None:
    """Over what was saved there by a process that knew its own rows only."""
    whole = state_dict(optimizer, keep=writes)
    if writes:
        torch.save(whole, path)
