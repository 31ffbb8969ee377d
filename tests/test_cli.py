"""The command line, in this process: no GPU, no processes, no memory for the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoshard import Plan
from autoshard.cli import main

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()

def build():
    return Net(), torch.zeros(2, 4096)

def with_sgd():
    return Net(), (torch.zeros(2, 4096),), lambda ps: torch.optim.SGD(ps, lr=0.1)

def fails():
    raise KeyError("hello")

def nothing():
    return 3

def misfit():
    return Net(), torch.zeros(2, 7)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "some_model.py"
    path.write_text(MODEL)
    return str(path)


def test_the_table_fits_80_columns(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--nproc-per-node", "8", "--zero", "3"]) == 0
    out = capsys.readouterr().out
    assert "layers.{0..2}" in out and "8/8/8" in out and "activations" in out and "not modelled" in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_is_a_plan_that_can_be_pinned(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--nproc-per-node", "4", "--json"]) == 0
    text = capsys.readouterr().out
    file = tmp_path / "plan.json"
    file.write_text(text)
    assert main(["plan", "--plan", str(file), "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out) == Plan.from_json(text)


def test_the_optimizer_of_the_file_counts(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {}
    for name in ("build", "with_sgd"):
        assert main(["plan", f"{model}:{name}", "--json"]) == 0
        sizes[name] = Plan.from_json(capsys.readouterr().out).predicted.memory["optimizer"]
    assert sizes["with_sgd"] == 0 and sizes["build"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{model}:nope"], "has no function 'nope'"),
        (["{model}:fails"], "failed: KeyError: 'hello'"),
        (["{model}:nothing"], "returned int; legal: (model, example_inputs)"),
        (["{model}:misfit"], "cannot be called with these example inputs"),
        (["nowhere.py"], "is no Python file"),
        ([], "give one of: a model file, or --hf"),
        (["{model}", "--zero", "5"], "zero: 5 is not legal"),
        (["{model}", "--device", "abacus"], "device: 'abacus' is not known"),
        (["{model}", "--mesh", "shard"], "legal: replicate=2,shard=4"),
        (["{model}", "--mesh", "shard=3"], "makes 3 processes; the job has 1"),
        (["{model}", "--memory-budget", "0.5GiB", "--nproc-per-node", "2", "--zero", "0"], "short: at best"),
        (["{model}", "--memory-budget", "1MiB"], "Cheapest fix: more than one process"),
        (["{model}", "--disable-passes", "name_parameters"], "requires names"),
        (["--plan", "nowhere.json"], "plan: 'nowhere.json' cannot be read"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(
    model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["plan", *(a.format(model=model) for a in arguments)]) == 2
    assert says in capsys.readouterr().err
