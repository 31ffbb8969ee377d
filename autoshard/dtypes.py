"""Short names of the floating dtypes, as configs, plans and layouts write them."""

from __future__ import annotations

import torch

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
LEGAL = tuple(_DTYPES)
FLOATING = tuple(_DTYPES.values())
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_named(name: str) -> torch.dtype:
    """torch's dtype for "fp32", "bf16", "fp16" or "fp64"."""
    return _DTYPES[name]


def dtype_or_own(name: str) -> torch.dtype | None:
    """`dtype_named`; None for "", a parameter's own."""
    return dtype_named(name) if name else None


def name_of_dtype(dtype: torch.dtype) -> str:
    """The inverse of `dtype_named`."""
    return _NAMES[dtype]
