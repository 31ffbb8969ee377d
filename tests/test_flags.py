"""Flags of the command line that are fields of Config."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from autoshard import Config, flags
from autoshard.cli import parser


def _of_plan() -> argparse.ArgumentParser:
    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    found: argparse.ArgumentParser = commands.choices["plan"]
    return found


def test_every_flag_of_a_config_field_explains_itself() -> None:
    assert all(a.help for a in _of_plan()._actions)


FLAGS: dict[str, tuple[str, Any]] = {
    "zero": ("3", 3),
    "mesh": ("replicate=2,shard=4", {"replicate": 2, "shard": 4}),
    "memory_budget": ("0.9", 0.9),
    "recompute": ("full", "full"),
    "partition_activations": ("True", True),
    "accumulation": ("no_sync", "no_sync"),
    "precision": ("bf16", "bf16"),
    "compression": ("powersgd", "powersgd"),
    "compression_rank": ("8", 8),
    "hierarchy": ("flat", "flat"),
    "early_gathers": ("True", True),
    "codegen": ("eager", "eager"),
    "cluster": ("ours.yaml", "ours.yaml"),
    "optimizer": ("sgd", "sgd"),
    "fuse_optimizer": ("False", False),
    "buffers": ("local", "local"),
    "replicate_below": ("0", 0),
    "plan": ("plan.json", "plan.json"),
    "passes": ("name_parameters", "name_parameters"),
    "disable_passes": ("early_matmuls,early_gathers", ("early_matmuls", "early_gathers")),
}


def test_every_flag_becomes_a_field_of_the_type_that_config_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "cluster", "plan":
        Path(FLAGS[name][0]).touch()
    there = [a for a in _of_plan()._actions if a.dest.startswith("config_")]
    assert {a.dest.removeprefix("config_") for a in there} == set(FLAGS)
    for action in there:
        name = action.dest.removeprefix("config_")
        text, value = FLAGS[name]
        read = getattr(flags.config(parser().parse_args(["plan", *action.option_strings, text])), name)
        assert (type(read), read) == (type(value), value), name


@pytest.mark.parametrize("name", ["precision", "compression", "mesh", "memory_budget", "plan", "passes"])
def test_none_is_said_as_the_help_says_it(name: str) -> None:
    given = parser().parse_args(["plan", f"--{name.replace('_', '-')}", "None"])
    assert flags.config(given) == Config()
