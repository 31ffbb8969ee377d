"""What a transport says when another process is gone, as an error with a name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from autoshard.errors import AutoshardError, PeerLostError

_SIGNS_OF_LOSS = ("gloo", "nccl", "connection closed", "connection reset", "timed out waiting")


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
                    f"(it died, or did not come within the timeout); look at its own log. ({error})"
                ) from error
            raise

    return guarded
