"""Random numbers that depend on a seed and a place alone, so that a kernel can draw them where it needs them.

Philox 4×32 with 10 rounds (Salmon et al., SC 2011), as torch and Triton draw theirs. `autoshard::keep` is what dropout keeps;
any other part of a step can draw the same again from the same seed. The definition here and the helper in a kernel give the
same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FACTORS, _STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
ROUNDS = 10

_ROUND = f"""    a, b = c0.to(tl.uint64) * {_FACTORS[0]}, c2.to(tl.uint64) * {_FACTORS[1]}
    c0, c1 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, b.to(tl.uint32)
    c2, c3 = (a >> 32).to(tl.uint32) ^ c3 ^ k1, a.to(tl.uint32)
    k0, k1 = k0 + {_STEPS[0]}, k1 + {_STEPS[1]}
"""
HELPER = f'''
@triton.jit
def uniform(seed, place):
    place = place.to(tl.uint64)
    c0, c1 = place.to(tl.uint32), (place >> 32).to(tl.uint32)
    c2, c3 = c0 * 0, c0 * 0
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
{_ROUND * ROUNDS}    return (c0 >> 8).to(tl.float32) * {2.0**-24}
'''


def uniform(seed: Tensor, count: int) -> Tensor:
    """The first `count` numbers of a seed (int64, one number), float32 in [0, 1)."""
    place = torch.arange(count, device=seed.device)
    c0, c1, c2, c3 = place & _LOW, place >> 32, torch.zeros_like(place), torch.zeros_like(place)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(ROUNDS):
        (high_a, low_a), (high_b, low_b) = _product(c0, _FACTORS[0]), _product(c2, _FACTORS[1])
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _STEPS[0]) & _LOW, (k1 + _STEPS[1]) & _LOW
    return (c0 >> 8).to(torch.float32) * 2.0**-24


def _product(numbers: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """(high, low) 32 bits of products of 32 bits, which int64 does not hold."""
    low = (numbers & 0xFFFF) * by
    middle = (numbers >> 16) * by + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


@torch.library.custom_op("autoshard::keep", mutates_args=())
def keep(like: Tensor, seed: Tensor, p: float) -> Tensor:
    """Which numbers of a tensor of this shape dropout keeps: each with probability 1 - p."""
    return (uniform(seed, like.numel()) >= p).view(like.shape)


@keep.register_fake
def _(like: Tensor, seed: Tensor, p: float) -> Tensor:
    return torch.empty(like.shape, dtype=torch.bool, device=like.device)
