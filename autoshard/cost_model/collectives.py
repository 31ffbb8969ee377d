"""What a collective costs: the α–β model of a ring, with the bytes that one process sends."""

from __future__ import annotations

from autoshard.cost_model.hardware import Link


def _rounds(collective: str, link: Link) -> int:
    """How often a ring passes the payload round."""
    twice = collective == "all_reduce" or (collective == "reduce_scatter" and not link.scatters)
    return 2 if twice else 1


def ring_bytes(collective: str, payload: int, size: int, link: Link) -> int:
    """Bytes that each of `size` processes sends in a ring for a payload of the full tensor's bytes."""
    return _rounds(collective, link) * (payload * (size - 1) // size)


def ring_seconds(collective: str, payload: int, size: int, link: Link) -> float:
    """Seconds of one message: every step of the ring pays the latency."""
    if size == 1:
        return 0.0
    steps = (size - 1) * _rounds(collective, link)
    return steps * link.latency + ring_bytes(collective, payload, size, link) / link.bandwidth
