"""A rehearsal's graphs beside those of a job with the same plan (rank 0 of 256, a fake process group)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.fx import GraphModule

from autoshard.capture import capture
from autoshard.rehearsal import rehearse
from tests.test_passes import Blocks, many_processes, plan_for, rewritten  # noqa: F401  (a fixture of a module)


def _operations(gm: GraphModule) -> Counter[str]:
    """What is called and how large its result is, but for views: a DTensor brings some."""
    found: Counter[str] = Counter()
    for node in gm.graph.nodes:
        name, value = str(node.target), node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and "view" not in name and "detach" not in name:
            found[f"{name} {tuple(value.shape)}"] += 1
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rehearsal_has_the_graphs_of_the_job(zero: int) -> None:
    inputs = torch.randn(4, 8)
    plan = plan_for(Blocks(), zero)
    rehearsed = rehearse(capture(Blocks(), inputs), plan, inductor=False)
    job = rewritten(Blocks(), inputs, plan)
    assert rehearsed.backward is not None
    assert _operations(rehearsed.forward) == _operations(job["forward"])
    assert _operations(rehearsed.backward) == _operations(job["backward"])
