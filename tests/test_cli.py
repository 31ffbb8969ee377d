"""The command line, in this process: no GPU, no processes, no memory for the model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autoshard import Degrees, ParameterGroup, Plan
from autoshard.cli import main
from autoshard.cost_model.cluster import Cluster
from autoshard.report import plan_tables, rendered

MODEL = """
import argparse
from collections import OrderedDict
import torch
from torch import nn

print("a line of the model file's own")

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

def with_two():
    return Net(), (torch.zeros(2, 4096),), lambda ps: [torch.optim.SGD(ps[:2], lr=0.1), torch.optim.SGD(ps[2:], lr=0.1)]

def with_no_optimizers():
    return Net(), (torch.zeros(2, 4096),), lambda ps: [torch.optim.SGD(ps[:2], lr=0.1), 7]

def in_groups():
    def factory(ps):
        return torch.optim.SGD([{"params": ps[:1], "momentum": 0.0}, {"params": ps[1:3], "momentum": 0.9}], lr=0.1)
    return Net(), torch.zeros(2, 4096), factory

def warning():
    import warnings
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.warn("of a loader")
    return Net(), torch.zeros(2, 4096)

def with_adafactor():
    return Net(), torch.zeros(2, 4096), lambda ps: torch.optim.Adafactor(ps)

def with_muon():
    def factory(ps):
        return [torch.optim.Muon([p for p in ps if p.dim() == 2]), torch.optim.SGD([p for p in ps if p.dim() < 2])]
    return Net(), torch.zeros(2, 4096), factory

def of_numbers():
    return Net(), torch.zeros(2, 4096), [rate.item() for rate in torch.linspace(0, 0.1, 3)]

class Asking(torch.optim.SGD):
    def step(self, closure=None):
        assert self.param_groups[0]["params"][0].sum().item() != 0.5

def of_values():
    return Net(), torch.zeros(2, 4096), lambda ps: Asking(ps)

def in_halves():
    return Net().bfloat16(), torch.zeros(2, 4096, dtype=torch.bfloat16)

def fails():
    raise KeyError("hello")

def has_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4096)
    return Net(), torch.zeros(2, parser.parse_args().width)

def exits():
    raise SystemExit("no data")

def nothing():
    return 3

def empty():
    return nn.ReLU(), torch.zeros(2)

def no_optimizer():
    def factory(parameters):
        raise ValueError("no rate")
    return Net(), torch.zeros(2, 4096), factory

def lazy():
    return nn.Sequential(nn.Linear(4, 8), nn.LazyLinear(8)), torch.zeros(2, 4)

def lacks():
    Net.forward = lambda this, x, y=None: this.layers[1](this.layers[0](x) + this.nothing)
    return Net(), torch.zeros(2, 4096)

def of_others():
    return nn.Linear(5, 8), torch.zeros(2, 4)

def breaks():
    Net.forward = lambda self, x: self.layers[0](x).sum() if x.sum().item() > 3 else x
    return Net(), torch.zeros(2, 4096)

def stepped():
    net = Net()
    return net, torch.zeros(2, 4096), torch.optim.SGD(net.parameters())

def frozen():
    return Net().requires_grad_(False), torch.zeros(2, 4096)

def in_brackets():
    return nn.Sequential(OrderedDict(by=nn.Sequential(OrderedDict({"[/INST]": nn.Linear(8, 8)})))), torch.ones(2, 8)

def misfit():
    return Net(), torch.zeros(2, 7)

def recurrent():
    return nn.LSTM(8, 8), torch.zeros(3, 2, 8)

def scripted():
    return nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8))), torch.zeros(2, 8)
def recurrent_inside():
    return nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8)), torch.zeros(3, 2, 8)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "some_model.py"
    path.write_text(MODEL)
    return str(path)


CONFIGS = {
    "llama": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 64},
    "vit": {"model_type": "vit"},
    "bart": {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]},
    "unlike": {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 5},
    "quantized": {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
    "broken": {"model_type": "llama", "hidden_size": "many"},
}  # fmt: skip


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, str]:
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return {name: str(tmp_path / name) for name in CONFIGS}


def test_the_table_fits_80_columns(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--nproc-per-node", "8", "--zero", "3"]) == 0
    out = capsys.readouterr().out
    assert "layers.{0..1}" in out and "8/8/8" in out and "1/8/8" in out and "communication" in out
    assert "The peak is at " in out and "in all" in out
    assert out.startswith("1 x 8 h100 (NVIDIA H100 data sheet, SXM)\n")
    assert max(map(len, out.splitlines())) <= 80


def test_what_is_known_before_the_trace_is_shown_first(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoshard.cli.PATIENCE", 0.0)
    assert main(["plan", model, "--nproc-per-node", "2"]) == 0
    shown = capsys.readouterr()
    assert "before the model is traced" in shown.err and "activations" in shown.err and "ZeRO-3" in shown.err
    assert "before the model is traced" not in shown.out and "time of a step" in shown.out


class Terminal(io.StringIO):
    """What is written to stderr where that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("command", "steps"),
    [
        (["plan"], ["building the model of ", "tracing Net", "simulating a step by ZeRO-0"]),
        (["sweep", "--batch", "1"], ["building the model of ", "tracing Net", "simulating configuration 2 of 2: ZeRO-0, with"]),
    ],
)
def test_what_is_being_done_is_said_on_a_terminal_alone(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str], steps: list[str]
) -> None:
    """And stdout is the same, byte by byte."""
    monkeypatch.setattr("autoshard.cli.PATIENCE", 100.0)
    monkeypatch.setenv("TERM", "xterm")
    said = {}
    for stderr in (io.StringIO(), Terminal()):
        torch.compiler.reset()
        monkeypatch.setattr("sys.stderr", stderr)
        assert main([command[0], model, *command[1:], "--codegen", "eager"]) == 0
        said[stderr.isatty()] = capsys.readouterr().out, stderr.getvalue()
    (out, piped), (shown, live) = said[False], said[True]
    assert shown == out and piped == "a line of the model file's own\n"
    assert all(step in live for step in steps)
    assert live.endswith("\x1b[2K")  # the line is gone


def test_what_is_not_modelled_is_said_of_one_process_too(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An optimizer that asks for values; its step is not free for that."""
    assert main(["plan", f"{model}:of_values"]) == 0
    out = capsys.readouterr().out
    assert "No communication." in out and "Not modelled: the optimizer's own state and step (Adam's are assumed)" in out
    (spent,) = (line.split()[1] for line in out.splitlines() if line.startswith("optimizer ") and line.count(".") and "iB" not in line)
    assert float(spent) > 0


def test_names_are_no_markup(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{model}:in_brackets", "--nproc-per-node", "2", "--replicate-below", "0"]) == 0
    assert "\nby.[/INST] " in capsys.readouterr().out


def test_an_optimizer_s_groups_are_as_its_factory_makes_them(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three layers, one weight and one bias have momentum, one weight has none, and the others are left out."""
    assert main(["plan", f"{model}:in_groups", "--json"]) == 0
    made = Plan.from_json("{" + capsys.readouterr().out.partition("{")[2])
    assert made.predicted.memory["optimizer"] == 4 * (4096 * 4096 + 4096)


def test_what_steps_on_rows_is_modelled(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{model}:with_adafactor", "--nproc-per-node", "2"]) == 0
    assert "the optimizer's own state" not in capsys.readouterr().out


def test_a_warning_is_said_once(model: str) -> None:
    with pytest.warns(UserWarning) as found:
        assert main(["plan", f"{model}:warning"]) == 0
    assert [str(each.message) for each in found if "of a loader" in str(each.message)] == ["of a loader"]


def test_a_model_of_which_nothing_is_trained_has_a_plan(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{model}:frozen", "--nproc-per-node", "2", "--memory-budget", "300MiB"]) == 0
    out = capsys.readouterr().out
    assert "parameters" in out and "gradients " not in out and "optimizer  " not in out.partition("time of a step")[0]


def test_dtypes_of_parameters_are_said(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Which a precision leaves as they are, and one process trains in."""
    numbers, kept = f"Net, parameters: {3 * 4097 * 4096:,} in bfloat16", "- precision: rows and what the optimizer keeps of them are bfloat16"
    for command in ("plan", "sweep"):
        assert main([command, f"{model}:in_halves", "--nproc-per-node", "2", "--precision", "bf16"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[1] == numbers and any(line.startswith(kept) for line in lines) and max(map(len, lines)) <= 80
        assert main([command, model, "--precision", "bf16"]) == 0
        assert "- precision: one process trains in the dtypes of its model" in capsys.readouterr().out


def test_what_cannot_step_on_rows_has_a_plan_without_them(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{model}:with_muon", "--nproc-per-node", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "plain data parallel" in out and "optimizer Muon cannot step on rows, so every process has all of them" in out
    assert main(["plan", f"{model}:with_muon", "--nproc-per-node", "2", "--memory-budget", "500MiB"]) == 2
    assert "Cheapest fix: another optimizer than Muon, with which rows can be sharded, or" in " ".join(capsys.readouterr().err.split())


def test_a_model_file_may_have_the_name_of_a_standard_module(model: str) -> None:
    json_py = Path(model).with_name("json.py")
    json_py.write_text(Path(model).read_text())
    before = sys.modules["json"]
    assert main(["plan", str(json_py)]) == 0
    assert sys.modules["json"] is before


def test_json_is_a_plan_that_can_be_pinned(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--nproc-per-node", "4", "--json"]) == 0
    text = capsys.readouterr().out
    file = tmp_path / "plan.json"
    file.write_text(text)
    assert main(["plan", "--plan", str(file), "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out) == Plan.from_json(text)


def test_the_optimizer_of_the_file_counts(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {}
    for name in ("build", "with_sgd", "with_two"):
        assert main(["plan", f"{model}:{name}", "--json"]) == 0
        sizes[name] = Plan.from_json(capsys.readouterr().out).predicted.memory.get("optimizer", 0)
    assert sizes["with_sgd"] == sizes["with_two"] == 0 and sizes["build"] > 0


def test_stages_that_were_not_simulated_have_the_optimizer_of_the_file_too(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGD keeps nothing. Adam would keep 192 MiB more at stage 3, which would be more than there is."""
    monkeypatch.setattr("autoshard.cli.PATIENCE", 0.0)
    assert main(["plan", f"{model}:with_sgd", "--nproc-per-node", "2", "--memory-budget", "500MiB"]) == 0
    out, first = capsys.readouterr()
    (looked,) = (line.split() for line in out.splitlines() if line.startswith("- ZeRO-3"))
    assert looked[2:5] == ["448.09", "MiB", "and"] and "over the budget" not in out
    assert "before the model is traced" in first and "optimizer " not in first


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


def test_a_sweep_says_which_batches_fit(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", model, "--nproc-per-node", "2", "--memory-budget", "1GiB", "--codegen", "eager"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[5].split() == ["batch", "ZeRO", "recompute", "peak", "step", "ms", "samples/s"]
    batches = [int(line.split()[0]) for line in lines[6:] if line[:5].strip().isdigit()]
    assert batches[:3] == [1, 2, 4] and f"The largest batch that fits into 1.00 GiB: {batches[-1]}." in lines
    assert max(map(len, lines)) <= 80


def test_a_sweep_of_several_numbers_of_machines(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--memory-budget", "1GiB", "--codegen", "eager", "--recompute", "none"]
    assert main(["sweep", model, "--nnodes", "1,2", "--nproc-per-node", "2", *options]) == 0
    out = capsys.readouterr().out
    assert "1 x 2, 2 x 2 h100" in out and "2 processes, the batch" in out and "4 processes, the batch" in out
    assert max(map(len, out.splitlines()[2:])) <= 80
    assert main(["sweep", model, "--nnodes", "1,2", "--nproc-per-node", "2,4", *options]) == 2
    assert "cluster: 1 x 4 and 2 x 2 are all 4 processes; legal: one of each number of them" in " ".join(capsys.readouterr().err.split())
    assert main(["sweep", f"{model}:with_muon", "--nproc-per-node", "2", "--zero", "1", *options]) == 2
    assert "optimizer Muon cannot step on sharded parameters" in " ".join(capsys.readouterr().err.split())


def test_a_sweep_of_what_is_not_open_is_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", model, "--batch", "1,2", "--seq", "7"]) == 2
    assert "sequence: this model's trace has it as a number; open are: batch" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["sweep", model, "--batch", "1,0"])
    assert "'1,0' is not legal; legal: numbers from 1 on, such as 1,2,4" in capsys.readouterr().err


def test_a_hugging_face_config_is_called_on_as_many_tokens_as_it_takes(
    configs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--hf", configs["llama"], "--nproc-per-node", "2", "--replicate-below", "0", "--zero", "3"]) == 0
    assert "ZeRO-3" in capsys.readouterr().out


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


@pytest.mark.full
def test_a_machine_is_measured_and_used(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ours.yaml"
    assert main(["calibrate", "--out", str(out)]) == 0
    device = Cluster.load(out).device
    assert device.is_cpu and {"matmul.fp32", "pointwise", "attention.fp32"} <= device.tables.keys()
    assert all(seconds > 0 for table in device.tables.values() for _, seconds in table)
    assert main(["plan", model, "--cluster", str(out)]) == 0


def test_a_plan_says_whether_it_fits_also_where_nothing_is_chosen(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, "--json"]) == 0
    small, pinned = tmp_path / "small.yaml", tmp_path / "plan.json"
    small.write_text("device: {preset: l4, memory: 500e6}")
    pinned.write_text(capsys.readouterr().out)
    for arguments, says in [
        (["--memory-budget", "4GiB"], "The step fits into 4.00 GiB, what a process may use."),
        (["--zero", "0", "--device", "l4"], "The step fits into 21.60 GiB, what a process may use."),
        (["--zero", "0", "--cluster", str(small)], " more than 429.15 MiB, what a process may use."),
        (["--plan", str(pinned), "--cluster", str(small)], " more than 429.15 MiB, what a process may use."),
    ]:
        assert main(["plan", model, *arguments]) == 0
        assert says in capsys.readouterr().out


def test_parameters_outside_of_the_graph_come_first(model: str) -> None:
    whole = Plan(world=1, axes=(("shard", 1),), groups=(), covered=0.5)
    assert "Warning: the first captured graph holds 50.0%" in rendered(plan_tables(whole)).splitlines()[1]


def test_a_row_stands_for_several_only_where_their_numbers_follow_each_other() -> None:
    names = ("layers.0", "layers.1", "layers.2", "layers.5", "layer1.0", "layer1.1", "layer2.0")
    groups = tuple(ParameterGroup(name, (f"{name}.weight",), Degrees(1, 1, 1)) for name in names)
    made = Plan(1, (("shard", 1),), groups, recompute=tuple((name, "full") for name in names))
    shown = [line.split()[0] for line in rendered(plan_tables(made)).splitlines() if "layer" in line]
    rows = ["layers.{0..2}", "layers.5", "layer1.{0..1}", "layer2.0"]
    assert shown == [*rows, *rows]  # of the groups, and of what is recomputed


def test_what_the_output_has_no_letters_for_is_printed_as_escapes(tmp_path: Path) -> None:
    """As the ellipsis of a narrow table, and names."""
    file, alone = tmp_path / "plan.json", Degrees(1, 2, 2)
    file.write_text(Plan(2, (("shard", 2),), (ParameterGroup("\u00dcberschicht", ("weight",), alone),)).to_json())
    command = [sys.executable, "-m", "autoshard", "plan", "--plan", str(file)]
    printed = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=60)
    assert printed.returncode == 0 and rb"\xdcberschicht" in printed.stdout, printed.stderr
