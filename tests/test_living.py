"""Whether a process of this machine lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoshard.runtime import living

pytestmark = pytest.mark.skipif(not living.mark(), reason="the system does not say who lives")
SAYS_ITS_MARK = "from autoshard.runtime.living import mark; print(mark(), flush=True); input()"


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    path = str(Path(living.__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", SAYS_ITS_MARK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    ) as process:
        yield process
        process.kill()


def _soon(mark: str, lives: bool) -> bool:
    """Whether it comes to that."""
    for _ in range(100):
        if living.lives(mark) is lives:
            return True
        time.sleep(0.05)
    return False


def test_a_process_lives_until_it_is_stopped_or_ends(other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    mark = other.stdout.readline().strip()
    assert living.lives(mark)
    other.send_signal(signal.SIGSTOP)
    assert _soon(mark, False)
    assert not living.has_ended(mark)
    other.send_signal(signal.SIGCONT)
    assert _soon(mark, True)
    other.kill()
    assert _soon(mark, False) and living.has_ended(mark)  # a zombie
    other.wait()
    assert living.has_ended(mark)


def test_one_of_another_machine_or_another_time_does_not() -> None:
    own = living.mark()
    assert living.lives(own)
    assert not living.has_ended(own)
    for other in ("", "/", f"another/{own}"):
        assert not living.lives(other) and not living.has_ended(other)
    assert living.has_ended(f"{own}0")  # its number is another one's
