"""The command line: `autoshard plan` prints the plan of a model, with no GPU and no processes."""

from __future__ import annotations

import argparse
import contextlib
import gc
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from autoshard import flags
from autoshard.cost_model.hardware import DEVICES, Topology
from autoshard.cost_model.optimizer import Make, like
from autoshard.errors import AutoshardError, ConfigError, ModelFileError
from autoshard.model_file import Candidate, from_file, from_hf
from autoshard.plan import Plan
from autoshard.planning import plan
from autoshard.report import plan_tables
from autoshard.version import __version__

_TOPOLOGY: dict[str, Any] = {"nnodes": 1, "nproc_per_node": 1, "device": "h100"}


def run() -> None:
    """The command `autoshard`: `main` in a process of its own."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `autoshard plan ... | head` ends quietly
    gc.disable()  # a tenth of the time of such a short life, in which next to nothing becomes garbage
    code = main()
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0, or 2 after an error that is the user's to mend."""
    arguments = parser().parse_args(argv)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a model file prints is not the plan
            made = _plan(arguments)
        show(made, arguments)
    except AutoshardError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"autoshard: {error}", markup=False)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser("autoshard", description=__doc__)
    top.add_argument("--version", action="version", version=f"autoshard {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    p = commands.add_parser("plan", help="print how a model would be trained")
    p.add_argument("model", nargs="?", help="model.py or model.py:NAME, a function like build()")
    p.add_argument("--hf", metavar="PATH", help="a Hugging Face config.json or its folder, instead of a file")
    p.add_argument("--batch", type=int, default=1, help="with --hf: sequences a process (default 1)")
    p.add_argument("--seq", type=int, help="with --hf: tokens a sequence (default 2048, or what the model takes)")
    p.add_argument("--nnodes", type=int, help="machines (default 1)")
    p.add_argument("--nproc-per-node", type=int, help="processes on each, one a device (default 1)")
    p.add_argument("--device", help=f"one of {', '.join(DEVICES)} (default {_TOPOLOGY['device']})")
    p.add_argument("--json", action="store_true", help="print the plan as a file that Config(plan=...) reads")
    flags.add(p)
    return top


def _plan(arguments: argparse.Namespace) -> Plan:
    config = flags.config(arguments)
    pinned = config.resolved_plan()
    if pinned is not None and arguments.model is None and arguments.hf is None:
        _refuse_topology(arguments)
        return pinned
    candidate = _candidate(arguments)
    topology = _topology(arguments)
    return plan(candidate.model, candidate.example_inputs, config, topology, candidate.optimizer_factory and _checked_factory(candidate))


def _refuse_topology(arguments: argparse.Namespace) -> None:
    """A plan that is only shown has its processes already."""
    for name in _TOPOLOGY:
        if getattr(arguments, name) is not None:
            raise ConfigError(f"{name}: a plan file says that itself; legal: with a model, to check the plan against it")


def _candidate(arguments: argparse.Namespace) -> Candidate:
    if (arguments.model is None) == (arguments.hf is None):
        raise ModelFileError("give one of: a model file, or --hf with a config")
    if arguments.hf is not None:
        _at_least_one("batch", arguments.batch)
        if arguments.seq is not None:
            _at_least_one("seq", arguments.seq)
        return from_hf(arguments.hf, arguments.batch, arguments.seq)
    return from_file(arguments.model)


def _at_least_one(name: str, value: Any) -> None:
    if value < 1:
        raise ConfigError(f"{name}: {value} is not legal; legal: 1 or more")


def _topology(arguments: argparse.Namespace) -> Topology:
    given = [getattr(arguments, name) for name in _TOPOLOGY]
    nnodes, per_node, device = (d if v is None else v for v, d in zip(given, _TOPOLOGY.values()))
    if device not in DEVICES:
        raise ConfigError(f"device: {device!r} is not known; legal: {', '.join(DEVICES)}")
    _at_least_one("nnodes", nnodes)
    _at_least_one("nproc_per_node", per_node)
    return Topology(nnodes, per_node, DEVICES[device])


def _checked_factory(candidate: Candidate) -> Make:
    """The file's optimizer factory, tried once."""
    factory = candidate.optimizer_factory
    assert factory is not None
    try:
        made = factory(candidate.model.parameters())
    except Exception as error:
        raise ModelFileError(f"the optimizer factory failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ModelFileError(f"the optimizer factory returned {type(made).__name__}; legal: a torch optimizer")
    return like(made)


def show(made: Plan, arguments: argparse.Namespace) -> None:
    """Prints a plan as tables, or as its file."""
    if arguments.json:
        print(made.to_json())
        return
    console = Console(highlight=False)
    if arguments.model is not None or arguments.hf is not None:
        where = _topology(arguments)
        console.print(f"{where.nodes} x {where.per_node} {where.device.name}", style="dim")
    for part in plan_tables(made):
        console.print(part)


if __name__ == "__main__":
    run()
