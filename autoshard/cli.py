"""The command line: `autoshard plan` prints the plan of a model, with no GPU and no processes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from rich.console import Console

from autoshard.config import Config
from autoshard.cost_model.hardware import DEVICES, Topology
from autoshard.errors import AutoshardError, ConfigError, ModelFileError
from autoshard.model_file import Candidate, from_file, from_hf
from autoshard.plan import Plan
from autoshard.planning import plan
from autoshard.report import plan_tables
from autoshard.runtime.optimizers import states_of
from autoshard.version import __version__

_NUMBERS = {"replicate_below": int, "timeout": float}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0, or 2 after an error that is the user's to mend."""
    arguments = parser().parse_args(argv)
    try:
        show(_plan(arguments), arguments)
    except AutoshardError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"autoshard: {error}", markup=False)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line's grammar: every Config field is a flag of the same name."""
    top = argparse.ArgumentParser("autoshard", description=__doc__)
    top.add_argument("--version", action="version", version=f"autoshard {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    p = commands.add_parser("plan", help="print how a model would be trained")
    p.add_argument("model", nargs="?", help="model.py or model.py:NAME, a function like build()")
    p.add_argument("--hf", metavar="PATH", help="a Hugging Face config.json or its folder, instead of a file")
    p.add_argument("--batch", type=int, default=1, help="with --hf: sequences a process (default 1)")
    p.add_argument("--seq", type=int, default=2048, help="with --hf: tokens a sequence (default 2048)")
    p.add_argument("--nnodes", type=int, default=1)
    p.add_argument("--nproc-per-node", type=int, default=1)
    p.add_argument("--device", default="h100", help=f"one of {', '.join(DEVICES)} (default h100)")
    p.add_argument("--json", action="store_true", help="print the plan as a file that Config(plan=...) reads")
    for field in fields(Config):
        if field.name not in ("verbose",):
            p.add_argument("--" + field.name.replace("_", "-"), dest=f"config_{field.name}", metavar="VALUE")
    return top


def _plan(arguments: argparse.Namespace) -> Plan:
    config = _config(arguments)
    pinned = config.resolved_plan()
    if pinned is not None:
        return pinned
    candidate = _candidate(arguments)
    return plan(
        candidate.model, candidate.example_inputs, config, _topology(arguments), _states(candidate)
    )


def _candidate(arguments: argparse.Namespace) -> Candidate:
    if (arguments.model is None) == (arguments.hf is None):
        raise ModelFileError("give one of: a model file, or --hf with a config")
    if arguments.hf is not None:
        return from_hf(arguments.hf, arguments.batch, arguments.seq)
    return from_file(arguments.model)


def _topology(arguments: argparse.Namespace) -> Topology:
    if arguments.device not in DEVICES:
        raise ConfigError(f"device: {arguments.device!r} is not known; legal: {', '.join(DEVICES)}")
    for name in ("nnodes", "nproc_per_node"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"{name}: {getattr(arguments, name)} is not legal; legal: 1 or more")
    return Topology(arguments.nnodes, arguments.nproc_per_node, DEVICES[arguments.device])


def _states(candidate: Candidate) -> int | None:
    if candidate.optimizer_factory is None:
        return None
    optimizer = candidate.optimizer_factory(candidate.model.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelFileError(f"the optimizer factory returned {type(optimizer).__name__}; legal: a torch optimizer")
    return states_of(optimizer)


def _config(arguments: argparse.Namespace) -> Config:
    given = {
        field.name: _value(field.name, text)
        for field in fields(Config)
        if (text := getattr(arguments, f"config_{field.name}", None)) is not None
    }
    return Config.from_options(given)


def _value(name: str, text: str) -> Any:
    """A flag's text as the field's value; Config checks whether it is legal."""
    if name == "zero":
        return int(text) if text.isdigit() else text
    if name == "memory_budget":
        return _budget(text)
    if name == "mesh":
        return _mesh(text)
    if name == "disable_passes":
        return tuple(text.split(","))
    if name in _NUMBERS and text != "auto":
        try:
            return _NUMBERS[name](text)
        except ValueError:
            raise ConfigError(f"{name}: {text!r} is not a number") from None
    return text


def _budget(text: str) -> float | str:
    """A share such as 0.9 or 1.0 as a float, an amount as its text."""
    try:
        share = float(text)
    except ValueError:
        return text
    return share if "." in text else text


def _mesh(text: str) -> dict[str, int]:
    try:
        return {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise ConfigError(f"mesh: {text!r} is not legal; legal: replicate=2,shard=4") from None


def show(made: Plan, arguments: argparse.Namespace) -> None:
    """Prints a plan as tables, or as its file."""
    if arguments.json:
        print(made.to_json())
        return
    console = Console(highlight=False)
    console.print(f"{arguments.nnodes} x {arguments.nproc_per_node} {arguments.device}", style="dim")
    for part in plan_tables(made):
        console.print(part)


if __name__ == "__main__":
    sys.exit(main())
