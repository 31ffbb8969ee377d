"""Real text without a download: the source files of Python's standard library, as bytes.

A token is a byte, so the vocabulary is 256 and no tokenizer is needed. Every process that runs the same
Python reads the same text; which sequences it trains on follows from its rank and the seed.
"""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY = 256


def standard_library() -> Tensor:
    """A few MB of Python, one byte an element, the same order everywhere."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise FileNotFoundError(f"no *.py in {folder}: this Python keeps its standard library elsewhere")
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


class Sequences(Dataset[Tensor]):
    """The text cut into pieces of `length` tokens; the last, shorter one is dropped."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return len(self.text) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.text[start : start + self.length].long()


def batches(text: Tensor, length: int, size: int, rank: int, world: int, seed: int) -> Iterator[Tensor]:
    """Endless batches (size, length) of process `rank` of `world`: no two processes get the same sequence.

    DistributedSampler is told rank and world, so it needs no process group, and one process can also read
    what another one would.
    """
    data = Sequences(text, length)
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=seed, drop_last=True)
    loader = DataLoader(data, batch_size=size, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        raise ValueError(f"{len(data)} sequences are too few for {world} processes with batches of {size}")
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader
