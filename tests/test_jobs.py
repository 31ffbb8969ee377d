"""Whole jobs, from outside: how they start, disagree, die and end."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.launch import launch

STEP = """
step = compiled({options})
for _ in range({steps}):
    step(torch.randn(4, 8)).sum().backward()
"""


def _steps(steps: int = 3, options: str = "") -> str:
    return STEP.format(steps=steps, options=options)


@pytest.mark.full
def test_a_finished_job_exits_with_0() -> None:
    for ended in launch(2, _steps(), fresh=True):
        assert ended.code == 0, ended.output


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_a_finished_job_exits_with_0_fifty_times() -> None:
    for _ in range(50):
        for ended in launch(2, _steps(), fresh=True):
            assert ended.code == 0, ended.output


@pytest.mark.full
@pytest.mark.parametrize("end", ["", "torch.distributed.destroy_process_group()"])
def test_a_job_ends_with_gathers_of_a_step_that_never_comes(end: str) -> None:
    body = """
    step, optimizer = compiled(early_gathers=True), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    for ended in launch(2, textwrap.dedent(body) + end, fresh=True):
        assert ended.code == 0 and "unwaited" not in ended.output, ended.output


def test_who_is_done_does_not_wait_for_one_that_failed() -> None:
    first, second = launch(2, _steps() + "if rank == 1: raise ValueError('of its own')", timeout=45)
    assert first.code == 0 and second.code != 0 and "ValueError: of its own" in second.output, first.output + second.output


def test_a_group_may_be_destroyed_and_another_started() -> None:
    body = """
    import copy, torch.distributed as dist
    for turn in range(2):
        again = copy.deepcopy(model)
        compiled(again)(torch.randn(4, 8)).sum().backward()
        dist.barrier()
        dist.destroy_process_group()
        print("turn", turn)
    """
    for ended in launch(2, textwrap.dedent(body), timeout=60):
        assert ended.code == 0 and "turn 1" in ended.output, ended.output


def test_a_model_of_a_later_group_is_not_sharded_over_groups_that_are_gone() -> None:
    body = """
    import copy, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.new_group([0]), dist.new_group([0, 1])  # so that later ones have other names
    for turn in range(2):
        again = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(again.parameters())
        compiled(again)(torch.randn(4, 8)).sum().backward()
        torch.nn.utils.clip_grad_norm_(again.parameters(), 1.0)
        optimizer.step()
        dist.barrier()
        dist.destroy_process_group()
        print("turn", turn)
    """
    for ended in launch(2, textwrap.dedent(body), timeout=60):
        assert ended.code == 0 and "turn 1" in ended.output, ended.output


def test_a_second_backend_s_config_is_said_to_count_for_nothing() -> None:
    body = """
    for zero in (3, 3, 2):
        compiled(zero=zero)(torch.randn(4, 8)).sum().backward()
        print("zero", zero, flush=True)
    print(autoshard.plan_of(model).stage)
    """
    first, second = launch(2, textwrap.dedent(body))
    said = "this model was sharded by another backend, whose config it keeps: another zero is for a model before its first call"
    assert first.code == second.code == 0 and first.output.endswith("zero 2\n3\n"), first.output
    assert first.output.count(said) == 1 and second.output.count(said) == 0


def test_one_process_is_left_alone() -> None:
    body = _steps() + "print(autoshard.plan_of(model).leaves_alone, type(model[0].weight).__name__)"
    (ended,) = launch(1, body)
    assert ended.code == 0 and "True Parameter" in ended.output, ended.output


def test_different_configs_are_named() -> None:
    for ended in launch(2, _steps(options="zero=rank + 2")):
        assert ended.code != 0
        assert "rank 1 disagrees with rank 0 about config: zero: '3' where rank 0 has '2'" in ended.output


def test_a_process_whose_store_went_before_its_first_call_ends() -> None:
    body = """
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
        time.sleep(0.2)
        if rank == 0:
            os._exit(0)
        time.sleep(1)
        backend = autoshard.backend(autoshard.Config())
        time.sleep(1)  # in which a sign of life is due
        """
    assert [ended.code for ended in launch(2, body, timeout=45)] == [0, 0]


def test_different_models_are_named() -> None:
    body = "model = nn.Sequential(nn.Linear(8, 16 + rank))\n" + _steps(options="model")
    for ended in launch(2, body):
        assert ended.code != 0
        assert "rank 1 disagrees with rank 0 about parameters: 0.weight: 17 where rank 0 has 16" in ended.output


BEFORE = {"group": "import torch.distributed as dist; dist.init_process_group('gloo')\n", "no group": ""}


def test_messages_go_in_turn_whatever_a_loop_s_own_group_is_called() -> None:
    body = """
    import torch.distributed as dist
    from autoshard.runtime.processes import name_of_everyone
    dist.init_process_group("cpu:gloo")
    compiled()(torch.randn(4, 8)).sum().backward()
    print("in turn", name_of_everyone() != dist.group.WORLD.group_name)
    """
    for ended in launch(2, textwrap.dedent(body)):
        assert ended.code == 0 and "in turn True" in ended.output, ended.output


@pytest.mark.full
@pytest.mark.parametrize("before", BEFORE)
def test_a_process_that_never_comes_is_named(before: str) -> None:
    body = "if rank == 1: time.sleep(5); os._exit(0)\ncompiled(arrival=3)(torch.randn(4, 8))"
    first, _ = launch(2, BEFORE[before] + body)
    what = "the first call of this model" if before == "group" else "the job"
    assert f"DisagreementError: rank 1 did not come to {what}, and gave no sign of life for 3 s" in first.output


@pytest.mark.full
@pytest.mark.parametrize("before", BEFORE)
def test_rank_0_that_never_comes_is_named(before: str) -> None:
    body = "if rank == 0: time.sleep(5); os._exit(0)\ncompiled(arrival=3)(torch.randn(4, 8))"
    _, second = launch(2, BEFORE[before] + body)
    assert "DisagreementError: rank 0 did not come to" in second.output


@pytest.mark.full
@pytest.mark.parametrize("before", BEFORE)
def test_no_one_waits_for_more_than_10_seconds_for_a_process_that_is_not_there(before: str) -> None:
    body = """
    if rank == 1: time.sleep(25); os._exit(0)
    step, begin = compiled(), time.time()
    try: step(torch.randn(4, 8))
    except Exception as error: print(type(error).__name__, "in time" if time.time() - begin < 10 else f"too late: {time.time() - begin:.1f} s")
    os._exit(1)
    """
    first, _ = launch(2, BEFORE[before] + textwrap.dedent(body))
    assert "DisagreementError in time" in first.output, first.output


@pytest.mark.full
@pytest.mark.parametrize("before", BEFORE)
def test_a_process_that_is_slow_is_waited_for(before: str) -> None:
    body = """
    step = compiled(arrival=2)
    def read_data(): time.sleep(9)
    if rank == 1: read_data()
    step(torch.randn(4, 8)).sum().backward()
    """
    first, second = launch(2, BEFORE[before] + textwrap.dedent(body))
    assert first.code == second.code == 0, first.output + second.output
    assert "waiting for rank 1" in first.output and "rank 1 is at <string>:" in first.output, first.output
    assert "in read_data)" in first.output


@pytest.mark.full
def test_a_process_that_is_too_slow_is_named() -> None:
    body = "step = compiled(timeout=3)\nif rank == 1: step = lambda x: time.sleep(8) or sys.exit(0)\nstep(torch.randn(4, 8))"
    first, _ = launch(2, BEFORE["group"] + body)
    assert "DisagreementError: rank 1 did not come to the first call of this model within 3 s" in first.output


@pytest.mark.parametrize(
    ("codegen", "moment"),
    [
        ("eager", "forward"),
        pytest.param("inductor", "backward", marks=pytest.mark.full),
        pytest.param("eager", "backward", marks=pytest.mark.full),
        pytest.param("inductor", "forward", marks=pytest.mark.full),
    ],
)
def test_a_process_that_dies_in_mid_step_ends_the_others(codegen: str, moment: str) -> None:
    body = f"""
    step = compiled(codegen={codegen!r}, timeout=20)
    for i in range(20):
        if i == 14 and rank == 1 and {moment!r} == "forward": os._exit(9)
        loss = step(torch.randn(4, 8)).sum()
        if i == 14 and rank == 1: os._exit(9)
        loss.backward()
    """
    first, dead, third = launch(3, body)
    assert dead.code == 9
    for rank, survivor in ((0, first), (2, third)):
        assert survivor.code not in (0, -6), survivor.output
        assert f"PeerLostError: rank {rank} lost another process of the job in a collective" in survivor.output, survivor.output
        assert "(it died, or ended; no word of it from rank 1)" in survivor.output, survivor.output


@pytest.mark.parametrize("moment", ["forward", pytest.param("backward", marks=pytest.mark.full)])
def test_a_process_that_stands_still_in_mid_step_ends_the_others(tmp_path: Path, moment: str) -> None:
    """By the config's timeout, where the script's own process group would wait for half an hour. It lives until they are through."""
    body = f"""
    from pathlib import Path
    over = Path({str(tmp_path / "over")!r})
    def stand_still():
        for _ in range(400):
            if over.exists(): os._exit(7)
            time.sleep(0.1)
        os._exit(9)
    step = compiled(timeout=5)
    try:
        for i in range(20):
            if i == 14 and rank == 1 and {moment!r} == "forward": stand_still()
            loss = step(torch.randn(4, 8)).sum()
            if i == 14 and rank == 1: stand_still()
            loss.backward()
    finally:
        if rank == 0: over.touch()
    """
    survivor, still = launch(2, BEFORE["group"] + textwrap.dedent(body))
    assert still.code == 7, survivor.output
    assert survivor.code not in (0, -6), survivor.output
    assert "PeerLostError: rank 0 lost another process of the job in a collective (it may live, but did not come" in survivor.output


@pytest.mark.full
def test_a_process_that_dies_in_its_first_steps_is_named() -> None:
    body = """
    step = compiled(timeout=6)
    for i in range(9):
        if i == 3 and rank == 1: os._exit(9)
        step(torch.randn(4, 8)).sum().backward()
    """
    survivor, dead = launch(2, body)
    assert dead.code == 9
    assert "DisagreementError: rank 1 did not come to training, with collectives" in survivor.output, survivor.output
    assert "rank 1 is at" not in survivor.output


def test_links_are_measured_where_nothing_says_what_they_carry(tmp_path: Path) -> None:
    body = f"""
    from autoshard.cost_model.cluster import Cluster
    from autoshard.cost_model.hardware import DEVICES
    os.environ["XDG_CACHE_HOME"] = {str(tmp_path)!r}
    for i, cluster in enumerate(("auto", Cluster(1, 2, DEVICES["cpu"]))):
        each = nn.Sequential(nn.Linear(8, 16))
        print("model", i, file=sys.stderr)
        compiled(each, cluster=cluster, verbose=True)(torch.randn(4, 8)).sum().backward()
    """
    first, second = launch(2, body)
    assert first.code == second.code == 0, first.output + second.output
    _, unknown, known = first.output.split("model ")
    assert "links carry" in unknown and "links carry" not in known, first.output
    assert "matmuls reach" in unknown and "matmuls reach" not in known, first.output


def test_a_process_that_dies_while_links_are_measured_ends_the_others() -> None:
    body = """
    import torch.distributed as dist
    from autoshard.runtime.link import link_rate
    dist.init_process_group("gloo")
    if rank == 1: os._exit(9)
    link_rate(5.0)
    """
    survivor, dead = launch(2, body)
    assert dead.code == 9
    assert "PeerLostError: rank 0 measured its links and lost another process" in survivor.output, survivor.output


def test_evaluation_on_one_process_alone_is_refused_by_name() -> None:
    body = """
    step = compiled(timeout=4)
    step(torch.randn(4, 8)).sum().backward()
    with torch.no_grad():
        step(torch.randn(4, 8))
    if rank == 0:
        step(torch.randn(4, 8)).sum().backward()
    with torch.no_grad():
        step(torch.randn(4, 8))
    """
    for ended in launch(2, body):
        assert ended.code != 0
        assert "DisagreementError: rank 1 disagrees with rank 0 about its call: 'evaluation, with collectives" in ended.output, ended.output


@pytest.mark.full
def test_a_graph_break_is_named_once() -> None:
    body = """
    class Breaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        def forward(self, x):
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)
    model = Breaking()
    step = compiled(model)
    for size in (4, 5, 6):
        step(torch.randn(size, 8)).sum().backward()
    print("share", autoshard.report(model).compiled)
    """
    first, second = launch(2, body)
    assert first.output.count("graph break at <string>:") == 1 and "graph break" not in second.output
    assert "share 1.0" in first.output


def test_a_graph_break_in_front_of_which_nothing_is_compiled_is_named_once() -> None:
    body = """
    class Breaking(nn.Linear):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = Breaking(8, 8), nn.Linear(8, 8)
        def forward(self, x):
            return self.head(self.inner(x))
    step = compiled(Outer())
    for size in (4, 5, 6):
        step(torch.randn(size, 8)).sum().backward()
    step = compiled(Breaking(8, 8))
    for size in (4, 5, 6):
        step(torch.randn(size, 8)).sum().backward()  # all of it is behind the break, in one piece
    """
    first, second = launch(2, body)
    assert first.output.count("graph break at <string>:") == 1 and "graph break at" not in second.output, first.output


def test_a_graph_before_the_first_call_is_of_its_own_rank(tmp_path: Path) -> None:
    body = f"""
    class Late(nn.Linear):
        def forward(self, x):
            x = x * 2
            torch._dynamo.graph_break()
            return super().forward(x)
    compiled(Late(8, 8), dump_dir={str(tmp_path)!r})(torch.ones(4, 8)).sum().backward()
    """
    first, second = launch(2, body)
    assert first.output.count("graph break at <string>:") == 1 and "graph break at" not in second.output
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["rank0", "rank1"]


@pytest.mark.parametrize("error", ["NotImplementedError", "KeyError('[/INST]')"])
def test_what_forward_raises_in_the_first_call_is_the_user_s(error: str) -> None:
    body = f"""
    class Raising(nn.Linear):
        def forward(self, x):
            raise {error}
    try:
        compiled(Raising(8, 8), verbose=True)(torch.ones(4, 8))
    except BaseException as raised:
        print("caught", type(raised).__name__)
    """
    for ended in launch(2, body):
        assert f"caught {error.partition('(')[0]}\n" in ended.output, ended.output


def test_nothing_half_sharded_goes_on() -> None:
    body = """
    import autoshard.first_call
    class Failing(autoshard.first_call.Sharder):
        def _hold(self, *args):
            raise MemoryError("no room")
    autoshard.first_call.Sharder = Failing
    step = compiled()
    for _ in range(2):
        try:
            step(torch.randn(4, 8))
        except autoshard.AutoshardError as error:
            print("caught", type(error).__name__, error)
    """
    for ended in launch(2, body):
        assert ended.output.count("caught ShardingError sharding Sequential failed half way (MemoryError: no room)") == 2


@pytest.mark.full
def test_a_budget_that_cannot_be_met_is_explained() -> None:
    for ended in launch(2, _steps(options="zero='auto', memory_budget='1KiB'")):
        assert ended.code != 0
        assert "short: at best, ZeRO-3 on 2 processes, a step takes" in ended.output
        assert "Cheapest fix:" in ended.output
