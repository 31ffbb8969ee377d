"""Fingerprints of tensors, to tell whether they are bit for bit the same."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.units import counted

_WORD = 8  # bytes; taken byte by byte it is twenty times as slow


def fingerprints(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Of each tensor, dense or sparse, what differs where its values do; read from the device at once.

    The hash is an exclusive or, in which equal words cancel; the sum tells those apart.
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
    return [torch.hash_tensor(words).view(torch.int64), words.sum(dtype=torch.int64)]
