"""Imported last before processes for tests are forked, which have from it what torch makes up when something is compiled first. What
was imported by then, half a million objects, is frozen: each first call in each of them would go through it several times."""

from __future__ import annotations

import gc

import torch
from torch import nn

from autoshard.heap import alive


def _compile_something() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))
    with torch.set_grad_enabled(torch.version.cuda is None):  # a CUDA build's autograd starts threads, which no fork survives
        torch.compile(model, backend="aot_eager")(torch.ones(2, 2))
    torch.compiler.reset()


_compile_something()
gc.collect()
gc.freeze()
alive(nn.Module)  # which looks through what is frozen once
