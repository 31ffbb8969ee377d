"""What a transport says when another process is gone, as an error with a name.

[Note: Who is lost] A transport names an address. So each process that loses another one leaves a word of that in the store, and a moment
later says who left none: who died, stands still, or ended by an error of its own, and who has not come to a collective since. Where one
closes its connections all that are in a collective with it lose it at once.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from autoshard.errors import AutoshardError, PeerLostError
from autoshard.runtime.presence import job_store
from autoshard.runtime.waiting import Answering, missing, named

_MOMENT = 1.0  # seconds in which all others have left a word, and in which they have asked
_SIGNS_OF_LOSS = ("gloo", "nccl", "connection closed", "connection reset", "timed out waiting", "pair closure")
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
                    f"({_what_happened(str(error))}{_who()}); look at its own log. ({error})"
                ) from error
            raise

    return guarded


def _who() -> str:
    """In words, those that left no word of a loss; "" where that is not known. See [Note: Who is lost]."""
    with contextlib.suppress(RuntimeError):  # the process that hosts the store may be the one
        rank, store = str(dist.get_rank()), Answering(job_store("autoshard/lost"), _MOMENT)
        store.set(rank, "")
        try:
            time.sleep(_MOMENT)
            silent = missing(store, range(dist.get_world_size()))
            time.sleep(_MOMENT)  # in which others ask; rank 0 may host the store
        finally:
            store.delete_key(rank)
        return f"; no word of it from {named(silent)}" if silent else ""
    return ""


def _what_happened(said: str) -> str:
    """To that other process, by what a transport says."""
    if any(sign in said.lower() for sign in _SIGNS_OF_DELAY):
        return "it may live, but did not come within the timeout, which Config(timeout=...) says"
    return "it died, or ended"
