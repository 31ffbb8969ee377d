"""What Inductor makes of the rewritten graph: the planned order, and caches that never mix plans."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.profiler import ProfilerActivity, profile

import autoshard
from autoshard.cost_model.cluster import Cluster as Machines
from autoshard.cost_model.hardware import DEVICES
from autoshard.errors import ConfigError
from autoshard.passes.dump import Dump
from autoshard.planning import first_look
from tests.cluster import Cluster
from tests.launch import launch
from tests.small import TOLERANCE, compiled_pair, config, in_full

TRAIN = """
from torch._dynamo.utils import counters
model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = compiled(model, codegen="inductor", {options})
for i in range(3):
    step(torch.full((4, 8), 1.0 + rank + i)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
total = sum((p.full_tensor() if hasattr(p, "full_tensor") else p).double().sum().item() for p in model.parameters())
print("total", round(total, 4))
print("hits", counters["inductor"]["fxgraph_cache_hit"], "misses", counters["inductor"]["fxgraph_cache_miss"])
print("report", "Parameters in compiled graphs: 100.0%" in str(autoshard.report(step)))
"""


def _train(options: str) -> list[str]:
    outputs = []
    for ended in launch(2, TRAIN.format(options=options)):
        assert ended.code == 0, ended.output
        outputs.append(ended.output)
    return outputs


def _of(word: str, output: str) -> str:
    found = re.search(rf"^{word} (.*)$", output, re.M)
    assert found, output
    return found[1]


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path


@pytest.mark.parametrize("zero", [in_full(0), in_full(1), in_full(2), 3])
@pytest.mark.full
def test_a_warm_start_skips_code_generation(fresh_cache: Path, zero: int) -> None:
    cold, warm = _train(f"zero={zero}"), _train(f"zero={zero}")
    assert all(_of("hits", o).startswith("0 ") for o in cold)
    assert len({_of("total", o) for o in [*cold, *warm]}) == 1
    assert all(_of("report", o) == "True" for o in [*cold, *warm])
    assert [_of("hits", o) for o in warm] == ["2 misses 0"] * 2


@pytest.mark.full
def test_another_plan_s_code_is_not_run(fresh_cache: Path) -> None:
    totals = set()
    for options in ("zero=2", "zero=3", "zero=2, passes='name_parameters,merge_unshards,lower'"):
        outputs = _train(options)
        assert all(_of("hits", o).startswith("0 ") for o in outputs), options
        totals |= {_of("total", o) for o in outputs}
    assert len(totals) == 1


OPS = "gather_direct|exchange_direct|swap_direct|all_gather_into_tensor|reduce_scatter_tensor|all_to_all_single|all_reduce"
COLLECTIVE = re.compile(rf"(?:^|= )torch\.ops\.(?:autoshard|_c10d_functional)\.({OPS})(?:_out|_)?\b")


def _sequence(code: str) -> list[str]:
    """The collectives that a text of calls starts, in order."""
    lines = [line for line in code.splitlines() if not line.strip().startswith("#")]
    return [m[1] for line in lines if (m := COLLECTIVE.search(line.strip()))]


EXECUTED = re.compile(rf"(?:autoshard|_c10d_functional)::({OPS})(?:_out|_)?$")


def _executed(run: Callable[[], Tensor]) -> list[str]:
    """The collectives that torch's profiler sees started, in order."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [m[1] for event in events if (m := EXECUTED.match(event.name))]


def _model() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(8, 8), nn.Tanh())))


def _order(zero: int, direct: bool, folder: Path) -> list[tuple[list[str], list[str], list[str]]]:
    """Of forward and backward: the collectives that the passes left, those in Inductor's code, and those of a step later."""
    plan = first_look(_model(), config(zero), Machines(1, 2, DEVICES["cpu"]))
    plan = plan if direct else replace(plan, direct=False, direct_sums=False)
    options = config("auto", plan=plan, replicate_below="auto", codegen="inductor", dump_dir=folder)
    step = torch.compile(_model(), backend=autoshard.backend(options))
    with torch._inductor.config.patch(fx_graph_cache=False):  # what a cache gives leaves no code to read
        _, codes = run_and_get_code(lambda: step(torch.ones(4, 8)).sum().backward())
    losses: list[Tensor] = []
    ran = [_executed(lambda: losses.append(step(torch.ones(4, 8)).sum())), _executed(lambda: losses[0].backward())]
    mine = folder / f"rank{dist.get_rank()}"
    dumps = [next(mine.glob(f"*_overlap_{phase}_after.py")) for phase in ("forward", "backward")]
    return [(_sequence(dump.read_text()), _sequence(code), order) for dump, code, order in zip(dumps, codes, ran, strict=True)]


@pytest.mark.parametrize(("zero", "direct"), [(3, True), in_full(3, False), in_full(0, True), in_full(0, False)])
def test_the_planned_order_is_generated_and_executed(two: Cluster, tmp_path: Path, zero: int, direct: bool) -> None:
    """In backward at stage 3 gathers and reductions take turns."""
    found = two.run(_order, zero, direct, tmp_path)
    for halves in found:
        for planned, generated, executed in halves:
            assert planned == generated == executed
        forward, backward = (planned for planned, *_ in halves)
        assert len(forward) == (5 if zero else 0) and len(backward) == (3 + 5 if zero else 5)  # the last group stays, the first is not needed
        turns = sum(one != other for one, other in zip(backward, backward[1:]))
        assert turns > 2 if zero else not turns, backward
    assert found[0] == found[1]


@pytest.mark.full
def test_a_dump_is_enough_for_a_bug_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_DUMP", str(tmp_path))
    launch(2, "step = compiled(model)\nstep(torch.randn(4, 8)).sum().backward()")
    names = sorted(f.name for f in (tmp_path / "rank0").iterdir())
    assert {"plan.json", "environment.txt", "passes.jsonl", "00_inline_regions_traced_before.py"} <= set(names)
    assert "passes inline_regions,hoist_unshards,name_parameters" in (tmp_path / "rank0" / "environment.txt").read_text()
    lowered = next((tmp_path / "rank0").glob("*_lower_forward_after.py")).read_text()
    assert "torch.ops.autoshard.gather_direct" in lowered


def test_a_folder_that_cannot_be_written_is_refused_by_the_name_it_was_given_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="^dump_dir: '.*file/rank0' cannot be written; legal: a folder"):
        Dump.of(tmp_path / "file", 0)
    monkeypatch.setenv("AUTOSHARD_DUMP", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="^AUTOSHARD_DUMP: "):
        Dump.of(None, 0)


def test_a_folder_without_room_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"dump_dir \(or AUTOSHARD_DUMP\): '.*plan.json' cannot be written \(No space left on device\)"):
        Dump(tmp_path).note("plan.json", "{}")


def _drops(x: Tensor) -> Tensor:
    x.add(1)
    return x


def test_a_graph_that_calls_nothing_is_run() -> None:
    """What nobody takes is a call to Dynamo, and none to Inductor any more; so is a piece between two breaks that asks for sizes alone."""
    torch.compiler.reset()
    compiled = torch.compile(_drops, backend=autoshard.backend(config(0, codegen="inductor")))
    x = torch.ones(3, 4)
    torch.testing.assert_close(compiled(x), x)


@pytest.mark.full
def test_without_a_compiler_codegen_is_eager_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    os.environ["PATH"], os.environ["CXX"] = "/nowhere", "/nowhere/g++"
    step = compiled(codegen="inductor")
    for _ in range(3):
        step(torch.randn(4 + rank, 8)).sum().backward()
    """
    for ended in launch(2, body):
        assert ended.code == 0, ended.output
        assert ended.output.count("no C++ compiler found") == 1


class Branches(nn.Module):
    """Two that meet at the end, each with an operation that reads `m`: Inductor may make one kernel of both, where they are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(5))
        self.b = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        for i, layer in enumerate(self.a):
            x = torch.tanh(layer(x)) if i else torch.relu(layer(x) * m)
        for i, layer in enumerate(self.b):
            y = torch.relu(layer(y) * m) if i == 1 else torch.tanh(layer(y))
        return x.sum() + y.sum()


def _apart(rows: tuple[int, ...]) -> float:
    """How far from the unsharded model's the loss is. rows: of the second branch, on each rank."""
    _, plain, step = compiled_pair(config(2, codegen="inductor"), Branches)
    torch.manual_seed(0)
    x, m, y = torch.randn(4, 64), torch.randn(64), torch.randn(max(rows), 64)[: rows[dist.get_rank()]]
    return float((step(x, y, m) - plain(x, y, m)).detach().abs())


@pytest.mark.parametrize("rows", [(4, 6), in_full((4, 4))])
def test_processes_send_in_the_planned_order_whatever_inductor_joins(two: Cluster, rows: tuple[int, ...]) -> None:
    assert max(two.run(_apart, rows)) <= TOLERANCE


class Remembers(nn.Module):
    """Gives what its weight is, which a loop may compare with what that becomes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weight = self.layer.weight
        return self.layer(x).pow(2).mean(), weight.clone(), weight.detach().clone().t()


def _remembered(silent: bool) -> list[tuple[Tensor, Tensor]]:
    """What was given of a weight, as it was before a step and as it is behind that."""
    model, _, step = compiled_pair(config(0, codegen="inductor"), Remembers)
    with autoshard.no_sync(model) if silent else contextlib.nullcontext():
        first, *given = step(torch.ones(4, 8))
    first.backward()
    if silent:
        step(torch.ones(4, 8))[0].backward()
    before = [each.detach().clone() for each in given]
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return list(zip(before, (each.detach() for each in given), strict=True))


@pytest.mark.parametrize("silent", [False, in_full(True)])
def test_what_a_model_gives_of_a_parameter_stays_what_it_was(two: Cluster, silent: bool) -> None:
    """Inductor takes a user's own copy out."""
    for given in two.run(_remembered, silent):
        for before, after in given:
            torch.testing.assert_close(before, after, rtol=0, atol=0)
