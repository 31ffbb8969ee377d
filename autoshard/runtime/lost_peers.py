"""What a transport says when another process is gone, as an error with a name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from autoshard.errors import AutoshardError, PeerLostError

_SIGNS_OF_LOSS = ("gloo", "nccl", "connection closed", "connection reset", "timed out waiting")
_SIGNS_OF_DELAY = ("timed out", "timeout")


def naming_lost_peers(run: Callable[..., Any]) -> Callable[..., Any]:
    """Turns the transport's error into PeerLostError, which says what it means for the job."""

    @functools.wraps(run)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except AutoshardError:
            raise
        except RuntimeError as error:
            if any(sign in str(error).lower() for sign in _SIGNS_OF_LOSS):
                raise PeerLostError(
                    f"rank {dist.get_rank()} lost another process of the job in a collective "
                    f"({_what_happened(str(error))}); look at its own log. ({error})"
                ) from error
            raise

    return guarded


def _what_happened(said: str) -> str:
    """To that other process, by what a transport says."""
    if any(sign in said.lower() for sign in _SIGNS_OF_DELAY):
        return "it may live, but did not come within the timeout, which Config(timeout=...) says"
    return "it died, or ended"
