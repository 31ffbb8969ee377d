"""Fingerprints of tensors, to tell whether they are bit for bit the same."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.units import counted

_WORD = 8  # bytes; taken byte by byte it is twenty times as slow
_ROW = 1024  # words that have a weight each; of a tensor with more, rows of so many are summed up, and what they give is words again
_PIECE, _PIECE_OF_GPUS = 1 << 17, 1 << 24  # words that are mixed at once, whole rows of them; a processor's cache holds the first
_SHIFT = 29  # which puts signs, of numbers of 2, 4 or 8 bytes, where no other ones are
_GAMMA, _MIX, _MIX_MORE = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's


def fingerprints(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Of each tensor, dense or sparse, what differs where its values do; read from the device at once.

    The hash is an exclusive or, in which equal words cancel, and which is the same in any order; the sum of words times weights, of
    which there is one for each place, tells those apart.
    """
    parts = [_parts(t.detach()) for t in tensors]
    flat = [part for each in parts for part in each]
    device = flat[0].device if flat else None
    found = torch.stack([part.to(device) for part in flat]).tolist() if flat else []
    return [tuple(found.pop(0) for _ in each) for each in parts]


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Of fingerprints, for texts."""
    return [zlib.crc32(repr(mark).encode()) for mark in fingerprints(tensors)]


def arithmetic(device: torch.device) -> str:
    """What decides how sums are rounded: what processes of one kind compute alike has the same bits."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()}, {counted(torch.get_num_threads(), 'thread', 'threads')}"


def _parts(tensor: Tensor) -> list[Tensor]:
    if tensor.is_sparse:
        whole = tensor.coalesce()
        return _parts(whole.indices()) + _parts(whole.values())
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1 or flat.storage_offset() * flat.itemsize % _WORD:
        flat = flat.clone(memory_format=torch.contiguous_format)
    data = flat.view(torch.uint8)
    whole_words = len(data) // _WORD * _WORD
    pieces = [data[:whole_words].view(torch.int64), data[whole_words:]]
    return [part for piece in pieces if piece.numel() for part in _hash_and_sum(piece)]


def _hash_and_sum(words: Tensor) -> list[Tensor]:
    return [torch.hash_tensor(words).view(torch.int64), _weighed(words.long())]


def _weighed(words: Tensor) -> Tensor:
    """The sum of words times weights, row by row; then of what that gives, until it is one."""
    size = _PIECE if words.device.type == "cpu" else _PIECE_OF_GPUS
    sums = torch.cat([row for piece in words.split(size) for row in _rows_weighed(piece)])
    return sums[0] if len(sums) == 1 else _weighed(sums)


def _rows_weighed(words: Tensor) -> list[Tensor]:
    """Of whole rows, and of what is left."""
    mixed, even, weights = _mixed(words), len(words) // _ROW * _ROW, _weights(words.device)
    rest = len(words) - even
    whole = [mixed[:even].view(-1, _ROW).mul_(weights).sum(1)] if even else []
    return [*whole, mixed[even:].mul_(weights[:rest]).sum()[None]] if rest else whole


def _mixed(words: Tensor) -> Tensor:
    """With the upper bits in the lower ones too: of the highest one, a sign, all odd weights make the same."""
    return (words >> _SHIFT).bitwise_and_((1 << 64 - _SHIFT) - 1).bitwise_xor_(words)


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """As irregular as hashes of their places."""
    return torch.tensor([_signed(_hashed(i) | 1) for i in range(_ROW)], dtype=torch.int64, device=device)


def _hashed(number: int) -> int:
    mixed = (number + 1) * _GAMMA % 2**64
    mixed = (mixed ^ mixed >> 30) * _MIX % 2**64
    mixed = (mixed ^ mixed >> 27) * _MIX_MORE % 2**64
    return mixed ^ mixed >> 31


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
