"""Jobs that torchrun starts again: what an earlier attempt left in the store is not read for what this one says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from autoshard.runtime.presence import of_this_attempt
from tests.launch import ROOT
from tests.small import in_full

JOB = """
import os, sys
import torch, autoshard

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
config = autoshard.Config(codegen="eager", zero=3, replicate_below=0, verbose=False, timeout=20, arrival=15)
compiled = torch.compile(model, backend=autoshard.backend(config))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4):
    if (attempt, rank, str(step)) == (0, 1, sys.argv[1]):
        raise ValueError("a fault")
    compiled(torch.full((4, 16), rank + 1.0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {rank} ended attempt {attempt}", flush=True)
"""


@pytest.mark.parametrize("step", ["2", in_full("0")])
def test_a_job_that_is_started_again_trains(step: str, tmp_path: Path) -> None:
    """One process fails, in a later step or before the first call, and all are started anew."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*launcher, str(script), step], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0 and all(f"rank {rank} ended attempt 1" in ended.stdout for rank in (0, 1)), ended.stdout + ended.stderr


def test_an_attempt_does_not_read_what_another_said(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    of_this_attempt(store).set("said", "by the first")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second = of_this_attempt(store)
    assert not second.check(["said"])
    second.set("said", "by the second")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")  # whose agents count for themselves
    assert of_this_attempt(store).get("said") == b"by the first"
