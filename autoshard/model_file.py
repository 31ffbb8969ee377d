"""Models for the command line: from a Python file, or from a Hugging Face config."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autoshard.cost_model.optimizer import Make
from autoshard.errors import ModelFileError, first_line

_PASTE = """
def build():                                   # called under torch.device("meta"): costs no memory
    model = MyModel()
    inputs = (torch.zeros(8, 512, dtype=torch.long),)      # a tuple, or a dict of keywords
    return model, inputs                       # or: return model, inputs, lambda ps: torch.optim.AdamW(ps)
"""


@dataclass(frozen=True)
class Candidate:
    """A model on the meta device, what it is called with, and how its optimizer is made, if known."""

    model: nn.Module
    example_inputs: Any
    optimizer_factory: Make | None = None


def from_file(spec: str) -> Candidate:
    """The model of "model.py" or "model.py:NAME"; ModelFileError shows what to paste."""
    path, _, name = spec.partition(":")
    name = name or "build"
    module = _import(Path(path))
    build = getattr(module, name, None)
    if not callable(build):
        own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
        legal = [n for n, v in own.items() if callable(v) and not n.startswith("_")]
        raise ModelFileError(
            f"{path} has no function {name!r} (it has: {', '.join(legal) or 'none'}); paste this into it:\n{_PASTE}"
        )
    with _running(path, f"{name}() in {path} failed"), torch.device("meta"):
        built = build()
    return _checked(f"{name}() in {path}", built)


@contextlib.contextmanager
def _running(path: str, failed: str) -> Iterator[None]:
    """While code of a model file runs: it finds no arguments but its own name, since those that there are were given to
    autoshard. What it raises is a ModelFileError that says what failed."""
    given = sys.argv
    sys.argv = [path]
    try:
        yield
    except SystemExit as error:
        raise ModelFileError(
            f"{failed}: it exits ({error.code}), as argparse does where arguments are missing; legal: arguments that have "
            'defaults, or are read behind if __name__ == "__main__"'
        ) from error
    except Exception as error:
        meta = '; legal: with torch.device("cpu"): around what needs values, which tensors on meta have not' if "meta tensor" in str(error) else ""
        raise ModelFileError(f"{failed}: {type(error).__name__}: {error}{meta}") from error
    finally:
        sys.argv = given


def _import(path: Path) -> ModuleType:
    name = f"{path.stem}_of_a_model" if path.stem in sys.stdlib_module_names else path.stem  # others import that by its name
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ModelFileError(f"{str(path)!r} is no Python file; legal: model.py or model.py:NAME")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    with _running(str(path), f"{path} cannot be imported"):
        spec.loader.exec_module(module)
    return module


def _checked(build: str, built: Any) -> Candidate:
    """What a model file gave. build: which function of which file."""
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not isinstance(built[0], nn.Module):
        raise ModelFileError(
            f"{build} returned {type(built).__name__}; legal: (model, example_inputs) or "
            f"(model, example_inputs, optimizer_factory):\n{_PASTE}"
        )
    if len(built) == 3 and not callable(built[2]):
        raise ModelFileError(f"{build} returned no optimizer factory but {type(built[2]).__name__}; legal: a callable, such as lambda ps: torch.optim.AdamW(ps)")
    return Candidate(*built)


def from_hf(path: str, batch: int, seq: int | None) -> Candidate:
    """The causal language model of a config.json or the folder it is in, called on `batch` x `seq` tokens.

    seq: None is 2048, or all positions that the model has where they are fewer.
    """
    try:
        import transformers
    except ImportError as error:
        raise ModelFileError("--hf needs transformers; install autoshard[hf]") from error
    if not Path(path).exists():
        raise ModelFileError(f"--hf: {path!r} does not exist; legal: a config.json, or the folder that it is in")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # validators of many kinds
        raise ModelFileError(f"--hf: {path!r} is no Hugging Face config: {first_line(error)}") from error
    with torch.device("meta"):
        model = _hf_model(transformers, config)
        ids = torch.zeros(batch, _tokens(config, seq), dtype=torch.long)
    return Candidate(model, {"input_ids": ids, "labels": ids})


def _tokens(config: Any, seq: int | None) -> int:
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and (seq or 0) > positions:
        raise ModelFileError(f"--seq: {seq} is more than the {positions} positions of this model")
    return seq or min(2048, positions or 2048)


def _hf_model(transformers: ModuleType, config: Any) -> nn.Module:
    factory = transformers.AutoModelForCausalLM
    if type(config) not in factory._model_mapping or config.is_encoder_decoder:  # of which it would be half the model
        raise ModelFileError(
            f"--hf: {config.model_type!r} is no causal language model; write a model.py with:\n{_PASTE}"
        )
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method", "?") if isinstance(quantized, dict) else type(quantized).__name__
        raise ModelFileError(
            f"--hf: this config is of quantized weights ({method}), which are not trained; legal: one without quantization_config"
        )
    config.use_cache = False  # nothing is generated; transformers' Trainer sets it too
    try:
        return factory.from_config(config)  # type: ignore[no-any-return]
    except Exception as error:
        raise ModelFileError(f"--hf: no model can be built from this config: {first_line(error)}") from error
