"""What the command line says of files and flags that it cannot use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autoshard import Degrees, ParameterGroup, Plan
from autoshard.cli import main
from tests.model_files import MODEL


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{model}:nope"], "has no function 'nope'"),
        (["{model}:of_others"], "example inputs: RuntimeError: a and b must have same reduction dim, but got [2, 4] X [5, 8]"),
        (["{model}:breaks"], "Net: its graph breaks before it uses any parameter, so there is no step to predict"),
        (["{model}:stepped"], "returned no optimizer factory but SGD; legal: a callable, such as lambda"),
        (["{model}:with_no_optimizers"], "the optimizer factory returned int; legal: a torch optimizer, or a list of several"),
        (["{model}:fails"], "failed: KeyError: 'hello'"),
        (["{model}:of_numbers"], 'on meta tensors; legal: with torch.device("cpu"): around what needs values'),
        (["{model}:with_muon", "--nproc-per-node", "2", "--zero", "3"], "optimizer Muon cannot step on sharded parameters; legal: those of"),
        (["{model}:exits"], "exits() in {model} failed: it exits (no data)"),
        (["{model}:nothing"], "nothing() in {model} returned int; legal: (model, example_inputs)"),
        (["{model}:misfit"], "cannot be called with these example inputs"),
        (["{model}:lacks"], "cannot be called with these example inputs: AttributeError: 'Net' object has no attribute 'nothing'"),
        (["{model}:lazy"], "parameter '1.weight' is lazy and has no shape yet; run one batch in eager first"),
        (["{model}:recurrent", "--nproc-per-node", "2"], "the model is an LSTM: Dynamo leaves it out of every graph"),
        (["{model}:scripted", "--nproc-per-node", "2"], "module '1' is TorchScript, which Dynamo leaves out of every graph"),
        (["{model}:recurrent_inside", "--nproc-per-node", "2"], "module '1' is an LSTM: Dynamo leaves it out of every graph"),
        (["nowhere.py"], "is no Python file"),
        ([], "give one of: a model file, or --hf"),
        (["{model}", "--zero", "5"], "zero: 5 is not legal"),
        (["{model}", "--device", "abacus"], "device: 'abacus' is not known"),
        (["{model}", "--batch", "4"], "--batch: 4 beside a model file, whose example inputs say that; legal: with --hf"),
        (["{model}", "--seq", "128"], "--seq: 128 beside a model file"),
        (["{model}", "--mesh", "shard"], "legal: replicate=2,shard=4"),
        (["{model}", "--mesh", "shard=3"], "makes 3 processes; the job has 1"),
        (["{model}", "--memory-budget", "0.5GiB", "--nproc-per-node", "2", "--zero", "0"], "short: at best"),
        (["{model}", "--memory-budget", "100MiB"], "Cheapest fix: more than one process"),
        (["{model}", "--memory-budget", "1KiB"], "Cheapest fix: a budget of"),
        (["{model}", "--memory-budget", "0.5", "--device", "cpu"], "memory_budget: 0.5 is a share of memory that is not known"),
        (["{model}", "--disable-passes", "name_parameters"], "requires names"),
        (["--plan", "nowhere.json"], "plan: 'nowhere.json' cannot be read"),
        (["--plan", "{weights}"], "plan: '{weights}' is no text; legal: what `autoshard plan --json` prints"),
        (["{model}", "--mesh", "shard=4,shard=2"], "names an axis twice"),
        (["{model}", "--memory-budget", "0"], "is no memory at all"),
        (["{model}:empty"], "has no parameters"),
        (["{model}:no_optimizer"], "the optimizer factory failed: ValueError: no rate"),
        (["--hf", "nowhere"], "--hf: 'nowhere' does not exist"),
        (["--hf", "{llama}", "--batch", "0"], "batch: 0 is not legal"),
        (["--hf", "{llama}", "--seq", "-1"], "seq: -1 is not legal"),
        (["--hf", "{llama}", "--seq", "65"], "--seq: 65 is more than the 64 positions"),
        (["--hf", "{vit}"], "'vit' is no causal language model; write a model.py"),
        (["--hf", "{bart}"], "'bart' is no causal language model; write a model.py"),
        (["--hf", "{broken}"], "--hf: "),
        (["--hf", "{unlike}"], "hidden size (64) is not a multiple of the number of attention heads (5)"),
        (["--hf", "{quantized}"], "this config is of quantized weights (gptq), which are not trained"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(
    model: str, configs: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], says: str
) -> None:
    weights = tmp_path / "weights.pt"
    torch.save({"weight": torch.randn(9)}, weights)
    assert main(["plan", *(a.format(model=model, weights=weights, **configs) for a in arguments)]) == 2
    assert says.format(model=model, weights=weights) in capsys.readouterr().err


SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--width", required={required})
parser.parse_args()
"""


def test_a_model_file_finds_no_arguments_but_its_own_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["autoshard", "plan", "script.py", "--zero", "1"]
    monkeypatch.setattr("sys.argv", given)
    for required, code in (False, 0), (True, 2):
        script = tmp_path / f"script_{code}.py"
        script.write_text(SCRIPT.format(required=required) + MODEL)
        assert main(["plan", f"{script}:has_arguments"]) == code
        assert sys.argv is given
    assert f"{script} cannot be imported: it exits (2), as argparse does where arguments are missing" in capsys.readouterr().err


def test_a_plan_file_is_checked_against_a_model(
    model: str, configs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, "--nproc-per-node", "4", "--json"]) == 0
    file = tmp_path / "plan.json"
    file.write_text(capsys.readouterr().out)
    assert main(["plan", model, "--nproc-per-node", "4", "--plan", str(file)]) == 0
    for arguments, says in [
        ([model, "--nproc-per-node", "2", "--plan", str(file)], "made for 4 processes; the job has 2"),
        (["--hf", configs["llama"], "--nproc-per-node", "4", "--plan", str(file)], "plan: not of this model"),
        (["--nproc-per-node", "4", "--plan", str(file)], "nproc_per_node: a plan file says that itself"),
        (["--batch", "4", "--plan", str(file)], "batch: a plan file says that itself"),
        (["--optimizer", "sgd", "--plan", str(file)], "optimizer: a plan file says that itself"),
        (["--zero", "3", "--plan", str(file)], "zero: a pinned plan decides this"),
    ]:
        assert main(["plan", *arguments]) == 2
        assert says in capsys.readouterr().err


def test_what_the_output_has_no_letters_for_is_printed_as_escapes(tmp_path: Path) -> None:
    """Names, say."""
    file, alone = tmp_path / "plan.json", Degrees(1, 2, 2)
    file.write_text(Plan(2, (("shard", 2),), (ParameterGroup("\u00dcberschicht", ("weight",), alone),)).to_json())
    command = [sys.executable, "-m", "autoshard", "plan", "--plan", str(file)]
    printed = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=60)
    assert printed.returncode == 0 and rb"\xdcberschicht" in printed.stdout, printed.stderr
