"""The command line: `autoshard plan` prints the plan of a model, `autoshard sweep` what batches fit and how fast they are;
with no GPU and no processes."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from autoshard import flags
from autoshard.cache import writable, write_at_once
from autoshard.calibrate import calibrate
from autoshard.config import Config
from autoshard.console import doing, live, saying_once
from autoshard.cost_model.cluster import Cluster, cache_file, measured_here
from autoshard.cost_model.hardware import DEVICES
from autoshard.cost_model.optimizer import Existing
from autoshard.errors import AutoshardError, ConfigError, ModelFileError
from autoshard.inventory import names_of
from autoshard.model_file import Candidate, from_file, from_hf
from autoshard.plan import Plan
from autoshard.planning import first_look, machines, plan
from autoshard.report import plan_tables
from autoshard.runtime.processes import launched_rank
from autoshard.sweep import Sweep, sweep
from autoshard.sweep_report import sweep_tables
from autoshard.units import counted
from autoshard.version import __version__

PATIENCE = 1.0  # seconds of work after which what is known is shown
_CLUSTER = ("nnodes", "nproc_per_node", "device")
_SIZES = ("batch", "seq")


def run() -> None:
    """The command `autoshard`: `main` in a process of its own."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `autoshard plan ... | head` ends quietly
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: a terminal without a name's letters is no reason to lose a plan
    gc.disable()  # a tenth of the time of such a short life, in which next to nothing becomes garbage
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell says it of a command that was interrupted; a traceback says nothing


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0, or 2 after an error that is the user's to mend."""
    arguments = parser().parse_args(argv)
    console = Console(stderr=True, highlight=False)
    try:
        if arguments.command == "calibrate":
            return _calibrate(arguments)
        with contextlib.redirect_stdout(sys.stderr), live(console), saying_once():  # what a model file prints is not the plan
            answer = _sweep(arguments) if arguments.command == "sweep" else _plan(arguments, console)
        show(answer, arguments)
    except AutoshardError as error:
        console.print(f"autoshard: {error}", markup=False, soft_wrap=True)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser("autoshard", description=__doc__)
    top.add_argument("--version", action="version", version=f"autoshard {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    p = commands.add_parser("plan", help="print how a model would be trained")
    p.add_argument("--batch", type=int, help="with --hf: sequences a process (default 1)")
    p.add_argument("--seq", type=int, help="with --hf: tokens a sequence (default 2048, or what the model takes)")
    p.add_argument("--json", action="store_true", help="print the plan as a file that Config(plan=...) reads")
    _add_model_and_cluster(p)
    s = commands.add_parser("sweep", help="print which batches fit, by what stage, and how fast they are")
    s.add_argument("--batch", type=_numbers, help="samples a process: 1,2,4 (default: doubled until none fits)")
    s.add_argument("--seq", type=_numbers, help="tokens a sequence: 1024,2048 (default: the example's; with --hf as of plan)")
    _add_model_and_cluster(s, several=True)
    c = commands.add_parser("calibrate", help="measure this machine for better predictions; under torchrun, its links too")
    c.add_argument("--out", type=_file, help="file for the cluster (default: where cluster='auto' finds it)")
    return top


def _add_model_and_cluster(p: argparse.ArgumentParser, several: bool = False) -> None:
    """several: whether there may be several numbers of machines, and of processes."""
    number, such = (_numbers, ": 1,2,4") if several else (int, "")
    p.add_argument("model", nargs="?", help="model.py or model.py:NAME, a function like build()")
    p.add_argument("--hf", metavar="PATH", help="a Hugging Face config.json or its folder, instead of a file")
    p.add_argument("--nnodes", type=number, help=f"machines{such} (default 1)")
    p.add_argument("--nproc-per-node", type=number, help=f"processes on each, one a device{such} (default 1)")
    p.add_argument("--device", help=f"one of {', '.join(DEVICES)} (default h100)")
    flags.add(p)


def _numbers(text: str) -> list[int]:
    """ "1,2,4" as numbers."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not legal; legal: numbers from 1 on, such as 1,2,4")
    return found


def _file(text: str) -> Path:
    """What a link such as /dev/stdout stands for is written to, not the link."""
    return Path(text).resolve()


def _calibrate(arguments: argparse.Namespace) -> int:
    """Measures, and rank 0 writes: it looks before whether it can, since measuring takes minutes."""
    leads = launched_rank() == 0
    if leads and not writable(file := arguments.out or cache_file("cpu")):
        raise _unwritable(file)
    cluster = calibrate()
    if leads:
        file = arguments.out or cache_file(cluster.device.name)
        if not write_at_once(file, cluster.to_yaml()):
            raise _unwritable(file)
        print(f"{file}: {counted(cluster.world, 'process', 'processes')} of {cluster.device.name}, measured")
    return 0


def _unwritable(file: Path) -> ConfigError:
    return ConfigError(f"--out: {str(file)!r} cannot be written; legal: a file in a folder that this user may write to")


@dataclass(frozen=True)
class Answer:
    """What a command found. about: of what, in lines."""

    made: Plan | Sweep
    about: tuple[str, ...] = ()


def _plan(arguments: argparse.Namespace, console: Console) -> Answer:
    config = flags.config(arguments)
    pinned = config.resolved_plan()
    if pinned is not None and arguments.model is None and arguments.hf is None:
        _refuse_beside_a_plan(arguments)
        return Answer(pinned)
    candidate, cluster = _candidate(arguments, *_sizes(arguments)), _cluster(arguments, arguments.nnodes, arguments.nproc_per_node)
    optimizer = _optimizer(candidate)
    alone = arguments.json or pinned is not None
    with contextlib.nullcontext() if alone else _first_look(candidate.model, config, cluster, optimizer, console):
        made = plan(candidate.model, candidate.example_inputs, config, cluster, optimizer)
    return Answer(made, _about(candidate.model, cluster))


def _sweep(arguments: argparse.Namespace) -> Answer:
    config = flags.config(arguments)
    candidate, clusters = _candidate(arguments, 2, max(arguments.seq or [0]) or None), _clusters(arguments)
    optimizer = _optimizer(candidate)
    made = sweep(candidate.model, candidate.example_inputs, config, clusters, optimizer)
    return Answer(made, _about(candidate.model, *clusters))


@contextlib.contextmanager
def _first_look(
    model: nn.Module, config: Config, cluster: Cluster, optimizer: Existing | None, console: Console
) -> Iterator[None]:
    """While the inside takes its time, what is known already stands on the console."""

    def show_it() -> None:
        with contextlib.suppress(AutoshardError):  # the inside will say it better
            _print_first(console, first_look(model, config, cluster, optimizer))

    timer = threading.Timer(PATIENCE, show_it)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # what it began to print stands before what follows


def _print_first(console: Console, first: Plan) -> None:
    console.print("[bold cyan]autoshard[/] before the model is traced (activations and time of a step follow):\n")
    _print_tables(console, first)
    console.print()


def _print_tables(console: Console, made: Plan) -> None:
    for part in plan_tables(made):
        console.print(part)


def _refuse_beside_a_plan(arguments: argparse.Namespace) -> None:
    """A plan that is only shown has its processes already, and what it was predicted for."""
    beside = [name for name in (*_CLUSTER, *_SIZES) if getattr(arguments, name) is not None]
    beside += [name for name in flags.said(arguments) if name != "plan"]
    if beside:
        raise ConfigError(f"{beside[0]}: a plan file says that itself; legal: with a model, to check the plan against it")


def _sizes(arguments: argparse.Namespace) -> tuple[int, int | None]:
    """The batch and the sequence that `plan` traces of a Hugging Face model. A model file has example inputs."""
    for name in _SIZES:
        value = getattr(arguments, name)
        if value is not None and arguments.model is not None and arguments.hf is None:
            raise ConfigError(f"--{name}: {value} beside a model file, whose example inputs say that; legal: with --hf")
    return 1 if arguments.batch is None else arguments.batch, arguments.seq


def _candidate(arguments: argparse.Namespace, batch: int, seq: int | None) -> Candidate:
    if (arguments.model is None) == (arguments.hf is None):
        raise ModelFileError("give one of: a model file, or --hf with a config")
    if arguments.hf is not None:
        _at_least_one("batch", batch)
        if seq is not None:
            _at_least_one("seq", seq)
        doing(f"building the model of {arguments.hf}")
        return from_hf(arguments.hf, batch, seq)
    doing(f"building the model of {arguments.model}")
    return from_file(arguments.model)


def _at_least_one(name: str, value: Any) -> None:
    if value < 1:
        raise ConfigError(f"{name}: {value} is not legal; legal: 1 or more")


def _clusters(arguments: argparse.Namespace) -> list[Cluster]:
    """One for each number of machines, and of processes on each."""
    numbers = itertools.product(arguments.nnodes or [None], arguments.nproc_per_node or [None])
    return [_cluster(arguments, nodes, per_node) for nodes, per_node in dict.fromkeys(numbers)]


def _cluster(arguments: argparse.Namespace, nodes: int | None, per_node: int | None) -> Cluster:
    """What the flags say, over what the cluster's file says."""
    said = machines(flags.config(arguments), "h100")
    for name, number in (("nnodes", nodes), ("nproc_per_node", per_node)):
        if number is not None:
            _at_least_one(name, number)
    return Cluster(
        said.nodes if nodes is None else nodes,
        said.per_node if per_node is None else per_node,
        said.device if arguments.device is None else measured_here(arguments.device),
    )


def _optimizer(candidate: Candidate) -> Existing | None:
    """What the file's optimizer factory makes, one or several; None if it has none."""
    factory = candidate.optimizer_factory
    if factory is None:
        return None
    try:
        made = factory(list(candidate.model.parameters()))
    except Exception as error:
        raise ModelFileError(f"the optimizer factory failed: {type(error).__name__}: {error}") from error
    every: list[Any] = list(made) if isinstance(made, list | tuple) and made else [made]
    if wrong := [each for each in every if not isinstance(each, torch.optim.Optimizer)]:
        raise ModelFileError(f"the optimizer factory returned {type(wrong[0]).__name__}; legal: a torch optimizer, or a list of several")
    return Existing(every, names_of(candidate.model))


def show(answer: Answer, arguments: argparse.Namespace) -> None:
    """Prints a plan as tables, or as its file; a sweep as a table."""
    made = answer.made
    if isinstance(made, Plan) and arguments.json:
        print(made.to_json())
        return
    console = Console(highlight=False)
    for line in answer.about:
        console.print(line, style="dim", markup=False)
    if isinstance(made, Plan):
        _print_tables(console, made)
        return
    for part in sweep_tables(made, arguments.batch, arguments.seq):
        console.print(part)


def _about(model: nn.Module, *clusters: Cluster) -> tuple[str, str]:
    """The processes, and where the figures of their devices are from; the model's numbers, and of which dtypes these are."""
    elements: Counter[str] = Counter()
    for parameter in model.parameters():
        elements[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    numbers = ", ".join(f"{count:,} in {dtype}" for dtype, count in elements.items())
    device, sizes = clusters[0].device, ", ".join(f"{cluster.nodes} x {cluster.per_node}" for cluster in clusters)
    return f"{sizes} {device.name} ({device.source or 'source not said'})", f"{type(model).__name__}, parameters: {numbers}"


if __name__ == "__main__":
    run()
