"""The same training once more on one process, in plain PyTorch, to compare the losses with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

TOLERANCE = 1e-3  # relative; float32 sums in another order differ by about 1e-7 and training amplifies that
MUST_FALL = 0.2


def losses_of_one_process(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    readers: Sequence[Iterator[Tensor]],
    steps: int,
) -> list[float]:
    """Trains without torch.compile, autoshard or collectives on what all processes read together.

    readers: the batches of each process. In a step they come in turn and their gradients are averaged,
    which is what data-parallel training computes.
    """
    losses = []
    for batches in islice(zip(*readers), steps):
        total = 0.0
        for batch in batches:
            loss = loss_of(model, batch) / len(readers)
            loss.backward()
            total += loss.item()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def compare(losses: Sequence[float], reference: Sequence[float], world: int, console: Console) -> bool:
    """Shows both curves at a few steps and says whether they are the same and learning happened."""
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, reference)]
    table = Table("step", f"autoshard, {processes(world)}", "PyTorch, 1 process", "difference", title="Loss")
    for step in sorted({0, *range(9, len(losses), 10), len(losses) - 1}):
        row = f"{losses[step]:.6f}", f"{reference[step]:.6f}", f"{differences[step]:.1e}"
        table.add_row(str(step + 1), *row)
    console.print(table)

    worst, fell = max(differences), 1 - losses[-1] / losses[0]
    same, learned = worst <= TOLERANCE, fell >= MUST_FALL
    verdict = "[bold green]same losses as one process" if same else "[bold red]not the losses of one process"
    console.print(f"{verdict}[/]: largest relative difference {worst:.1e}, allowed {TOLERANCE:g}")
    verdict = "[bold green]loss fell" if learned else f"[bold red]loss did not fall by {MUST_FALL:.0%}"
    console.print(f"{verdict}[/]: {losses[0]:.3f} to {losses[-1]:.3f}, {fell:.0%} less")
    return same and learned
