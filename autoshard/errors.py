"""The errors that users see. Each names the value that was wrong and the legal form."""

from __future__ import annotations

import difflib
from typing import Any

from autoshard.torch_internals import ThroughDynamo


def first_line(error: BaseException) -> str:
    """Its class and the first line of its text, with the next where that ends in a colon; it may have none (`raise NotImplementedError`, a
    bare assert)."""
    first, *others = (line.strip() for line in (str(error).strip() or "(no text)").splitlines() if line.strip())
    return f"{type(error).__name__}: {' '.join([first, *others[:1]]) if first.endswith(':') else first}"


class AutoshardError(ThroughDynamo):
    """Base of every error of autoshard. A RuntimeError that torch.compile passes through as it is."""


class ConfigError(AutoshardError, ValueError):
    """A configuration field has an unknown name or an impossible value."""


class ClusterError(AutoshardError, ValueError):
    """The description of a cluster has an unknown name or an impossible figure."""


class PlanError(AutoshardError, ValueError):
    """A plan cannot be made, read, or applied to this model on these processes."""


class BudgetError(PlanError):
    """No plan fits in the memory budget. Says how many bytes are missing and the cheapest fix."""


class ModelFileError(AutoshardError, ValueError):
    """The file given on the command line does not hold what `autoshard plan` needs."""


class SweepError(AutoshardError, ValueError):
    """A sweep was asked for sizes that the model's trace does not leave open, or of clusters that do not go together."""


class PassError(AutoshardError, ValueError):
    """A pass pipeline is not legal, or a pass left a graph that is not."""


class DisagreementError(AutoshardError):
    """Processes came with different configs, models or graphs, or one of them never came."""


class UnsupportedError(AutoshardError):
    """The model or the loop does something that cannot be sharded right. Names what and where."""


class ShardingError(AutoshardError):
    """Sharding failed half way; the model cannot be used any more in this process."""


class PeerLostError(AutoshardError):
    """A collective failed because another process of the job died, or did not come within `Config.timeout`. Says which of both."""


class StaleParameterError(AutoshardError):
    """A full parameter from before sharding was used; the model holds a shard in its place now."""


class DivergenceError(AutoshardError):
    """Parameters would silently differ between processes from here on."""


def nearest(value: Any, legal: tuple[Any, ...]) -> str:
    """The end of an error message: what was probably meant, and all that is legal."""
    texts = {str(v): v for v in legal}
    close = difflib.get_close_matches(str(value).lower(), list(texts), n=1, cutoff=0.5)
    hint = f"did you mean {texts[close[0]]!r}? " if close else ""
    return hint + "legal: " + ", ".join(repr(v) for v in legal)
