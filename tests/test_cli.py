"""The command line, in this process: no GPU, no processes, no memory for the model."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

from autoshard import Degrees, ParameterGroup, Plan
from autoshard.cli import main
from autoshard.cost_model.cluster import Cluster
from autoshard.report import plan_tables, rendered


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
