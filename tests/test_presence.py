"""Signs of life, without processes: who is missed, who is waited for."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from autoshard.errors import ConfigError, DisagreementError
from autoshard.runtime import living, presence
from autoshard.runtime.presence import Patience, SignsOfLife


def _wait(store: dist.HashStore, arrival: float | None, timeout: float = 30.0) -> None:
    """Waits for ranks 1 and 2, which never come, as rank 0 does."""
    Patience(timeout, arrival, print).wait(store, "the job", lambda: False, lambda: [1, 2], lambda: [1, 2])


def test_who_gives_no_sign_is_named_and_who_does_is_not() -> None:
    store, over = dist.HashStore(), threading.Event()

    def give() -> None:
        count = 0
        while not over.wait(0.05):
            store.set("autoshard/alive/2", f" {(count := count + 1)} train.py:7 in load")

    signs = threading.Thread(target=give)
    signs.start()
    try:
        with pytest.raises(DisagreementError, match=r"^rank 1 did not come to the job, and gave no sign of life for 1 s"):
            _wait(store, arrival=1.0)
    finally:
        over.set()
        signs.join()


def test_the_last_sign_says_where_it_was_given() -> None:
    store = dist.HashStore()
    store.set("autoshard/alive/1", " 12.5 train.py:7 in load")
    with pytest.raises(DisagreementError, match=r"ranks 1, 2 .* within 1 s \(rank 1 is at train.py:7 in load\)"):
        _wait(store, arrival=60.0, timeout=1.0)


@pytest.mark.skipif(not living.mark(), reason="the system does not say who lives")
def test_who_lives_on_this_machine_need_not_give_signs() -> None:
    """It may be in one call that keeps Python's lock. Its last sign has no mark."""
    store = dist.HashStore()
    for rank in (1, 2):
        store.set(f"autoshard/alive/{rank}", f"{living.mark()} 12.5 train.py:7 in load")
    with pytest.raises(DisagreementError, match=r"ranks 1, 2 did not come to the job within 1.5 s"):
        _wait(store, arrival=0.1, timeout=1.5)
    store.set("autoshard/alive/2", " 13.5 train.py:7 in load")
    with pytest.raises(DisagreementError, match=r"^rank 2 did not come .* gave no sign of life for 0.1 s \(rank 2 is at train.py:7 in load\)"):
        _wait(store, arrival=0.1)


@pytest.mark.skipif(not living.mark(), reason="the system does not say who lives")
@pytest.mark.parametrize("arrival", [None, 60.0])
def test_who_is_seen_to_end_is_not_waited_for(arrival: float | None) -> None:
    """Behind the first call too, where nobody gives signs."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        store, mark = dist.HashStore(), f"{living._machine()}/{other.pid}/{living._state_and_start(other.pid)[1]}"
        assert living.lives(mark)
        for rank, one in ((1, living.mark()), (2, mark)):
            presence.processes_of(store).set(str(rank), one if arrival is None else "")
            store.set(f"autoshard/alive/{rank}", f"{one if arrival is not None else ''} 12.5 train.py:7 in load")
        ends = threading.Timer(1.0, other.kill)
        ends.start()
        with pytest.raises(DisagreementError, match="^rank 2 did not come to the job, and ended: its own log says why"):
            _wait(store, arrival)
        ends.join()


@pytest.mark.skipif(not living.mark(), reason="the system does not say who lives")
def test_a_sign_of_before_a_restart_is_not_one_of_who_ended() -> None:
    store = dist.HashStore()
    for rank in (1, 2):
        store.set(f"autoshard/alive/{rank}", f"{living.mark()}0 12.5 train.py:7 in load")
    with pytest.raises(DisagreementError, match="ranks 1, 2 did not come to the job within 1.5 s"):
        _wait(store, arrival=60.0, timeout=1.5)


def test_without_signs_only_the_timeout_counts() -> None:
    store = dist.HashStore()
    store.set("autoshard/alive/1", " 12.5 train.py:7 in load")  # of an earlier wait
    with pytest.raises(DisagreementError, match=r"ranks 1, 2 did not come to the job within 1 s;"):
        _wait(store, arrival=None, timeout=1.0)


def test_signs_are_given_until_they_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(presence, "launcher_store", lambda host: store)
    monkeypatch.setenv("RANK", "3")
    before = set(threading.enumerate())
    signs = SignsOfLife()
    (thread,) = {t for t in set(threading.enumerate()) - before if not t.daemon}
    store.wait(["autoshard/alive/3"])
    assert " in " in store.get("autoshard/alive/3").decode()
    more = SignsOfLife()
    assert {t for t in set(threading.enumerate()) - before if not t.daemon} == {thread}
    signs.end()
    time.sleep(3 * presence._LOOK)
    assert thread.is_alive() and store.get("autoshard/alive/3").decode().split(" ")[0] == living.mark()
    more.end()
    thread.join(10)
    assert not thread.is_alive() and store.get("autoshard/alive/3").decode().startswith(" ")


def test_signs_end_where_a_connection_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, there, store = threading.Event(), threading.Event(), dist.HashStore()

    def connect(host: bool) -> dist.HashStore:
        begun.set()
        there.wait()
        return store

    monkeypatch.setattr(presence, "launcher_store", connect)
    monkeypatch.setenv("RANK", "3")
    before, signs = set(threading.enumerate()), SignsOfLife()
    assert begun.wait(10)
    (thread,) = {t for t in set(threading.enumerate()) - before if not t.daemon}
    signs.end()
    thread.join(10)
    assert not thread.is_alive()
    there.set()


def test_a_connection_that_comes_late_has_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    there, store = threading.Event(), dist.HashStore()
    monkeypatch.setattr(presence, "launcher_store", lambda host: store if there.wait() else None)
    monkeypatch.setenv("RANK", "3")
    signs = SignsOfLife()
    time.sleep(3 * presence._LOOK)
    there.set()
    store.wait(["autoshard/alive/3"])
    signs.end()


@pytest.mark.parametrize("port", ["abc", "-1"])
def test_a_port_that_is_none_is_named_at_once(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    for name, value in {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"environment: MASTER_PORT is '{port}'"):
        Patience(30.0, 30.0, print).wait_for_store()


@pytest.mark.parametrize(
    ("rank", "said"), [("0", "rank 0 could not listen at"), ("1", "rank 0 did not come to the job: for 0.1 s nothing answered at")]
)
def test_a_port_that_another_has_is_not_a_process_that_is_missing(monkeypatch: pytest.MonkeyPatch, rank: str, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        if rank != "0":
            taken.close()
        with pytest.raises(DisagreementError, match=said):
            Patience(0.1, 0.1, print).wait_for_store()


def test_a_host_that_is_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # whose connections nobody takes
        for name, value in {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(DisagreementError, match="rank 0 did not come to the job: for 1 s nothing answered at"):
            Patience(60.0, 1.0, print).wait_for_store()
    for thread in threading.enumerate():
        if thread.name == "autoshard asks apart":  # the interpreter must not end before it
            thread.join(10)
