"""Imported last before processes for tests are forked, which have from it what torch makes up when something is compiled first, and
what was imported by then frozen."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.heap import alive
from tests.garbage import collect_seldom


def _compile_something() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
    with torch.set_grad_enabled(torch.version.cuda is None):  # a CUDA build's autograd starts threads, which no fork survives
        torch.compile(model, backend="aot_eager")(torch.ones(2, 2))
    torch.compiler.reset()


_compile_something()
collect_seldom()
alive(nn.Module)  # which looks through what is frozen once
