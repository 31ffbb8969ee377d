"""What a collective costs: the α–β model of a ring, with the bytes that one process sends."""

from __future__ import annotations

from autoshard.cost_model.hardware import Link


def ring_bytes(collective: str, payload: int, size: int) -> int:
    """Bytes that each of `size` processes sends in a ring for a payload of the full tensor's bytes."""
    share = payload * (size - 1) // size
    return 2 * share if collective == "all_reduce" else share


def ring_seconds(collective: str, payload: int, size: int, link: Link) -> float:
    """Seconds of one message: each of the size-1 (all-reduce: twice that) ring steps pays the latency."""
    if size == 1:
        return 0.0
    steps = (size - 1) * (2 if collective == "all_reduce" else 1)
    return steps * link.latency + ring_bytes(collective, payload, size) / link.bandwidth
